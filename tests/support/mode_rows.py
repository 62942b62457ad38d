"""Every public function with small inputs, a call of it, and what is right: the rows of the table of modes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from convert_cases import CASES
from torch import nn

import runtime
from codegen.fp8 import KEY_ORDER, KEYS_TOGETHER
from runtime import compat, convert, distributed, patterns, video
from runtime.nn import BlockSparseLinear
from runtime.ops.attention_choice import arch_of
from runtime.prepare.bsr_matrix import BsrMatrix

BF16 = torch.bfloat16
TRACED = ("fake", "meta", "vmap", "compile", "export")
HOST = (*TRACED, "first capture", "capture")
"""Modes without values on the host: torch refuses there what the documentation says reads them."""
SPARSE = ("fake", "meta", "dual", "vmap", "func.grad", "compile", "export")
"""Modes in which torch has no sparse_bsr tensors: a BsrMatrix goes there."""
OUTSIDE = ("compile", "export")
"""Modes that trace: what returns text, and expressions that are read, are made outside of them."""


class Made(NamedTuple):
    """Inputs and a call of them.

    Attributes:
        tensors: what a mode may wrap, move, copy or map.
        inner: the call, as torch.compile and export take it; whatever pytree it returns is compared leaf by leaf.
        outside: makes its arguments of the tensors; None: they are its arguments.
    """

    tensors: tuple[torch.Tensor, ...]
    inner: Callable[..., Any]
    outside: Callable[..., tuple[Any, ...]] | None = None

    def arguments(self, *tensors: Any) -> tuple[Any, ...]:
        """Return the arguments of ``inner``."""
        return tensors if self.outside is None else self.outside(*tensors)

    def call(self, *tensors: Any) -> Any:
        """Make the arguments, and call."""
        return self.inner(*self.arguments(*tensors))


@dataclass(frozen=True)
class Row:
    """A public function, or one way to call it.

    Attributes:
        name: of the row.
        covers: the public names that it calls.
        make: the inputs and the call, on a device.
        right: the leaves that are right, of the tensors in float64; None: those of a first plain call, whose values
            other tests hold to their definition.
        learned: places of the tensors that have a gradient.
        floats: places of those a derivative may be asked of; by default the learned ones.
        constant: whether the results have no derivative by their nature (indices, sizes).
        torch_refuses: modes in which an error of torch's own is a refusal, as the documentation names why.
        one_thread: whether torch itself allows one thread at a time.
        gpu: whether nothing stands for its kernel on a CPU.
        close: largest relative error.
    """

    name: str
    covers: tuple[str, ...]
    make: Callable[[torch.device], Made]
    right: Callable[..., Any] | None = None
    learned: tuple[int, ...] = ()
    floats: tuple[int, ...] = ()
    constant: bool = False
    torch_refuses: tuple[str, ...] = ()
    gpu: bool = False
    one_thread: bool = False
    close: float = 2e-2

    @property
    def asked(self) -> tuple[int, ...]:
        """Places of the tensors that derivatives are asked of."""
        return self.floats or self.learned


HELD: dict[tuple[str, torch.device], torch.Tensor] = {}


def held(name: str, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a tensor of a row on a device: made by the first call, without a mode, so that no capture copies it."""
    if (name, device) not in HELD:
        HELD[name, device] = make().to(device)
    return HELD[name, device]


def normal(seed: int, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attention_inputs(device: torch.device, length: int = 128) -> tuple[torch.Tensor, ...]:
    shapes = ((1, 2, length, 64), (1, 1, length, 64), (1, 1, length, 64))
    return tuple(normal(seed, *shape).to(device) for seed, shape in enumerate(shapes))


def softmax(q: Any, k: Any, v: Any, seen: Any = None, score: Any = None, sink: Any = None) -> tuple[Any, Any]:
    """Return attention and its log-sum-exp by the definition; ``seen`` is bool (q_len, kv_len)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    rows, columns = places(q, k)
    logits = logits if score is None else score(logits, rows, columns)
    logits = logits if seen is None else logits.masked_fill(~seen, -math.inf)
    more = () if sink is None else (sink[None, :, None, None].expand(*logits.shape[:3], 1),)
    lse = torch.cat((logits, *more), -1).logsumexp(-1)
    return (logits - lse[..., None]).exp() @ v, lse


def places(q: Any, k: Any) -> tuple[Any, Any]:
    return torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)[None]


def causal(q: Any, k: Any, v: Any, *_: Any, **more: Any) -> tuple[Any, Any]:
    rows, columns = places(q, k)
    return softmax(q, k, v, columns <= rows, **more)


def attend(make_pattern: Callable[..., Any], *more: torch.Tensor, **options: Any) -> Callable[[torch.device], Made]:
    """Return what makes a call of attention; ``make_pattern`` takes the tensors beside q, k and v."""

    def outside(q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
        given = {name: value(*rest) if callable(value) else value for name, value in options.items()}
        return q, k, v, make_pattern(*rest), given

    def inner(q: Any, k: Any, v: Any, pattern: Any, given: Any) -> Any:
        return runtime.block_sparse_attention(q, k, v, pattern, return_lse=True, **given)

    tensors = lambda device: (*attention_inputs(device), *(tensor.to(device) for tensor in more))  # noqa: E731
    return lambda device: Made(tensors(device), inner, outside)


LISTS = torch.tensor([[[[0, 1], [1, -1]]]], dtype=torch.int32)
ALL_LISTS = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
COUNTS = torch.tensor([[[2, 1]]], dtype=torch.int32)
DOCUMENTS = torch.arange(128, dtype=torch.int32)[None] // 48
DOCUMENTS_TEXT = "doc[batch, q_idx] == doc[batch, kv_idx]"


def of_lists(q: Any, k: Any) -> Any:
    """Return which pairs those lists show: the second query block sees the second key block alone."""
    rows, columns = places(q, k)
    return (rows < 64) | (columns >= 64)


def listed(q: Any, k: Any, v: Any, lists: Any, sink: Any) -> Any:
    return softmax(q, k, v, of_lists(q, k), sink=sink)


def with_functions(doc: Any, counts: Any, lists: Any) -> Any:
    mask = lambda b, h, i, j: doc[b, i] == doc[b, j]  # noqa: E731 - as users write it
    return patterns.BlockLists(counts, lists, block=(64, 64), mask=mask)


def a_score(*_: Any) -> Any:
    return patterns.Score(lambda score, b, h, i, j: 2.0 * torch.tanh(score / 2.0) + 0.01 * (i - j))


def by_functions(q: Any, k: Any, v: Any, doc: Any, *_: Any) -> Any:
    seen = (doc[0, :, None] == doc[0, None]) & of_lists(q, k)
    return softmax(q, k, v, seen, lambda s, i, j: 2 * torch.tanh(s / 2) + 0.01 * (i - j))


def flex_mask(counts: Any, lists: Any) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask.from_kv_blocks(counts, lists, BLOCK_SIZE=64, mask_mod=lambda b, h, q, k: q >= k)


def by_flex_mask(q: Any, k: Any, v: Any, *_: Any) -> Any:
    rows, columns = places(q, k)
    return softmax(q, k, v, of_lists(q, k) & (rows >= columns))


# ------------------------------------------------------------------------------------------------------------ FP8


def codes(seed: int, *shape: int) -> torch.Tensor:
    return normal(seed, *shape).to(torch.float8_e4m3fn)


def values_of(given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v that operands in FP8 stand for."""
    q_scale, k_scale = (
        scale.repeat_interleave(rows, 2)[:, :, : x.shape[2], None]
        for scale, rows, x in ((given.q_scale, given.q_rows, given.q), (given.k_scale, given.k_rows, given.k))
    )
    order = held("keys in order", given.q.device, lambda: torch.tensor(KEY_ORDER).argsort())
    v = given.v_t.float().unflatten(-1, (-1, KEYS_TOGETHER))[..., order].flatten(-2)[..., : given.k.shape[2]]
    k = given.k.float() * k_scale
    k = k if given.k_mean is None else k + given.k_mean[:, :, None]
    return given.q.float() * q_scale, k, (v * given.v_scale[..., None]).mT


def operands(q: Any, k: Any, v: Any) -> Any:
    return runtime.quantized_operands(q, k, v, q_scale=0.5, k_scale=0.25, v_scale=2.0)


def fp8_inputs(device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(codes(seed, 1, 2, 128, 64).to(device) for seed in range(3))


def appended(q: Any, k: Any, v: Any) -> Any:
    """Return all keys and values, of which the second half was appended."""
    first = runtime.quantize_attention(q, k[:, :, :128], v[:, :, :128], smooth_k=False, kv_capacity=256)
    return values_of(first.append(k[:, :, 128:], v[:, :, 128:] / 2))[1:]


def by_appending(q: Any, k: Any, v: Any) -> Any:
    return k, torch.cat((v[:, :, :128], v[:, :, 128:] / 2), 2)


def matrix_values(x: Any) -> Any:
    found = runtime.quantize_matrix(x)
    return found.codes.float() * found.scales.repeat_interleave(128, 1)


# ------------------------------------------------------------------------------------------------------------ BSR

STORED = torch.tensor([[True, False, True], [False, True, True]])


def bsr(values: Any) -> torch.Tensor:
    """Return the sparse matrix (128, 192) of four blocks of 64."""
    crow, col = (held(str(x), values.device, lambda x=x: torch.tensor(x).int()) for x in ([0, 2, 4], [0, 2, 1, 2]))
    return torch.sparse_bsr_tensor(crow, col, values, size=(128, 192), device=values.device, check_invariants=False)


def dense(values: Any) -> Any:
    """Return that matrix, dense."""
    zero = torch.zeros_like(values[0])
    return torch.cat((torch.cat((values[0], zero, values[1]), 1), torch.cat((zero, values[2], values[3]), 1)))


def with_matrix(call: Callable[..., Any], *given: torch.Tensor) -> Callable[[torch.device], Made]:
    """Return what makes a call of (matrix, *given): the tensors are the values, those given, and the indices."""

    def make(device: torch.device) -> Made:
        a = runtime.prepare_bsr(bsr(normal(7, 4, 64, 64).to(device)))
        tensors = a.values, *(x.to(device) for x in given), a.crow_indices, a.col_indices, *a.order, *a.index

        def called(values: Any, *rest: Any) -> Any:
            own, (crow, col, order, *index) = rest[: len(given)], rest[len(given) :]
            return call(BsrMatrix(values, crow, col, a.columns, (order,), tuple(index), a.how), *own)

        return Made(tensors, called)

    return make


def with_sparse(call: Callable[..., Any], *given: torch.Tensor) -> Callable[[torch.device], Made]:
    return lambda device: Made(
        (normal(7, 4, 64, 64).to(device), *(x.to(device) for x in given)),
        lambda values, *rest: call(bsr(values), *rest),
    )


def multiplied(a: Any, b: Any, bias: Any) -> Any:
    return runtime.bsr_matmul(a, b, bias=bias, activation="gelu")


def by_multiplying(values: Any, b: Any, bias: Any, *_: Any) -> Any:
    return nn.functional.gelu(dense(values) @ b + bias[:, None])


def sampled(pattern: Any, a: Any, b: Any) -> Any:
    return runtime.bsr_sddmm(a, b, pattern).values


def by_sampling(values: Any, a: Any, b: Any, *_: Any) -> Any:
    blocks = (a @ b.mT).unflatten(0, (-1, 64)).unflatten(2, (-1, 64)).transpose(1, 2)
    return blocks[STORED.to(a.device)]


def layer_made(device: torch.device) -> Made:
    torch.manual_seed(0)
    layer = BlockSparseLinear(bsr(normal(7, 4, 64, 64).to(device)), normal(8, 128).to(device))
    state = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}

    tensors = (normal(9, 16, 192).to(device), *(tensor.detach() for tensor in state.values()))
    return Made(tensors, LayerCall(layer, tuple(state)))


class LayerCall(nn.Module):
    """A layer whose parameters and buffers are arguments."""

    def __init__(self, layer: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.layer, self.names = layer, names

    def forward(self, x: Any, *given: Any) -> Any:
        return torch.func.functional_call(self.layer, dict(zip(self.names, given, strict=True)), (x,))


def by_layer(x: Any, values: Any, bias: Any, *_: Any) -> Any:
    return x @ dense(values).mT + bias


def places_of(layer: Any) -> Any:
    return layer.crow_indices, layer.col_indices


def linear(device: torch.device) -> Made:
    dense_layer = nn.Linear(192, 128, dtype=BF16, device=device)
    with torch.no_grad():
        dense_layer.weight.copy_(dense(normal(7, 4, 64, 64)))
    return Made(
        (dense_layer.weight.detach(), STORED.to(device)),
        lambda weight, mask: places_of(BlockSparseLinear.from_linear(_with(dense_layer, weight), 64, mask=mask)),
    )


def _with(layer: Any, weight: Any) -> Any:
    found = nn.Linear(layer.in_features, layer.out_features, device="meta", dtype=weight.dtype)
    found.weight, found.bias = nn.Parameter(weight, requires_grad=False), None
    return found


def spots(*_: Any) -> Any:
    return [torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 4], [0, 2, 1, 2])]


# ---------------------------------------------------------------------------------------------------------- others


def merged_inputs(device: torch.device) -> tuple[torch.Tensor, ...]:
    found = []
    for seed in (20, 30):
        lse = normal(seed, 1, 2, 64, dtype=torch.float32)
        lse[..., :8] = -math.inf  # rows without keys on either side, and some more on one
        lse[..., 8 + seed : 12 + seed] = -math.inf
        out = normal(seed + 1, 1, 2, 64, 32, dtype=torch.float32) * (lse > -math.inf)[..., None]
        found += [out.to(device), lse.to(device)]
    return tuple(found)


def by_merging(out1: Any, lse1: Any, out2: Any, lse2: Any) -> Any:
    most = torch.maximum(lse1, lse2).detach()
    most = torch.where(most == -math.inf, 0.0, most)
    one, two = (
        torch.where(x == -math.inf, 0.0, (torch.where(x == -math.inf, 0.0, x) - most).exp()) for x in (lse1, lse2)
    )
    total = one + two
    some = torch.where(total == 0, 1.0, total)
    lse = torch.where(total == 0, -math.inf, some.log() + most)
    return (one[..., None] * out1 + two[..., None] * out2) / some[..., None], lse


def by_selecting(q: Any, k: Any) -> Any:
    means = [x.unflatten(2, (-1, 64)).mean(3) for x in (q, k)]
    product = means[0] @ means[1].repeat_interleave(2, 1).mT
    product = product.masked_fill(~torch.ones(4, 4, dtype=torch.bool, device=q.device).tril(), -math.inf)
    found = product.topk(2, -1)
    last = torch.where(found.values == -math.inf, 4, found.indices).sort(-1).values
    return torch.where(last == 4, -1, last).int()


def documents_right(doc: Any) -> Any:
    """Return the lists of the mask of documents, by the definition."""
    seen = (doc[0, :, None] == doc[0, None]).unflatten(0, (2, 64)).unflatten(2, (2, 64)).transpose(1, 2)
    some, whole = seen.flatten(2).any(-1), seen.flatten(2).all(-1)
    found = []
    for blocks in (some & ~whole, whole):
        numbers = torch.where(blocks, torch.arange(2, device=doc.device), 2).sort(-1).values
        found += [blocks.sum(-1)[None, None], torch.where(numbers == 2, -1, numbers)[None, None]]
    return found


def causal_right(*_: Any) -> Any:
    return torch.tensor([[[1, 1]]]), torch.tensor([[[[0, -1], [1, -1]]]]), torch.tensor([[[0, 1]]]), torch.tensor(
        [[[[-1, -1], [0, -1]]]]
    )  # fmt: skip


GRID, TILE, WINDOW = (2, 8, 16), (1, 8, 8), (1, 1, 2)


def tiles_of(device: torch.device) -> video.VideoTiles:
    return video.VideoTiles(GRID, TILE, device=device)


def order_of(tiles: video.VideoTiles) -> Any:
    return tiles.to_tiles, tiles.from_tiles


def of_frames(q: Any, k: Any, v: Any) -> Any:
    rows, columns = places(q, k)
    return softmax(q, k, v, rows // 128 == columns // 128)[0]


def tiled(device: torch.device) -> Made:
    tiles = tiles_of(device)
    pattern = video.tile_window(tiles, WINDOW)
    return Made(attention_inputs(device, 256), lambda q, k, v: video.tiled_attention(q, k, v, tiles, pattern))


def windowed(device: torch.device) -> Made:
    window = video.VideoWindow(GRID, WINDOW, TILE)

    def call(q: Any, k: Any, v: Any) -> Any:
        return video.tiled_attention(q, k, v, *window(None, q, k, patterns.Dense()))

    return Made(attention_inputs(device, 256), call)


def in_tiles(device: torch.device) -> Made:
    tiles = tiles_of(device)
    return Made(
        (normal(3, 1, 2, 256, 8, dtype=torch.float32).to(device),),
        lambda x: (tiles.tile(x), tiles.untile(tiles.tile(x))),
    )


def by_tiles(x: Any) -> Any:
    return x.unflatten(2, (2, 8, 2, 8)).transpose(3, 4).flatten(2, 5), x


def without(call: Callable[[torch.device], Any]) -> Callable[[torch.device], Made]:
    """Return what makes a call without tensors."""
    return lambda device: Made((), lambda: call(device))


def of(call: Callable[..., Any], *tensors: torch.Tensor) -> Callable[[torch.device], Made]:
    return lambda device: Made(tuple(tensor.to(device) for tensor in tensors), call)


def explained(function: Any, *pattern: Any, **options: Any) -> Callable[[torch.device], Made]:
    return lambda device: Made(
        attention_inputs(device), lambda *qkv: str(function(*qkv, *pattern, arch="sm_90a", **options))
    )


def explained_packed() -> Callable[[torch.device], Made]:
    def call(q: Any, k: Any, v: Any) -> str:
        packed = (t[0].transpose(0, 1) for t in (q, k, v))
        bounds = torch.tensor([0, q.shape[2]], dtype=torch.int32, device=q.device)
        options = {"cu_seqlens_q": bounds, "arch": "sm_90a", "gradients": True}
        return str(runtime.explain_varlen_attention(*packed, patterns.Causal(), **options))

    return lambda device: Made(attention_inputs(device), call)


def explained_over_pages() -> Callable[[torch.device], Made]:
    def call(q: Any, k: Any, v: Any) -> str:
        tokens = q[0].transpose(0, 1)
        return str(runtime.explain_paged_attention(tokens, k, v, patterns.Causal(), layout="HND", arch="sm_90a"))

    return lambda device: Made(attention_inputs(device), call)


def converter(name: str) -> Callable[[torch.device], Made]:
    case = next(case for case in CASES if case.name == name)
    return lambda device: Made(
        tuple(tensor.to(device) for tensor in case.tensors()), lambda *given: case.pattern(*given).index_tensors()
    )


def topk(lists: Any) -> Any:
    return patterns.TopK(lists, block=(64, 64))


def to_flex(lists: Any) -> Any:
    found = convert.to_block_mask(topk(lists), q_len=128, kv_len=128)
    return found.kv_num_blocks, found.kv_indices


def joined(x: Any) -> Any:
    layout = distributed.Layout.zigzag(2)
    parts = [layout.shard(x, rank) for rank in range(2)]
    return *parts, layout.join(parts)


def by_joining(x: Any) -> Any:
    a, b, c, d = x.chunk(4, 2)
    return torch.cat((a, d), 2), torch.cat((b, c), 2), x


def loaded(fields: dict[str, Any], call: Callable[..., Any], *tensors: torch.Tensor) -> Callable[[torch.device], Made]:
    """Return what makes a call of a kernel of the device: (kernel, *tensors)."""

    def make(device: torch.device) -> Made:
        kernel = runtime.load_kernel({"arch": arch_of(device), "dtype": "bf16", **fields}, device=device)
        return Made(tuple(tensor.to(device) for tensor in tensors), lambda *given: call(kernel, *given))

    return make


def load(device: torch.device) -> Any:
    fields = {"op": "select_topk", "arch": arch_of(device), "dtype": "bf16"}
    return runtime.load_kernel(fields, device=device).spec.dtype


QKV = attention_inputs(torch.device("cpu"))
ATTENTION = {"op": "attention", "head_dim": 64, "lse": True, "pattern": {"kind": "causal"}}
BLOCK = {"block": {"rows": 64, "cols": 64}}
VALUES, WIDE = normal(7, 4, 64, 64), normal(11, 192, 128)


def numbers_only() -> list[str]:
    p = patterns
    made = p.Dense(), p.Causal(), p.SlidingWindow(3), p.SinkWindow(1, 2), p.Strided(4, 1)
    return [each.spec_json for each in made]


def flash(*tensors: Any) -> tuple[Any, Any]:
    """FlashAttention's call, whose layout is (batch, length, heads, head_dim), of tensors in the layout of torch."""
    q, k, v = (t.transpose(1, 2) for t in tensors)
    out, lse, _ = compat.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    return out.transpose(1, 2), lse


def packed(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Both packed calls of FlashAttention; the first one has the heads of k alone."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    first = compat.flash_attn_qkvpacked_func(torch.stack([q[:, :, :1], k, v], 2), causal=True)
    second = compat.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True)
    return first.transpose(1, 2), second.transpose(1, 2)


def by_packed(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    return causal(q[:, :1], k, v)[0], causal(q, k, v)[0]


def compat_rows() -> Iterable[Row]:
    bias, seen = normal(6, 128, dtype=torch.float32), torch.rand(128, 128, generator=torch.Generator().manual_seed(1))

    def flexed(q: Any, k: Any, v: Any, pattern: Any, score: Any) -> Any:
        return compat.flex_attention(q, k, v, score, pattern, enable_gqa=True, return_lse=True)

    def outside(q: Any, k: Any, v: Any, bias: Any) -> tuple[Any, ...]:
        return q, k, v, patterns.Causal(), patterns.Score("score + bias[kv_idx]", aux={"bias": bias})

    def with_more(more: torch.Tensor, *made: Any) -> Callable[[torch.device], Made]:
        return lambda device: Made((*attention_inputs(device), more.to(device)), *made)

    by_bias = lambda q, k, v, bias: causal(q, k, v, score=lambda s, i, j: s + bias[j])  # noqa: E731
    name = ("runtime.compat.flex_attention",)
    yield Row("compat.flex_attention", name, with_more(bias, flexed, outside), by_bias, (0, 1, 2, 3))
    name = ("runtime.compat.flash_attn_func",)
    yield Row("compat.flash_attn_func", name, lambda device: Made(attention_inputs(device), flash), causal, (0, 1, 2))
    both = ("runtime.compat.flash_attn_qkvpacked_func", "runtime.compat.flash_attn_kvpacked_func")
    yield Row("... packed", both, lambda device: Made(attention_inputs(device), packed), by_packed, (0, 1, 2))
    dotted = lambda q, k, v, mask: compat.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)  # noqa: E731
    by_mask = lambda q, k, v, mask: softmax(q, k, v, mask != 0)[0]  # noqa: E731
    name = ("runtime.compat.scaled_dot_product_attention",)
    yield Row("compat.scaled_dot_product_attention", name, with_more(seen > 0.3, dotted), by_mask, (0, 1, 2))


def attention_rows() -> Iterable[Row]:
    attention, bias = "runtime.block_sparse_attention", normal(6, 128, dtype=torch.float32)
    yield Row("block_sparse_attention", (attention,), attend(patterns.Causal), causal, (0, 1, 2))
    sink = torch.tensor([0.5, -0.5])
    lists = attend(lambda lists, _: topk(lists), LISTS, sink, sink=lambda _, sink: sink)
    yield Row("... over lists, with a sink", (attention,), lists, listed, (0, 1, 2, 4))
    score = lambda bias: patterns.Score("score + bias[kv_idx]", aux={"bias": bias})  # noqa: E731
    by_bias = lambda q, k, v, bias: causal(q, k, v, score=lambda s, i, j: s + bias[j])  # noqa: E731
    learned = attend(lambda _: patterns.Causal(), bias, score=score)
    yield Row("... with a learned bias", (attention, "runtime.patterns.Score"), learned, by_bias, (0, 1, 2, 3))
    functions = attend(with_functions, DOCUMENTS, COUNTS, ALL_LISTS, score=a_score)
    yield Row("... of functions", (attention, "runtime.patterns.BlockLists"), functions, by_functions, (0, 1, 2))
    flex = attend(flex_mask, COUNTS, ALL_LISTS)
    yield Row("... of a BlockMask", (attention,), flex, by_flex_mask, (0, 1, 2), torch_refuses=("export",))
    fp8 = lambda device: Made(  # noqa: E731
        fp8_inputs(device), lambda *qkv: runtime.block_sparse_attention_fp8(operands(*qkv), patterns.Causal())
    )
    by_codes = lambda q, k, v: causal(q * 0.5, k * 0.25, v * 2.0)[0]  # noqa: E731
    yield Row(
        "... in FP8", ("runtime.block_sparse_attention_fp8", "runtime.quantized_operands"), fp8, by_codes, close=0.06
    )
    by_torch = lambda q, k, v: runtime.reference_attention(q, k, v, patterns.Causal(), return_lse=True)  # noqa: E731
    name = ("runtime.reference_attention",)
    made = lambda device: Made(attention_inputs(device), by_torch)  # noqa: E731
    yield Row("reference_attention", name, made, causal, (0, 1, 2), torch_refuses=("compile", "export"))
    yield from compat_rows()
    yield Row(
        "merge_attention",
        ("runtime.merge_attention",),
        lambda device: Made(merged_inputs(device), runtime.merge_attention),
        by_merging,
        (0, 1, 2, 3),
    )
    explain = partial(explained, runtime.explain_attention, patterns.Causal(), gradients=True)
    yield Row(
        "explain_attention",
        ("runtime.explain_attention",),
        explain(),
        floats=(0,),
        constant=True,
        torch_refuses=OUTSIDE,
    )
    packed, over_pages = explained_packed(), explained_over_pages()
    for name, made in (("explain_varlen_attention", packed), ("explain_paged_attention", over_pages)):
        yield Row(name, (f"runtime.{name}",), made, floats=(0,), constant=True, torch_refuses=OUTSIDE)


def fp8_rows() -> Iterable[Row]:
    call = lambda *qkv: values_of(runtime.quantize_attention(*qkv))  # noqa: E731
    quantize = lambda device: Made(attention_inputs(device), call)  # noqa: E731
    same = lambda *qkv: qkv  # noqa: E731
    yield Row("quantize_attention", ("runtime.quantize_attention",), quantize, same, floats=(0, 1, 2), close=0.06)
    append = lambda device: Made(attention_inputs(device, 256), appended)  # noqa: E731
    name, whole = ("runtime.QuantizedAttention",), ("compile",)
    yield Row("... append", name, append, by_appending, floats=(0, 1, 2), close=0.06, torch_refuses=whole)
    queries = lambda q, k, v: values_of(runtime.quantize_attention(q, k, v).with_queries(q[:, :, :64]))  # noqa: E731
    yield Row(
        "... with_queries",
        ("runtime.QuantizedAttention",),
        lambda device: Made(attention_inputs(device), queries),
        lambda q, k, v: (q[:, :, :64], k, v),
        floats=(0, 1, 2),
        close=0.06,
    )
    matrix = of(matrix_values, normal(12, 128, 256))
    yield Row(
        "quantize_matrix",
        ("runtime.quantize_matrix",),
        matrix,
        lambda x: x,
        floats=(0,),
        close=0.06,
        torch_refuses=whole,
    )
    put = lambda device: Made(fp8_inputs(device), lambda *qkv: values_of(operands(*qkv)))  # noqa: E731
    scaled = lambda q, k, v: (q * 0.5, k * 0.25, v * 2.0)  # noqa: E731
    yield Row("quantized_operands", ("runtime.quantized_operands",), put, scaled, close=1e-6)
    scale = lambda x: x.abs().amax() / 448  # noqa: E731
    yield Row(
        "scales_of",
        ("runtime.scales_of",),
        of(runtime.scales_of, normal(13, 64, 64)),
        scale,
        floats=(0,),
        constant=True,
    )


def matrix_rows() -> Iterable[Row]:
    matmul, sddmm = ("runtime.bsr_matmul", "runtime.BsrMatrix"), ("runtime.bsr_sddmm",)
    factors, pair = (WIDE, normal(12, 128)), (normal(13, 128, 64), normal(14, 192, 64))
    yield Row("bsr_matmul", matmul, with_matrix(multiplied, *factors), by_multiplying, (0, 1, 2))
    sparse = with_sparse(multiplied, *factors)
    # The gradient of torch.sparse_bsr_tensor is neither deterministic nor captured: torch synchronizes in it.
    refuses = (*SPARSE, "deterministic", "capture")
    yield Row("... of torch.sparse_bsr", matmul, sparse, by_multiplying, (0, 1, 2), torch_refuses=refuses)
    yield Row("bsr_sddmm", sddmm, with_matrix(sampled, *pair), by_sampling, (1, 2))
    prepare = with_sparse(runtime.prepare_bsr)
    yield Row(
        "prepare_bsr", ("runtime.prepare_bsr",), prepare, torch_refuses=TRACED + SPARSE, floats=(0,), constant=True
    )
    problem = with_sparse(lambda a: runtime.bsr_problem(a, 128, arch="sm_90a").text())
    yield Row(
        "bsr_problem", ("runtime.bsr_problem",), problem, torch_refuses=TRACED + SPARSE, floats=(0,), constant=True
    )
    explain = with_matrix(lambda a, b: str(runtime.explain_matmul(a, b, arch="sm_90a", gradients=True)), WIDE)
    name = ("runtime.explain_matmul",)
    yield Row("explain_matmul", name, explain, floats=(0, 1), constant=True, torch_refuses=OUTSIDE)
    name = ("runtime.nn.BlockSparseLinear",)  # functional_call swaps the parameters of the layer that threads share
    yield Row("BlockSparseLinear", name, layer_made, by_layer, (0, 1, 2), one_thread=True)
    of_mask = of(lambda mask: places_of(BlockSparseLinear.from_mask(mask, 64)), STORED)
    name = ("runtime.nn.BlockSparseLinear",)
    yield Row("... from_mask", name, of_mask, spots, torch_refuses=TRACED, constant=True)
    yield Row("... from_linear", name, linear, spots, torch_refuses=TRACED, floats=(0,), constant=True)


def list_rows() -> Iterable[Row]:
    name = ("runtime.create_block_mask",)
    sizes: dict[str, Any] = {"B": 1, "H": 2, "Q_LEN": 128, "KV_LEN": 128, "BLOCK_SIZE": (64, 64)}
    of_text = of(lambda doc: runtime.create_block_mask(DOCUMENTS_TEXT, **sizes, aux={"doc": doc}), DOCUMENTS)
    yield Row("create_block_mask", name, lists_alone(of_text), documents_right, constant=True)
    mask = lambda doc: lambda b, h, i, j: doc[b, i] == doc[b, j]  # noqa: E731
    of_function = of(lambda doc: runtime.create_block_mask(mask(doc), **sizes), DOCUMENTS)
    yield Row(
        "... of a function", name, lists_alone(of_function), documents_right, constant=True, torch_refuses=OUTSIDE
    )
    alone = without(lambda device: runtime.create_block_mask("q_idx >= kv_idx", **sizes, device=device))
    yield Row("... without tensors", name, lists_alone(alone), causal_right, constant=True)
    select = lambda q, k: runtime.select_topk_blocks(q, k, (64, 64), 2, causal=True)  # noqa: E731
    chosen = of(select, normal(15, 1, 2, 256, 64), normal(16, 1, 1, 256, 64))
    yield Row("select_topk_blocks", ("runtime.select_topk_blocks",), chosen, by_selecting, floats=(0, 1), constant=True)
    names = tuple(f"runtime.patterns.{each}" for each in ("Dense", "Causal", "SlidingWindow", "SinkWindow", "Strided"))
    yield Row("patterns of numbers", names, without(lambda _: numbers_only()), constant=True)
    yield Row("TopK", ("runtime.patterns.TopK",), of(topk, LISTS), constant=True)
    yield Row("PrefixLM", ("runtime.patterns.PrefixLM",), of(patterns.PrefixLM, COUNTS[0, 0]), constant=True)
    expression = of(with_functions, DOCUMENTS, COUNTS, ALL_LISTS)
    yield Row("BlockLists", ("runtime.patterns.BlockLists",), expression, constant=True, torch_refuses=OUTSIDE)
    score = lambda x: patterns.Score(lambda s, b, h, i, j: s + x[j])  # noqa: E731
    looked_up, name = of(score, normal(17, 128)), ("runtime.patterns.Score",)
    yield Row("Score", name, looked_up, lambda x: x, floats=(0,), torch_refuses=OUTSIDE)


def lists_alone(make: Callable[[torch.device], Made]) -> Callable[[torch.device], Made]:
    """Return what makes the same call, of whose pattern the four tensors of lists are looked at."""

    def made(device: torch.device) -> Made:
        given = make(device)
        return Made(given.tensors, lambda *tensors: given.call(*tensors).index_tensors()[:4])

    return made


FROM = {
    "from_block_mask": "flex_causal_documents",
    "from_q2k": "q2k_block_sizes",
    "from_token_lists": "token_lists_merged",
    "from_causal_lists": "causal_lists",
    "from_csr": "csr",
    "from_bool_blocks": "bool_blocks_merged",
    "from_token_mask": "token_mask",
    "from_key_mask": "key_mask",
    "from_key_ranges": "key_ranges",
    "from_cu_seqlens": "documents_causal",
}
TO: dict[str, Callable[..., Any]] = {
    "to_block_mask": to_flex,
    "to_bool_blocks": lambda lists: convert.to_bool_blocks(topk(lists), kv_len=128),
    "to_csr": lambda lists: convert.to_csr(topk(lists)),
    "to_q2k": lambda lists: convert.to_q2k(topk(lists)),
    "to_token_lists": lambda lists: convert.to_token_lists(patterns.TopK(lists, block=(1, 64))),
    "to_token_mask": lambda lists: convert.to_token_mask(topk(lists), q_len=128, kv_len=128),
}


def converter_rows() -> Iterable[Row]:
    for name, case in FROM.items():
        yield Row(f"convert.{name}", (f"runtime.convert.{name}",), converter(case), constant=True)
    for name, call in TO.items():
        yield Row(f"convert.{name}", (f"runtime.convert.{name}",), of(call, LISTS), constant=True)
    lengths = torch.tensor([3, 7], dtype=torch.int32)
    keys = lambda lengths: convert.mask_from_kv_lengths(lengths, 9)  # noqa: E731
    yield Row("convert.mask_from_kv_lengths", ("runtime.convert.mask_from_kv_lengths",), of(keys, lengths))
    back = of(convert.kv_lengths_from_mask, torch.arange(9)[None] < lengths[:, None])
    yield Row("convert.kv_lengths_from_mask", ("runtime.convert.kv_lengths_from_mask",), back, lambda _: lengths)


def other_rows() -> Iterable[Row]:
    order = without(lambda device: order_of(tiles_of(device)))
    yield Row("video.VideoTiles", ("runtime.video.VideoTiles",), order, constant=True, torch_refuses=HOST)
    yield Row("... tile, untile", ("runtime.video.VideoTiles",), in_tiles, by_tiles, (0,))
    window = without(lambda device: video.tile_window(tiles_of(device), WINDOW))
    yield Row("video.tile_window", ("runtime.video.tile_window",), window, constant=True, torch_refuses=HOST)
    yield Row("video.tiled_attention", ("runtime.video.tiled_attention",), tiled, of_frames, (0, 1, 2))
    yield Row(
        "video.VideoWindow", ("runtime.video.VideoWindow",), windowed, of_frames, (0, 1, 2), torch_refuses=("compile",)
    )
    layout = distributed.Layout
    name = ("runtime.distributed.Layout",)
    positions = without(lambda device: layout.zigzag(2).positions(1, 64, device))
    at = lambda: torch.arange(16, 48)  # noqa: E731
    yield Row("distributed.Layout", name, positions, at, constant=True)
    yield Row("... shard, join", name, of(joined, normal(18, 1, 2, 64, 8, dtype=torch.float32)), by_joining, (0,))
    work = of(lambda work: str(layout.balanced(work, 2).chunks), torch.tensor([3.0, 1.0, 2.0, 2.0]))
    yield Row("... balanced", name, work, constant=True, torch_refuses=HOST)
    received = lambda _: distributed.keys_received(patterns.Causal(), layout.zigzag(2), 1, 64, 64)  # noqa: E731
    yield Row(
        "distributed.keys_received",
        ("runtime.distributed.keys_received",),
        without(received),
        constant=True,
        torch_refuses=OUTSIDE,
    )
    local = lambda lists: distributed.local_lists(topk(lists), layout.contiguous(2), 1)  # noqa: E731
    yield Row("distributed.local_lists", ("runtime.distributed.local_lists",), of(local, LISTS), lambda x: x[:, :, 1:])


def kernel_rows() -> Iterable[Row]:
    kernel = ("runtime.load_kernel", "runtime.Kernel", "runtime.AttentionResult")
    yield Row("load_kernel", kernel, without(load), lambda: ["bf16"], gpu=True, constant=True, torch_refuses=HOST)
    call: Callable[..., Any] = lambda kernel, *given: tuple(kernel(*given))  # noqa: E731
    yield Row(
        "... attention",
        kernel,
        loaded(ATTENTION, call, *QKV),
        causal,
        floats=(0, 1, 2),
        gpu=True,
        torch_refuses=OUTSIDE,
    )
    product = lambda kernel, values, b: kernel(bsr(values), b)  # noqa: E731
    fields, by_product = {"op": "bsr_spmm", **BLOCK}, lambda values, b: dense(values) @ b
    spmm = loaded(fields, product, VALUES, WIDE)
    yield Row("... bsr_spmm", kernel, spmm, by_product, floats=(0, 1), gpu=True, torch_refuses=SPARSE)
    prepared = lambda kernel, values, b: kernel(kernel.prepare(bsr(values), columns=128), b)  # noqa: E731
    spmm = loaded(fields, prepared, VALUES, WIDE)
    names = ("runtime.PreparedBsr", "runtime.PreparedLists")
    yield Row("... prepare", names, spmm, by_product, floats=(0, 1), gpu=True, torch_refuses=(*SPARSE, *HOST))
    sample = lambda kernel, values, a, b: kernel(a, b, bsr(values)).values()  # noqa: E731
    sddmm = loaded({"op": "bsr_sddmm", **BLOCK}, sample, VALUES, normal(13, 128, 64), normal(14, 192, 64))
    yield Row("... bsr_sddmm", kernel, sddmm, by_sampling, floats=(1, 2), gpu=True, torch_refuses=SPARSE)
    spgemm = loaded({"op": "bsr_spgemm", **BLOCK}, _spgemm, VALUES, normal(19, 3, 64, 64))
    yield Row("... bsr_spgemm", kernel, spgemm, by_spgemm, floats=(0, 1), gpu=True, torch_refuses=SPARSE)
    selected = lambda kernel, q, k: kernel(q, k, (64, 64), 2, causal=True)  # noqa: E731
    select = loaded({"op": "select_topk"}, selected, normal(15, 1, 2, 256, 64), normal(16, 1, 1, 256, 64))
    yield Row(
        "... select_topk", kernel, select, by_selecting, floats=(0, 1), gpu=True, constant=True, torch_refuses=OUTSIDE
    )
    pattern = {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": DOCUMENTS_TEXT}
    pattern["aux"] = {"doc": "int32[batch, q_len]"}
    mask = loaded({"op": "block_mask", "pattern": pattern}, _of_documents, DOCUMENTS)
    yield Row("... block_mask", kernel, mask, documents_right, gpu=True, constant=True, torch_refuses=OUTSIDE)
    rows = {"op": "quantize", "head_dim": 64, "codes": "e4m3", "scales": "row", "tile": {"m": 64}}
    quantize = loaded(rows, _decoded, QKV[0])
    yield Row("... quantize", kernel, quantize, lambda x: x, floats=(0,), gpu=True, close=0.06, torch_refuses=OUTSIDE)


def _of_documents(kernel: Any, doc: Any) -> Any:
    return kernel(1, 2, 128, 128, aux={"doc": doc})


def _decoded(kernel: Any, x: Any) -> Any:
    made = kernel(x)
    return made.codes.float() * made.scales[..., None]


def _spgemm(kernel: Any, values: Any, b: Any) -> Any:
    crow = held("four rows", b.device, lambda: torch.arange(4).int())
    col = held("one column", b.device, lambda: torch.zeros(3).int())
    return kernel(bsr(values), torch.sparse_bsr_tensor(crow, col, b, size=(192, 64), check_invariants=False))


def by_spgemm(values: Any, b: Any) -> Any:
    return dense(values) @ b.flatten(0, 1)


ROWS: tuple[Row, ...] = (
    *attention_rows(), *fp8_rows(), *matrix_rows(), *list_rows(), *converter_rows(), *other_rows(), *kernel_rows()
)  # fmt: skip
"""A row whose name begins with dots goes with the one before it that has none."""

NOT_CALLED = {
    "is an error": """ArgumentError CacheError CodegenError CollectiveError CompileError DeviceError ExportError
        NoJitError SpecError ToolchainError UnverifiedError""",
    "is a mode: tests/runtime/receipts": "verified_only",
    "is a module": "nn patterns compat",
    "is runtime.create_block_mask": "compat.create_block_mask",
    "takes packed sequences: tests/runtime/ops/test_varlen.py": "varlen_attention compat.flash_attn_varlen_func",
    "takes packed sequences: tests/runtime/ops/test_varlen_lists.py": """convert.from_sequence_lists
        convert.packed_list_rows convert.to_key_lists""",
    "takes a cache in pages: tests/runtime/ops/test_paged.py": "paged_attention paged_workspace KeyLists",
    "takes a cache in pages: tests/runtime/convert/test_paged.py": """convert.from_page_csr convert.from_stacked_cache
        convert.from_joined_cache convert.from_msa_lists convert.from_qsa_lists convert.from_token_requests
        convert.from_slots convert.to_token_pages convert.PageTable convert.PagedCache""",
    "is a result of functions that have rows": """QuantizedMatrix convert.Csr convert.Q2K distributed.SendPlan
        distributed.Traffic""",
    "is a base class": "patterns.Pattern",
    "needs a process group: tests/runtime/distributed": """distributed.context_parallel_attention distributed.plan_sends
        distributed.head_parallel_attention distributed.shared_keys""",
}
"""Public names without a row, by why."""


def public_names() -> set[str]:
    """Return every name that is documented as public, with its module."""
    modules = (runtime, runtime.nn, patterns, convert, video, distributed, compat)
    return {f"{module.__name__}.{name}" for module in modules for name in module.__all__}


def full_name(row: Row) -> str:
    """Return a row's name with what its dots stand for."""
    heads = [each.name for each in ROWS[: ROWS.index(row) + 1] if not each.name.startswith("...")]
    return row.name if row.name == heads[-1] else f"{heads[-1]} {row.name}"
