"""bsr_matmul and bsr_sddmm without a GPU: everything but the kernels, which the definition stands for."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bsr_oracle  # noqa: E402
from bsr_oracle import assert_near, by_definition, dense, drawn  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from runtime import ArgumentError, BsrMatrix, PreparedBsr, explain_matmul, prepare_bsr  # noqa: E402
from runtime.ops import bsr, bsr_calls, bsr_layout  # noqa: E402

bsr_matmul: Any = bsr.bsr_matmul
bsr_sddmm: Any = bsr.bsr_sddmm
ACTIVATIONS = (None, "relu", "gelu", "silu")
CLOSE = {"atol": 2e-2, "rtol": 2e-2}
BLOCKS = [(16, 16), (64, 64), (128, 64)]
GRADIENTS = [
    ((16, 16), None, False, ()),
    ((16, 16), "gelu", True, (2,)),
    ((64, 64), "relu", True, ()),
    ((64, 64), "silu", False, (2,)),
    ((64, 64), "gelu", False, ()),
    ((128, 64), None, True, (2,)),
    ((128, 64), "relu", False, (2,)),
    ((128, 64), "silu", True, ()),
]


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    return bsr_oracle.install(monkeypatch)


def normal(*shape: int) -> Any:
    """Return a normal matrix whose rows are padded, so that kernels can read it."""
    columns = -(-shape[-1] // 8) * 8
    return (torch.randn(*shape[:-1], columns) / 4).bfloat16()[..., : shape[-1]]


def whole(a: Any) -> Any:
    return dense(a.values(), a.crow_indices(), a.col_indices(), tuple(a.shape))


def assert_close(found: Any, right: Any) -> None:
    torch.testing.assert_close(found.double(), right.double(), **CLOSE)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "A^T"])
def test_products(block: tuple[int, int], transposed: bool) -> None:
    a = drawn((3, 4), block)
    w = whole(a).mT if transposed else whole(a)
    for width in (1, 77):
        b = normal(w.shape[1], width)
        for given in (a, prepare_bsr(a)):
            assert_close(bsr_matmul(given, b, transpose_a=transposed), w @ b.double())
    columns = normal(77, w.shape[1]).mT
    assert columns.stride(0) == 1
    assert_close(bsr_matmul(a, columns, transpose_a=transposed), w @ columns.double())
    batch = normal(3, w.shape[1], 24)
    assert_close(bsr_matmul(a, batch, transpose_a=transposed), w @ batch.double())


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "A^T"])
def test_what_is_added(arch: str, activation: Any, transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = bsr_oracle.install(monkeypatch, arch)
    a = drawn((2, 3), (64, 64))
    w = whole(a).mT if transposed else whole(a)
    b, bias, c = normal(w.shape[1], 40), normal(w.shape[0]), normal(w.shape[0], 40)
    options: dict[str, Any] = {"activation": activation, "transpose_a": transposed}
    for more in ({"bias": bias}, {"c": c}, {"c": c, "beta": -0.5, "bias": bias}):
        found = bsr_matmul(a, b, **options, **more)
        assert_close(found, by_definition(w, b, activation=activation, **more))
    nothing = torch.full_like(c, torch.nan)
    assert_close(bsr_matmul(a, b, c=nothing, beta=0, **options), by_definition(w, b, activation=activation))
    assert bool(loaded.of(accumulate=True)) == (arch == "sm_90a" and not transposed), "only there kernels add c"


def test_operands_that_no_kernel_reads_are_copied_if_that_is_asked_for() -> None:
    a, b, c = drawn((3, 2), (64, 64)), normal(128, 77).contiguous(), normal(192, 77).contiguous()
    right = whole(a) @ b.double() + c.double()
    for strides in ((77, 1), (160, 2), (1, 129)):
        given = torch.empty(21000).bfloat16().as_strided((128, 77), strides).copy_(b)
        with pytest.raises(ArgumentError, match="b: has stri"):
            bsr_matmul(a, given, c=normal(192, 77))
        assert_close(bsr_matmul(a, given, c=c, arrange=True), right)


@pytest.mark.parametrize("arrange", [False, True])
@pytest.mark.parametrize(("columns", "arch"), [(1, "sm_90a"), (8, "sm_89")])
def test_up_to_8_columns_are_read_as_they_are(
    columns: int, arch: str, arrange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = bsr_oracle.install(monkeypatch, arch)
    monkeypatch.setattr(bsr_calls, "readable", lambda b: pytest.fail("copies b"))
    monkeypatch.setattr(bsr_calls, "by_rows", lambda c: pytest.fail("copies c"))
    a, b = drawn((3, 2), (64, 64)), normal(128, columns).contiguous()
    c, bias = normal(192, columns).contiguous(), normal(192)
    for strides in ((columns, 1), (37, 3), (1, 129)):
        given = torch.empty(21000).bfloat16().as_strided((128, columns), strides).copy_(b)
        right = by_definition(whole(a), b, activation="gelu", c=c, bias=bias)
        assert_close(bsr_matmul(a, given, activation="gelu", c=c, bias=bias, arrange=arrange), right)
        assert_close(bsr_matmul(a, given, arrange=arrange), whole(a) @ b.double())
    assert {kernel.spec.b_layout for kernel in loaded.values()} == {"strided"} and len(loaded) == 2


def test_up_to_8_columns_are_copied_where_no_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = bsr_oracle.install(monkeypatch, "sm_90a")
    a, b = drawn((3, 2), (64, 64)), normal(192, 3).contiguous()
    with pytest.raises(ArgumentError, match="b: has stri"):
        bsr_matmul(a, b, transpose_a=True)
    assert_close(bsr_matmul(a, b, transpose_a=True, arrange=True), whole(a).mT @ b.double())
    assert {kernel.spec.b_layout for kernel in loaded.values()} == {"row_major"}


def test_what_begins_or_lies_where_kernels_do_not_read_is_copied() -> None:
    whole_rows = torch.zeros(16, 33).bfloat16()[:, :32]
    for t in (whole_rows, torch.zeros(16, 40).bfloat16()[:, 1:33], torch.zeros(2, 16, 20).bfloat16().mT[:, :16]):
        found = bsr_layout.by_rows(t)
        assert found is not t and bsr_layout.is_by_rows(found) and found.data_ptr() % 16 == 0
    fine = torch.zeros(16, 40).bfloat16()[:, 8:31]
    columns = torch.zeros(24, 40).bfloat16().mT[:, 1:]
    assert bsr_layout.by_rows(fine) is fine and bsr_layout.readable(columns) is columns
    shifted = columns[1:]
    assert bsr_layout.readable(shifted) is not shifted
    assert bsr_layout.is_by_rows(bsr_layout.readable(torch.zeros(24, 41).bfloat16().mT))


def test_a_matrix_without_blocks_and_one_of_one_block() -> None:
    one = drawn((1, 1), (64, 64))
    b = normal(64, 16)
    assert_close(bsr_matmul(one, b), whole(one) @ b.double())
    empty = torch.sparse_bsr_tensor(
        torch.tensor([0, 0]), torch.tensor([], dtype=torch.long), torch.zeros(0, 64, 64).bfloat16(), size=(64, 64)
    )
    assert not bsr_matmul(empty, b).any()
    leaf, values = b.clone().requires_grad_(), torch.zeros(0, 64, 64).bfloat16().requires_grad_()
    bsr_matmul(prepare_bsr(empty).with_values(values), leaf).sum().backward()
    assert leaf.grad is not None and not leaf.grad.any() and values.grad.shape == (0, 64, 64)


def test_the_order_of_uneven_rows_goes_to_the_kernel(loaded: Any) -> None:
    mask = torch.zeros(24, 24, dtype=torch.bool)
    mask[0] = True
    mask[:, 0] = True
    crow = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    values = torch.randn(int(crow[-1]), 64, 64).bfloat16() / 8
    a = torch.sparse_bsr_tensor(crow, mask.nonzero()[:, 1].contiguous(), values, size=(1536, 1536))
    b, bias = normal(1536, 4096), normal(1536)  # a smaller product gets another kernel
    right = whole(a).float() @ b.float()
    assert_close(bsr_matmul(a, b), right)
    assert not loaded.of(scheduler="dynamic"), "how uneven a raw matrix is would have to be read in each call"
    assert_close(bsr_matmul(prepare_bsr(a), b), right)
    (kernel,) = loaded.of(scheduler="dynamic")
    assert kernel.calls[-1].row_order is not None
    prepared = PreparedBsr(a, kernel.calls[-1].row_order, kernel=kernel.spec.canonical_json())
    assert_close(bsr_matmul(prepared, b), right)
    assert kernel.calls[-1] is prepared, "the kernel that prepared it computes"
    assert_close(bsr_matmul(prepared, b, bias=bias), right + bias.float()[:, None])
    assert [k.spec.tile for k in loaded.of(scheduler="dynamic")] == [kernel.spec.tile] * 2


@pytest.mark.parametrize(("block", "activation", "transposed", "batch"), GRADIENTS, ids=str)
def test_gradients(block: tuple[int, int], activation: Any, transposed: bool, batch: tuple[int, ...]) -> None:
    a = drawn((3, 2), block)
    rows, depth = a.shape[::-1] if transposed else a.shape
    leaves = {"b": normal(*batch, depth, 37), "bias": normal(rows), "c": normal(*batch, rows, 37)}
    values = a.values().clone().requires_grad_()
    for leaf in leaves.values():
        leaf.requires_grad_()
    matrix = prepare_bsr(a).with_values(values)
    kept = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    own = values.detach().double().requires_grad_()
    w = dense(own, a.crow_indices(), a.col_indices(), tuple(a.shape))
    options: dict[str, Any] = {"beta": -0.5, "activation": activation, "transpose_a": transposed}
    found = bsr_matmul(matrix, **leaves, **options)
    product = w.mT if transposed else w
    right = by_definition(product, **kept, beta=-0.5, activation=None if activation == "relu" else activation)
    if activation == "relu":  # rounding may decide which side of 0 an element is on
        right = right * (found.detach() > 0)
    assert_close(found, right)
    with torch.no_grad():
        assert torch.equal(found, bsr_matmul(matrix, **leaves, **options)), "as without gradients"
    grad = torch.randn_like(right)
    found.backward(grad.bfloat16())
    right.backward(grad.bfloat16().double())
    for name, leaf in {**leaves, "values": values}.items():
        exact = {**kept, "values": own}[name].grad
        assert_near(leaf.grad, exact)


def test_gradients_reach_the_leaf_that_a_user_has() -> None:
    a, b = drawn((2, 2), (64, 64)), normal(128, 24)
    leaf = a.clone().requires_grad_()
    (whole_grad,) = torch.autograd.grad(bsr_matmul(leaf, b).sum(), leaf)  # torch accumulates none in a sparse leaf
    values = a.values().clone().requires_grad_()
    made = torch.sparse_bsr_tensor(a.crow_indices(), a.col_indices(), values, size=a.shape)
    bsr_matmul(made, b).sum().backward()
    kernels = PreparedBsr(a).with_values(values.detach().clone().requires_grad_())
    bsr_matmul(kernels, b).sum().backward()
    assert values.grad is not None and torch.equal(whole_grad.values(), values.grad)
    right = (torch.ones(128, 24).double() @ b.double().mT).unflatten(0, (-1, 64)).unflatten(2, (-1, 64))
    row = torch.repeat_interleave(torch.arange(2), a.crow_indices().diff())
    assert_close(values.grad, right.transpose(1, 2)[row, a.col_indices()])


def test_only_the_gradients_that_are_asked_for_are_computed(loaded: Any) -> None:
    a, b = drawn((2, 2), (64, 64)), normal(128, 24).requires_grad_()
    bsr_matmul(a, b).sum().backward()
    assert not loaded.of(op="bsr_sddmm")
    values = a.values().clone().requires_grad_()
    bsr_matmul(prepare_bsr(a).with_values(values), b.detach()).sum().backward()
    assert sum(len(k.calls) for k in loaded.of(op="bsr_spmm")) == 3
    assert len(loaded.of(op="bsr_sddmm")) == 1


@pytest.mark.parametrize(("activation", "products"), [(None, 1), ("relu", 1), ("gelu", 2), ("silu", 2)])
def test_what_an_activation_computes_again(activation: Any, products: int, loaded: Any) -> None:
    a, bias = drawn((2, 2), (64, 64)), normal(128).requires_grad_()
    found = bsr_matmul(a, normal(128, 24), bias=bias, activation=activation)
    found.sum().backward()
    assert sum(len(k.calls) for k in loaded.of(op="bsr_spmm")) == products


@pytest.mark.parametrize("block", [(16, 16), (64, 64)], ids=str)
def test_sampled_products(block: tuple[int, int]) -> None:
    pattern = drawn((3, 2), block)
    a, b = normal(pattern.shape[0], 40).requires_grad_(), normal(pattern.shape[1], 40).requires_grad_()
    found = bsr_sddmm(a, b, pattern)
    assert found.layout == torch.sparse_bsr and torch.equal(found.col_indices(), pattern.col_indices())
    left, right = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    ones = torch.ones_like(pattern.values())
    mask = dense(ones, pattern.crow_indices(), pattern.col_indices(), tuple(pattern.shape))
    exact = (left @ right.mT) * mask
    assert_close(whole(found), exact)
    weights = torch.randn_like(found.values())
    (found.values() * weights).sum().backward()
    (exact * dense(weights, pattern.crow_indices(), pattern.col_indices(), tuple(pattern.shape))).sum().backward()
    assert_close(a.grad, left.grad)
    assert_close(b.grad, right.grad)
    prepared = bsr_sddmm(a.detach(), b.detach(), prepare_bsr(pattern))
    assert isinstance(prepared, BsrMatrix) and torch.equal(prepared.values, found.values())


def test_double_backward_is_refused() -> None:
    a, b = drawn((2, 2), (64, 64)), normal(128, 24).requires_grad_()
    pattern = drawn((2, 2), (64, 64))
    for name, result in (("bsr_matmul", bsr_matmul(a, b)), ("bsr_sddmm", bsr_sddmm(b, b.detach(), pattern).values())):
        (first,) = torch.autograd.grad(result.square().sum(), b, create_graph=True)
        with pytest.raises(ArgumentError, match=f"{name}: has no gradient of its gradient"):
            torch.autograd.grad(first.sum(), b)


WRONG: dict[str, tuple[Any, str]] = {
    "dense a": (lambda a, b: bsr_matmul(a.to_dense(), b), r"a: is torch\.strided, expected a torch\.sparse_bsr"),
    "no tensor": (lambda a, b: bsr_matmul(a, [1]), r"b: is list, expected a torch\.Tensor"),
    "no tensor to copy": (lambda a, b: bsr_matmul(a, [1], arrange=True), r"b: is list, expected a torch\.Tensor"),
    "sparse c": (lambda a, b: bsr_matmul(a, b, c=a, arrange=True), r"c: has layout torch\.sparse_bsr, expected a"),
    "float32": (lambda a, b: bsr_matmul(a, b.float()), r"b: is torch\.float32, expected torch\.float16 or"),
    "types": (lambda a, b: bsr_matmul(a, b.half()), r"b: is torch\.float16, a is torch\.bfloat16: pass one type"),
    "depth": (lambda a, b: bsr_matmul(a, b[:64]), r"b: has shape \(64, 24\), expected \(K 128, N\), as a is"),
    "rank": (lambda a, b: bsr_matmul(a, b[0]), r"b: has 1 dimensions \(24,\), expected 2, or 3 with a batch"),
    "sparse b": (lambda a, b: bsr_matmul(a, a), r"b: has layout torch\.sparse_bsr, expected a dense tensor"),
    "device": (lambda a, b: bsr_matmul(a, b.to("meta")), r"b: is on meta, a is on cpu"),
    "activation": (lambda a, b: bsr_matmul(a, b, activation="tanh"), r"activation: is 'tanh'; allowed: None, relu"),
    "beta": (lambda a, b: bsr_matmul(a, b, beta=2.0), r"beta: is 2\.0, but there is no c"),
    "beta's type": (lambda a, b: bsr_matmul(a, b, c=b, beta="1"), r"beta: is str, expected a number"),
    "bias": (lambda a, b: bsr_matmul(a, b, bias=b[:7, 0]), r"bias: has shape \(7,\), expected \(192,\), \(M,\)"),
    "c": (lambda a, b: bsr_matmul(a, b, c=b), r"c: has shape \(128, 24\), expected \(192, 24\), as the result"),
    "block": (
        lambda a, b: bsr_matmul(torch.randn(80, 80).bfloat16().to_sparse_bsr((40, 40)), b[:80]),
        r"a: has blocks of \(40, 40\), for which sm_90a has no kernel: block\.rows: is 40",
    ),
    "stride": (lambda a, b: bsr_matmul(a, normal(128, 80)[:, 1:78:2]), "b: has stride 2 in its last dimension"),
    "values": (
        lambda a, b: prepare_bsr(a).with_values(torch.zeros(1, 64, 64)),
        r"values: has shape \(1, 64, 64\), expected",
    ),
    "sampled": (lambda a, b: bsr_sddmm(b, b[None], a), r"b: has 3 dimensions \(1, 128, 24\), expected 2"),
    "pattern": (lambda a, b: bsr_sddmm(b, b, b), r"pattern: is torch\.strided, expected a torch\.sparse_bsr"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, loaded: Any) -> None:
    call, message = WRONG[name]
    a, b = drawn((3, 2), (64, 64)), normal(128, 24)
    with pytest.raises(ArgumentError, match=message):
        call(a, b)
    assert not any(kernel.calls for kernel in loaded.values()) or name == "stride"


def test_a_kernel_that_prepared_the_matrix_and_does_not_compute_this_is_named() -> None:
    a, b = drawn((2, 2), (16, 16)), normal(32, 24)
    gathered = find_spec("h100_bsr_spmm_b16_gathered").spec.canonical_json().replace("fp16", "bf16")
    with pytest.raises(ArgumentError, match=r"a: is prepared for .*, which does not compute this: "):
        bsr_matmul(PreparedBsr(a, kernel=gathered), b, bias=normal(32))


@pytest.mark.parametrize("which", ["b16_gathered", "b16_balanced", "b128_transposed", "b64_balanced"])
def test_what_a_kernel_prepared_is_for_that_kernel(which: str) -> None:
    spec = find_spec(f"h100_bsr_spmm_{which}").spec
    a = drawn((2, 2), (spec.block.rows, spec.block.cols), dtype=torch.float16)
    prepared, b = PreparedBsr(a, kernel=spec.canonical_json()), normal(a.shape[0], 24).half()
    found = explain_matmul(prepared, b, transpose_a=spec.transpose_a, arch="sm_90a").choice
    assert found.spec == spec and found.reason == "the matrix is prepared for it"
    other = explain_matmul(prepared, b, transpose_a=not spec.transpose_a, arch="sm_90a").choice
    assert other.reason != found.reason


def test_without_a_gpu_a_call_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="b: is on cpu, expected a CUDA device"):
        bsr_matmul(drawn((2, 2), (64, 64)), normal(128, 24))
    with pytest.raises(ArgumentError, match="a: is on cpu, expected a CUDA device"):
        bsr_sddmm(normal(128, 24), normal(128, 24), drawn((2, 2), (64, 64)))


def test_explanations() -> None:
    a, b = drawn((4, 4), (16, 16)), normal(64, 24)
    text = str(explain_matmul(a, b, activation="gelu", bias=normal(64), gradients=True, arch="sm_90a"))
    assert "C: " in text and "dB: " in text and "dA: " in text
    assert "each call copies the stored blocks, transposed" in text and "once more" in text
    assert "matrix 64 x 64, blocks 16 x 16" in text
    fused = explain_matmul(drawn((2, 2), (64, 64)), normal(128, 24), c=normal(128, 24), arch="sm_90a")
    assert fused.choice.spec.accumulate and list(fused.products) == ["C"]
    narrow = str(explain_matmul(a, b[:, :5], activation="gelu", bias=normal(64), arch="sm_90a"))
    assert "with up to 8 columns B and C are read and written as they are" in narrow and "in torch" not in narrow
    ada = str(explain_matmul(a, b, activation="relu", arch="sm_89"))
    assert "bias, c and activation follow in torch: no kernel has them" in ada
    with pytest.raises(ArgumentError, match="arch: is missing: b is on cpu"):
        explain_matmul(a, b)
