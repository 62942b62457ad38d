"""bsr_matmul, bsr_sddmm and BlockSparseLinear on a GPU: beside the definition, and torch's compilers and graphs."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bsr_oracle import assert_near, by_definition, dense, drawn  # noqa: E402
from kept_calls import forget  # noqa: E402

from codegen.arch import ARCHS  # noqa: E402
from runtime import (  # noqa: E402
    ArgumentError,
    BsrMatrix,
    bsr_matmul,
    bsr_sddmm,
    explain_matmul,
    load_kernel,
    prepare_bsr,
)
from runtime.nn import BlockSparseLinear  # noqa: E402

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
if torch.cuda.is_available():  # these call kernels of the device's own architecture, as no others are taken
    HERE = torch.cuda.get_device_capability()
    pytestmark = pytest.mark.skipif(
        HERE not in {arch.compute_capability for arch in ARCHS.values()}, reason="no kernels for this device"
    )
hopper = pytest.mark.skipif(not HOPPER, reason="kernels of sm_90a")
CLOSE = {"atol": 2e-2, "rtol": 2e-2}
SQUARE = [(16, 16), (32, 32), (64, 64), (128, 128)]
BLOCKS = [*SQUARE, *([(64, 128), (128, 64)] if HOPPER else [])]  # others of sm_89 have no sampled product
DTYPES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def matrix(block: tuple[int, int] = (64, 64), blocks: tuple[int, int] = (5, 7), dtype: Any = torch.bfloat16) -> Any:
    """Return random blocks, whose second block row is empty; small values keep sums near 1."""
    a = drawn(blocks, block, dtype=dtype, device="cuda")
    a.values().mul_((blocks[1] * block[1]) ** -0.5)
    return a


def normal(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    """Return a normal matrix whose rows are padded, so that kernels can read it."""
    columns = -(-shape[-1] // 8) * 8
    return torch.randn(*shape[:-1], columns, device="cuda").to(dtype)[..., : shape[-1]]


def whole(a: Any) -> Any:
    return dense(a.values(), a.crow_indices(), a.col_indices(), tuple(a.shape))


def assert_close(found: Any, right: Any) -> None:
    torch.testing.assert_close(found.double(), right.double(), **CLOSE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "A^T"])
def test_products(block: tuple[int, int], transposed: bool, dtype: Any) -> None:
    a = matrix(block, dtype=dtype)
    w, prepared = (whole(a).mT if transposed else whole(a)), prepare_bsr(a)
    for width in (1, 8, 77, 520):
        b = normal(w.shape[1], width, dtype=dtype)
        for given in (a, prepared):
            found = bsr_matmul(given, b, transpose_a=transposed, validate=True)
            assert found.dtype == dtype
            assert_close(found, w @ b.double())
    by_columns = normal(77, w.shape[1], dtype=dtype).mT
    assert_close(bsr_matmul(prepared, by_columns, transpose_a=transposed), w @ by_columns.double())
    batch = normal(3, w.shape[1], 24, dtype=dtype)
    assert_close(bsr_matmul(prepared, batch, transpose_a=transposed), w @ batch.double())
    wide = normal(w.shape[1], 160, dtype=dtype)
    assert_close(bsr_matmul(prepared, wide[:, 16:93], transpose_a=transposed), w @ wide[:, 16:93].double())


@pytest.mark.parametrize("block", [(16, 16), (64, 64)], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "A^T"])
def test_what_is_added(block: tuple[int, int], activation: Any, transposed: bool) -> None:
    a = matrix(block)
    w = whole(a).mT if transposed else whole(a)
    b, bias, c = normal(w.shape[1], 40), normal(w.shape[0]), normal(w.shape[0], 40)
    options: dict[str, Any] = {"activation": activation, "transpose_a": transposed}
    for more in ({"bias": bias}, {"c": c}, {"c": c, "beta": -0.5, "bias": bias}):
        found = bsr_matmul(a, b, **options, **more)
        assert_close(found, by_definition(w, b, activation=activation, **more))
    nothing = torch.full_like(c, torch.nan)
    assert_close(bsr_matmul(a, b, c=nothing, beta=0, **options), by_definition(w, b, activation=activation))


def test_a_matrix_without_blocks_and_one_of_one_block() -> None:
    one, b = matrix(blocks=(1, 1)), normal(64, 16)
    assert_close(bsr_matmul(one, b), whole(one) @ b.double())
    indices = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.zeros(0, dtype=torch.int32, device="cuda")
    empty = BsrMatrix(torch.zeros(0, 64, 64, device="cuda").bfloat16().requires_grad_(), *indices, 64)
    leaf, bias = b.clone().requires_grad_(), normal(64)
    found = bsr_matmul(empty, leaf, bias=bias)
    assert_close(found, bias.double()[:, None].expand(64, 16))
    found.sum().backward()
    assert leaf.grad is not None and not leaf.grad.any() and empty.values.grad.shape == (0, 64, 64)


def uneven() -> Any:
    """Return a matrix with one long block row, of which kernels want the order of the rows."""
    mask = torch.zeros(32, 32, dtype=torch.bool)
    mask[0], mask[:, 0] = True, True
    crow = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    values = torch.randn(int(crow[-1]), 64, 64) / 8
    parts = crow.cuda(), mask.nonzero()[:, 1].contiguous().cuda(), values.cuda().bfloat16()
    return torch.sparse_bsr_tensor(*parts, size=(2048, 2048))


def test_uneven_rows() -> None:
    a, b = uneven(), normal(2048, 1024)
    right = whole(a).float() @ b.float()
    prepared = prepare_bsr(a)
    for given in (a, prepared):
        assert_close(bsr_matmul(given, b, validate=True), right)
    if "H100" in torch.cuda.get_device_name():  # whose rows the choice prefers
        assert explain_matmul(prepared, b).choice.spec.scheduler == "dynamic"


@hopper
@pytest.mark.parametrize("which", ["b16_gathered", "b16_balanced", "b128_transposed"])
def test_what_a_kernel_prepared_is_computed_by_that_kernel(which: str) -> None:
    kernel: Any = load_kernel(f"h100_bsr_spmm_{which}")
    block = kernel.spec.block.rows, kernel.spec.block.cols
    transposed = kernel.spec.transpose_a
    a = matrix(block, (12, 9), dtype=torch.float16)
    prepared, w = kernel.prepare(a, 96), whole(a).mT if transposed else whole(a)
    b = normal(w.shape[1], 96, dtype=torch.float16)
    assert explain_matmul(prepared, b, transpose_a=transposed).choice.spec == kernel.spec
    found = bsr_matmul(prepared, b, transpose_a=transposed, validate=True)
    assert torch.equal(found, kernel(prepared, b))
    values = a.values().clone().requires_grad_()
    leaf = b.clone().requires_grad_()
    again = bsr_matmul(prepared.with_values(values), leaf, transpose_a=transposed)
    assert torch.equal(again, found), "what the operator is given is what was prepared"
    again.backward(torch.ones_like(again))
    assert_close(leaf.grad, (w.mT @ torch.ones_like(again).double()))
    assert values.grad is not None
    if which == "b16_gathered":
        packed = kernel.prepare(a, 96, pack=True)
        assert torch.equal(bsr_matmul(packed, leaf), found)
        with pytest.raises(ArgumentError, match=r"a: is prepared for .*, which does not compute this: epilogue"):
            bsr_matmul(prepared, b, bias=normal(a.shape[0], dtype=torch.float16))


GRADIENTS = [
    *((block, None, False, ()) for block in BLOCKS),
    *((block, "gelu", True, ()) for block in BLOCKS),
    *(((64, 64), activation, False, ()) for activation in ("relu", "gelu", "silu")),
    *(((64, 64), activation, True, (2,)) for activation in (None, "relu", "silu")),
    ((16, 16), "relu", False, (3,)),
]


@pytest.mark.parametrize(("block", "activation", "transposed", "batch"), GRADIENTS, ids=str)
def test_gradients(block: tuple[int, int], activation: Any, transposed: bool, batch: tuple[int, ...]) -> None:
    a = matrix(block)
    rows, depth = a.shape[::-1] if transposed else a.shape
    leaves = {"b": normal(*batch, depth, 77), "bias": normal(rows), "c": normal(*batch, rows, 77)}
    for leaf in leaves.values():
        leaf.requires_grad_()
    values = a.values().clone().requires_grad_()
    matrix_ = prepare_bsr(a).with_values(values)
    options: dict[str, Any] = {"beta": -0.5, "activation": activation, "transpose_a": transposed}
    found = bsr_matmul(matrix_, **leaves, **options)
    with torch.no_grad():
        assert torch.equal(found, bsr_matmul(matrix_, **leaves, **options)), "as without gradients"
    kept = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    own = values.detach().double().requires_grad_()
    w = dense(own, a.crow_indices(), a.col_indices(), tuple(a.shape))
    product = w.mT if transposed else w
    right = by_definition(product, **kept, beta=-0.5, activation=None if activation == "relu" else activation)
    if activation == "relu":  # rounding may decide which side of 0 an element is on
        right = right * (found.detach() > 0)
    assert_close(found, right)
    grad = torch.randn_like(right).bfloat16()
    found.backward(grad)
    right.backward(grad.double())
    for name, leaf in {**leaves, "values": values}.items():
        exact = {**kept, "values": own}[name].grad
        assert leaf.grad.shape == leaf.shape and leaf.grad.dtype == leaf.dtype
        assert_near(leaf.grad, exact)


def test_gradients_without_strides_of_their_own() -> None:
    """The gradient of a sum is one element, expanded; that of a transpose is stored by columns."""
    a, b = matrix(), normal(448, 77)
    w, grads = whole(a), []
    values = a.values().clone().requires_grad_()
    for use in (lambda y: y.sum(), lambda y: y.mT.contiguous().sum(), lambda y: (y.mT * torch.ones_like(y.mT)).sum()):
        leaf = b.detach().requires_grad_()  # a clone has other strides
        use(bsr_matmul(prepare_bsr(a).with_values(values), leaf)).backward()
        grads.append(leaf.grad)
    right = w.sum(0).unsqueeze(1).expand(-1, 77)
    for grad in grads:
        assert_close(grad, right)


@pytest.mark.parametrize("block", SQUARE, ids=str)
def test_sampled_products(block: tuple[int, int]) -> None:
    pattern = matrix(block)
    a, b = (normal(n, 77).mul_(0.3).requires_grad_() for n in pattern.shape)
    found = bsr_sddmm(a, b, pattern, validate=True)
    left, right = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    parts = pattern.crow_indices(), pattern.col_indices(), tuple(pattern.shape)
    exact = (left @ right.mT) * dense(torch.ones_like(pattern.values()), *parts)
    assert_close(whole(found), exact)
    weights = torch.randn_like(found.values()) * 0.1
    (found.values() * weights).sum().backward()
    (exact * dense(weights, *parts)).sum().backward()
    assert_close(a.grad, left.grad)
    assert_close(b.grad, right.grad)
    assert_close(bsr_sddmm(a.detach(), b.detach(), prepare_bsr(pattern)).values, found.values())


def test_opcheck() -> None:
    operators = torch.ops.sparse_kernel_codegen
    a = prepare_bsr(matrix(blocks=(2, 3)))
    values, lists = a.values.clone().requires_grad_(), (list(a.order), list(a.index), a.columns, a.how)
    parts = values, a.crow_indices, a.col_indices
    c, bias = normal(128, 24).requires_grad_(), normal(128).requires_grad_()
    samples: list[tuple[Any, dict[str, Any]]] = [
        ((*parts, normal(192, 24).requires_grad_(), None, None, *lists), {}),
        ((*parts, normal(192, 24).requires_grad_(), bias, c, *lists), {"activation": "gelu", "beta": 0.5}),
        (
            (*parts, normal(2, 128, 24).requires_grad_(), None, None, *lists),
            {"activation": "relu", "transpose_a": True},
        ),
    ]
    for arguments, options in samples:
        torch.library.opcheck(operators.bsr_matmul.default, arguments, options)
    operands = normal(128, 24).requires_grad_(), normal(192, 24).requires_grad_()
    parts = a.crow_indices, a.col_indices, list(a.order), list(a.index), a.columns, 64, 64, a.how
    torch.library.opcheck(operators.bsr_sddmm.default, (*operands, *parts), {})


def step(a: BsrMatrix, b: Any, bias: Any, values: Any) -> Any:
    """A product between other operators of a graph."""
    found = bsr_matmul(a.with_values(values), b * 2, bias=bias, activation="gelu")
    return (found + 1).float().square().sum()


@pytest.mark.own_allocator
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile_takes_steps_of_training_in_one_graph(mode: str) -> None:
    a = prepare_bsr(matrix())
    compiled = torch.compile(step, fullgraph=True, dynamic=True, mode=mode)
    stance = "default"
    for width in (1152, 1024, 1000, 1152):
        leaves = normal(448, width), normal(320), a.values.clone()
        for leaf in leaves:
            leaf.requires_grad_()
        right = torch.autograd.grad(step(a, *leaves), leaves)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.compiler.set_stance(stance):
            found = torch.autograd.grad(compiled(a, *leaves), leaves)
        for one, other in zip(found, right, strict=True):
            assert_near(one, other)
        stance = "fail_on_recompile"


def test_cuda_graphs_read_the_values_of_each_replay() -> None:
    a, b = prepare_bsr(matrix()), normal(448, 96)
    bias = normal(320)
    bsr_matmul(a, b, bias=bias, activation="silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bsr_matmul(a, b, bias=bias, activation="silu")
    for _ in range(3):
        a.values.copy_(torch.randn_like(a.values) / 20)
        b.copy_(normal(448, 96))
        graph.replay()
        assert torch.equal(out, bsr_matmul(a, b, bias=bias, activation="silu"))


def test_cuda_graphs_capture_transposed_copies() -> None:
    raw = matrix((16, 16))
    a, b = prepare_bsr(raw), normal(80, 96)
    bsr_matmul(a, b, transpose_a=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bsr_matmul(a, b, transpose_a=True)
    a.values.copy_(torch.randn_like(a.values))
    graph.replay()
    assert torch.equal(out, bsr_matmul(a, b, transpose_a=True))


def test_a_kernel_is_not_loaded_in_a_capture() -> None:
    a, b = prepare_bsr(matrix((32, 32))), normal(224, 8)
    forget()
    with (
        pytest.raises(ArgumentError, match="make one call before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        torch.zeros(1, device="cuda")
        bsr_matmul(a, b)
    torch.cuda.synchronize()


def test_operands_that_no_kernel_reads_are_copied_if_that_is_asked_for() -> None:
    a, b, c = prepare_bsr(matrix()), normal(448, 77).contiguous(), normal(320, 77).contiguous()
    assert b.stride(0) == 77
    right = whole(a.to_sparse()) @ b.double() + c.double()
    assert_close(bsr_matmul(a, b, c=c, arrange=True), right)
    assert_close(bsr_matmul(a, normal(448, 154)[:, ::2].copy_(b), c=c, arrange=True), right)


def test_autocast() -> None:
    a, b, bias = matrix(), normal(448, 96).float(), normal(320).float()
    values = a.values().float().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        found = bsr_matmul(prepare_bsr(a).with_values(values), b, bias=bias)
        assert bsr_sddmm(normal(320, 8).float(), normal(448, 8).float(), a).dtype == torch.bfloat16
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, bsr_matmul(prepare_bsr(a), b.bfloat16(), bias=bias.bfloat16()))
    found.sum().backward()
    assert values.grad.dtype == torch.float32


def twice(a: Any, b: Any) -> Any:
    """The gradient of a gradient, of which the first one may be taken."""
    (first,) = torch.autograd.grad(bsr_matmul(a, b).square().sum(), b, create_graph=True)
    return torch.autograd.grad(first.sum(), b)


WRONG: dict[str, tuple[Any, str]] = {
    "place": (lambda a, b: bsr_matmul(a, b.cpu()), r"b: is on cpu, a is on cuda:0"),
    "index place": (
        lambda a, b: bsr_matmul(BsrMatrix(a.values(), a.crow_indices().cpu(), a.col_indices(), 448), b),
        r"a\.indices: is on cpu, its values are on cuda:0",
    ),
    "type": (lambda a, b: bsr_matmul(a, b.half()), r"b: is torch\.float16, a is torch\.bfloat16: pass one type"),
    "depth": (lambda a, b: bsr_matmul(a, b[:64]), r"b: has shape \(64, 96\), expected \(K 448, N\)"),
    "odd rows": (lambda a, b: bsr_matmul(a, b[:, :77].contiguous()), r"b: has stride 77 in dimension 0"),
    "address": (lambda a, b: bsr_matmul(a, b[:, 1:90]), r"b: starts at address .*, which is not a multiple of 16"),
    "bias": (lambda a, b: bsr_matmul(a, b, bias=b[:320, 0]), r"bias: has stride 96, expected a contiguous"),
    "double backward": (lambda a, b: twice(a, b.requires_grad_()), "bsr_matmul: .* gradient of its gradient"),
    "vmap": (lambda a, b: torch.vmap(lambda b: bsr_matmul(a, b))(b[None]), r"mapped by torch\.vmap"),
    "sampled": (lambda a, b: bsr_sddmm(b, b, a), r"a: has shape \(448, 96\), expected \(M 320, K\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ArgumentError, match=message):
        call(matrix(), normal(448, 96))


def test_wrong_indices_are_named() -> None:
    a = matrix()
    col = a.col_indices().clone()
    col[0] = 7
    parts = a.crow_indices(), col, a.values()
    wrong = torch.sparse_bsr_tensor(*parts, size=a.shape, check_invariants=False)
    with pytest.raises(ArgumentError, match=r"a\.col_indices\(\): ranges from \d to 7, allowed: 0 to 6"):
        bsr_matmul(wrong, normal(448, 96), validate=True)


def by_elements(blocks: Any, block: tuple[int, int]) -> Any:
    return blocks.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", SQUARE, ids=str)
def test_layers_train_as_dense_ones_with_a_mask(block: tuple[int, int], dtype: Any) -> None:
    mask = torch.rand(5, 6, device="cuda") < 0.5
    mask[0, 0], mask[1] = True, False
    inputs, outputs = 6 * block[1], 5 * block[0]
    linear = torch.nn.Linear(inputs, outputs, device="cuda", dtype=dtype)
    layer = BlockSparseLinear.from_linear(linear, block, mask=mask)
    weight = (linear.weight.detach().double() * by_elements(mask, block)).requires_grad_()
    bias = linear.bias.detach().double().requires_grad_()
    right_optimizer = torch.optim.SGD([weight, bias], lr=3e-4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=3e-4)
    before = weight.detach().clone(), bias.detach().clone()
    for tokens in (37, 64, 1):
        x = torch.randn(2, tokens, inputs, device="cuda").to(dtype).requires_grad_()
        wanted = torch.randn(2, tokens, outputs, device="cuda")
        exact_x = x.detach().double().requires_grad_()
        y = layer(x)
        right = torch.nn.functional.linear(exact_x, weight * by_elements(mask, block), bias)
        assert_close(y, right)
        for one, found in ((optimizer, y), (right_optimizer, right)):
            one.zero_grad()
            (found.to(wanted.dtype if found is y else torch.float64) - wanted).square().sum().backward()
            one.step()
        assert_near(x.grad, exact_x.grad)
    moved = layer.weight.to_sparse().to_dense().double() - before[0], layer.bias.double() - before[1]
    assert_near(moved[0], weight * by_elements(mask, block) - before[0], 0.05)
    assert_near(moved[1], bias - before[1], 0.05)


def test_layers_are_saved_moved_and_compiled() -> None:
    mask = torch.rand(3, 4) < 0.7
    mask[:, 0] = True
    layer = BlockSparseLinear.from_mask(mask, 64, device="cuda")
    state = {name: tensor.cpu() for name, tensor in layer.state_dict().items()}
    other = BlockSparseLinear.from_mask(mask.flip(1), 64, device="cpu").cuda()
    other.load_state_dict(state, strict=True)
    x = torch.randn(5, 9, 256, device="cuda", dtype=torch.float16)
    grads = []
    for module in (layer, other):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.sum().backward()
        grads.append((y, leaf.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])
    model = torch.nn.Sequential(layer, torch.nn.GELU(), BlockSparseLinear.from_mask(mask.mT, 64, device="cuda"))
    torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x), atol=1e-2, rtol=1e-2)
    half = model.bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices() -> None:
    a, b = matrix(), normal(448, 96)
    right = bsr_matmul(a, b)
    found = bsr_matmul(a.to("cuda:1"), b.to("cuda:1"))
    assert found.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert torch.equal(found.to("cuda:0"), right)


@pytest.mark.parametrize("block", SQUARE, ids=str)
def test_kept_launches_compute_what_checked_calls_do(block: tuple[int, int]) -> None:
    """On other operands, on another stream and in a graph; the second call of each kind is the first kept one."""
    from runtime.ops import bsr_launches

    raw = matrix(block)
    a, layer = prepare_bsr(raw), BlockSparseLinear(raw, normal(raw.shape[0]))
    b, x, wide = normal(raw.shape[1], 77), normal(16, raw.shape[1]), normal(raw.shape[0], 96)
    bias, c, right = normal(raw.shape[0]), normal(raw.shape[0], 77), normal(raw.shape[1], 96)
    side = torch.cuda.Stream()
    calls: list[Any] = [
        lambda: bsr_matmul(a, b),
        lambda: bsr_matmul(raw, b, bias=bias, activation="gelu"),
        lambda: bsr_matmul(a, b, c=c, beta=0.5),
        lambda: bsr_matmul(a, wide, transpose_a=True),
        lambda: bsr_sddmm(wide, right, a).values,
        lambda: layer(x).detach(),
    ]

    with torch.no_grad():
        for number, call in enumerate(calls):
            bsr_launches.launches.clear()
            checked = call()
            assert torch.equal(call(), checked), number
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                on_side = call()
            side.synchronize()
            assert torch.equal(on_side, checked), number
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = call()
            for tensor in (b, x, wide):
                tensor.copy_(torch.randn_like(tensor))
            graph.replay()
            bsr_launches.launches.clear()
            assert torch.equal(captured, call()), number


@pytest.mark.parametrize("block", SQUARE, ids=str)
def test_kept_launches_have_the_gradients_of_the_operator(block: tuple[int, int]) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    raw = matrix(block)
    layer, x = BlockSparseLinear(raw, normal(raw.shape[0])), normal(2, 24, raw.shape[1]).requires_grad_()

    def gradients() -> list[Any]:
        leaves = [layer.values, layer.bias, x]
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y.float().square().mean(), leaves)]

    with Seen():
        by_operator = gradients()
    for _ in range(3):
        for found, right in zip(gradients(), by_operator, strict=True):
            assert torch.equal(found, right)
