"""What torch sees of bsr_matmul and bsr_sddmm: operators under compile, export, fake tensors, modes and transforms."""

from __future__ import annotations

import io
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bsr_oracle  # noqa: E402
from bsr_oracle import assert_near, drawn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from runtime import ArgumentError, BsrMatrix, bsr_matmul, bsr_sddmm, prepare_bsr  # noqa: E402
from runtime.ops import bsr  # noqa: E402

MATMUL = torch.ops.sparse_kernel_codegen.bsr_matmul.default
SDDMM = torch.ops.sparse_kernel_codegen.bsr_sddmm.default


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return bsr_oracle.install(monkeypatch)


def normal(*shape: int) -> Any:
    return (torch.randn(*shape) / 4).bfloat16()


def matrix() -> BsrMatrix:
    return prepare_bsr(drawn((2, 3), (64, 64)))


def arguments(a: BsrMatrix, b: Any, bias: Any = None, c: Any = None) -> tuple[Any, ...]:
    lists = list(a.order), list(a.index)
    return (a.values, a.crow_indices, a.col_indices, b, bias, c, *lists, a.columns, a.how)


class Seen(TorchDispatchMode):
    """Keeps the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


class Counted:
    """A backend of torch.compile that counts its graphs, whose operators aot_eager runs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def test_the_kernel_is_called_directly_where_nothing_else_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bsr, "matmul", None)
    monkeypatch.setattr(bsr, "sddmm", None)
    a, b = drawn((2, 3), (64, 64)), normal(192, 24)
    for given in (a, prepare_bsr(a)):
        bsr_matmul(given, b)
    with torch.no_grad():
        bsr_matmul(a, b.requires_grad_())
    bsr_sddmm(normal(128, 24), b.detach(), a)
    assert bsr_matmul(a, b).requires_grad
    with pytest.raises(TypeError), Seen():
        bsr_matmul(a, b)


def test_dispatch_modes_see_the_operators() -> None:
    with Seen() as seen:
        bsr_matmul(matrix(), normal(192, 24))
        bsr_sddmm(normal(128, 24), normal(192, 24), matrix())
    assert MATMUL in seen.operators and SDDMM in seen.operators


def test_opcheck() -> None:
    a = matrix()
    raw = BsrMatrix(a.values, a.crow_indices, a.col_indices, a.columns)
    a.values.requires_grad_()
    c, bias = normal(128, 24).requires_grad_(), normal(128).requires_grad_()
    torch.library.opcheck(MATMUL, arguments(raw, normal(192, 24)), {})
    gelu = {"activation": "gelu", "beta": 0.5}
    torch.library.opcheck(MATMUL, arguments(a, normal(192, 24).requires_grad_(), bias, c), gelu)
    relu = {"activation": "relu", "transpose_a": True}
    torch.library.opcheck(MATMUL, arguments(a, normal(2, 128, 24).requires_grad_()), relu)
    sampled = (normal(128, 24).requires_grad_(), normal(192, 24).requires_grad_())
    parts = (a.crow_indices, a.col_indices, list(a.order), list(a.index), a.columns, 64, 64, a.how)
    torch.library.opcheck(SDDMM, (*sampled, *parts), {})


def test_fake_tensors_of_a_gpu_need_none(loaded: Any) -> None:
    with FakeTensorMode():
        values = torch.empty(5, 64, 64, device="cuda", dtype=torch.float16)
        crow, col = (torch.empty(n, device="cuda", dtype=torch.int32) for n in (3, 5))
        a, b = BsrMatrix(values, crow, col, 192), torch.empty(192, 77, device="cuda", dtype=torch.float16)
        found = bsr_matmul(a, b)
        assert (found.shape, found.stride(), found.dtype, found.device) == ((128, 77), (80, 1), b.dtype, b.device)
        assert bsr_matmul(a, b.new_empty(4, 192, 77)).stride() == (80, 4 * 80, 1)
        assert bsr_matmul(a, b.new_empty(128, 8), transpose_a=True).shape == (192, 8)
        assert bsr_sddmm(b.new_empty(128, 8), b.new_empty(192, 8), a).values.shape == values.shape
        with pytest.raises(ArgumentError, match="b: is on cpu, a is on cuda:0"):
            bsr_matmul(a, b.cpu())
    assert not loaded


def step(a: BsrMatrix, b: Any, bias: Any, values: Any) -> Any:
    """Products between other operators of a graph."""
    found = bsr_matmul(a.with_values(values), b * 2, bias=bias, activation="gelu")
    return bsr_sddmm(found, b[: found.shape[0]] + 1, square(a)).values.sum() + found.float().square().sum()


def square(a: BsrMatrix) -> BsrMatrix:
    """Return the pattern of a's first 128 columns, as if all blocks lay there."""
    return BsrMatrix(a.values, a.crow_indices, a.col_indices % 2, 128)


def test_compile_takes_steps_of_training_in_one_graph() -> None:
    backend, a = Counted(), matrix()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for width in (40, 24, 80):  # none is the size of a block: torch.compile would expect that of all
        b, bias = normal(192, width).requires_grad_(), normal(128).requires_grad_()
        values = a.values.clone().requires_grad_()
        leaves = b, bias, values
        right = torch.autograd.grad(step(a, *leaves), leaves)
        found = torch.autograd.grad(compiled(a, *leaves), leaves)
        for one, other in zip(found, right, strict=True):
            assert_near(one, other)
    assert backend.graphs == 1


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        a = matrix()
        self.values, self.how = torch.nn.Parameter(a.values), a.how
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(t, requires_grad=False) for t in (a.crow_indices, a.col_indices)
        )

    def forward(self, b: Any) -> Any:
        return bsr_matmul(BsrMatrix(self.values, *self.parts, 192), b, activation="relu")


def test_export_saves_the_operator() -> None:
    layer, b = Layer(), normal(192, 24)
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, (b,)), file)
    file.seek(0)
    program = torch.export.load(file)
    assert "bsr_matmul" in program.graph_module.code
    assert torch.equal(program.module()(b), layer(b))


def test_a_matrix_is_a_pytree_of_its_tensors() -> None:
    a = matrix()
    leaves, spec = pytree.tree_flatten(a)
    assert len(leaves) == 6 and all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, spec)
    assert repr(again) == repr(a) and again.how == a.how and len(again.order) == 1 and len(again.index) == 2


def test_autocast_casts_fake_tensors_of_a_gpu() -> None:
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode():
            values = torch.empty(5, 64, 64, device="cuda")
            crow, col = (torch.empty(n, device="cuda", dtype=torch.int32) for n in (3, 5))
            a = BsrMatrix(values, crow, col, 192)
            b, bias = torch.empty(192, 8, device="cuda"), torch.empty(128, device="cuda")
            assert bsr_matmul(a, b, bias=bias).dtype == torch.get_autocast_dtype("cuda")
            assert bsr_sddmm(bias.new_empty(128, 8), b, a).values.dtype == torch.get_autocast_dtype("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_vmap_is_refused_by_name() -> None:
    a, b, left = matrix(), normal(3, 192, 24), normal(128, 24)
    with pytest.raises(ArgumentError, match=r"a, b, bias and c: one of them is mapped by torch\.vmap: pass a batch"):
        torch.vmap(lambda b: bsr_matmul(a, b))(b)
    with pytest.raises(ArgumentError, match=r"a and b: one of them is mapped by torch\.vmap"):
        torch.vmap(lambda b: bsr_sddmm(left, b, a).values)(b)
    with pytest.raises(ArgumentError, match=r"mapped by torch\.vmap"):
        torch.vmap(lambda b: MATMUL(*arguments(a, b)))(b)


def test_gradients_by_torch_func_are_refused_by_name() -> None:
    a, b = matrix(), normal(192, 24)
    with pytest.raises(ArgumentError, match=r"a, b, bias and c: one of them is differentiated by torch\.func"):
        torch.func.grad(lambda b: bsr_matmul(a, b).sum())(b)


def test_dtensors_are_refused_by_name(tmp_path: Any) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        pytest.skip("torch has no distributed package")
    from torch.distributed.tensor import DTensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        b = DTensor.from_local(normal(192, 24), init_device_mesh("cpu", (1,)))
        with pytest.raises(ArgumentError, match=r"is a DTensor: pass each rank's part, tensor\.to_local\(\)"):
            bsr_matmul(matrix(), b)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(192, 77), (3, 192, 24), (3, 192, 77)], ids=str)
def test_results_may_be_written_to_in_place(shape: tuple[int, ...]) -> None:
    a, b = matrix(), normal(*shape[:-1], -(-shape[-1] // 8) * 8)[..., : shape[-1]].requires_grad_()
    found = bsr_matmul(a, b)
    assert not found._is_view()
    right = torch.autograd.grad(torch.relu(found).sum(), b)
    again = torch.autograd.grad(torch.relu_(bsr_matmul(a, b)).sum(), b)
    assert torch.equal(again[0], right[0])


def test_a_gradient_of_a_gradient_is_refused_where_one_is_asked_for() -> None:
    """A penalty on the gradients of another layer goes through a product without asking for a gradient of its own."""
    a, b, other = matrix(), normal(192, 24).requires_grad_(), torch.ones(24, dtype=torch.bfloat16, requires_grad=True)
    total = (bsr_matmul(a, b, activation="relu") * other).sum() + (other**3).sum()
    of_other, of_b = torch.autograd.grad(total, (other, b), create_graph=True)
    plain = torch.autograd.grad((bsr_matmul(a, b, activation="relu") * other).sum(), b)
    assert torch.equal(of_b.detach(), plain[0])
    assert torch.equal(torch.autograd.grad(of_other.sum(), other, retain_graph=True)[0], 6 * other)
    with pytest.raises(ArgumentError, match="bsr_matmul: has no gradient of its gradient"):
        torch.autograd.grad(of_b.sum(), other)
    left, right = normal(128, 24).requires_grad_(), normal(192, 24).requires_grad_()
    grads = torch.autograd.grad(bsr_sddmm(left, right, a).values.square().sum(), (left, right), create_graph=True)
    with pytest.raises(ArgumentError, match="bsr_sddmm: has no gradient of its gradient"):
        grads[0].sum().backward()


def test_tangents_are_refused_by_name() -> None:
    import torch.autograd.forward_ad as forward

    with forward.dual_level():
        b = forward.make_dual(normal(192, 24), normal(192, 24))
        with pytest.raises(ArgumentError, match="a, b, bias and c: one of them has a tangent"):
            bsr_matmul(matrix(), b)
        with pytest.raises(ArgumentError, match="a and b: one of them has a tangent"):
            bsr_sddmm(normal(128, 24), b, matrix())


def test_values_that_are_sampled_are_not_those_that_were_packed() -> None:
    a = matrix()
    order = tuple(torch.zeros(1, dtype=torch.int32) for _ in range(4))
    packed = BsrMatrix(a.values, a.crow_indices, a.col_indices, a.columns, (*order, torch.zeros(1)), (), "{}")
    found = bsr_sddmm(normal(128, 24), normal(192, 24), packed)
    assert len(found.order) == 4 and len(packed.order) == 5


@pytest.mark.parametrize("name", ["quantize", "block_mask", "select_topk", "bsr_calls"])
def test_a_first_call_in_a_capture_is_refused_on_the_device_of_its_tensors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import import_module

    monkeypatch.undo()  # of the oracles
    entered: list[Any] = []

    class Device:
        def __init__(self, device: Any) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: Any) -> None:
            entered.append(None)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: entered[-1] == torch.device("cuda", 5))
    module = import_module(f"runtime.ops.{name}")
    monkeypatch.setattr(module, "load_kernel", None)
    with pytest.raises(ArgumentError, match="is in a CUDA graph capture, and the first call with new options"):
        if name == "bsr_calls":
            module._loaded("{}", torch.device("cuda", 5))
        else:
            module._kernel(5, "{}")
