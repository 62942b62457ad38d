"""BlockSparseLinear without a GPU: everything but the kernels, which the definition stands for."""

from __future__ import annotations

import copy
import io
import random
from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bsr_oracle  # noqa: E402

from runtime import ArgumentError  # noqa: E402
from runtime.nn import BlockSparseLinear  # noqa: E402
from runtime.nn.blocks import check_places  # noqa: E402
from runtime.prepare.bsr_matrix import prepare_bsr  # noqa: E402


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return bsr_oracle.install(monkeypatch)


def dense_layer(bias: bool = True) -> Any:
    return torch.nn.Linear(192, 128, bias=bias, dtype=torch.bfloat16)


def mask() -> Any:
    return torch.tensor([[True, False, True], [False, True, False]])


def layer(bias: bool = True) -> BlockSparseLinear:
    return BlockSparseLinear.from_linear(dense_layer(bias), 64, mask=mask())


def whole(layer: Any) -> Any:
    return layer.weight.to_sparse().to_dense()


def by_elements(blocks: Any, block: int = 64) -> Any:
    return blocks.repeat_interleave(block, 0).repeat_interleave(block, 1)


@pytest.mark.parametrize("shape", [(5, 192), (2, 3, 192), (192,), (1, 1, 192)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_computes_that_of_its_dense_weight(shape: tuple[int, ...], bias: bool) -> None:
    one, x = layer(bias), torch.randn(shape).bfloat16()
    right = torch.nn.functional.linear(x.double(), whole(one).double(), one.bias.double() if bias else None)
    found = one(x)
    assert found.shape == (*shape[:-1], 128)
    torch.testing.assert_close(found.double(), right, atol=2e-2, rtol=2e-2)


def test_layers_read_what_layers_write_without_a_copy(loaded: Any) -> None:
    first = BlockSparseLinear.from_mask(torch.ones(2, 3, dtype=torch.bool), 64, dtype=torch.bfloat16)
    second = BlockSparseLinear.from_mask(torch.ones(1, 2, dtype=torch.bool), 64, dtype=torch.bfloat16)
    x = torch.randn(2, 9, 192).bfloat16()
    with torch.no_grad():
        hidden = first(x)
        assert hidden.stride(-1) != 1 and hidden.reshape(-1, 128).data_ptr() == hidden.data_ptr()
        second(hidden)
    assert {kernel.spec.b_layout for kernel in loaded.values()} == {"column_major", "row_major"}


@pytest.mark.parametrize("density", [0.01, 0.34, 1.0])
def test_the_largest_blocks_are_kept(density: float) -> None:
    dense = dense_layer()
    norms = dense.weight.detach().float().unflatten(0, (-1, 64)).unflatten(2, (-1, 64)).square().sum((1, 3))
    one = BlockSparseLinear.from_linear(dense, 64, density=density)
    kept = max(1, round(6 * density))
    there = (whole(one).unflatten(0, (-1, 64)).unflatten(2, (-1, 64)) != 0).any(3).any(1)
    assert int(there.sum()) == kept == one.values.shape[0]
    assert norms[there].min() >= norms[~there].max() if kept < 6 else True
    assert torch.equal(whole(one), dense.weight.detach() * by_elements(there))
    assert torch.equal(one.bias, dense.bias)


def test_other_blocks_and_weights() -> None:
    dense = dense_layer(bias=False)
    rectangular = BlockSparseLinear.from_linear(dense, (128, 64), density=1)
    assert rectangular.block == (128, 64) and torch.equal(whole(rectangular), dense.weight)
    weight = dense.weight.detach().to_sparse_bsr((64, 64))
    given = BlockSparseLinear(weight)
    assert given.bias is None and torch.equal(whole(given), dense.weight)
    with torch.no_grad():
        given.values.zero_()
    assert weight.values().any(), "values are copied"
    new = BlockSparseLinear.from_mask(mask(), 64, dtype=torch.bfloat16)
    bound = (3 * 64 / 2) ** -0.5
    assert new.values.shape == (3, 64, 64) and 0.9 * bound < new.values.abs().max() <= bound * 1.01
    assert BlockSparseLinear.from_mask(mask(), 32, bias=False).bias is None


def train(module: Any, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for x, wanted in batches:
        optimizer.zero_grad()
        loss = (module(x).float() - wanted).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class Masked(torch.nn.Module):
    """A dense layer in float64 whose weight is masked."""

    def __init__(self, other: BlockSparseLinear) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(whole(other).detach().double())
        self.bias = torch.nn.Parameter(other.bias.detach().double())

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.linear(x.double(), self.weight * by_elements(mask()), self.bias)


def test_steps_of_training_are_those_of_a_dense_layer_with_a_mask() -> None:
    one = layer()
    right = Masked(one)
    before = whole(one).detach().double(), one.bias.detach().double()
    batches = [(torch.randn(17, 192).bfloat16(), torch.randn(17, 128)) for _ in range(3)]
    found = train(one, torch.optim.SGD(one.parameters(), lr=1e-3), batches)
    exact = train(right, torch.optim.SGD(right.parameters(), lr=1e-3), batches)
    assert found == pytest.approx(exact, rel=1e-2)
    bsr_oracle.assert_near(whole(one) - before[0], right.weight * by_elements(mask()) - before[0], 0.05)
    bsr_oracle.assert_near(one.bias - before[1], right.bias - before[1], 0.05)


def test_a_state_is_saved_and_loaded() -> None:
    one = layer()
    assert set(one.state_dict()) == {"values", "bias", "crow_indices", "col_indices"}
    assert [name for name, _ in one.named_parameters()] == ["values", "bias"]
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    elsewhere = BlockSparseLinear.from_mask(mask().flip(1), 64, dtype=torch.bfloat16)
    elsewhere.load_state_dict(torch.load(file, weights_only=True), strict=True)
    x = torch.randn(5, 192).bfloat16().requires_grad_()
    grads = []
    for module in (one, elsewhere, copy.deepcopy(one)):  # the gradient of x reads what was prepared
        x.grad = None
        y = module(x)
        y.sum().backward()
        grads.append((y, x.grad))
    for y, grad in grads[1:]:
        assert torch.equal(y, grads[0][0]) and torch.equal(grad, grads[0][1])
    unborn = layer().to("meta")
    unborn.load_state_dict(one.state_dict(), strict=True, assign=True)
    assert torch.equal(unborn(x), grads[0][0])
    with pytest.raises(RuntimeError, match=r"size mismatch for values: \(2, 64, 64\), the layer has \(3, 64, 64\)"):
        one.load_state_dict(layer_of_two().state_dict())
    assert torch.equal(one(x), grads[0][0]), "nothing is loaded of a state with other sizes"


def layer_of_two() -> BlockSparseLinear:
    return BlockSparseLinear.from_mask(torch.tensor([[True, False, True], [False, False, False]]), 64)


def test_types_change_and_indices_do_not() -> None:
    one = layer().half()
    assert one.values.dtype == one.bias.dtype == torch.float16 and one.crow_indices.dtype == torch.int32
    assert one(torch.randn(3, 192).half()).dtype == torch.float16
    assert all(not buffer.is_floating_point() for buffer in one.buffers())
    there = one.to("meta")
    assert all(tensor.is_meta for tensor in (*there.parameters(), *there.buffers()))
    assert "128" in repr(layer()) and "3 of 6 blocks of 64 x 64, bias=True" in repr(layer())


@pytest.mark.parametrize("change", [torch.nn.functional.gelu, lambda y: y[..., ::2].repeat(1, 2), torch.clone])
def test_layers_take_activations_of_any_strides(change: Any) -> None:
    one = BlockSparseLinear.from_mask(torch.ones(2, 2, dtype=torch.bool), 64, dtype=torch.bfloat16)
    x = change(one(torch.randn(5, 128).bfloat16())).detach()
    right = torch.nn.functional.linear(x.double(), whole(one).double(), one.bias.double())
    torch.testing.assert_close(one(x).double(), right, atol=2e-2, rtol=2e-2)


def test_compile_takes_a_layer_in_one_graph() -> None:
    model = torch.nn.Sequential(layer(), torch.nn.GELU(), BlockSparseLinear.from_mask(mask()[:, :2], 64))
    model = model.bfloat16()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (40, 21):
        x = torch.randn(tokens, 192).bfloat16()
        found, right = compiled(x), model(x)
        torch.testing.assert_close(found, right)
        grads = [torch.autograd.grad(y.float().square().mean(), list(model.parameters())) for y in (found, right)]
        for one, other in zip(*grads, strict=True):
            bsr_oracle.assert_near(one, other)


WRONG: dict[str, tuple[Any, str]] = {
    "weight": (lambda: BlockSparseLinear(torch.zeros(64, 64)), r"weight: is torch\.strided, expected a torch\.sparse"),
    "linear": (lambda: BlockSparseLinear.from_linear(3, 64, density=0.5), "linear: is int, expected a torch.nn.Lin"),
    "both": (lambda: BlockSparseLinear.from_linear(dense_layer(), 64), "density: and mask: one of them is expected"),
    "density": (lambda: BlockSparseLinear.from_linear(dense_layer(), 64, density=0), "density: is 0, expected"),
    "block": (lambda: BlockSparseLinear.from_linear(dense_layer(), 48, density=1), "block: is 48, expected one or two"),
    "divides": (
        lambda: BlockSparseLinear.from_linear(dense_layer(), 128, density=1),
        r"block: is \(128, 128\), which does not divide the weight, \(128, 192\)",
    ),
    "mask's type": (lambda: BlockSparseLinear.from_mask(mask().int(), 64), r"mask: is torch\.int32, expected a torch"),
    "mask's shape": (
        lambda: BlockSparseLinear.from_linear(dense_layer(), 64, mask=mask().mT),
        r"mask: has shape \(3, 2\), expected \(2, 3\), a bit for each block",
    ),
    "bias": (
        lambda: BlockSparseLinear(dense_layer().weight.detach().to_sparse_bsr((64, 64)), torch.zeros(128)),
        r"bias: is \(128,\) torch\.float32 on cpu, expected \(128,\) torch\.bfloat16 on cpu",
    ),
    "x": (lambda: layer()(torch.zeros(2, 128)), r"x: has shape \(2, 128\), expected \(\.\.\., in_features 192\)"),
    "x's type": (lambda: layer()(torch.zeros(2, 192)), r"b: is torch\.float32, expected torch\.float16 or torch\.bf"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ArgumentError, match=message):
        call()


def test_buffers_may_be_written_between_a_forward_and_its_backward_pass() -> None:
    """DDP copies the first rank's buffers in each forward pass: tests/stress/ddp_layers.py has two ranks do it."""
    one, inputs = layer(), [torch.randn(5, 192).bfloat16().requires_grad_() for _ in range(2)]
    right = torch.autograd.grad(sum(one(x).sum() for x in inputs), [*one.parameters(), *inputs])
    ys = []
    for x in inputs:
        with torch.no_grad():
            for buffer in one.buffers():
                buffer.copy_(buffer.clone())
        ys.append(one(x).sum())
    for found, wanted in zip(torch.autograd.grad(sum(ys), [*one.parameters(), *inputs]), right, strict=True):
        assert torch.equal(found, wanted)


def test_copies_compute_the_same() -> None:
    one, x = layer(), torch.randn(5, 192).bfloat16()
    averaged = torch.optim.swa_utils.AveragedModel(one, use_buffers=True)
    averaged.update_parameters(one)
    averaged.update_parameters(one)
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    for other in (averaged, copy.deepcopy(one), torch.load(file, weights_only=False), copy.deepcopy(averaged)):
        assert torch.equal(other(x), one(x))
    moved = copy.deepcopy(one).to("meta").to_empty(device="cpu")
    kept = copy.deepcopy(one).to_empty(device="cpu")
    cast = copy.deepcopy(one).type(torch.float16).type(torch.bfloat16)
    for other in (moved, kept, cast):
        assert all(torch.equal(*pair) for pair in zip(other.buffers(), one.buffers(), strict=True))
    assert torch.equal(cast(x.half().bfloat16()), one.half().bfloat16()(x.half().bfloat16()))


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_of_other_places_does_not_reach_what_was_computed_before(assign: bool) -> None:
    one = layer()
    x = torch.randn(5, 192).bfloat16()
    values = one.values
    wanted = torch.autograd.grad(one(x).sum(), values)[0]
    elsewhere = BlockSparseLinear.from_mask(mask().flip(1), 64, dtype=torch.bfloat16)
    loss, before = one(x).sum(), list(one.buffers())
    with torch.inference_mode():
        one.load_state_dict(elsewhere.state_dict(), assign=assign)
    if assign:
        assert torch.equal(torch.autograd.grad(loss, values)[0], wanted)
    else:
        assert all(buffer is old for buffer, old in zip(one.buffers(), before, strict=True)), "graphs read these"
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    y = x.clone().requires_grad_()
    one(y).sum().backward()  # nothing that was prepared is an inference tensor
    assert torch.equal(one(x), elsewhere(x))


def test_a_layer_that_begins_on_meta() -> None:
    torch.manual_seed(3)
    right = BlockSparseLinear.from_mask(mask(), 64, dtype=torch.bfloat16)
    here = mask()
    with torch.device("meta"):
        layers = [BlockSparseLinear.from_mask(here, 64, dtype=torch.bfloat16)]
        with pytest.raises(ArgumentError, match="mask: is on meta and has no values: make the mask with device='cpu'"):
            BlockSparseLinear.from_mask(torch.ones(2, 3, dtype=torch.bool), 64)
    layers.append(BlockSparseLinear.from_mask(here, 64, dtype=torch.bfloat16, device="meta"))
    for one in layers:
        assert all(tensor.is_meta for tensor in (*one.parameters(), *one.buffers()))
        assert one.in_features == 192 and "3 of 6 blocks" in repr(one)
        for _ in range(2):  # away once more
            one.to("meta")
            one.to_empty(device="cpu")
            torch.manual_seed(3)
            one.reset_parameters()  # as FSDP does
            assert all(torch.equal(*pair) for pair in zip(one.buffers(), right.buffers(), strict=True))
            assert torch.equal(whole(one), whole(right)) and torch.equal(one.bias, right.bias)
        one.to("meta").load_state_dict(right.state_dict(), assign=True)
        x = torch.randn(2, 192).bfloat16()
        assert torch.equal(one(x), right(x))
    one.to("meta")
    with pytest.warns(UserWarning, match="no-op"):
        one.load_state_dict(right.state_dict())
    one.to_empty(device="cpu").load_state_dict(right.state_dict())
    assert torch.equal(one(x), right(x))
    with pytest.raises(ArgumentError, match="weight: is on meta"):
        BlockSparseLinear(dense_layer().weight.detach().to_sparse_bsr((64, 64)).to("meta"))
    with pytest.raises(ArgumentError, match="linear: is on meta"):
        BlockSparseLinear.from_linear(dense_layer().to("meta"), 64, density=1)


def damaged(state: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A state with one to three changes, some of which leave it as good as it was."""
    state = {name: tensor.clone() for name, tensor in state.items()}
    for _ in range(draw.randint(1, 3)):
        name = draw.choice(["crow_indices", "col_indices", "col_indices", "values", "bias"])
        tensor = state.get(name)
        if not isinstance(tensor, torch.Tensor):
            continue
        change = draw.choice(["number", "number", "type", "missing", "shape", "order", "meta", "value"])
        if change == "number" and "indices" in name and tensor.numel() and not tensor.is_meta:
            number = draw.choice([-1, 0, 1, 2, 3, 4, 99, -(2**31), 2**31 - 1])
            tensor.flatten()[draw.randrange(tensor.numel())] = number if tensor.dtype.itemsize >= 4 else 1
        elif change == "type":
            state[name] = tensor.to(draw.choice([torch.int64, torch.float16, torch.float64, torch.bool, torch.uint8]))
        elif change == "missing":
            del state[name]
        elif change == "shape":
            state[name] = tensor[:-1] if draw.random() < 0.5 else tensor[None]
        elif change == "order":
            state[name] = tensor.flip(0)
        elif change == "meta":
            state[name] = tensor.to("meta")
        elif change == "value":
            state[name] = draw.choice([3, None, [1, 2]])  # type: ignore[assignment]
    return state


def test_a_damaged_state_is_refused_by_name_or_loaded_and_right() -> None:
    draw, outcomes = random.Random(0), Counter[str]()
    places = torch.tensor([[True, False, True, True], [False, True, False, True], [True] * 4])
    for number in range(150):
        one = BlockSparseLinear.from_mask(places, 16, dtype=torch.bfloat16)
        before = {name: tensor.clone() for name, tensor in one.state_dict().items()}
        state = damaged(BlockSparseLinear.from_mask(places.flip(1), 16, dtype=torch.bfloat16).state_dict(), draw)
        strict, assign = draw.random() < 0.5, draw.random() < 0.3
        try:
            one.load_state_dict(state, strict=strict, assign=assign)
        except RuntimeError as error:
            assert any(name in str(error) for name in before), error
            outcomes["refused"] += 1
            if "Missing key" not in str(error):
                for name, tensor in one.state_dict().items():
                    assert torch.equal(tensor, before[name]), (number, name, "lost")
        else:
            outcomes["loaded"] += 1
            expected = before | state
            wanted = bsr_oracle.dense(*(expected[name] for name in NAMES), (48, 64))
            assert torch.equal(whole(one).double(), wanted.to(one.values.dtype).double()), number
        # What it holds is a layer either way, of which everything that was prepared is right.
        check_places(one.crow_indices, one.col_indices, 4)
        again = prepare_bsr(one.weight.to_sparse().detach())
        for found, wanted in zip((*one.weight.order, *one.weight.index), (*again.order, *again.index), strict=True):
            assert found.dtype == torch.int32 and torch.equal(found, wanted)
    assert min(outcomes["refused"], outcomes["loaded"]) > 15, outcomes


NAMES = ("values", "crow_indices", "col_indices")
STATES: dict[str, tuple[Any, str]] = {
    "out of range": (lambda s: s["col_indices"].fill_(99), "col_indices: ranges from 99 to 99, allowed: 0 to 2"),
    "-1": (lambda s: s["col_indices"].copy_(torch.tensor([0, -1, 1])), "col_indices: ranges from -1 to 1, allowed"),
    "twice": (lambda s: s["col_indices"].fill_(1), "col_indices: has block column 1 twice in block row 0, each may"),
    "falls": (lambda s: s["crow_indices"].copy_(torch.tensor([0, 4, 3])), "crow_indices: must rise from 0 to the num"),
    "floats": (lambda s: s.update(col_indices=s["col_indices"].half()), "col_indices: is torch.float16, expected torc"),
    "integers": (lambda s: s.update(values=s["values"].int()), "values: is torch.int32, expected a floating-point"),
    "moved": (lambda s: (s.pop("values"), s["col_indices"].copy_(torch.tensor([0, 1, 2]))), "values: is missing besid"),
    "meta": (lambda s: s.update(crow_indices=s["crow_indices"].to("meta")), "crow_indices: is on meta and has no val"),
    "a list": (lambda s: s.update(bias=[0.0] * 128), "bias: is list, expected a torch.Tensor"),
}


@pytest.mark.parametrize("name", STATES)
def test_what_is_wrong_with_a_state_is_named(name: str) -> None:
    change, message = STATES[name]
    model = torch.nn.Sequential(layer())
    state = {key[2:]: tensor.clone() for key, tensor in model.state_dict().items()}
    change(state)
    with pytest.raises(RuntimeError, match=rf"0\.{message}"):
        model.load_state_dict({f"0.{key}": tensor for key, tensor in state.items()}, strict=False)


def test_a_hook_of_the_layer_puts_no_wrong_places_into_it() -> None:
    one = layer()
    before = one.col_indices.clone()
    one.register_load_state_dict_pre_hook(lambda module, state, *_: state["col_indices"].fill_(7))
    with pytest.raises(RuntimeError, match="col_indices: ranges from 7 to 7"):
        one.load_state_dict({name: tensor.clone() for name, tensor in one.state_dict().items()})
    assert torch.equal(one.col_indices, before)
