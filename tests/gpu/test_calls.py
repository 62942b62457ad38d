"""What a caller may and may not do: streams, graphs, out=, and a clear error for every wrong argument."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from codegen.library import find_spec, shipped_specs  # noqa: E402
from codegen.render import render  # noqa: E402
from codegen.spec import AttentionSpec  # noqa: E402
from runtime import ArgumentError, DeviceError, load_kernel  # noqa: E402
from runtime.compile.compiler import run_nvrtc  # noqa: E402
from runtime.prepare.mask_bits import pack_mask_bits  # noqa: E402

# The sm_89 kernels run on every device these tests accept.
ATTENTION, LISTS, SPMM = "l4_topk32", "h100_block_lists", "l4_bsr_spmm_b128"
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
# Kernels for BSR products with blocks of 128: calls do not differ between the architectures.
SDDMM = [pytest.param("h100_bsr_sddmm_b128", marks=HOPPER), "l4_bsr_sddmm_b128", "l4_bsr_sddmm_wmma"]
SPGEMM = [pytest.param("h100_bsr_spgemm_b128_balanced", marks=HOPPER), "l4_bsr_spgemm_b128", "l4_bsr_spgemm_wmma"]
STATIC_SPGEMM = {"op": "bsr_spgemm", "arch": "sm_90a", "block": {"rows": 128, "cols": 128}}


def load(name: str) -> Any:
    """Load a kernel; those of sm_89 also where the device is newer."""
    return load_kernel(name, forward_compatible=name.startswith("l4_"))


@pytest.fixture(scope="module")
def attn() -> Any:
    return load_kernel(ATTENTION, forward_compatible=True)


@pytest.fixture(scope="module")
def spmm() -> Any:
    return load_kernel(SPMM, forward_compatible=True)


def tensors(q_len: int = 256, kv_len: int = 4096, heads: int = 4, kv_heads: int = 2) -> dict[str, Any]:
    def draw(h: int, s: int) -> Any:
        return torch.randn(2, h, s, 128, device="cuda", dtype=torch.float16)

    lists = torch.randint(0, kv_len // 64, (2, heads, q_len // 64, 32), device="cuda", dtype=torch.int32)
    return {"q": draw(heads, q_len), "k": draw(kv_heads, kv_len), "v": draw(kv_heads, kv_len), "kv_indices": lists}


def half(rows: int, cols: int, shown: int | None = None) -> Any:
    """Return a (rows, cols) matrix, or its first ``shown`` columns."""
    return torch.ones(rows, cols, device="cuda", dtype=torch.float16)[:, :shown]


def misaligned(t: Any) -> Any:
    return torch.empty(t.numel() + 1, device="cuda", dtype=t.dtype)[1:].view(t.shape)


def holed(t: Any) -> Any:
    """Return lists of which one has padding before its last block."""
    t[1, 2, 3, 20:] = -1
    t[1, 2, 3, 31] = 0
    return t


def expanded(_: Any) -> Any:
    return torch.empty(1, 4, 256, 128, device="cuda", dtype=torch.float16).expand(2, -1, -1, -1)


# (what is wrong, argument, how it becomes wrong, message)
WRONG: list[tuple[str, str, Callable[[Any], Any], str]] = [
    ("dtype", "q", lambda t: t.bfloat16(), r"q: is torch\.bfloat16, this kernel takes torch\.float16"),
    ("device", "k", lambda t: t.cpu(), r"k: is on cpu, expected a CUDA device"),
    ("not a tensor", "v", lambda t: 3, r"v: is int, expected a torch\.Tensor"),
    ("rank", "q", lambda t: t[0], r"q: has 3 dimensions .* expected 4"),
    ("head_dim", "q", lambda t: t[..., :64], r"q: has shape .* head_dim 128"),
    ("batch", "k", lambda t: t[:1], r"k: has shape .*batch 2"),
    ("kv_len", "v", lambda t: t[:, :, :100], r"v: has shape .* kv_len 4096"),
    ("heads", "q", lambda t: t[:, :3], r"k: has 2 heads, q has 3: not a multiple"),
    ("last stride", "k", lambda t: t.mT.contiguous().mT, r"k: has stride .* contiguous"),
    (
        "row stride",
        "q",
        lambda t: torch.nn.functional.pad(t, (0, 1))[..., :128],
        r"q: has stride \d+ .* multiples of 8",
    ),
    ("alignment", "q", misaligned, r"q: starts at address 0x"),
    ("empty", "k", lambda t: t[:, :, :0], r"k: is empty"),
    ("gradient", "q", lambda t: t.requires_grad_(), r"q: requires a gradient"),
    ("index dtype", "kv_indices", lambda t: t.long(), r"kv_indices: is torch\.int64, expected torch\.int32"),
    ("index rank", "kv_indices", lambda t: t[0], r"kv_indices: has shape .* expected"),
    ("index length", "kv_indices", lambda t: t[..., :31], r"kv_indices: has shape .* k 32"),
    ("index rows", "kv_indices", lambda t: t[:, :, :3], r"kv_indices: has shape .* query_blocks 4"),
    ("index heads", "kv_indices", lambda t: t[:, :2], r"kv_indices: has shape .* heads 1 or 4"),
    ("index device", "kv_indices", lambda t: t.cpu(), r"kv_indices: is on cpu"),
    ("no indices", "kv_indices", lambda t: None, r"kv_indices: is missing"),
    ("index value", "kv_indices", lambda t: t.fill_(64), r"kv_indices: is 64 at .* allowed: 0 to 63"),
    ("negative index", "kv_indices", lambda t: t.fill_(-2), r"kv_indices: is -2 at"),
    ("hole", "kv_indices", holed, "kv_indices: is -1 at batch 1, head 2, row 3, column 30, and block 0 follows"),
    ("NaN scale", "scale", lambda _: float("nan"), r"scale: is nan, expected a number from"),
    ("negative scale", "scale", lambda _: -1.0, r"scale: is -1\.0"),
    ("scale type", "scale", lambda _: "1", r"scale: is str"),
    ("out shape", "out", lambda _: half(8, 8), r"out: has 2 dimensions"),
    ("out expanded", "out", expanded, r"out: is expanded in dimension 0"),
    ("unknown argument", "mask", lambda _: None, r"mask: is not an argument of l4_topk32"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_arguments_are_named(attn: Any, name: str, spoil: Callable[[Any], Any], message: str) -> None:
    arguments = tensors()
    arguments[name] = spoil(arguments.get(name))
    with pytest.raises(ArgumentError, match=message):
        attn(**arguments, validate=True)
    torch.cuda.synchronize()  # nothing was launched that could fail later


def test_correct_arguments_pass_validation(attn: Any) -> None:
    out, lse = attn(**tensors(), validate=True)
    assert out.shape == (2, 4, 256, 128) and lse.shape == (2, 4, 256) and lse.dtype == torch.float32


def test_padded_lists_pass_validation_and_count_as_shorter_ones(attn: Any) -> None:
    arguments = tensors()
    lists = arguments["kv_indices"]
    lists[..., 7:] = -1
    out, lse = attn(**arguments, validate=True)
    arguments["kv_indices"] = torch.cat([lists[..., :7]] * 4 + [lists[..., :4]], -1)  # 32 entries, each of 7 four times
    arguments["kv_indices"][..., 28:] = -1
    again, lse_again = attn(**arguments, validate=True)
    torch.testing.assert_close(again, out, atol=2e-3, rtol=0)
    torch.testing.assert_close(lse_again, lse + math.log(4))
    arguments["kv_indices"].fill_(-1)
    out, lse = attn(**arguments, validate=True)
    assert not out.any() and bool((lse == -math.inf).all())


@HOPPER
def test_lists_of_every_kind_of_kernel_may_be_padded_at_their_end() -> None:
    for named in shipped_specs():
        spec = named.spec
        if not isinstance(spec, AttentionSpec) or spec.arch != "sm_90a" or spec.pattern.kind != "topk":
            continue
        if spec.dtype not in ("fp16", "bf16"):  # kernels in FP8 are called with scales
            continue
        kernel, block = load_kernel(named), spec.pattern.fixed_block
        dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float16
        shapes = ((1, h, 512, spec.head_dim) for h in (2 * spec.pack_gqa, 2, 2))
        q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
        rows, width = -(-512 // block.q), spec.pattern.k or 9
        lists = torch.full((1, 2, rows, width), -1, device="cuda", dtype=torch.int32)
        lists[..., :3] = torch.tensor([2, 0, 3], device="cuda", dtype=torch.int32)
        given = kernel.prepare(lists, 512) if spec.query_grouping == "given" else lists
        more = {"sink": torch.zeros(q.shape[1], device="cuda")} if spec.sink else {}
        out = kernel(q, k, v, given, **more, validate=True).out
        assert bool(out.isfinite().all()), named.stem
        lists[0, 1, 1, 1] = -1
        message = "kv_indices: is -1 at batch 0, head 1, row 1, column 1, and block 3 follows"
        with pytest.raises(ArgumentError, match=message):
            kernel(q, k, v, given, **more, validate=True)


def test_out_is_returned_and_written(attn: Any) -> None:
    arguments = tensors()
    expected, _ = attn(**arguments)
    out = torch.full((2, 256, 4, 128), float("nan"), device="cuda", dtype=torch.float16).transpose(1, 2)
    returned, _ = attn(**arguments, out=out)
    assert returned is out and torch.equal(out, expected)


def test_a_new_output_has_the_layout_of_q(attn: Any) -> None:
    arguments = tensors()
    arguments["q"] = arguments["q"].transpose(1, 2).contiguous().transpose(1, 2)
    out, _ = attn(**arguments)
    assert out.stride() == arguments["q"].stride()


def test_calls_run_on_the_current_stream_and_in_a_graph(attn: Any) -> None:
    arguments = tensors()
    expected, _ = attn(**arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream, _ = attn(**arguments)
    stream.synchronize()
    assert torch.equal(on_stream, expected)

    graph = torch.cuda.CUDAGraph()
    out = torch.empty_like(arguments["q"])
    with torch.cuda.graph(graph):
        attn(**arguments, out=out)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@HOPPER
def test_a_graph_of_a_tma_kernel_keeps_its_tensor_maps() -> None:
    kernel = load_kernel("h100_dense")
    arguments = {name: value for name, value in tensors().items() if name != "kv_indices"}
    expected, _ = kernel(**arguments)
    graph = torch.cuda.CUDAGraph()
    out = torch.empty_like(arguments["q"])
    with torch.cuda.graph(graph):
        kernel(**arguments, out=out)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@HOPPER
def test_a_captured_call_of_one_tile_keeps_its_counters_and_its_parts_apart() -> None:
    """The tile's keys are divided between thread blocks, which count and leave parts in memory of the capture."""
    kernel = load_kernel("h100_dense")
    q, k, v = (torch.randn(1, 1, length, 128, device="cuda", dtype=torch.float16) for length in (100, 30000, 30000))
    expected, _ = kernel(q, k, v)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(q)
    with torch.cuda.graph(graph):
        kernel(q, k, v, out=out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@HOPPER
def test_a_kernel_that_hands_out_tiles_runs_on_streams_and_in_graphs_at_once() -> None:
    """h100_causal counts tiles in device memory: launches side by side must not share a counter."""
    kernel = load_kernel("h100_causal")
    arguments = {name: value for name, value in tensors(q_len=4096).items() if name != "kv_indices"}
    expected, _ = kernel(**arguments)
    graphs, outs = [], [torch.empty_like(arguments["q"]) for _ in range(4)]
    for out in outs[:2]:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            kernel(**arguments, out=out)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, out, graph in zip(streams, outs, [*graphs, None, None], strict=True):
            with torch.cuda.stream(stream):
                if graph is not None:
                    graph.replay()
                else:
                    kernel(**arguments, out=out)
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs)


@HOPPER
def test_a_product_that_hands_out_tiles_runs_on_streams_and_in_graphs_at_once() -> None:
    """Tiles that are put off are listed in device memory, which launches side by side must not share."""
    kernel = load_kernel("h100_bsr_spgemm_b128_balanced")
    stored = (torch.rand(40, 40, device="cuda") < 0.2).repeat_interleave(128, 0).repeat_interleave(128, 1)
    large = (half(5120, 5120) * stored).to_sparse_bsr((128, 128))
    expected = kernel(large, large)
    for a, b in ((bsr(), bsr(384, 256)), (large, large), (bsr(2560), bsr(384, 2560)), (large, large)):
        result = load_kernel(STATIC_SPGEMM)(a, b)
        assert torch.equal(kernel(a, b), result)
    graph, outs = torch.cuda.CUDAGraph(), [torch.empty_like(expected) for _ in range(3)]
    with torch.cuda.graph(graph):
        kernel(large, large, out=outs[0])
    streams = [torch.cuda.Stream() for _ in outs]
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, out in zip(streams, outs, strict=True):
            with torch.cuda.stream(stream):
                if out is outs[0]:
                    graph.replay()
                else:
                    kernel(large, large, out=out)
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs)


def in_a_new_thread(work: Callable[[], None]) -> None:
    """Run something where no CUDA context is current, and raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_a_thread_without_a_context_gets_one(attn: Any) -> None:
    given = tensors()
    expected, _ = attn(**given)
    out = torch.full_like(expected, float("nan"))
    torch.cuda.synchronize()
    in_a_new_thread(lambda: attn(**given, out=out))
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@HOPPER
def test_autograd_may_call_kernels_from_its_own_thread() -> None:
    forwards, backwards = load_kernel("h100_bsr_spmm_b128"), load_kernel("h100_bsr_spmm_b128_transposed")
    a = bsr()
    prepared = backwards.prepare(a)  # so that torch launches nothing in the other thread

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, b: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = forwards(a, b)
            return result

        @staticmethod
        def backward(ctx: Any, dc: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = backwards(prepared, dc)
            return result

    b = torch.randn(384, 256, device="cuda", dtype=torch.float16, requires_grad=True)
    dc = torch.randn(256, 256, device="cuda", dtype=torch.float16)
    Product.apply(b).backward(dc)  # type: ignore[no-untyped-call]
    exact = a.to_dense().double().mT @ dc.double()
    assert b.grad is not None and (b.grad.double() - exact).abs().max() < 2e-3 * exact.abs().max()


@HOPPER
def test_copies_of_b_by_rows_belong_to_their_launch() -> None:
    rows = find_spec("h100_bsr_spmm_b32").spec.model_dump(mode="json", by_alias=True)
    kernel = load_kernel({**rows, "b_layout": "column_major"})
    a = bsr(512, 1024, 32)
    matrices = [torch.randn(1000, 1024, device="cuda", dtype=torch.float16).mT for _ in range(4)]
    expected = [load_kernel("h100_bsr_spmm_b32")(a, b.contiguous()) for b in matrices]
    captured, outs = torch.empty_like(expected[0]), [torch.full_like(expected[0], float("nan")) for _ in range(3)]
    kernel(a, matrices[0])
    torch.cuda.synchronize()
    graph, streams = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(3)]
    with torch.cuda.graph(graph):
        kernel(a, matrices[0], out=captured)
    torch.cuda.synchronize()
    for _ in range(20):
        graph.replay()
        for stream, b, out in zip(streams, matrices[1:], outs, strict=True):
            with torch.cuda.stream(stream):
                kernel(a, b, out=out)
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip((captured, *outs), expected, strict=True))


def test_a_prepared_matrix_is_read_where_it_is(spmm: Any) -> None:
    a, other = bsr(256, 384, 128), bsr(256, 384, 128)
    b = torch.randn(384, 256, device="cuda", dtype=torch.float16)
    prepared, expected = (spmm.prepare(a), spmm.prepare(other)), (spmm(a, b), spmm(other, b))
    for _ in range(2):
        assert all(torch.equal(spmm(one, b), out) for one, out in zip(prepared, expected, strict=True))
    out = torch.empty_like(expected[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        spmm(prepared[0], b, out=out)
    a.values().neg_()
    graph.replay()
    assert torch.equal(out, -expected[0]) and torch.equal(spmm(prepared[0], b), out)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = spmm(prepared[1], b)
    torch.cuda.synchronize()
    assert torch.equal(beside, expected[1])


@HOPPER
@pytest.mark.parametrize("block", [16, 32])
def test_few_block_rows_are_cut_for_the_columns_of_b(block: int) -> None:
    kernel = load_kernel(f"h100_bsr_spmm_b{block}_balanced")
    a = bsr(4 * block, 96 * block, block)
    prepared = kernel.prepare(a), kernel.prepare(a, 200)
    whole, cut = (each.row_order for each in prepared)
    assert cut.limit < 96 < whole.limit and int(cut.total) > int(whole.total) == 4
    for columns in (200, 3000):
        b = torch.randn(96 * block, columns, device="cuda", dtype=torch.float16)
        exact = a.to_dense().double() @ b.double()
        found = [kernel(given, b, validate=True) for given in (*prepared, a)]
        assert all((out.double() - exact).abs().max() < 2e-3 * exact.abs().max() for out in found)
        assert torch.equal(found[2], kernel(kernel.prepare(a, columns), b))
    other = replace(prepared[1], matrix=bsr(4 * block, 96 * block, block), row_order=cut._replace(total=cut.total - 1))
    with pytest.raises(ArgumentError, match=r"row_order: is not what prepare\(a\) returns"):
        kernel(other, b, validate=True)


@HOPPER
@pytest.mark.parametrize("block", [16, 32])
def test_groups_of_block_rows_are_for_any_values_and_columns(block: int) -> None:
    kernel = load_kernel(f"h100_bsr_spmm_b{block}_gathered")
    stored = (torch.rand(60, 40, device="cuda") < 0.4).repeat_interleave(block, 0).repeat_interleave(block, 1)
    a = (torch.randn(60 * block, 40 * block, device="cuda").half() * stored).to_sparse_bsr((block, block))
    b = torch.randn(40 * block, 3000, device="cuda", dtype=torch.float16)
    prepared = kernel.prepare(a, 200)

    def check(out: torch.Tensor, columns: int) -> None:
        exact = a.to_dense().double() @ b[:, :columns].double()
        assert (out.double() - exact).abs().max() < 2e-3 * exact.abs().max()

    for columns in (200, 3000):
        check(kernel(prepared, b[:, :columns], validate=True), columns)
    captured, graph = torch.empty(60 * block, 200, device="cuda", dtype=torch.float16), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        kernel(prepared, b[:, :200], out=captured)
    packed = kernel.prepare(prepared, pack=True)
    assert packed.row_order is prepared.row_order and packed.packed is not None
    assert torch.equal(kernel(packed, b, validate=True), kernel(prepared, b))
    best = kernel.prepare(a, 200, pack=True, effort="best")
    check(kernel(best, b, validate=True), 3000)
    batch = b.view(2, 20 * block, 3000).repeat(1, 2, 1)
    for given in (prepared, packed):
        for found, each in zip(kernel(given, batch), batch, strict=True):
            assert torch.equal(found, kernel(prepared, each))
    a.values().copy_(torch.randn_like(a.values()))  # each call packs A anew
    graph.replay()
    check(captured, 200)
    check(kernel(prepared, b[:, :200]), 200)
    with pytest.raises(ArgumentError, match=r"a\.packed: is not what prepare\(a, pack=True\) returns"):
        kernel(packed, b, validate=True)
    check(kernel(kernel.prepare(packed, pack=True), b, validate=True), 3000)
    check(kernel(packed.with_values(a.values()), b, validate=True), 3000)
    elsewhere = a.to_dense().roll(block, 1).to_sparse_bsr((block, block))  # as many blocks in each row
    with pytest.raises(ArgumentError, match=r"row_order: is not what prepare\(a\) returns"):
        kernel(replace(kernel.prepare(elsewhere, 200), matrix=a), b, validate=True)


@HOPPER
@pytest.mark.parametrize("block", [16, 32])
def test_thread_blocks_have_several_tiles_of_gathered_rows_and_some_without_rounds(block: int) -> None:
    kernel = load_kernel(f"h100_bsr_spmm_b{block}_gathered")
    stored = torch.rand(130, 90, device="cuda") < torch.rand(130, 1, device="cuda")
    stored[torch.rand(130, device="cuda") < 0.5] = False  # whole groups have no block: long rows are grouped first
    stored = stored.repeat_interleave(block, 0).repeat_interleave(block, 1)
    a = (torch.randn(130 * block, 90 * block, device="cuda").half() * stored).to_sparse_bsr((block, block))
    b = torch.randn(90 * block, 8200, device="cuda", dtype=torch.float16)
    prepared = kernel.prepare(a)
    order = prepared.row_order
    assert int((order.starts.diff() == 0).sum()) > 0 and order.rows.shape[0] * 33 > 2 * 66  # clusters
    outs = [torch.full((130 * block, 8200), float("nan"), device="cuda", dtype=torch.float16) for _ in range(2)]
    for out in outs:
        kernel(prepared, b, out=out, validate=True)
    exact = a.to_dense().double() @ b.double()
    assert torch.equal(*outs) and (outs[0].double() - exact).abs().max() < 2e-3 * exact.abs().max()


@HOPPER
def test_an_order_of_query_blocks_says_who_shares_and_changes_nothing_else() -> None:
    kernel = load_kernel("h100_topk32_b64_ordered")
    arguments = tensors(q_len=832)  # 13 query blocks: the last tile has one
    q, k, v, lists = arguments.values()
    prepared = kernel.prepare(lists, k.shape[2])
    found, lse = kernel(q, k, v, prepared, validate=True)
    again, lse_again = kernel(q, k, v, lists, prepared.query_order, validate=True)
    assert torch.equal(found, again) and torch.equal(lse, lse_again)
    plain, plain_lse = load_kernel("h100_topk32_b64_shared")(q, k, v, lists)
    assert (found - plain).abs().max() < 2e-3 and (lse - plain_lse).abs().max() < 1e-4
    broadcast = torch.arange(13, device="cuda", dtype=torch.int32).flip(0)[None, None]
    turned, _ = kernel(q, k, v, lists, query_order=broadcast)
    assert (turned - plain).abs().max() < 2e-3
    with pytest.raises(ArgumentError, match=r"query_order: is missing"):
        kernel(q, k, v, lists)

    # What is not in the order is not written; numbers of no query block are passed over.
    order = torch.tensor([12, -1, 3, 13, 2**31 - 1, 0, *[-7] * 7], device="cuda", dtype=torch.int32)[None, None]
    with pytest.raises(ArgumentError, match="query_order: is -1 at batch 0, head 0, row 1"):
        kernel(q, k, v, lists, order, validate=True)
    out = torch.full_like(q, float("nan"))
    kernel(q, k, v, lists, order, out=out)
    by_block = out.unflatten(2, (13, 64))
    assert (by_block[:, :, [0, 3, 12]] - plain.unflatten(2, (13, 64))[:, :, [0, 3, 12]]).abs().max() < 2e-3
    assert by_block[:, :, [1, 2, *range(4, 12)]].isnan().all()


@HOPPER
@pytest.mark.parametrize(
    ("name", "block", "divides"),
    [
        ("h100_topk32_b64_shared_long", 64, False),
        ("h100_topk32_long", 128, False),
        ("h100_topk32_long", 128, True),  # counters of divided tiles lie behind those of the lockstep
    ],
)
def test_paced_launches_of_several_streams_and_a_graph_go_on_without_each_other(
    name: str, block: int, divides: bool
) -> None:
    kernel = load_kernel(name)
    slots = torch.cuda.get_device_properties(0).multi_processor_count
    length = 128 * (slots + 1 if divides else slots)  # of 4 heads: whole rounds of tiles of 128, or 4 tiles more
    blocks = length // block
    split = kernel.compiled.plan.stream_k
    assert (split is not None and split.divide(4 * blocks, 32, slots) != (0, 0)) is divides
    q, k, v = (torch.randn(1, 4, length, 128, device="cuda", dtype=torch.float16) for _ in range(3))
    lists = torch.randint(0, blocks, (1, 4, blocks, 32), device="cuda", dtype=torch.int32).sort(-1).values
    expected, _ = kernel(q, k, v, lists)
    torch.cuda.synchronize()
    graph, captured = torch.cuda.CUDAGraph(), torch.empty_like(q)
    with torch.cuda.graph(graph):
        kernel(q, k, v, lists, out=captured)
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = [torch.full_like(q, float("nan")) for _ in streams]
    captured.fill_(float("nan"))
    torch.cuda.synchronize()
    for _ in range(5):
        graph.replay()
        for stream, out in zip(streams, outs, strict=True):
            with torch.cuda.stream(stream):
                kernel(q, k, v, lists, out=out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in (captured, *outs))
    assert torch.equal(kernel(q, k, v, lists)[0], expected)


@HOPPER
def test_the_two_lists_of_block_lists_come_in_pairs() -> None:
    kernel = load_kernel(LISTS)
    q = torch.randn(1, 2, 256, 128, device="cuda", dtype=torch.float16)
    counts = torch.ones(1, 1, 2, device="cuda", dtype=torch.int32)
    lists = torch.zeros(1, 1, 2, 2, device="cuda", dtype=torch.int32)
    kernel(q, q, q, counts, lists, validate=True)
    with pytest.raises(ArgumentError, match="belong together"):
        kernel(q, q, q, counts, lists, counts)
    with pytest.raises(ArgumentError, match=r"kv_num_blocks: is 3 at .* allowed: 0 to 2"):
        kernel(q, q, q, counts * 3, lists, validate=True)
    lists[..., 1] = 99  # beyond the count: not used, so not an error
    kernel(q, q, q, counts, lists, validate=True)


@HOPPER
def test_bits_of_a_causal_mask_are_the_causal_kernel_bit_by_bit() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 1000, 128, device="cuda", dtype=torch.float16) for _ in range(3))
    rows = torch.arange(8, device="cuda", dtype=torch.int32)
    counts, full = torch.ones_like(rows)[None, None], rows.expand(1, 1, 8, 8).contiguous()
    lists = (counts, rows[None, None, :, None].contiguous(), rows[None, None].contiguous(), full)
    diagonal = torch.ones(128, 128, dtype=torch.bool, device="cuda").tril()
    bits = pack_mask_bits(diagonal[None, None, None, None]).expand(1, 1, 8, 1, -1)
    expected, of_bits = load_kernel(LISTS), load_kernel("h100_lists128_bits")
    out, lse = of_bits(q, k, v, *lists, bits, validate=True)
    causal, causal_lse = expected(q, k, v, *lists, validate=True)
    assert torch.equal(out, causal) and torch.equal(lse, causal_lse)
    no_bits = torch.zeros_like(bits)
    hidden, _ = of_bits(q, k, v, *lists, mask_bits=no_bits)
    assert torch.equal(hidden[:, :, :128], torch.zeros_like(hidden[:, :, :128]))  # no full block comes before
    assert not torch.equal(hidden[:, :, 128:], causal[:, :, 128:])
    full_alone, _ = expected(q, k, v, torch.zeros_like(counts), *lists[1:])
    torch.testing.assert_close(hidden, full_alone, atol=2e-3, rtol=0)


def test_a_kernel_for_another_architecture_is_refused() -> None:
    capability = torch.cuda.get_device_capability()
    if capability != (8, 9):
        with pytest.raises(DeviceError, match=r"written for sm_89.*forward_compatible=True"):
            load_kernel(ATTENTION)
    if capability != (9, 0):
        with pytest.raises(DeviceError, match="written for sm_90"):
            load_kernel("h100_topk32", forward_compatible=True)


def bsr(rows: int = 256, cols: int = 384, block: int = 128, dtype: Any = torch.float16) -> Any:
    return torch.randn(rows, cols, device="cuda", dtype=dtype).to_sparse_bsr((block, block))


def windows(**changes: Any) -> dict[str, Any]:
    """Arguments of h100_window1k_sink."""
    q, k, v = (torch.randn(1, heads, 300, 64, device="cuda", dtype=torch.float16) for heads in (8, 2, 2))
    return {"q": q, "k": k, "v": v, "sink": torch.randn(8, device="cuda"), **changes}


@HOPPER
@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (lambda t: None, r"sink: is missing: float32 \(heads 8,\)"),
        (lambda t: t[:4], r"sink: has shape \(4,\), expected \(heads 8\)"),
        (lambda t: t.half(), r"sink: is torch\.float16, this kernel takes torch\.float32"),
        (lambda t: torch.zeros(16, device="cuda")[::2], r"sink: has stride 2, expected 1"),
        (lambda t: t.fill_(float("nan")), r"sink: has nan, expected numbers from -6e\+29"),
    ],
    ids=["missing", "shape", "dtype", "stride", "value"],
)
def test_wrong_sinks_are_named(sink: Callable[[Any], Any], message: str) -> None:
    arguments = windows()
    with pytest.raises(ArgumentError, match=message):
        load_kernel("h100_window1k_sink")(**{**arguments, "sink": sink(arguments["sink"])}, validate=True)


def test_a_sink_is_not_ignored(attn: Any) -> None:
    with pytest.raises(ArgumentError, match="sink: is given, but the spec of l4_topk32 says sink: false"):
        attn(**tensors(), sink=torch.zeros(4, device="cuda"))


@HOPPER
def test_heads_that_cannot_be_packed_are_named() -> None:
    kernel = load_kernel("h100_topk32_gqa8_b64")
    with pytest.raises(ArgumentError, match=r"q: has 4 heads, 2 for each of k: this kernel packs 8"):
        kernel(**tensors())
    arguments = tensors(heads=16)
    with pytest.raises(ArgumentError, match=r"kv_indices: has shape .* heads / 8 1 or 2"):
        kernel(**arguments | {"kv_indices": arguments["kv_indices"][:, :1].repeat(1, 16, 1, 1)})


@HOPPER
def test_packed_heads_compute_what_single_ones_do() -> None:
    arguments = tensors(q_len=200, heads=16)
    lists = torch.randint(0, 64, (2, 2, 4, 32), device="cuda", dtype=torch.int32)
    out, lse = load_kernel("h100_topk32_gqa8_b64")(**arguments | {"kv_indices": lists})
    pattern = {"kind": "topk", "k": 32, "block": {"q": 64, "kv": 64}}
    plain = load_kernel({"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": pattern})
    single, single_lse = plain(**arguments | {"kv_indices": lists.repeat_interleave(8, 1)})
    torch.testing.assert_close(out, single, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(lse, single_lse)


WRONG_SPMM: list[tuple[str, Callable[[], tuple[Any, Any, Any]], str]] = [
    ("dense a", lambda: (half(256, 384), None, None), r"a: is torch\.strided, expected a torch\.sparse_bsr"),
    (
        "block",
        lambda: (bsr(block=64), half(384, 64), None),
        r"a: has blocks of \(64, 64\), this kernel takes \(128, 128\)",
    ),
    ("dtype of a", lambda: (bsr(dtype=torch.float32), half(384, 64), None), r"a: is torch\.float32"),
    ("dtype of b", lambda: (bsr(), half(384, 64).float(), None), r"b: is torch\.float32"),
    ("depth", lambda: (bsr(), half(256, 64), None), r"b: has shape .*K 384"),
    ("column-major b", lambda: (bsr(), half(64, 384).T, None), r"b: has strides \(1, 384\): it is column_major"),
    ("row stride of b", lambda: (bsr(), half(384, 65), None), r"b: has stride 65"),
    ("out columns", lambda: (bsr(), half(384, 72, 66), half(256, 72, 66)), r"out: has 66 columns"),
    ("out shape", lambda: (bsr(), half(384, 64), half(128, 64)), r"out: has shape"),
]


@pytest.mark.parametrize(("make", "message"), [w[1:] for w in WRONG_SPMM], ids=[w[0] for w in WRONG_SPMM])
def test_wrong_spmm_arguments_are_named(spmm: Any, make: Callable[[], tuple[Any, Any, Any]], message: str) -> None:
    a, b, out = make()
    with pytest.raises(ArgumentError, match=message):
        spmm(a, b, out=out)


def test_columns_out_of_range_are_found_on_request(spmm: Any) -> None:
    values = torch.ones(1, 128, 128, device="cuda", dtype=torch.float16)
    crow, col = torch.tensor([0, 1, 1], device="cuda"), torch.tensor([7], device="cuda")
    a = torch.sparse_bsr_tensor(crow, col, values, size=(256, 384), check_invariants=False)
    with pytest.raises(ArgumentError, match=r"a\.col_indices\(\): ranges from 7 to 7, allowed: 0 to 2"):
        spmm(a, half(384, 64), validate=True)


@HOPPER
def test_bias_and_activation() -> None:
    kernel = load_kernel("h100_bsr_spmm_b128_bias_gelu")
    a, b, bias = bsr(), half(384, 64), half(1, 256)[0]
    wrong = [
        (None, r"bias: is missing"),
        (bias[:128], r"bias: has shape .*M 256"),
        (bias.float(), r"bias: is torch\.float32"),
        (half(256, 2)[:, 0], r"bias: has stride 2"),
        (bias[:, None], r"bias: has 2 dimensions"),
    ]
    for value, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            kernel(a, b, bias=value)
    values = torch.ones(0, 128, 128, device="cuda", dtype=torch.float16)
    crow, col = torch.zeros(3, device="cuda", dtype=torch.int64), torch.zeros(0, device="cuda", dtype=torch.int64)
    c = kernel(torch.sparse_bsr_tensor(crow, col, values, size=(256, 384)), b, bias=bias)
    assert torch.equal(c, torch.nn.functional.gelu(torch.ones_like(c).float()).half())
    with pytest.raises(
        ArgumentError, match=r"bias: is not an argument of h100_bsr_spmm_b128: its epilogue has no bias"
    ):
        load_kernel("h100_bsr_spmm_b128")(a, b, bias=bias)


@pytest.mark.parametrize("name", SDDMM)
def test_sampled_product(name: str) -> None:
    kernel = load(name)
    a, b, pattern = half(256, 192), half(384, 192), bsr(dtype=torch.float32)
    c = kernel(a, b, pattern, validate=True)
    assert c.layout == torch.sparse_bsr and c.dtype == torch.float16 and c.shape == (256, 384)
    assert bool((c.to_dense() == 192).all())
    wrong = [
        ((half(128, 192), b, pattern, None), r"a: has shape .*M 256"),
        ((a, half(384, 128), pattern, None), r"b: has shape .*K 192"),
        ((a, half(256, 192), pattern, None), r"b: has shape .*N 384"),
        ((a, b.bfloat16(), pattern, None), r"b: is torch\.bfloat16"),
        ((a, b, half(256, 384), None), r"pattern: is torch\.strided, expected a torch\.sparse_bsr"),
        ((a, b, bsr(block=64), None), r"pattern: has blocks of \(64, 64\), this kernel takes \(128, 128\)"),
        ((a, b, pattern, c.values()[:1]), r"out: has shape .*stored blocks 6"),
        ((a, b, pattern, c.values().mT), r"out: has strides .* contiguous"),
    ]
    for (x, y, shown, out), message in wrong:
        with pytest.raises(ArgumentError, match=message):
            kernel(x, y, shown, out=out)


@pytest.mark.parametrize("name", SPGEMM)
def test_product_of_two_sparse_matrices(name: str) -> None:
    kernel = load(name)
    a, b = bsr(), bsr(384, 256)
    kernel(a, b, validate=True)
    wrong = [
        ((half(256, 384), b, None), r"a: is torch\.strided, expected a torch\.sparse_bsr"),
        ((a, half(384, 256), None), r"b: is torch\.strided, expected a torch\.sparse_bsr"),
        ((a, bsr(256, 256), None), r"b: has shape .*K 384"),
        ((a, bsr(384, 256, dtype=torch.bfloat16), None), r"b: is torch\.bfloat16"),
        ((a, bsr(384, 256, block=64), None), r"b: has blocks of \(64, 64\)"),
        ((a, b, half(256, 128)), r"out: has shape .*N 256"),
    ]
    for (x, y, out), message in wrong:
        with pytest.raises(ArgumentError, match=message):
            kernel(x, y, out=out)
    values = torch.ones(2, 128, 128, device="cuda", dtype=torch.float16)
    crow, col = torch.tensor([0, 2, 2, 2], device="cuda"), torch.tensor([1, 0], device="cuda")
    shuffled = torch.sparse_bsr_tensor(crow, col, values, size=(384, 256), check_invariants=False)
    with pytest.raises(ArgumentError, match=r"b\.col_indices\(\): does not rise in block row 0"):
        kernel(a, shuffled, validate=True)


@HOPPER
def test_product_of_two_sparse_matrices_on_a_pattern() -> None:
    kernel = load_kernel("h100_bsr_spgemm_b128_bsr")
    a, b, pattern = bsr(), bsr(384, 256), bsr(256, 256, dtype=torch.float32)
    c = kernel(a, b, pattern, validate=True)
    assert c.layout == torch.sparse_bsr and c.dtype == torch.float16 and c.shape == (256, 256)
    assert torch.equal(c.to_dense(), load_kernel(STATIC_SPGEMM)(a, b))
    with pytest.raises(ArgumentError, match=r"pattern: is missing"):
        kernel(a, b)
    with pytest.raises(ArgumentError, match=r"pattern: has shape .*N 256"):
        kernel(a, b, bsr(256, 384))


def test_a_matrix_without_blocks_gives_zeros(spmm: Any) -> None:
    values = torch.ones(0, 128, 128, device="cuda", dtype=torch.float16)
    crow, col = torch.zeros(3, device="cuda", dtype=torch.int64), torch.zeros(0, device="cuda", dtype=torch.int64)
    a = torch.sparse_bsr_tensor(crow, col, values, size=(256, 384))
    assert not spmm(a, half(384, 64)).any()


def test_the_log_of_a_second_compilation_tells_of_registers_too() -> None:
    """Beside a driver NVRTC keeps what it compiled, without its log: that must not be where a kernel comes from."""
    source = render(find_spec("l4_topk32_d64")) + f"// {uuid.uuid4()}\n"
    options = ("--gpu-architecture=sm_89", "--std=c++17", "--ptxas-options=-v")
    logs = [run_nvrtc(source, "twice.cu", "cubin", options)[1] for _ in range(2)]
    assert "registers" in logs[0] and logs[1] == logs[0]
