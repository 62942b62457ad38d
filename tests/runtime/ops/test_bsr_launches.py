"""Launches of products that are kept: the same as those of checked calls, and only for calls like the first."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from scripts import imported

torch = pytest.importorskip("torch")

import bsr_oracle  # noqa: E402
from bsr_oracle import drawn  # noqa: E402
from recorded_launches import record  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from runtime import prepare_bsr, verified_only  # noqa: E402
from runtime.kernels import bsr_sddmm as sddmm_objects  # noqa: E402
from runtime.kernels import bsr_spmm as spmm_objects  # noqa: E402
from runtime.kernels import product_launch  # noqa: E402
from runtime.nn import BlockSparseLinear  # noqa: E402
from runtime.ops import bsr, bsr_launches  # noqa: E402
from runtime.ops.bsr_layout import by_rows  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
bsr_matmul: Any = bsr.bsr_matmul
bsr_sddmm: Any = bsr.bsr_sddmm


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with imported("pretended") as module:
        yield module


@pytest.fixture
def pretended(script: ModuleType) -> Iterator[ModuleType]:
    """Kernels whose launches are taken and not run."""
    torch.manual_seed(0)
    with script.pretended():
        yield script


@pytest.fixture
def enqueued(pretended: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each launch is given, and whether it was kept."""
    return record(monkeypatch, (spmm_objects, sddmm_objects), product_launch)


def half(*shape: int) -> Any:
    return torch.randn(*shape).half()


def matrix(block: tuple[int, int] = (64, 64), blocks: tuple[int, int] = (3, 4)) -> Any:
    return drawn(blocks, block, dtype=torch.float16)


def uneven() -> Any:
    """A prepared matrix whose order of block rows a kernel reads."""
    mask = torch.zeros(32, 32, dtype=torch.bool)
    mask[0], mask[:, 0] = True, True
    crow = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    values = half(int(crow[-1]), 64, 64)
    a = torch.sparse_bsr_tensor(crow, mask.nonzero()[:, 1].contiguous(), values, size=(2048, 2048))
    return prepare_bsr(a)


def of_kernel(script: ModuleType, spec: str, **options: Any) -> Any:
    """A matrix that a kernel prepared."""
    kernel = script.kernel_object(spec)
    return kernel.prepare(matrix((kernel.spec.block.rows, kernel.spec.block.cols)), 64, **options)


def calls(script: ModuleType) -> dict[str, Callable[[], Any]]:
    """Calls of each kind whose launches are kept."""
    a, raw, small, large = prepare_bsr(matrix()), matrix(), prepare_bsr(matrix((16, 16))), uneven()
    cut = of_kernel(script, "h100_bsr_spmm_b16_balanced")
    packed = of_kernel(script, "h100_bsr_spmm_b16_gathered", pack=True)
    b, b_t, columns, bias, c = half(256, 128), half(192, 128), half(128, 256).mT, half(192), half(192, 128)
    narrow, of_small, of_large = half(64, 64), half(128, 64).mT, half(2048, 1024)
    left, right = half(192, 64), half(256, 64)
    added = {"bias": bias, "c": c, "beta": 0.5, "activation": "silu"}
    return {
        "prepared": lambda: bsr_matmul(a, b),
        "columns that are no multiple of 8": lambda: bsr_matmul(a, b[:, :77]),
        "one column": lambda: bsr_matmul(a, b[:, :1], bias=bias, c=c[:, 1:2]),
        "few columns that begin anywhere": lambda: bsr_matmul(a, b[:, 3:6], arrange=True),
        "raw": lambda: bsr_matmul(raw, b),
        "transposed": lambda: bsr_matmul(a, b_t, transpose_a=True),
        "bias, c, beta and an activation": lambda: bsr_matmul(a, b, **added),
        "columns contiguous": lambda: bsr_matmul(a, columns),
        "columns contiguous, copied by rows": lambda: bsr_matmul(small, of_small, arrange=True),
        "an order of block rows": lambda: bsr_matmul(large, of_large),
        "split block rows": lambda: bsr_matmul(cut, narrow),
        "packed clusters": lambda: bsr_matmul(packed, narrow),
        "sampled": lambda: bsr_sddmm(left, right, a),
        "sampled, raw": lambda: bsr_sddmm(left, right, raw),
    }


def described(result: Any) -> Any:
    """Type, sizes, strides and address of a result."""
    values = result.values if isinstance(result, bsr.BsrMatrix) else result
    values = values.values() if values.layout == torch.sparse_bsr else values
    layout = tuple(values.shape), values.stride(), values.dtype, values.requires_grad, values._is_view()
    return type(result), tuple(result.shape), layout


def address(result: Any) -> int:
    values = result.values if isinstance(result, bsr.BsrMatrix) else result
    return int((values.values() if values.layout == torch.sparse_bsr else values).data_ptr())


def check_launches(name: str, call: Callable[[], Any], enqueued: list[dict[str, Any]]) -> None:
    """Assert that the second of two calls launches at once, what the first one launched."""
    enqueued.clear()
    first, again = call(), call()
    checked, kept = enqueued
    assert not checked["kept"] and kept["kept"]
    assert described(again) == described(first)
    assert kept["signature"] is checked["signature"]
    for key in ("memory", "prologue"):
        assert kept[key] == checked[key], key
    written = {"c"} | ({"b", "b_groups"} if "copied" in name else set())
    assert checked["read"].keys() == kept["read"].keys() and None not in kept["read"].values()
    for parameter, place in kept["read"].items():
        if parameter not in written:
            assert place == checked["read"][parameter], parameter
    assert checked["read"]["c"] == address(first) and kept["read"]["c"] == address(again)


def test_a_kept_launch_is_that_of_the_checked_call(enqueued: list[Any], pretended: ModuleType) -> None:
    for name, call in calls(pretended).items():
        try:
            check_launches(name, call, enqueued)
        except Exception as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("shape", [(16, 256), (2, 8, 256), (77, 256), (1, 256), (256,)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_kept_launch_of_a_layer_is_that_of_the_checked_call(
    bias: bool, shape: tuple[int, ...], enqueued: list[Any], pretended: ModuleType
) -> None:
    layer, x = BlockSparseLinear(matrix(), half(192) if bias else None), half(*shape)
    with torch.no_grad():
        first, again = layer(x), layer(x)
        checked, kept = enqueued
        assert first.shape == again.shape == (*shape[:-1], 192) and first.stride() == again.stride()
        assert kept["kept"] and not checked["kept"] and kept["signature"] is checked["signature"]
        assert {**kept["read"], "c": 0} == {**checked["read"], "c": 0}
        assert kept["read"]["c"] == again.data_ptr()
        assert again.untyped_storage().nbytes() >= 2 * 192 * (-(-math.prod(shape[:-1]) // 8) * 8)


def leaf(tensor: Any) -> Any:
    return tensor.detach().clone().requires_grad_()


def backward_calls() -> dict[str, tuple[Callable[[], Any], list[Any], Any, set[str]]]:
    """Results, their gradients' leaves, values of blocks and b first, the gradient of the result, and what is new.

    The last are parameters of kernels that lie elsewhere in each pass, beside the result.
    """
    plain = prepare_bsr(matrix())
    a = plain.with_values(leaf(plain.values))
    b, b_t, columns, x = (leaf(t) for t in (half(256, 64), half(192, 64), half(64, 256).mT, half(2, 32, 256)))
    bias, c, dc = leaf(half(192)), leaf(half(192, 64)), half(192, 64)
    odd, layer, features = (
        leaf(half(256, 21)),
        BlockSparseLinear(matrix(), half(192)),
        half(256, 64).mT.view(2, 32, 256),
    )
    inner, copied = {"a", "b", "b_groups"}, {"b"}
    added = {"bias": bias, "c": c}
    return {
        "rows": (lambda: bsr_matmul(a, b), [a.values, b], dc, set()),
        "values alone": (lambda: bsr_matmul(a, b.detach()), [a.values], dc, set()),
        "b alone": (lambda: bsr_matmul(plain, b), [b], dc, set()),
        "transposed": (lambda: bsr_matmul(a, b_t, transpose_a=True), [a.values, b_t], half(256, 64), set()),
        "b by columns": (lambda: bsr_matmul(a, columns), [a.values, columns], dc, set()),
        "dC by columns": (lambda: bsr_matmul(a, b), [a.values, b], half(64, 192).mT, set()),
        "bias and c": (lambda: bsr_matmul(a, b, **added), [a.values, b, bias, c], dc, set()),
        "relu": (lambda: bsr_matmul(a, b, **added, activation="relu"), [a.values, b, bias, c], dc, inner),
        "gelu": (lambda: bsr_matmul(a, b, bias=bias, activation="gelu"), [a.values, b, bias], dc, inner),
        "odd": (lambda: bsr_matmul(a, odd, arrange=True), [a.values, odd], half(192, 24)[:, :21], copied),
        "layer, odd": (lambda: layer(odd.detach().mT), [layer.values], half(21, 192), copied),
        "layer": (lambda: layer(x), [layer.values, x, layer.bias], half(192, 64).mT.view(2, 32, 192), set()),
        "layer, features": (lambda: layer(features), [layer.values], half(192, 64).mT.view(2, 32, 192), set()),
        "layer, dy by tokens": (lambda: layer(x), [layer.values, x], half(2, 32, 192), set()),
    }


def check_backward(call: Callable[[], Any], leaves: list[Any], grad: Any, new: set[str], enqueued: list[Any]) -> None:
    """Assert that the second of two backward passes launches at once, what the first one launched."""
    passes = []
    for _ in range(2):
        out = call()
        enqueued.clear()
        found = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        passes.append((found, list(enqueued)))
    (first, checked), (again, kept) = passes
    assert [launch["kept"] for launch in kept] == [True] * len(checked) and not checked[-1]["kept"]
    for before, after in zip(checked, kept, strict=True):
        assert after["signature"] is before["signature"] and after["read"].keys() == before["read"].keys()
        assert after["memory"] == before["memory"] and after["prologue"] == before["prologue"]
        differing = {name for name, place in after["read"].items() if place != before["read"][name]}
        assert differing <= new | {"c"} and None not in after["read"].values()
    layouts = [[(t.shape, t.stride(), t.dtype) for t in each] for each in (first, again)]
    assert layouts[0] == layouts[1]
    for results, launched in passes:
        gradients = [t.data_ptr() for t, leaf in zip(results, leaves, strict=True) if leaf.dim() > 1][:2]
        assert [launch["read"]["c"] for launch in launched][-len(gradients) :] == gradients


def test_kept_launches_of_a_backward_pass_are_those_of_the_checked_one(enqueued: list[Any]) -> None:
    for name, arguments in backward_calls().items():
        bsr_launches.launches.clear()
        try:
            check_backward(*arguments, enqueued)
        except Exception as error:
            raise AssertionError(name) from error


def test_operands_of_a_gradient_are_copied_as_in_a_checked_call(pretended: ModuleType) -> None:
    layer, x, dy = BlockSparseLinear(matrix()), half(256, 21).mT.view(3, 7, 256), half(3, 7, 192)
    for _ in range(2):
        torch.autograd.grad(layer(x), [layer.values], dy)
    (launch,) = [
        launch for key, kept in bsr_launches.launches._kept.items() for _, launch in kept if key[0] == "gradients"
    ]
    *_, copy, same = launch._copied((x, dy))
    wanted = x.reshape(21, -1).mT
    assert torch.equal(copy, wanted) and copy.stride() == by_rows(wanted).stride() == (24, 1) and same is dy


def test_other_arguments_are_checked_as_in_a_first_call(pretended: ModuleType) -> None:
    a, b, bias = prepare_bsr(matrix()), half(256, 128), half(192)
    plain = {"a": a, "b": b, "bias": bias, "c": None, "activation": None, "beta": None}
    wrong: dict[str, dict[str, Any]] = {
        "rows": {"b": half(128, 128)},
        "type": {"b": b.bfloat16()},
        "types of both": {"b": b.bfloat16(), "bias": bias.bfloat16()},
        "no tensor": {"b": 3},
        "none": {"b": None},
        "sparse": {"b": b.to_sparse()},
        "nested": {"b": torch.nested.nested_tensor([b])},
        "opaque": {"b": b.float().to_mkldnn()},
        "misaligned": {"b": torch.zeros(256 * 128 + 1).half()[1:].view(256, 128)},
        "strides": {"b": torch.zeros(256, 129).half()[:, :128]},
        "bias of another size": {"bias": half(193)},
        "bias nested": {"bias": torch.nested.nested_tensor([bias])},
        "beta without c": {"beta": 1.0},
        "beta": {"beta": True, "c": half(192, 128)},
        "activation": {"activation": ""},
        "activation of another type": {"activation": 3},
        "transpose_a": {"transpose_a": 0},
        "arrange": {"arrange": 1},
        "validate": {"validate": 1},
        "columns": {"a": replace(a, columns=256.0)},
        "how": {"a": replace(a, how=3)},
        "lists": {"a": replace(a, order=list(a.order))},
        "no columns": {"a": replace(a, col_indices=a.col_indices[:0])},
        "values of another size": {"a": replace(a, values=a.values[:, :32])},
        "sparse values": {"a": replace(a, values=a.values.to_sparse())},
        "no matrix": {"a": b},
    }
    for name, changed in wrong.items():
        outcomes = []
        for warm in (False, True):
            bsr_launches.launches.clear()
            if warm:
                bsr_matmul(**plain)
                bsr_matmul(**{**plain, "c": half(192, 128), "beta": 1.0})
                assert len(bsr_launches.launches._kept) == 2
            try:
                outcomes.append(described(bsr_matmul(**{**plain, **changed})))
            except Exception as error:
                outcomes.append((type(error), str(error).partition(":")[0]))
        assert outcomes[0] == outcomes[1], f"{name}: {outcomes}"
        assert name == "values of another size" or issubclass(outcomes[0][0], Exception), f"{name}: {outcomes[0]}"


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_see_calls_like_earlier_ones(enqueued: list[Any]) -> None:
    a, b, layer = prepare_bsr(matrix()), half(256, 128), BlockSparseLinear(matrix())
    calls = (lambda: bsr_matmul(a, b), lambda: bsr_sddmm(half(192, 64), half(256, 64), a), lambda: layer(b.mT))
    with torch.no_grad():
        for call in calls:
            call()
            call()
            for mode in (_Operators(), _Functions()):
                enqueued.clear()
                with mode:
                    call()
                assert len(enqueued) == 1
                if isinstance(mode, _Operators):
                    assert any("sparse_kernel_codegen.bsr_" in name for name in mode.seen)


def test_the_mode_of_receipts_and_gradients_are_part_of_what_is_kept(pretended: ModuleType) -> None:
    a, b = prepare_bsr(matrix()), half(256, 128)
    options = (None, None, False, False)
    bsr_matmul(a, b)
    assert bsr_launches.find_launch(a, b, None, None, options)[1] is not None
    with verified_only():
        assert bsr_launches.find_launch(a, b, None, None, options)[1] is None
    with torch.no_grad():
        assert bsr_launches.find_launch(a, b, None, None, options)[1] is None
    assert bsr_launches.find_launch(a, b.requires_grad_(), None, None, options)[1] is None


def test_a_prepared_matrix_that_was_resized_is_another(pretended: ModuleType, enqueued: list[Any]) -> None:
    prepared = of_kernel(pretended, "h100_bsr_spmm_b64")
    b = half(256, 128)
    bsr_matmul(prepared, b)
    other = drawn((3, 4), (64, 64), dtype=torch.float16, share=0.9)
    prepared.matrix.resize_as_sparse_(other).copy_(other)
    for _ in range(2):
        bsr_matmul(prepared, b)
        read = enqueued[-1]["read"]
        assert read["a"] == prepared.matrix.values().data_ptr()
        assert read["crow_indices"] == prepared.matrix.crow_indices().data_ptr()
        assert read["col_indices"] == prepared.matrix.col_indices().data_ptr()


@pytest.fixture
def oracles(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    return bsr_oracle.install(monkeypatch)


def gradients(call: Callable[[], Any], leaves: list[Any]) -> list[Any]:
    """The result and the gradients of a call."""
    for leaf in leaves:
        leaf.grad = None
    found = call()
    found.float().square().sum().backward()
    return [found.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.usefixtures("oracles")
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_later_calls_are_those_of_the_first(activation: Any, transposed: bool) -> None:
    a = drawn((3, 2), (64, 64))
    rows, depth = (128, 192) if transposed else (192, 128)
    b, bias, c = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((depth, 40), (rows,), (rows, 40)))
    matrix = prepare_bsr(a).with_values(a.values().clone().requires_grad_())
    leaves = [matrix.values, b, bias, c]

    def call() -> Any:
        return bsr_matmul(matrix, b, bias=bias, c=c, beta=0.5, activation=activation, transpose_a=transposed)

    with _Operators():
        by_operator = gradients(call, leaves)
    for _ in range(3):
        for found, right in zip(gradients(call, leaves), by_operator, strict=True):
            assert torch.equal(found, right)
    assert any(
        type(launch).__name__ == "_Matmul" for kept in bsr_launches.launches._kept.values() for _, launch in kept
    )


@pytest.mark.usefixtures("oracles")
@pytest.mark.parametrize("shape", [(24, 128), (2, 8, 128), (13, 128)])
def test_gradients_of_later_calls_of_a_layer_are_those_of_the_first(shape: tuple[int, ...]) -> None:
    layer = BlockSparseLinear(drawn((3, 2), (64, 64)), torch.randn(192).bfloat16())
    x = torch.randn(shape).bfloat16().requires_grad_()
    leaves = [layer.values, layer.bias, x]
    with _Operators():
        by_operator = gradients(lambda: layer(x), leaves)
    for _ in range(3):
        for found, right in zip(gradients(lambda: layer(x), leaves), by_operator, strict=True):
            assert found.shape == right.shape and torch.equal(found, right)


@pytest.mark.usefixtures("oracles")
def test_a_backward_pass_refuses_values_that_were_written_and_takes_rewritten_places() -> None:
    layer, x = BlockSparseLinear(drawn((3, 2), (64, 64))), torch.randn(24, 128).bfloat16()
    for _ in range(3):
        y = layer(x)
        layer.crow_indices.copy_(layer.crow_indices.clone())  # as DDP does between the passes
        y.sum().backward()
        y = layer(x)
        with torch.no_grad():
            layer.values.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.usefixtures("oracles")
def test_tensors_that_a_transform_has_left_behind_are_read() -> None:
    layer, x, left = BlockSparseLinear(drawn((3, 2), (64, 64))), torch.randn(24, 128).bfloat16(), []
    torch.func.grad(lambda t: (left.append(t), t.float().sum())[1])(x)
    for call in (layer, lambda x: bsr_matmul(layer.weight, x.mT)):
        right = call(x)
        for given in (left[0], x, left[0], x):
            assert torch.equal(call(given), right)


@pytest.mark.usefixtures("oracles")
def test_a_checkpoint_keeps_the_same_tensors_in_a_first_call_and_in_a_later_one() -> None:
    """Torch compares them: the forward pass is the first call, which is checked, and its repetition is a later one."""
    layer, x = BlockSparseLinear(drawn((3, 2), (64, 64)), torch.randn(192).bfloat16()), torch.randn(24, 128).bfloat16()
    weight, b = layer.weight, x.mT.contiguous().requires_grad_()
    for step, leaves in (
        (lambda: layer(x), [layer.values, layer.bias]),
        (lambda: bsr_matmul(weight, b, bias=layer.bias, activation="relu"), [layer.values, b]),
    ):
        bsr_launches.launches.clear()
        again = torch.autograd.grad(checkpoint(step, use_reentrant=False).sum(), leaves)
        assert all(map(torch.equal, again, torch.autograd.grad(step().sum(), leaves)))


@pytest.mark.usefixtures("oracles")
def test_results_of_later_calls_may_be_written_in_place() -> None:
    layer, x = BlockSparseLinear(drawn((3, 2), (64, 64))), torch.randn(24, 128).bfloat16()
    for _ in range(3):
        y = layer(x)
        y.mul_(2)
        y.sum().backward()


@pytest.mark.usefixtures("oracles")
def test_a_second_derivative_of_later_calls_is_refused() -> None:
    layer, x = BlockSparseLinear(drawn((3, 2), (64, 64))), torch.randn(24, 128).bfloat16().requires_grad_()
    for _ in range(3):
        (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        with pytest.raises(bsr.ArgumentError, match="gradient of its gradient"):
            grad.sum().backward()


def test_values_that_another_module_puts_in_the_place_of_the_parameter_are_read(enqueued: list[Any]) -> None:
    """As FSDP does, and pruning."""
    layer, x = BlockSparseLinear(matrix()), half(16, 256)
    with torch.no_grad():
        layer(x)
        layer(x)
        other = layer.values.clone()
        del layer.values
        layer.values = other
        for _ in range(3):
            layer(x)
            assert enqueued[-1]["read"]["a"] == other.data_ptr()


def test_threads_do_not_mix_their_launches(pretended: ModuleType, enqueued: list[Any]) -> None:
    a = prepare_bsr(matrix())
    operands = [half(256, 8 * (1 + number)) for number in range(6)]
    for b in operands:
        bsr_matmul(a, b)
    enqueued.clear()
    threads = [threading.Thread(target=lambda b=b: [bsr_matmul(a, b) for _ in range(50)]) for b in operands]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = {(launch["read"]["b"], id(launch["signature"])) for launch in enqueued}
    assert len(enqueued) == 300 and all(launch["kept"] for launch in enqueued)
    assert len(pairs) == 6 and {place for place, _ in pairs} == {b.data_ptr() for b in operands}


@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 256), (0, 4, 256)])
def test_a_layer_without_tokens_has_a_result_and_gradients(script: ModuleType, shape: tuple[int, ...]) -> None:
    with script.pretended():
        layer = BlockSparseLinear(torch.randn(256, 256).half().to_sparse_bsr((64, 64)), torch.zeros(256).half())
        for _ in range(3):
            x = torch.randn(shape).half().requires_grad_()
            out = layer(x)
            assert out.shape == shape
            leaves = [x, *layer.parameters()]
            found = torch.autograd.grad(out, leaves, torch.ones_like(out))
            assert [each.shape for each in found] == [leaf.shape for leaf in leaves]


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_gradients_of_a_product_without_columns_are_zeros(script: ModuleType, activation: str | None) -> None:
    with script.pretended():
        matrix = prepare_bsr(torch.randn(256, 256).half().to_sparse_bsr((64, 64)))
        for _ in range(3):
            values, b = matrix.values.detach().clone().requires_grad_(), torch.zeros(256, 0).half().requires_grad_()
            out = bsr.bsr_matmul(matrix.with_values(values), b, activation=activation)
            found = torch.autograd.grad(out, (values, b), torch.ones_like(out))
            assert found[0].shape == values.shape and not found[0].any() and found[1].shape == b.shape
