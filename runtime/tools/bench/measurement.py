"""Timing of a kernel and its peers, in one run on the same inputs.

FLOPs for effective TFLOPS: attention has 4 * head_dim per visible pair (listed blocks count whole, masked pairs do not
count). BSR x dense has 2 * stored elements * N. A sampled product has 2 * stored elements * K. BSR x BSR has 2 *
block^3 per pair of stored blocks that meet in a computed block of C. A copy has none; only its time is reported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from codegen.expressions.nodes import Aux
from codegen.patterns.block_lists import BlockLists
from codegen.patterns.topk import TopK
from codegen.receipts import MeasurementRecord
from codegen.spec import AttentionSpec, BlockShape, KeyListsBackwardSpec, KeyListsForwardSpec, Spec
from runtime.expressions.draw import draw_aux
from runtime.expressions.dtypes import TORCH_DTYPES as AUX_DTYPES
from runtime.kernel import Kernel
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.attention import AttentionKernel
from runtime.kernels.attention_backward import AttentionBackwardKernel
from runtime.kernels.block_mask import BlockMaskKernel
from runtime.kernels.bsr_sddmm import BsrSddmmKernel
from runtime.kernels.bsr_spgemm import BsrSpgemmKernel
from runtime.kernels.bsr_spmm import ACTIVATIONS, BsrSpmmKernel
from runtime.kernels.key_lists_backward import KeyListsBackwardKernel
from runtime.kernels.key_lists_forward import KeyListsForwardKernel
from runtime.kernels.key_lists_paged import KeyListsPagedKernel
from runtime.kernels.paged_attention import PagedAttentionKernel
from runtime.kernels.paged_prefill import PagedPrefillKernel
from runtime.kernels.pattern_numbers import numbers_for
from runtime.kernels.quantize import QuantizeKernel
from runtime.kernels.select_topk import SelectTopkKernel
from runtime.kernels.tile_copy import TileCopyKernel
from runtime.operators import operator_of, part
from runtime.prepare.mask_bits import pack_mask_bits
from runtime.prepare.quantized import quantize
from runtime.tools.bench import bsr_fp8
from runtime.tools.bench.timing import Call, single_calls

FLEX_LEAST_ROWS = 16  # of a FlexAttention block; kernels with smaller blocks are compared with SDPA over every key
EVERY_KEY = "SDPA, every key"
LIST_LENGTH = 32  # blocks per row, if the spec does not fix the number


@dataclass(frozen=True)
class Workload:
    """A kernel's call, its peers' calls, and the FLOPs of each."""

    shape: str
    flops: float
    call: Call
    peers: dict[str, Call]
    peer_flops: dict[str, float]
    inputs: dict[str, Any] = field(default_factory=dict)
    """Tensors of the kernel's arguments, for peers of other libraries: q, k, v and lists; a and b."""


def workload_of(spec: Spec) -> Callable[..., Workload]:
    """The function that makes the reference workload of a spec, from the kernel and sizes as keyword arguments."""
    found: Callable[..., Workload] = part(operator_of(spec).workload)
    return found


def measure(kernel: Kernel) -> tuple[MeasurementRecord, ...]:
    """Time a kernel on its reference workload, beside its peers."""
    # Compile FlexAttention again for each kernel. After eight compilations, torch would run it unfused, with memory for
    # every pair.
    torch._dynamo.reset()
    with torch.no_grad():
        load = workload_of(kernel.spec)(kernel)
        own = kernel.compiled.named.stem
        times = single_calls({own: load.call, **load.peers})
    return tuple(
        MeasurementRecord(
            shape=load.shape,
            milliseconds=round(times[own], 4),
            tflops=round(load.flops / times[own] / 1e9, 1),
            peer=peer,
            peer_milliseconds=round(times[peer], 4),
            peer_tflops=round(load.peer_flops.get(peer, load.flops) / times[peer] / 1e9, 1),
        )
        for peer in load.peers
    )


def random_lists(heads: int, rows: int, columns: int, length: int) -> torch.Tensor:
    """``length`` distinct block indices per head and row, int32 (1, heads, rows, length)."""
    lists = torch.empty((1, heads, rows, length), dtype=torch.int32, device="cuda")
    for head in range(heads):
        lists[0, head] = torch.rand((rows, columns), device="cuda").argsort(-1)[:, :length]
    return lists


def attention_workload(kernel: AttentionKernel, heads: int | None = None, length: int | None = None) -> Workload:
    """The reference workload of an attention kernel: batch 1, random normal inputs, S 32768 (dense: 16384)."""
    spec = with_numbers(kernel.spec)
    heads = heads or (16 if spec.head_dim == 128 else 8)
    positional = spec.pattern.fixed_block is None
    length = length or (16384 if spec.pattern.kind in ("dense", "causal") else 32768)
    packs = heads // spec.pack_gqa  # each has its own K and V
    in_fp8 = spec.is_fp8
    dtype = TORCH_DTYPES[spec.output if in_fp8 else spec.dtype]  # dtype before quantization, and of peers
    q, k, v = (
        torch.randn((1, count, length, spec.head_dim), device="cuda", dtype=dtype) for count in (heads, packs, packs)
    )
    indices = pattern_values(spec, 1, length) if positional else pattern_lists(spec, packs, length)
    lists = (kernel.prepare(indices[0], length),) if spec.query_grouping == "given" else indices  # once for many calls
    out = torch.empty_like(q)
    sink = torch.randn(heads, device="cuda") if spec.sink else None
    lengths: dict[str, Any] = every_key(spec, length)
    aux = aux_of(spec, {"batch": 1, "heads": heads, "q_len": length, "kv_len": length}, q.device)
    inputs, scales = operands(spec, q, k, v)
    options = {**lengths, **aux, **scales, **numbers_for(kernel.spec.pattern, spec.pattern)}
    peers = sdpa_calls(spec, q, k, v)
    block, peer_flops = spec.pattern.fixed_block, {}
    if spec.score is not None:  # for FlexAttention with scores, see benchmarks/expressions.py
        peers = {}
    elif not peers and (block is None or block.q >= FLEX_LEAST_ROWS):
        mask = flex_mask(spec, length, indices)
        peers = {"FlexAttention": flex_call(q, k, v, mask, score_mod=score_mod(spec), sink=sink)}
    elif not peers:  # torch has no peer for such lists
        peers = {EVERY_KEY: lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)}
        peer_flops = {EVERY_KEY: 4.0 * spec.head_dim * heads * length * length}
    if in_fp8:
        peers = {f"{name}, {spec.output}": peer for name, peer in peers.items()}
        peer_flops = {f"{name}, {spec.output}": flops for name, flops in peer_flops.items()}
    return Workload(
        shape=f"B1 H{heads} S{length} d{spec.head_dim}, {pattern_words(spec, indices)}",
        flops=4.0 * spec.head_dim * heads * pairs_of_head(spec, length, indices),
        call=lambda: kernel(*inputs, *lists, out=out, sink=sink, **options),
        peers=peers,
        peer_flops=peer_flops,
        inputs={"q": q, "k": k, "v": v, "lists": indices},
    )


def with_numbers(spec: AttentionSpec) -> AttentionSpec:
    """The spec of a workload, with example parameters if the kernel takes them per call."""
    return spec.model_copy(update={"pattern": spec.pattern.example()})


def operands(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """q, k and v in the kernel's dtype, and the scales of FP8 inputs."""
    if not spec.is_fp8:
        return (q, k, v), {}
    given = quantize(q, k, v, spec.dtype, q_rows=spec.scale_rows.q, k_rows=spec.scale_rows.k)
    return (given.q, given.k, given.v_t), given.scales()


def pattern_words(spec: AttentionSpec, indices: tuple[torch.Tensor, ...]) -> str:
    """Description of a workload's pattern, with the length of its lists if the spec does not fix it."""
    pattern = spec.pattern
    if isinstance(pattern, TopK) and pattern.k is None:
        pattern = pattern.model_copy(update={"k": indices[0].shape[3]})
    return pattern.stem()


def pattern_values(spec: AttentionSpec, batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """Tensors of a pattern with one value per batch: half the largest value."""
    return tuple(
        torch.full((batch,), {"kv_len": length}[tensor.upper] // 2, dtype=torch.int32, device="cuda")
        for tensor in spec.pattern.index_tensors
        if tensor.per_batch
    )


def aux_of(spec: AttentionSpec, sizes: dict[str, int], device: torch.device) -> dict[str, Any]:
    """Random ``aux`` tensors of a spec with expressions."""
    if not spec.aux_tensors:
        return {}
    source = torch.Generator(device).manual_seed(0)
    return {"aux": draw_aux(spec.aux_tensors, sizes, source, device)}


def every_key(spec: AttentionSpec, length: int) -> dict[str, Any]:
    """``kv_lengths`` that include all keys, if the spec takes them, so that peers compute the same."""
    return {"kv_lengths": torch.full((1,), length, dtype=torch.int32, device="cuda")} if spec.kv_lengths else {}


def pattern_lists(spec: AttentionSpec, heads: int, length: int) -> tuple[torch.Tensor, ...]:
    """Random lists of a list pattern, different for each head."""
    block = spec.pattern.fixed_block
    assert block is not None
    rows, columns = length // block.q, length // block.kv
    if isinstance(spec.pattern, TopK):
        return (random_lists(heads, rows, columns, min(spec.pattern.k or LIST_LENGTH, columns)),)
    # Lists like those of a causal top-k: the diagonal block is partial, and up to LIST_LENGTH - 1 earlier blocks are
    # full. Mask bits, if any, are those of the diagonal, the same for all blocks.
    shape = (1, heads, rows)
    row = torch.arange(rows, device="cuda", dtype=torch.int32)
    full = torch.zeros((*shape, LIST_LENGTH - 1), dtype=torch.int32, device="cuda")
    for i in range(1, rows):
        picks = torch.rand((heads, i), device="cuda").argsort(-1)[:, : LIST_LENGTH - 1]
        full[0, :, i, : picks.shape[1]] = picks
    counts = row.clamp(max=LIST_LENGTH - 1).expand(shape).contiguous()
    lists = torch.ones(shape, dtype=torch.int32, device="cuda"), row.expand(shape)[..., None].contiguous(), counts, full
    if not spec.pattern.masks_by_bits:
        return lists
    diagonal = torch.ones((block.q, block.kv), dtype=torch.bool, device="cuda").tril()
    return *lists, pack_mask_bits(diagonal[None, None, None, None]).expand(1, 1, rows, 1, -1)


def pairs_of_head(
    spec: AttentionSpec, length: int, indices: tuple[torch.Tensor, ...] = (), device: str = "cuda"
) -> int:
    """Visible pairs of a head of ``length`` queries and keys in the first batch, counted through lists if there are
    any."""
    block = spec.pattern.fixed_block
    if block is None:
        pairs = 0
        key = torch.arange(length, device=device)[None]
        values = {name: tensor[0] for name, tensor in spec.pattern.values_of(indices).items()}
        for first in range(0, length, 1024):
            query = torch.arange(first, min(first + 1024, length), device=device)[:, None]
            seen = spec.pattern.visible(query, key, length, length, values)
            pairs += int(seen.expand(query.shape[0], length).sum())
        return pairs
    rows = length // block.q
    if isinstance(spec.pattern, TopK):
        return rows * int(indices[0].shape[3]) * block.q * block.kv
    assert isinstance(spec.pattern, BlockLists)
    diagonal = block.q * (block.q + 1) // 2 if spec.pattern.masks_pairs else block.q * block.kv
    return rows * diagonal + int(indices[2][0, 0].sum()) * block.q * block.kv


def sdpa_calls(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Call]:
    """torch's dense attention through each of its fast backends, if it computes the same result."""
    if spec.pattern.kind not in ("dense", "causal") or spec.softcap is not None or spec.score is not None:
        return {}
    if spec.sink or spec.pack_gqa > 1:
        return {}

    def through(backend: SDPBackend) -> Call:
        def run() -> torch.Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=spec.pattern.kind == "causal"
                )

        return run

    flash = {"SDPA flash": through(SDPBackend.FLASH_ATTENTION)}
    return flash if spec.mma != "wgmma" else {**flash, "SDPA cuDNN": through(SDPBackend.CUDNN_ATTENTION)}


def flex_mask(spec: AttentionSpec, length: int, indices: tuple[torch.Tensor, ...]) -> BlockMask:
    """FlexAttention's mask of the same pairs."""
    tensors = spec.pattern.values_of(indices)
    batch = max((len(tensor) for tensor in tensors.values()), default=None)

    # For bit masks, the bits of ``pattern_lists``.
    pattern = spec.pattern.model_copy(update={"mask": "causal"}) if spec.pattern.masks_by_bits else spec.pattern

    def sees(b: Any, h: Any, query: Any, key: Any) -> Any:
        return pattern.visible(query, key, length, length, {name: t[b] for name, t in tensors.items()})

    block = spec.pattern.fixed_block
    if block is None:
        return create_block_mask(sees, batch, None, length, length, device="cuda")
    columns = length // block.kv
    indices = tuple(tensor.repeat_interleave(spec.pack_gqa, 1) for tensor in indices[:4])

    def padded(lists: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(lists, (0, columns - lists.shape[3])).contiguous()

    if isinstance(spec.pattern, TopK):
        counts = torch.full(indices[0].shape[:3], indices[0].shape[3], dtype=torch.int32, device="cuda")
        lists = (torch.zeros_like(counts), padded(torch.zeros_like(indices[0])), counts, padded(indices[0]))
    else:
        lists = (indices[0], padded(indices[1]), indices[2], padded(indices[3]))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(block.q, block.kv), mask_mod=sees, seq_lengths=(length, length))


def score_mod(spec: AttentionSpec) -> Callable[..., torch.Tensor] | None:
    """The spec's score as a ``score_mod`` of FlexAttention; None without one."""
    cap = spec.softcap
    if cap is None:
        return None
    return lambda score, b, h, query, key: cap * torch.tanh(score / cap)


def flex_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask,
    options: dict[str, Any] | None = None,
    *,
    score_mod: Callable[..., torch.Tensor] | None = None,
    sink: torch.Tensor | None = None,
) -> Call:
    """FlexAttention, compiled on the first call, with ``options`` as its kernel options.

    A sink, (heads,), is applied afterwards, as a rescaling by its share of each row's sum.
    """
    if options is None and min(mask.BLOCK_SIZE) < 128:  # such blocks are not a multiple of the default tile
        options = dict(zip(("BLOCK_M", "BLOCK_N"), mask.BLOCK_SIZE, strict=True))
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    grouped = q.shape[1] != k.shape[1]
    call = functools.partial(
        compiled, q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=grouped, kernel_options=options
    )
    if sink is None:
        return call
    logits = sink[None, :, None]

    def with_sink() -> torch.Tensor:
        out, lse = call(return_lse=True)
        result: torch.Tensor = out * torch.sigmoid(lse - logits)[..., None].to(out.dtype)
        return result

    return with_sink


def random_bsr(block: BlockShape, dtype: torch.dtype, size: int, row_blocks: int) -> torch.Tensor:
    """A size x size BSR matrix with ``row_blocks`` blocks of random normal values per block row."""
    rows, cols = size // block.rows, size // block.cols
    crow = torch.arange(0, rows + 1, device="cuda") * row_blocks
    col = torch.rand((rows, cols), device="cuda").argsort(-1)[:, :row_blocks].sort(-1).values.flatten()
    shape = (col.numel(), block.rows, block.cols)
    if dtype.itemsize == 1:
        values = bsr_fp8.codes(*shape, dtype=dtype)
    else:
        values = torch.randn(shape, device="cuda", dtype=dtype)
    return torch.sparse_bsr_tensor(crow, col, values, size=(size, size), device=values.device, check_invariants=False)


def bsr_workload(kernel: BsrSpmmKernel, size: int = 8192, row_blocks: int = 16, columns: int = 8192) -> Workload:
    """The reference workload of a BSR kernel: A size x size, ``row_blocks`` random blocks per block row."""
    if kernel.spec.is_fp8:
        return fp8_workload(kernel, size, row_blocks, columns)
    block, dtype = kernel.spec.block, TORCH_DTYPES[kernel.spec.dtype]
    a = random_bsr(block, dtype, size, row_blocks)
    b = torch.randn((size, columns), device="cuda", dtype=dtype)
    if kernel.spec.b_layout != "row_major":
        b = b.mT.contiguous().mT
    # Not A itself: a matrix of mostly zeros draws less power, and cuBLAS would run faster than on real data.
    dense = torch.randn((size, size), device="cuda", dtype=dtype)
    out = torch.empty((size, columns), device="cuda", dtype=dtype)
    epilogue = kernel.spec.epilogue
    bias = torch.randn(size, device="cuda", dtype=dtype) if epilogue is not None and epilogue.bias else None
    c = torch.randn((size, columns), device="cuda", dtype=dtype) if kernel.spec.accumulate else None
    prepared = kernel.prepare(a, columns, effort="best")
    left = dense.T if kernel.spec.transpose_a else dense

    def finished(product: torch.Tensor) -> torch.Tensor:
        product = product if c is None else product.add_(c)
        shifted = product if bias is None else product.add_(bias[:, None])
        return shifted if epilogue is None else ACTIVATIONS[epilogue.activation](shifted)

    return Workload(
        shape=f"M{size} K{size} N{columns}, {row_blocks} blocks {block.rows}x{block.cols} a row",
        flops=2.0 * a.values().numel() * columns,
        call=lambda: kernel(prepared, b, c=c, bias=bias, out=out),
        peers={
            # On a GPU, torch has no product with a transposed BSR matrix or with non-square blocks.
            **(
                {}
                if kernel.spec.transpose_a or block.rows != block.cols
                else {"torch A @ B (BSR)": lambda: finished(a @ b)}
            ),
            "cuBLAS, dense A": lambda: finished(torch.mm(left, b)),
        },
        peer_flops={"cuBLAS, dense A": 2.0 * size * size * columns},
        inputs={"a": a, "b": b},
    )


def fp8_workload(kernel: BsrSpmmKernel | BsrSddmmKernel, size: int, row_blocks: int, width: int) -> Workload:
    """The reference workload of an FP8 BSR product. ``width`` is N, or K for a sampled product."""
    spec = kernel.spec
    dtype, output = TORCH_DTYPES[spec.dtype], TORCH_DTYPES[spec.output]
    matrix = random_bsr(spec.block, dtype, size, row_blocks)
    values = matrix.values()
    flops, blocks = 2.0 * values.numel() * width, f"{row_blocks} blocks {spec.block.rows}x{spec.block.cols} a row"
    columns, depth = (size, width) if isinstance(kernel, BsrSddmmKernel) else (width, size)
    scales: dict[str, Any] = bsr_fp8.scales(spec, values.shape[0], columns, depth)
    b = bsr_fp8.codes(columns, depth, dtype=dtype)
    peers, peer_flops = bsr_fp8.peers(spec, size, columns, depth, flops)
    if isinstance(kernel, BsrSddmmKernel):
        a, out = bsr_fp8.codes(size, depth, dtype=dtype), torch.empty(values.shape, device="cuda", dtype=output)
        shape = f"M{size} N{size} K{width}, {blocks}"
        return Workload(shape, flops, lambda: kernel(a, b, matrix, **scales, out=out), peers, peer_flops)
    product = torch.empty((size, columns), device="cuda", dtype=output)
    shape = f"M{size} K{size} N{width}, {blocks}"
    return Workload(shape, flops, lambda: kernel(matrix, b.mT, **scales, out=product), peers, peer_flops)


def copy_workload(kernel: TileCopyKernel, size: int = 16384) -> Workload:
    """The reference workload of a copy: size x size elements, far more than the L2 holds."""
    x = torch.randn((size, size), device="cuda", dtype=TORCH_DTYPES[kernel.spec.dtype])
    out = torch.empty_like(x)
    return Workload(
        shape=f"{size} x {size}, {2 * x.nbytes / 1e6:.0f} MB read and written",
        flops=0.0,
        call=lambda: kernel(x, out=out),
        peers={"torch copy_": lambda: out.copy_(x)},
        peer_flops={},
    )


def select_workload(kernel: SelectTopkKernel, length: int = 32768, heads: int = 16, topk: int = 32) -> Workload:
    """The reference workload of a selection: blocks of 128 x 128, d 128, causal."""
    shape, dtype = (1, heads, length, 128), TORCH_DTYPES[kernel.spec.dtype]
    q, k = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))

    def by_torch() -> torch.Tensor:
        q_means, k_means = (x.unflatten(2, (-1, 128)).float().mean(3) for x in (q, k))
        hidden = torch.ones((length // 128,) * 2, dtype=torch.bool, device="cuda").triu(1)
        lists: torch.Tensor = (q_means @ k_means.mT).masked_fill(hidden, -torch.inf).topk(topk).indices
        return lists.sort(-1).values

    return Workload(
        shape=f"H{heads} S{length} d128, blocks 128 x 128, top {topk}, causal, {2 * q.nbytes / 1e6:.0f} MB read",
        flops=0.0,
        call=lambda: kernel(q, k, (128, 128), topk, causal=True),
        peers={"torch: mean, matmul, topk, sort": by_torch},
        peer_flops={},
    )


def paged_workload(kernel: PagedAttentionKernel, requests: int = 64, keys: int = 4096) -> Workload:
    """The reference workload of attention over pages: one query for each request, 32 heads over 8, pages of 64."""
    spec, heads, kv_heads, page_size = kernel.spec, 32, 8, 64
    dtype = TORCH_DTYPES[spec.dtype]
    pages = requests * keys // page_size
    k, v = (torch.randn((pages, page_size, kv_heads, spec.head_dim), device="cuda", dtype=dtype) for _ in range(2))
    table = torch.randperm(pages, device="cuda").int().view(requests, -1)
    q = torch.randn((requests, heads, spec.head_dim), device="cuda", dtype=dtype)
    out = torch.empty_like(q)
    lengths = torch.full((requests,), keys, device="cuda", dtype=torch.int32)
    size = kernel.workspace_bytes(q.device, batch=requests, tokens=requests, heads=heads, kv_heads=kv_heads)
    workspace = torch.zeros(size.total, device="cuda", dtype=torch.uint8)
    cache = [tensor.to(TORCH_DTYPES["e4m3"]) if spec.cache == "e4m3" else tensor for tensor in (k, v)]
    options: dict[str, Any] = {"block_table": table, "seq_lens": lengths, "out": out, "workspace": workspace}
    # The same keys without pages, for torch.
    k_rows, v_rows = (tensor.view(requests, keys, kv_heads, spec.head_dim).transpose(1, 2) for tensor in (k, v))
    one = q.unsqueeze(2)
    read = 2 * pages * page_size * kv_heads * spec.head_dim * cache[0].element_size()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return Workload(
        shape=f"{requests} x {keys} keys, H{heads}:{kv_heads} d{spec.head_dim}, pages of 64, {read / 1e6:.0f} MB read",
        flops=4.0 * requests * heads * keys * spec.head_dim,
        call=lambda: kernel(q, *cache, **options),
        peers={"torch SDPA without pages": lambda: sdpa(one, k_rows, v_rows, enable_gqa=True)},
        peer_flops={},
    )


def prefill_workload(kernel: PagedPrefillKernel, queries: int = 4096, keys: int = 32768) -> Workload:
    """The reference workload of prefill over pages: a chunk of causal queries at the end of the keys, pages of 64."""
    spec, kv_heads, page_size = kernel.spec, 8, 64
    heads = kv_heads * max(4, spec.pack_gqa)
    dtype, d = TORCH_DTYPES[spec.dtype], spec.head_dim
    pages = keys // page_size
    k, v = (torch.randn((pages, page_size, kv_heads, d), device="cuda", dtype=dtype) for _ in range(2))
    table = torch.randperm(pages, device="cuda").int().view(1, -1)
    q = torch.randn((queries, heads, d), device="cuda", dtype=dtype)
    bounds, lengths = (torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([0, queries], [keys]))
    options: dict[str, Any] = {"block_table": table, "cu_seqlens_q": bounds, "seq_lens": lengths}
    options |= {"out": torch.empty_like(q), "softcap": spec.softcap}
    if spec.sink:
        options["sink"] = torch.randn(heads, device="cuda")
    k_rows, v_rows = (tensor[table[0].long()].view(1, keys, kv_heads, d).transpose(1, 2) for tensor in (k, v))
    seen: Any = causal_lower_right(queries, keys)
    sdpa, heads_first = torch.nn.functional.scaled_dot_product_attention, q.transpose(0, 1)[None]
    plain = not spec.sink and spec.softcap is None
    by_torch = {"torch SDPA without pages": lambda: sdpa(heads_first, k_rows, v_rows, seen, enable_gqa=True)}
    return Workload(
        shape=f"{queries} queries over {keys} keys, H{heads}:{kv_heads} d{d}, pages of 64",
        flops=4.0 * heads * d * queries * (keys - (queries - 1) / 2),
        call=lambda: kernel(q, k, v, **options),
        peers=by_torch if plain else {},
        peer_flops={},
    )


def quantize_workload(kernel: QuantizeKernel, length: int = 16384, heads: int = 32) -> Workload:
    """The reference workload of a quantize kernel; its peer is a copy with equal memory traffic."""
    spec = kernel.spec
    x = torch.randn((1, heads, length, spec.head_dim), device="cuda", dtype=TORCH_DTYPES[spec.dtype])
    mean = torch.randn((1, heads, spec.head_dim), device="cuda") if spec.mean == "product" else None
    scales = torch.full((1, heads, 1), 0.01, device="cuda") if spec.scales == "given" else None
    named: dict[str, Any] = {"mean": mean, "scales": scales}
    if spec.rotary != "none":
        angles = torch.rand((length, spec.head_dim // 2), device="cuda")
        named["rotary"] = angles.cos(), angles.sin()
    moved = x.nbytes + sum(tensor.nbytes for tensor in kernel(x, **named) if tensor is not None)
    moved += sum(tensor.nbytes for tensor in named.get("rotary", ()))
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return Workload(
        shape=f"H{heads} S{length} d{spec.head_dim}, {moved / 1e6:.0f} MB read and written",
        flops=0.0,
        call=lambda: kernel(x, **named),
        peers={"torch: a copy of as many bytes": lambda: target.copy_(source)},
        peer_flops={},
    )


def block_mask_workload(kernel: BlockMaskKernel, length: int = 131072) -> Workload:
    """The reference workload of block lists, with 8 documents along the last dimension of its tensors."""
    sizes = {"batch": 1, "heads": 1, "q_len": length, "kv_len": length}

    def documents(tensor: Aux) -> torch.Tensor:
        shape = [sizes.get(str(dim)) or int(dim) for dim in tensor.dims]
        numbers = torch.arange(shape[-1] if shape else 1, device="cuda") * 8 // (shape[-1] if shape else 1)
        return numbers.to(AUX_DTYPES[tensor.dtype]).view(shape[-1:]).expand(shape).contiguous()

    aux = {tensor.name: documents(tensor) for tensor in kernel.spec.aux_tensors}
    return Workload(
        shape=f"S{length}, {kernel.spec.pattern.describe()}",
        flops=0.0,
        call=lambda: kernel(1, 1, length, length, aux=aux, device="cuda"),
        peers={},
        peer_flops={},
    )


def backward_workload(kernel: AttentionBackwardKernel, length: int = 8192, heads: int = 16, topk: int = 32) -> Workload:
    """The reference workload of a gradient kernel: the kernel with its statistics, without the other gradients."""
    spec = kernel.spec
    shape, dtype = (1, heads, length, spec.head_dim), TORCH_DTYPES[spec.dtype]
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))
    block, forward = spec.pattern.fixed_block, with_numbers(spec.forward)
    lists: tuple[Any, ...] = pattern_values(forward, 1, length)
    if block is None:
        pairs = float(pairs_of_head(forward, length, lists))
    else:
        rows, blocks = length // block.q, length // block.kv
        entries = min(topk, blocks)
        kv_indices = torch.rand((1, heads, rows, blocks), device="cuda").argsort(-1)[..., :entries].int().contiguous()
        counts = torch.full((1, heads, rows), entries, dtype=torch.int32, device="cuda")
        pairs = float(rows * entries * block.q * block.kv)
        lists = (counts, kv_indices) if spec.pattern.lists > 1 else (kv_indices,)
        if spec.pattern.masks_by_bits:  # all pairs are visible
            words = torch.full((block.q * block.kv // 32,), -1, dtype=torch.int32, device="cuda")
            lists = (*lists, None, None, words.expand(1, 1, rows, entries, -1))
    for lengths in every_key(forward, length).values():
        lists = (*lists, *(None,) * (len(forward.index_tensors) - 1 - len(lists)), lengths)
    options = aux_of(forward, {"batch": 1, "heads": heads, "q_len": length, "kv_len": length}, q.device)
    options |= numbers_for(spec.pattern, forward.pattern)
    out, lse = dout, torch.full(shape[:3], math.log(length), device="cuda")  # of the right magnitude, which is enough
    products = {"dq": 3, "dkdv": 4, "dq_dkdv": 5, "daux": 2}[spec.gradients]
    return Workload(
        shape=f"H{heads} S{length} d{spec.head_dim}, {forward.pattern.describe()}",
        flops=2.0 * products * heads * pairs * spec.head_dim,
        call=lambda: kernel(q, k, v, *lists, out=out, dout=dout, lse=lse, **options),
        peers={},
        peer_flops={},
    )


def key_lists_forward_workload(kernel: KeyListsForwardKernel) -> Workload:
    """The reference workload of attention over lists of keys, as of its gradients."""
    problem = _key_lists(kernel.spec)
    return Workload(
        shape=problem.shape,
        flops=2.0 * 2 * problem.pairs * kernel.spec.head_dim,
        call=lambda: kernel(problem.q, problem.k, problem.v, **problem.options),
        peers={},
        peer_flops={},
    )


def key_lists_paged_workload(kernel: KeyListsPagedKernel, page_size: int = 64) -> Workload:
    """The same with K and V in pages, in order: what matters is where pages end."""
    problem = _key_lists(kernel.spec)
    caches = [t.unflatten(0, (-1, page_size)) for t in (problem.k, problem.v)]
    table = torch.arange(caches[0].shape[0], dtype=torch.int32, device="cuda")[None]
    options = {"lists": problem.options["lists"], "entry_keys": kernel.spec.entry_keys, "block_table": table}
    return Workload(
        shape=f"{problem.shape}, pages of {page_size}",
        flops=2.0 * 2 * problem.pairs * kernel.spec.head_dim,
        call=lambda: kernel(problem.q, *caches, **options),
        peers={},
        peer_flops={},
    )


def key_lists_workload(kernel: KeyListsBackwardKernel) -> Workload:
    """The reference workload of gradients over lists of keys: each query sees random blocks, and all of its own."""
    problem = _key_lists(kernel.spec)
    rows: dict[str, Any] = {"out": problem.dout, "dout": problem.dout, "lse": problem.lse}
    return Workload(
        shape=problem.shape,
        flops=2.0 * 5 * problem.pairs * kernel.spec.head_dim,
        call=lambda: kernel(problem.q, problem.k, problem.v, **problem.options, **rows),
        peers={},
        peer_flops={},
    )


class _KeyLists(NamedTuple):
    """Attention over random lists of keys: pairs that are seen, and tensors."""

    shape: str
    pairs: float
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    options: dict[str, Any]


def _key_lists(
    spec: KeyListsBackwardSpec | KeyListsForwardSpec, length: int = 8192, kv_heads: int = 4, topk: int = 16
) -> _KeyLists:
    """One sequence whose queries list random blocks, and their own."""
    dtype, d, keys = TORCH_DTYPES[spec.dtype], spec.head_dim, spec.entry_keys
    heads = kv_heads * spec.group
    q, dout = (torch.randn((length, heads, d), device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn((length, kv_heads, d), device="cuda", dtype=dtype) for _ in range(2))
    bounds = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    position = torch.arange(length, device="cuda")[:, None]
    block = torch.arange(length // keys, device="cuda")
    score = torch.rand((kv_heads, length, len(block)), device="cuda") + (block == position // keys)
    best = score.masked_fill(block > position // keys, -1.0).topk(topk, -1)
    lists = torch.where(best.values < 0, -1, best.indices).int()
    seen = (position + 1 - lists * keys).clamp(0, keys).where(lists >= 0, 0).sum(dtype=torch.float64)
    lse = torch.full((heads, length), math.log(topk * keys), device="cuda")  # of the right magnitude, which is enough
    options: dict[str, Any] = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "lists": lists}
    shape = f"H{heads}:{kv_heads} S{length} d{d}, top {topk} of {keys} keys for each query"
    return _KeyLists(shape, spec.group * float(seen), q, k, v, dout, lse, options)


def sddmm_workload(kernel: BsrSddmmKernel, size: int = 8192, row_blocks: int = 16, depth: int = 8192) -> Workload:
    """The reference workload of a sampled product: C size x size, ``row_blocks`` random blocks per block row."""
    if kernel.spec.is_fp8:
        return fp8_workload(kernel, size, row_blocks, depth)
    block, dtype = kernel.spec.block, TORCH_DTYPES[kernel.spec.dtype]
    pattern = random_bsr(block, dtype, size, row_blocks)
    layouts = kernel.spec.a_layout, kernel.spec.b_layout
    a, b = (
        torch.randn((size, depth) if layout == "row_major" else (depth, size), device="cuda", dtype=dtype)
        for layout in layouts
    )
    a, b = (x if layout == "row_major" else x.mT for x, layout in zip((a, b), layouts, strict=True))
    out = torch.empty_like(pattern.values())
    row = torch.arange(size // block.rows, device="cuda").repeat_interleave(row_blocks)

    def gathered() -> torch.Tensor:
        a_blocks = a.unflatten(0, (-1, block.rows))[row]
        return torch.bmm(a_blocks, b.unflatten(0, (-1, block.cols))[pattern.col_indices()].mT)

    return Workload(
        shape=f"M{size} N{size} K{depth}, {row_blocks} blocks {block.rows}x{block.cols} a row",
        flops=2.0 * out.numel() * depth,
        call=lambda: kernel(a, b, pattern, out=out),
        peers={"torch.bmm of gathered blocks": gathered, "cuBLAS, dense C": lambda: torch.mm(a, b.T)},
        peer_flops={"cuBLAS, dense C": 2.0 * size * size * depth},
    )


def blocks_stored(matrix: torch.Tensor) -> torch.Tensor:
    """Number of stored copies of each block of a BSR matrix: float32 (block rows, block columns)."""
    crow, col = matrix.crow_indices(), matrix.col_indices()
    row = torch.repeat_interleave(torch.arange(crow.shape[0] - 1, device=crow.device), crow.diff())
    stored = torch.zeros((crow.shape[0] - 1, matrix.shape[1] // matrix.values().shape[2]), device=crow.device)
    return stored.index_put_((row, col), torch.ones_like(col, dtype=stored.dtype), accumulate=True)


def spgemm_workload(kernel: BsrSpgemmKernel, size: int = 8192, row_blocks: int = 16) -> Workload:
    """The reference workload of BSR x BSR: both size x size, ``row_blocks`` random blocks per block row.

    A pattern of C has equally many blocks per row.
    """
    block, dtype = kernel.spec.block, TORCH_DTYPES[kernel.spec.dtype]
    a, b = (random_bsr(block, dtype, size, row_blocks) for _ in range(2))
    pattern = random_bsr(block, dtype, size, row_blocks) if kernel.spec.output == "bsr" else None
    # Each block of A meets all blocks of one block row of B.
    pairs = float(a.values().shape[0] * row_blocks)
    if pattern is not None:
        pairs = float((blocks_stored(a) @ blocks_stored(b) * blocks_stored(pattern)).sum())
    flops = 2.0 * pairs * block.rows * block.cols**2
    a_dense, b_dense = (torch.randn((size, size), device="cuda", dtype=dtype) for _ in range(2))
    out = (
        torch.empty((size, size), device="cuda", dtype=dtype) if pattern is None else torch.empty_like(pattern.values())
    )
    return Workload(
        shape=f"M{size} K{size} N{size}, {row_blocks} blocks {block.rows}x{block.cols} a row of "
        + ("A and B" if pattern is None else "A, B and C"),
        flops=flops,
        call=lambda: kernel(a, b, pattern, out=out),
        peers={"torch A @ dense B": lambda: a @ b_dense, "cuBLAS, dense": lambda: torch.mm(a_dense, b_dense)},
        peer_flops={
            "torch A @ dense B": 2.0 * a.values().numel() * size,
            "cuBLAS, dense": 2.0 * size * size * size,
        },
    )
