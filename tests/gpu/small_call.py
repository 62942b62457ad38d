"""One call of a kernel on a small problem of odd size: what compute-sanitizer is given.

    compute-sanitizer --tool racecheck --kernel-regex kns=h100_ python tests/gpu/small_call.py h100_topk32

Inputs are made on the CPU and copied, so that initcheck knows who wrote them; for it, leave the filter out. memcheck
also wants ``--report-api-errors no``: torch asks the driver for what it may not have. A name may have wildcards.

With --garbage the index tensors hold anything (tests/gpu/garbage.py says what), drawn ROUNDS times, and the results are
compared with those of the proper ones; kernels without index tensors are passed over. Those of gradients are given the
lists of the forward pass, and transpose them in front of the main kernel, within the same filter:

    compute-sanitizer --tool memcheck --report-api-errors no --kernel-regex kns=h100_ \\
        python tests/gpu/small_call.py --garbage 'h100_*'
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import key_list_garbage
import paged_garbage
from gpu import garbage

from codegen.dtypes import FP8
from codegen.library import find_spec, shipped_names
from codegen.plans.bsr.balance import cuts_rows
from codegen.plans.bsr.gathered import gathers_rows, slots
from codegen.plans.bsr.row_chunks import row_cutting
from codegen.spec import (
    AttentionBackwardSpec,
    AttentionSpec,
    BlockMaskSpec,
    BsrSddmmSpec,
    BsrSpgemmSpec,
    BsrSpmmSpec,
    KeyListsBackwardSpec,
    KeyListsForwardSpec,
    PagedAttentionSpec,
    QuantizeSpec,
    SelectTopkSpec,
    Spec,
)
from runtime import load_kernel
from runtime.expressions.draw import draw_aux
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.paged_attention import Window
from runtime.prepare.quantized import quantize

LENGTH = 640  # queries and keys of a head
HEADS, MANY_HEADS = 2, 70  # query heads, or packs of them; so many that each thread block has several tiles
COLUMNS = 328  # of a dense matrix
DENSE_ROWS = 1000  # of a copy
LISTED = 9  # blocks of a list, where the spec leaves that open
LISTED_OF_GRADIENTS = 40  # more than the 32 that a warp takes at once where lists are transposed
MOST_LSE = 12.0  # weights of a row then add up to less than 1, whatever its list has: fixed point holds such sums alone
ROUNDS = 6  # of garbage
NUMBERS = {"window": (137, 41), "sink_keys": 5}  # of patterns whose specs leave them to the call

Arguments = tuple[list[Any], dict[str, Any]]


def arguments_of(spec: Spec, device: str = "cuda") -> Arguments:
    """Return what a call of the kernel takes, random."""

    def draw(*shape: int, dtype: torch.dtype = TORCH_DTYPES[spec.dtype]) -> torch.Tensor:
        return torch.randn(shape).to(dtype).to(device)

    if isinstance(spec, AttentionSpec) and spec.dtype in FP8:
        (q, k, v, *rest), named = _attention(spec, lambda *shape, **_: torch.randn(shape), "cpu")
        given = quantize(q, k, v, spec.dtype, q_rows=spec.scale_rows.q, k_rows=spec.scale_rows.k)
        inputs = [tensor.to(device) for tensor in (given.q, given.k, given.v_t, *rest)]
        return inputs, {name: to_device(value, device) for name, value in {**named, **given.scales()}.items()}
    if isinstance(spec, KeyListsForwardSpec | KeyListsBackwardSpec):
        return _key_lists(spec, draw, device)
    if isinstance(spec, PagedAttentionSpec) or (isinstance(spec, AttentionSpec) and spec.layout == "paged"):
        return _paged(spec, draw, device)
    if isinstance(spec, AttentionSpec):
        return _attention(spec, draw, device)
    if isinstance(spec, AttentionBackwardSpec):
        given, named = _attention(spec.forward, draw, device, LISTED_OF_GRADIENTS)
        numbers = {name: named.pop(name) for name in NUMBERS if name in named}
        rest = [named.get(tensor.name) for tensor in spec.forward.index_tensors[len(given) - 3 :]]
        aux = {"aux": named.pop("aux")} if "aux" in named else {}
        given += rest if named else []  # by place, without the second list
        gradients = {name: torch.randn_like(given[0]) for name in ("out", "dout")}
        lse = draw(*given[0].shape[:3], dtype=torch.float32) + MOST_LSE
        return given, {**gradients, **aux, **numbers, "lse": lse}
    if isinstance(spec, BsrSpmmSpec):
        # Where long rows are cut, the first one is.
        longest = row_cutting(spec).cut(6, 0).limit + 5 if cuts_rows(spec) else 3
        block_rows = slots(spec) + 6 if gathers_rows(spec) else 6  # two groups
        a = _bsr(spec.block.rows, spec.block.cols, block_rows, max(8, longest), draw, device, longest)
        rows, depth = reversed(a.shape) if spec.transpose_a else a.shape
        more = {"c": draw(rows, COLUMNS)} if spec.accumulate else {}
        biased = spec.epilogue is not None and spec.epilogue.bias
        b = draw(COLUMNS, depth).mT if spec.b_layout == "column_major" else draw(depth, COLUMNS)
        more |= _block_scales(spec, a.values().shape[0], depth, device)
        return [a, b], more | ({"bias": draw(rows)} if biased else {})
    if isinstance(spec, BsrSddmmSpec):
        pattern = _bsr(spec.block.rows, spec.block.cols, 6, 8, draw, device)
        width = COLUMNS + 8  # rows of whole 16 bytes, in FP8 too
        a, b = (
            draw(size, width)[:, :COLUMNS] if layout == "row_major" else draw(COLUMNS, size).mT
            for size, layout in zip(pattern.shape, (spec.a_layout, spec.b_layout), strict=True)
        )
        return [a, b, pattern], _row_scales(spec, *pattern.shape, device)
    if isinstance(spec, BsrSpgemmSpec):
        size = spec.block.rows
        factors = [_bsr(size, size, 6, 8, draw, device), _bsr(size, size, 8, 5, draw, device)]
        return factors + ([_bsr(size, size, 6, 5, draw, device)] if spec.output == "bsr" else []), {}
    if isinstance(spec, BlockMaskSpec):
        sizes = {"batch": 2, "heads": HEADS, "q_len": LENGTH - 7, "kv_len": LENGTH - 3}
        return [*sizes.values()], {"aux": _aux(spec, sizes, device)}
    if isinstance(spec, QuantizeSpec):
        mean = draw(2, HEADS, spec.head_dim, dtype=torch.float32)
        x = draw(2, 3 * HEADS, LENGTH - 7, spec.head_dim)
        scales = draw(1, 3 * HEADS, 1, dtype=torch.float32).abs() + 0.1
        named = {"mean": mean} if spec.mean == "product" else {}
        angles = draw(2, LENGTH - 7, spec.head_dim // 2, dtype=torch.float32)
        named |= {"rotary": (angles.cos(), angles.sin())} if spec.rotary != "none" else {}
        return [x], {**named, "scales": scales} if spec.scales == "given" else named
    if isinstance(spec, SelectTopkSpec):
        # Rows of fewer chunks than a warp has lanes, and blocks that do not divide the lengths.
        q, k = draw(1, 2 * HEADS, LENGTH - 7, 72), draw(1, HEADS, LENGTH - 3, 72)
        return [q, k, (48, 80), 5], {"causal": True, "always": (0, -1)}
    return [draw(DENSE_ROWS, COLUMNS)], {}


def to_device(value: Any, device: str) -> Any:
    """Return a tensor, or a mapping of some, on a device."""
    if isinstance(value, dict):
        return {name: to_device(each, device) for name, each in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _aux(spec: AttentionSpec | BlockMaskSpec, sizes: dict[str, int], device: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a spec's expressions."""
    drawn = draw_aux(spec.aux_tensors, sizes, torch.Generator().manual_seed(0), torch.device("cpu"))
    return {name: tensor.to(device) for name, tensor in drawn.items()}


def _block_scales(spec: BsrSpmmSpec, blocks: int, depth: int, device: str) -> dict[str, Any]:
    """Return the scales of a product of a sparse matrix in FP8; of others none."""
    if spec.scales == "tensor":
        return _one_scale(spec, device)
    scales = torch.rand(blocks) + 0.5, torch.rand(depth // 128, COLUMNS) + 0.5
    return {"scale_a": scales[0].to(device), "scale_b": scales[1].to(device).mT}


def _row_scales(spec: BsrSddmmSpec, rows: int, columns: int, device: str) -> dict[str, Any]:
    """Return the scales of a sampled product in FP8; of others none."""
    if spec.scales == "tensor":
        return _one_scale(spec, device)
    scales = (torch.rand(-(-COLUMNS // 128), lines) + 0.5 for lines in (rows, columns))
    return {name: scale.to(device).mT for name, scale in zip(("scale_a", "scale_b"), scales, strict=True)}


def _one_scale(spec: BsrSpmmSpec | BsrSddmmSpec, device: str) -> dict[str, Any]:
    return {name: torch.full((), 0.5).to(device) for name in ("scale_a", "scale_b")} if spec.dtype in FP8 else {}


def _attention(spec: AttentionSpec, draw: Any, device: str, listed: int = LISTED) -> Arguments:
    # Where the ends of tiles are a protocol of their own, one tile follows another.
    packs = MANY_HEADS if spec.share_kv_loads or spec.kv_splits > 1 else HEADS
    heads = packs * spec.pack_gqa
    kv_heads = packs if spec.pack_gqa > 1 else heads
    q, k, v = (draw(1, count, LENGTH, spec.head_dim) for count in (heads, kv_heads, kv_heads))
    more: dict[str, Any] = {"sink": draw(heads, dtype=torch.float32)} if spec.sink else {}
    if spec.pattern.is_general:
        more |= {number.argument: NUMBERS[number.argument] for number in spec.pattern.call_numbers}
    if spec.aux_tensors:
        more["aux"] = _aux(spec, {"batch": 1, "heads": heads, "q_len": LENGTH, "kv_len": LENGTH}, device)
    lengths = [torch.tensor([LENGTH - 101], dtype=torch.int32)] if spec.kv_lengths else []
    if spec.layout == "varlen":  # one sequence is empty
        bounds = torch.tensor([0, 101, 101, LENGTH - 37, LENGTH], dtype=torch.int32).to(device)
        lists = _packed_lists(spec, 4, listed) if spec.pattern.lists else []
        return [q, k, v, *(tensor.to(device) for tensor in lists), bounds, bounds.clone()], more
    block = spec.pattern.fixed_block
    if block is None:  # one value for each batch, if there are tensors
        values = (torch.tensor([LENGTH // 2 + 3], dtype=torch.int32) for _ in spec.pattern.index_tensors)
        return [q, k, v, *(tensor.to(device) for tensor in (*values, *lengths))], more
    lists, rows, columns = packs if spec.pack_gqa > 1 else heads, -(-LENGTH // block.q), -(-LENGTH // block.kv)
    if spec.pattern.kind == "topk":
        shape = (1, lists, rows, spec.pattern.k or listed)  # type: ignore[attr-defined]
        indices = [torch.randint(0, columns, shape, dtype=torch.int32)]
        if spec.query_grouping == "given":
            indices.append(torch.rand(shape[:3]).argsort(-1).int())
        return [q, k, v, *(tensor.to(device) for tensor in (*indices, *lengths))], more
    counts = torch.full((1, lists, rows), columns, dtype=torch.int32)
    numbers = torch.arange(columns, dtype=torch.int32).expand(1, lists, rows, columns).contiguous()
    if spec.pattern.masks_by_bits:
        words = (1, lists, rows, columns, block.q * block.kv // 32)
        more["mask_bits"] = torch.randint(-(2**31), 2**31, words).int().to(device)
    if lengths:  # by name, as the second list is left out
        more["kv_lengths"] = lengths[0].to(device)
    return [q, k, v, counts.to(device), numbers.to(device)], more


def _packed_lists(spec: AttentionSpec, sequences: int, listed: int) -> list[torch.Tensor]:
    """Return counts and lists for packed sequences, with entries that repeat and that there are not."""
    block = spec.pattern.fixed_block
    assert block is not None
    rows, columns = LENGTH // block.q + sequences, -(-LENGTH // block.kv)
    counts = torch.randint(0, listed + 1, (1, HEADS, rows)).int()
    return [counts, torch.randint(-1, columns + 1, (1, HEADS, rows, listed)).int()] * 2


def _paged(spec: PagedAttentionSpec | AttentionSpec, draw: Any, device: str) -> Arguments:
    """Return a batch of requests of uneven lengths, one of them of one key, with lists beside a window."""
    decodes = isinstance(spec, PagedAttentionSpec)
    lengths, tokens, page = torch.tensor([LENGTH - 7, 1, 101]), 3 if decodes else 90, 16
    most = LENGTH // page
    table = torch.randperm(len(lengths) * most).view(len(lengths), most).int()
    shape = (len(lengths) * most, page, HEADS, spec.head_dim)
    in_e4m3 = spec.cache == "e4m3"
    dtype = torch.float8_e4m3fn if in_e4m3 else TORCH_DTYPES[spec.dtype]
    caches = [torch.randn(shape).to(dtype).to(device) for _ in range(2)]
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])} if in_e4m3 else {}
    given = {"block_table": table, "seq_lens": lengths.int(), **scales}
    if decodes:
        given["lists"] = torch.randint(-1, most, (1, tokens * len(lengths), LISTED)).int()
    named: dict[str, Any] = {name: tensor.to(device) for name, tensor in given.items()}
    named |= {"window": Window(left=137, sink=5), "return_lse": True}
    heads = 4 * HEADS
    if isinstance(spec, PagedAttentionSpec):
        named |= {"entry_keys": page, "sink": draw(heads, dtype=torch.float32)}
    else:
        heads = HEADS * max(4, spec.pack_gqa)
        named |= {"softcap": spec.softcap, "sink": draw(heads, dtype=torch.float32) if spec.sink else None}
    return [draw(tokens * len(lengths), heads, spec.head_dim), *caches], named


def _key_lists(spec: KeyListsForwardSpec | KeyListsBackwardSpec, draw: Any, device: str) -> Arguments:
    """Return two sequences whose queries list blocks twice, and blocks that there are not."""
    bounds = {"cu_seqlens_q": torch.tensor([0, 150, 183]).int(), "cu_seqlens_k": torch.tensor([0, 300, 350]).int()}
    tokens, keys = (int(each[-1]) for each in bounds.values())
    named = {"lists": torch.randint(-1, 300 // spec.entry_keys + 2, (HEADS, tokens, LISTED)).int(), **bounds}
    q, *of_keys = (draw(n, heads, spec.head_dim) for n, heads in ((tokens, HEADS * spec.group), *[(keys, HEADS)] * 2))
    if isinstance(spec, KeyListsForwardSpec) and spec.layout == "paged":
        page = 16
        table = torch.randperm(2 * (304 // page)).view(2, -1).int()
        of_keys = [draw(table.numel(), page, HEADS, spec.head_dim) for _ in range(2)]
        del named["cu_seqlens_k"]
        named |= {"block_table": table, "seq_lens": torch.tensor([300, 50]).int()}
    named = {name: tensor.to(device) for name, tensor in named.items()}
    if isinstance(spec, KeyListsBackwardSpec):
        named |= {"out": draw(*q.shape), "dout": draw(*q.shape), "lse": draw(*q.shape[1::-1], dtype=torch.float32)}
    elif spec.layout == "paged":
        return [q, *of_keys], {**named, "entry_keys": spec.entry_keys, "return_lse": True}
    return [q, *of_keys], named


def _bsr(
    rows: int, cols: int, block_rows: int, block_columns: int, draw: Any, device: str, longest: int = 3
) -> torch.Tensor:
    """Return a BSR matrix with three random blocks in each row but the first, which has ``longest``."""
    lengths = [longest] + [3] * (block_rows - 1)
    crow = torch.tensor([0, *lengths]).cumsum(0)
    col = torch.cat([torch.randperm(block_columns)[:length].sort().values for length in lengths])
    shape = (block_rows * rows, block_columns * cols)
    return torch.sparse_bsr_tensor(crow.to(device), col.to(device), draw(len(col), rows, cols), size=shape)


def call(kernel: Any, device: str = "cuda") -> None:
    """Call a kernel."""
    positional, named = arguments_of(kernel.spec, device)
    if isinstance(kernel.spec, BsrSpmmSpec) and gathers_rows(kernel.spec):
        a, *rest = positional
        positional = [kernel.prepare(a), *rest]
        kernel(kernel.prepare(a, pack=True), *rest, **named)
    kernel(*positional, **named)


def run(name: str) -> None:
    """Load a kernel and call it."""
    call(load_kernel(name, forward_compatible=True))
    torch.cuda.synchronize()
    sys.stdout.write(f"{name}: ran\n")


def run_with_garbage(name: str) -> None:
    """Call a kernel with garbage in its index tensors, if it has some."""
    spec = find_spec(name).spec
    of_key_lists, over_pages = key_list_garbage.is_of_key_lists(spec), paged_garbage.is_over_pages(spec)
    if not (garbage.has_indices(spec) or of_key_lists or over_pages):
        sys.stdout.write(f"{name}: has no indices\n")
        return
    kernel = load_kernel(name, forward_compatible=True)
    positional, named = arguments_of(kernel.spec)
    for seed in range(ROUNDS):
        if over_pages:
            paged_garbage.check(kernel, seed, "cuda")
        elif of_key_lists:
            key_list_garbage.check(kernel, positional, named, seed)
        else:
            garbage.check(kernel, garbage.spoil(kernel.spec, positional, seed), named)
    torch.cuda.synchronize()
    sys.stdout.write(f"{name}: ran, {ROUNDS} times with garbage\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="of shipped specs")
    parser.add_argument("--garbage", action="store_true", help="with garbage in the index tensors")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: a call needs a GPU, and torch sees none; nothing was run")
    warnings.simplefilter("ignore")
    for given in options.names:
        for name in fnmatch.filter(shipped_names(), given) or [given]:
            (run_with_garbage if options.garbage else run)(name)


if __name__ == "__main__":
    main()
