"""block_sparse_attention on a GPU: patterns and options beside the definition, and torch's compilers and graphs."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from typing import Any, get_args

import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

from codegen.arch import ARCHS  # noqa: E402
from codegen.patterns.block_lists import BlockLists as BlockListsSpec  # noqa: E402
from codegen.spec import AttentionSpec  # noqa: E402
from runtime import (  # noqa: E402
    ArgumentError,
    block_sparse_attention,
    explain_attention,
    load_kernel,
    merge_attention,
)
from runtime.ops import attention_calls, attention_launches  # noqa: E402
from runtime.ops.attention_choice import arch_of  # noqa: E402
from runtime.patterns import (  # noqa: E402
    BlockLists,
    Causal,
    Dense,
    PrefixLM,
    Score,
    SinkWindow,
    SlidingWindow,
    Strided,
    TopK,
)

if torch.cuda.is_available():  # these call kernels of the device's own architecture, as no others are taken
    HERE = torch.cuda.get_device_capability()
    pytestmark = pytest.mark.skipif(
        HERE not in {arch.compute_capability for arch in ARCHS.values()}, reason="no kernels for this device"
    )
OPERATOR = "block_sparse_attention"
LENGTH = 1024
needs_bits = pytest.mark.skipif(
    "bits" not in get_args(BlockListsSpec.model_fields["mask"].annotation), reason="no kernel has mask: bits"
)
needs_lengths = pytest.mark.skipif("kv_lengths" not in AttentionSpec.model_fields, reason="no kernel has kv_lengths")


def qkv(q_len: int = LENGTH, kv_len: int = LENGTH, heads: int = 4, kv_heads: int = 4, head_dim: int = 128) -> list[Any]:
    shapes = (heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len)
    return [torch.randn(2, h, n, head_dim, device="cuda").bfloat16() for h, n in shapes]


def drawn(heads: int, rows: int, blocks: int, entries: int) -> Any:
    """Return lists of different blocks."""
    return torch.rand(2, heads, rows, blocks, device="cuda").argsort(-1)[..., :entries].to(torch.int32).contiguous()


def counts(heads: int, rows: int, most: int) -> Any:
    return torch.randint(0, most + 1, (2, heads, rows), dtype=torch.int32, device="cuda")


def topk(block: tuple[int, int] = (128, 128), heads: int = 4, length: int = LENGTH, entries: int = 3) -> TopK:
    return TopK(drawn(heads, -(-length // block[0]), -(-length // block[1]), entries), block=block)


def causal_lists(length: int = LENGTH) -> BlockLists:
    blocks = -(-length // 128)
    partial, full = drawn(4, blocks, blocks, 4), drawn(1, blocks, blocks, blocks)
    return BlockLists(counts(4, blocks, 4), partial, counts(1, blocks, 3), full, mask="causal")


def expected(q: Any, k: Any, v: Any, pattern: Any, kv_lengths: Any = None, **options: Any) -> Any:
    shape = (*q.shape[:3], k.shape[2])
    seen = attention_oracle.times_seen(pattern.spec_json, pattern.index_tensors(), shape, kv_lengths)
    return attention_oracle.attention(q, k, v, seen, **options)


def assert_right(tensors: list[Any], pattern: Any, **options: Any) -> None:
    out, lse = block_sparse_attention(*tensors, pattern, return_lse=True, validate=True, **options)
    q, k, v = tensors
    right, right_lse = expected(q, k, v, pattern, **options)
    torch.testing.assert_close(out.float(), right, atol=1.6e-2, rtol=1.6e-2)
    torch.testing.assert_close(lse, right_lse, atol=1e-3, rtol=1e-3)
    alone = block_sparse_attention(*tensors, pattern, **options)
    torch.testing.assert_close(alone.float(), right, atol=1.6e-2, rtol=1.6e-2)


PATTERNS: dict[str, Callable[[], Any]] = {
    "dense": Dense,
    "causal": Causal,
    "top left": lambda: Causal(align="top_left"),
    "window": lambda: SlidingWindow(200, 50),
    "sink window": lambda: SinkWindow(4, 200),
    "strided": lambda: Strided(stride=3, local=1, block=64),
    "prefix": lambda: PrefixLM(torch.tensor([10, 850], dtype=torch.int32, device="cuda")),
    "topk": topk,
    "topk, shared": lambda: topk(heads=1),
    "causal lists": causal_lists,
    "256 x 64": lambda: topk((256, 64)),
    "192 x 192": lambda: topk((192, 192)),
    "384 x 128": lambda: topk((384, 128), entries=2),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name: str) -> None:
    assert_right(qkv(), PATTERNS[name]())


@pytest.mark.parametrize(("q_len", "kv_len", "head_dim"), [(1000, 1000, 64), (77, 900, 128), (1, 500, 96)])
def test_lengths_and_head_sizes(q_len: int, kv_len: int, head_dim: int) -> None:
    assert_right(qkv(q_len, kv_len, head_dim=head_dim), Causal())


@needs_lengths
@pytest.mark.parametrize("head_dim", [72, 80, 160])
def test_head_sizes_that_are_filled_up(head_dim: int) -> None:
    assert_right(qkv(head_dim=head_dim), Causal())


@pytest.mark.parametrize(("heads", "kv_heads", "list_heads"), [(8, 2, 2), (8, 2, 8), (6, 2, 2), (8, 1, 1)])
def test_grouped_heads(heads: int, kv_heads: int, list_heads: int) -> None:
    assert_right(qkv(heads=heads, kv_heads=kv_heads), topk((64, 64), heads=list_heads))


def test_lists_of_single_queries() -> None:
    assert_right(qkv(64, heads=16, kv_heads=1), TopK(drawn(1, 64, 16, 4), block=(1, 64)))


@needs_bits
@pytest.mark.parametrize("block", [(1, 64), (8, 128), (64, 16), (128, 32)])
def test_small_blocks(block: tuple[int, int]) -> None:
    length = 64 if block[0] < 16 else 512
    rows, blocks = -(-length // block[0]), -(-512 // block[1])
    assert_right(qkv(length, 512), TopK(drawn(4, rows, blocks, 3), block=block))
    partial = BlockLists(counts(4, rows, blocks), drawn(4, rows, blocks, blocks), block=block, mask="causal")
    assert_right(qkv(length, 512), partial)


def test_options() -> None:
    sink = torch.randn(4, device="cuda")
    assert_right(qkv(), SlidingWindow(300), scale=0.2, softcap=10.0, sink=sink)


@needs_lengths
@pytest.mark.parametrize("name", ["dense", "causal", "topk", "causal lists", "256 x 64"])
def test_lengths_of_batches(name: str) -> None:
    assert_right(qkv(), PATTERNS[name](), kv_lengths=torch.tensor([0, 700], dtype=torch.int32, device="cuda"))


@pytest.mark.skipif(importlib.util.find_spec("runtime.convert") is None, reason="there is no converter")
def test_block_masks() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    def mask(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (k <= q) & ((q - k < 300) | (k < 40))

    tensors = qkv()
    block_mask = create_block_mask(mask, None, None, LENGTH, LENGTH, device="cuda")
    out = block_sparse_attention(*tensors, block_mask)
    q, k = torch.arange(LENGTH, device="cuda")[:, None], torch.arange(LENGTH, device="cuda")
    seen = mask(0, 0, q, k).int().expand(2, 4, -1, -1)
    right, _ = attention_oracle.attention(*tensors, seen)
    torch.testing.assert_close(out.float(), right, atol=1.6e-2, rtol=1.6e-2)


def test_layouts_and_out() -> None:
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv())
    out = block_sparse_attention(q, k, v, Causal())
    assert out.stride() == q.stride()
    packed = torch.randn(2, LENGTH, 3, 4, 128, device="cuda").bfloat16()
    assert_right([packed[:, :, i].transpose(1, 2) for i in range(3)], Causal())
    written = torch.empty_like(q)
    assert block_sparse_attention(q, k, v, Causal(), out=written) is written
    assert torch.equal(written, out)
    with pytest.raises(ArgumentError, match="out: overlaps v in memory"):
        block_sparse_attention(q, k, v, Causal(), out=v)


def test_wrong_values_and_places_are_named() -> None:
    q, k, v = qkv()
    with pytest.raises(ArgumentError, match=r"kv_indices: is on cpu, q is on cuda:0: pass kv_indices\.to\(q\.device\)"):
        block_sparse_attention(q, k, v, TopK(torch.zeros(1, 1, 8, 3, dtype=torch.int32)))
    with pytest.raises(ArgumentError, match="kv_indices: is 8 at batch 0"):
        wrong = torch.full((1, 1, 8, 3), 8, dtype=torch.int32, device="cuda")
        block_sparse_attention(q, k, v, TopK(wrong), validate=True)
    with pytest.raises(ArgumentError, match="out: is given, and q requires a gradient"):
        block_sparse_attention(q.detach().requires_grad_(), k, v, Dense(), out=torch.empty_like(q))
    with pytest.raises(ArgumentError, match=r"q: is torch\.float32"):
        block_sparse_attention(q.float(), k.float(), v.float(), Dense())


def test_autocast() -> None:
    tensors = [t.float() for t in qkv()]
    with torch.autocast("cuda", torch.bfloat16):
        out = block_sparse_attention(*tensors, Causal())
        compiled = torch.compile(lambda q, k, v: block_sparse_attention(q, k, v, Causal()), fullgraph=True)(*tensors)
    assert out.dtype == compiled.dtype == torch.bfloat16 and torch.equal(out, compiled)
    assert torch.equal(out, block_sparse_attention(*(t.bfloat16() for t in tensors), Causal()))


def test_opcheck() -> None:
    operators = torch.ops.sparse_kernel_codegen
    lists, causal = topk(), causal_lists()
    samples: list[tuple[Any, ...]] = [
        ((*qkv(), [], None, None, None, Dense().spec_json), {}),
        ((*qkv(), list(lists.index_tensors()), None, None, None, lists.spec_json), {"lse": True, "scale": 0.3}),
        ((*qkv(), list(causal.index_tensors()), torch.zeros(4, device="cuda"), None, None, causal.spec_json), {}),
    ]
    for arguments, options in samples:
        torch.library.opcheck(operators.block_sparse_attention.default, arguments, options)
    *inputs, spec_json = samples[1][0]
    out = torch.empty_like(inputs[0])
    torch.library.opcheck(operators.block_sparse_attention_out.default, (*inputs, out, spec_json), {"lse": True})


def surrounded(q: Any, k: Any, v: Any, indices: Any) -> Any:
    """Attention between other operators of a graph."""
    out, lse = block_sparse_attention(q * 2, k, v, TopK(indices), return_lse=True)
    return (out + 1).relu(), lse - 1


@pytest.mark.own_allocator
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile_recompiles_nothing_for_other_lengths_and_lists(mode: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(surrounded, fullgraph=True, dynamic=True, mode=mode)
    stance = "default"
    for length, entries in ((1152, 5), (1024, 3), (640, 4), (1024, 3), (1000, 2)):
        tensors, indices = qkv(length, length), topk(length=length, entries=entries).kv_indices
        with torch.no_grad(), torch.compiler.set_stance(stance):
            out, lse = compiled(*tensors, indices)
            out, lse = out.clone(), lse.clone()
        right, right_lse = surrounded(*tensors, indices)
        torch.testing.assert_close(out, right)
        torch.testing.assert_close(lse, right_lse)
        stance = "fail_on_recompile"
    torch._dynamo.reset()


@pytest.mark.own_allocator
def test_compile_replays_graphs_with_new_lists() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(surrounded, fullgraph=True, mode="reduce-overhead")
    tensors = qkv()
    for _ in range(5):
        indices = topk().kv_indices
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(*tensors, indices)[0].clone()
        torch.testing.assert_close(out, surrounded(*tensors, indices)[0])
    torch._dynamo.reset()


def test_cuda_graphs_read_the_lists_of_each_replay() -> None:
    tensors, pattern = qkv(), topk()
    block_sparse_attention(*tensors, pattern)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block_sparse_attention(*tensors, pattern)
    for _ in range(3):
        pattern.kv_indices.copy_(topk().kv_indices)
        graph.replay()
        assert torch.equal(out, block_sparse_attention(*tensors, pattern))


def test_cuda_graphs_capture_split_and_repeated_lists() -> None:
    tensors, pattern = qkv(heads=6, kv_heads=2), topk((256, 64), heads=2)
    block_sparse_attention(*tensors, pattern)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block_sparse_attention(*tensors, pattern)
    pattern.kv_indices.copy_(topk((256, 64), heads=2).kv_indices)
    graph.replay()
    assert torch.equal(out, block_sparse_attention(*tensors, pattern))


def test_a_kernel_is_not_loaded_in_a_capture() -> None:
    tensors = qkv()
    torch.cuda.synchronize()
    with (
        pytest.raises(ArgumentError, match="make one call before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        torch.zeros(1, device="cuda")
        block_sparse_attention(*tensors, SlidingWindow(123, 45))
    torch.cuda.synchronize()


class Layer(torch.nn.Module):
    """A layer with lists of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("indices", topk().kv_indices)

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return block_sparse_attention(q, k, v, TopK(self.indices), return_lse=True)  # type: ignore[arg-type]


def test_export() -> None:
    tensors, layer = qkv(), Layer()
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, tuple(tensors)), file)
    file.seek(0)
    program = torch.export.load(file)
    assert OPERATOR in program.graph_module.code
    out, lse = program.module()(*tensors)
    right, right_lse = layer(*tensors)
    assert torch.equal(out, right) and torch.equal(lse, right_lse)


def test_streams() -> None:
    tensors, stream = qkv(), torch.cuda.Stream()
    right = block_sparse_attention(*tensors, Causal())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = block_sparse_attention(*tensors, Causal())
    stream.synchronize()
    assert torch.equal(out, right)


@pytest.mark.own_allocator
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices() -> None:
    tensors, pattern = qkv(), topk()
    right = block_sparse_attention(*tensors, pattern)
    there = [t.to("cuda:1") for t in tensors]
    out = block_sparse_attention(*there, TopK(pattern.kv_indices.to("cuda:1")))
    assert out.device == there[0].device and torch.cuda.current_device() == 0
    assert torch.equal(out.to("cuda:0"), right)
    with pytest.raises(ArgumentError, match="k: is on cuda:1, q is on cuda:0"):
        block_sparse_attention(tensors[0], *there[1:], Dense())


def test_merged_parts() -> None:
    q, k, v = qkv()
    parts = [
        block_sparse_attention(q, k[:, :, part], v[:, :, part], Dense(), return_lse=True)
        for part in (slice(None, 300), slice(300, None))
    ]
    out, lse = merge_attention(*parts[0], *parts[1])  # type: ignore[arg-type]
    right, right_lse = expected(q, k, v, Dense())
    torch.testing.assert_close(out.float(), right, atol=1.6e-2, rtol=1.6e-2)
    torch.testing.assert_close(lse, right_lse, atol=1e-3, rtol=1e-3)


def test_merged_rows_without_keys_have_gradients() -> None:
    """Of 128 queries and twice 64 keys, causal, the first 64 queries see no key on either side."""
    q, k, v = (t.requires_grad_() for t in qkv(128, 128))
    parts = [
        block_sparse_attention(q, k[:, :, part], v[:, :, part], Causal(), return_lse=True)
        for part in (slice(None, 64), slice(64, None))
    ]
    out, lse = merge_attention(*parts[0], *parts[1])  # type: ignore[arg-type]
    assert bool((lse[:, :, :63] == -torch.inf).all())
    found = torch.autograd.grad(out.float().square().sum() + lse[:, :, 64:].sum(), (q, k, v))
    assert all(bool(gradient.isfinite().all()) for gradient in found)
    assert not found[0][:, :, :63].any() and all(bool(gradient.any()) for gradient in found)


def test_forward_mode_is_refused() -> None:
    q, k, v = qkv()
    fields = {"op": "attention", "arch": arch_of(q.device), "dtype": "bf16", "head_dim": 128}
    kernel: Any = load_kernel({**fields, "pattern": {"kind": "dense"}})
    right = block_sparse_attention(q, k, v, Dense())
    kernel(q, k, v)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(v, torch.ones_like(v))
        for call in (lambda: block_sparse_attention(q, k, dual, Dense()), lambda: kernel(q, k, dual)):
            with torch.no_grad(), pytest.raises(ArgumentError, match="has a tangent of forward-mode"):
                call()
        assert torch.equal(block_sparse_attention(q, k, v, Dense()), right)
    with pytest.raises(ArgumentError, match="has a tangent of forward-mode"):
        torch.func.jvp(lambda v: block_sparse_attention(q, k, v, Dense()), (v,), (v,))


def test_what_is_written_over_is_not_differentiated_with() -> None:
    q, k, v = qkv()
    out, weights = torch.zeros_like(q), torch.ones_like(q).requires_grad_()
    product = weights * out
    block_sparse_attention(q, k, v, Dense(), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.own_allocator
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_first_call_in_a_capture_of_another_device_is_refused() -> None:
    there = [t.to("cuda:1") for t in qkv()]
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(ArgumentError, match="make one call before the capture"),
            torch.cuda.graph(graph),
            torch.cuda.device(0),
        ):
            block_sparse_attention(*there, Dense(), softcap=7.125)
    assert block_sparse_attention(*there, Dense(), softcap=7.125).device == there[0].device


def test_the_explained_kernel_is_the_one_that_is_called() -> None:
    tensors = qkv()
    attention_launches.launches.clear()
    block_sparse_attention(*tensors, Causal())
    told = explain_attention(*tensors, Causal())
    _, route = attention_calls._routes.last
    assert route.kernel.spec == told.choice.spec


def test_kept_launches_compute_what_checked_calls_do() -> None:
    """On other operands, on another stream and in a graph; the second call of each kind is the first kept one."""
    q, k, v = qkv()
    out, side = torch.empty_like(q), torch.cuda.Stream()
    score = Score("score + slope[head]", aux={"slope": torch.rand(q.shape[1], device="cuda")})
    calls: list[Any] = [
        lambda: block_sparse_attention(q, k, v, Causal()),
        lambda: block_sparse_attention(q, k, v, Causal(), return_lse=True).lse,
        lambda: block_sparse_attention(q, k, v, Causal(), out=out).clone(),
        lambda: block_sparse_attention(q, k, v, Causal(), score=score),
    ]
    for number, call in enumerate(calls):
        attention_launches.launches.clear()
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
        for tensor in (q, k, v):
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        attention_launches.launches.clear()
        assert torch.equal(captured, call()), number
    with pytest.raises(ArgumentError, match="out: overlaps q"):
        block_sparse_attention(q, k, v, Causal(), out=q)
