"""BlockSparseLinear without a GPU: everything but the kernels, which the definition stands for."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bsr_oracle  # noqa: E402

from runtime import ArgumentError  # noqa: E402
from runtime.nn import BlockSparseLinear  # noqa: E402


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


def train(module: Any, optimiser: Any, batches: Any) -> list[float]:
    losses = []
    for x, wanted in batches:
        optimiser.zero_grad()
        loss = (module(x).float() - wanted).square().sum()
        loss.backward()
        optimiser.step()
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
