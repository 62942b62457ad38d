"""Index tensors full of garbage, and the proper ones that a kernel must take them for.

What is promised: no kernel reads or writes outside its tensors, or waits forever, whatever is in the index tensors of
attention (lists, counts, prefix lengths, orders of query blocks), and in ``col_indices`` of BSR matrices up to 2^22
either way. An entry out of range is a block without keys, a count or a prefix out of range is the nearest that is not,
a column out of range multiplies zeros or gives a block of zeros. Row pointers are trusted, and so are the columns of B
in BSR x BSR: these are left as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from codegen.dtypes import FP8
from codegen.plans.bsr.gathered import gathers_rows
from codegen.spec import (
    AttentionBackwardSpec,
    AttentionSpec,
    BsrSddmmSpec,
    BsrSpgemmSpec,
    BsrSpmmSpec,
    Spec,
    UnchosenSpec,
)
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.verify.common import ABSOLUTE, ROUNDOFF

INT32 = torch.iinfo(torch.int32)
MOST_COLUMN = 1 << 22  # either way, of BSR
VALID, EXTREME = 0.4, 0.8  # so many entries are in range, so many more are next to it or at an end of the type


@dataclass(frozen=True)
class Garbage:
    """The arguments of two calls that must have the same result.

    Attributes:
        given: with garbage.
        proper: without.
        zeros: of a result in BSR, whether a block must be zeros; None of others.
        named: of a kernel that is given an order of query blocks, whether it names a query: (1, heads, q_len).
    """

    given: list[Any]
    proper: list[Any]
    zeros: torch.Tensor | None = None
    named: torch.Tensor | None = None


def has_indices(spec: Spec) -> bool:
    """Return whether a kernel reads index tensors."""
    spec = spec.forward if isinstance(spec, AttentionBackwardSpec) else spec
    if not isinstance(spec, AttentionSpec):
        return not isinstance(spec, UnchosenSpec)
    return any(tensor.dims != ("bounds",) for tensor in spec.index_tensors)


def result_type(spec: AttentionSpec | BsrSpmmSpec | BsrSddmmSpec | BsrSpgemmSpec) -> str:
    """Name of the type of a kernel's result: of the inputs, unless they are FP8."""
    return spec.output if spec.dtype in FP8 else spec.dtype


def spoil(spec: Spec, positional: list[Any], seed: int) -> Garbage:
    """Return the arguments of a call with garbage in the place of their indices.

    Args:
        spec: of the kernel.
        positional: the arguments of a proper call.
        seed: of what is drawn, on the CPU.
    """
    random = torch.Generator().manual_seed(seed)
    spec = spec.forward if isinstance(spec, AttentionBackwardSpec) else spec
    if isinstance(spec, AttentionSpec):
        return _attention(spec, positional, random)
    if isinstance(spec, BsrSpmmSpec):
        a, *rest = positional
        given, proper, _ = _columns(a, random)
        return Garbage([given, *rest], [proper, *rest])
    if isinstance(spec, BsrSddmmSpec):
        a, b, pattern = positional
        given, proper, known = _columns(pattern, random)
        return Garbage([a, b, given], [a, b, proper], zeros=~known)
    assert isinstance(spec, BsrSpgemmSpec)
    a, b, *patterns = positional
    given, proper, _ = _columns(a, random)
    if not patterns:
        return Garbage([given, b], [proper, b])
    c_given, c_proper, known = _columns(patterns[0], random)
    return Garbage([given, b, c_given], [proper, b, c_proper], zeros=~known)


def _draw(shape: tuple[int, ...], most: int, random: torch.Generator) -> torch.Tensor:
    """Draw int32: some from 0 to ``most`` - 1, some next to these or at an end of the type, some anything."""
    extremes = torch.tensor([INT32.min, INT32.min + 1, -2, -1, most, most + 1, 1 << 16, 1 << 25, INT32.max])
    kind = torch.rand(shape, generator=random)
    anything = torch.randint(INT32.min, INT32.max, shape, generator=random)
    extreme = extremes[torch.randint(0, len(extremes), shape, generator=random)]
    valid = torch.randint(0, most, shape, generator=random)
    return torch.where(kind < VALID, valid, torch.where(kind < EXTREME, extreme, anything)).to(torch.int32)


def _in_range(entries: torch.Tensor, most: int) -> torch.Tensor:
    return (entries >= 0) & (entries < most)


def _attention(spec: AttentionSpec, positional: list[Any], random: torch.Generator) -> Garbage:
    q, k, v, *indices = positional
    kv_len, q_len = k.shape[2], q.shape[2]
    given: list[torch.Tensor] = []
    proper: list[torch.Tensor] = []
    named = None
    behind: list[torch.Tensor] = []
    if spec.pattern.kind == "block_lists":
        behind = indices[4:]  # of gradients
        indices = [*indices[:2], *indices[:2]]  # the optional second list too
    # What is given by name, or behind both lists, is left as it is: bits of pairs, which may be anything, and lengths.
    listed = [what for what in spec.index_tensors if not what.of_entries][: len(indices)]
    for tensor, what in zip(indices, listed, strict=True):
        block = spec.pattern.fixed_block
        most = kv_len + 1 if block is None or what.upper == "kv_len" else -(-kv_len // block.kv)
        if what.upper == "query_blocks":
            most = tensor.shape[2]
        elif "num_blocks" in what.name:
            most = indices[1].shape[3] + 1
        drawn = _draw(tuple(tensor.shape), most, random)
        given.append(drawn)
        if what.upper == "query_blocks":
            assert block is not None
            named = torch.zeros((*drawn.shape[:2], most + 1), dtype=torch.bool)
            named.scatter_(2, torch.where(_in_range(drawn, most), drawn, most).long(), True)
            named = named[..., :most].repeat_interleave(block.q, 2)[..., :q_len]
            named = named.repeat_interleave(spec.pack_gqa, 1)
            proper.append(drawn)
        elif what.upper == "key_blocks":
            proper.append(torch.where(_in_range(drawn, most), drawn, -1).int())
        else:
            proper.append(drawn.clamp(0, most - 1))
    device = q.device
    moved = [[tensor.to(device) for tensor in tensors] for tensors in (given, proper)]
    moved = [[*tensors, *behind] for tensors in moved]
    return Garbage([q, k, v, *moved[0]], [q, k, v, *moved[1]], named=None if named is None else named.to(device))


def _columns(matrix: torch.Tensor, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a BSR matrix with columns that are out of range or repeated; one with zeros in their place; and which of
    the columns are in range."""
    crow, col, values = matrix.crow_indices(), matrix.col_indices(), matrix.values()
    most = matrix.shape[1] // values.shape[2]
    drawn = _draw(tuple(col.shape), most, random).clamp(-MOST_COLUMN, MOST_COLUMN).to(col.device, col.dtype)
    known = _in_range(drawn, most)

    def with_columns(columns: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        return torch.sparse_bsr_tensor(crow, columns, blocks, size=matrix.shape, check_invariants=False)

    zeroed = torch.where(known[:, None, None], values.float(), 0).to(values.dtype)  # FP8 has no torch.where
    return with_columns(drawn, values), with_columns(torch.where(known, drawn, 0), zeroed), known


def check(kernel: Any, garbage: Garbage, named: dict[str, Any]) -> None:
    """Call a kernel with garbage and without, and compare.

    Raises:
        AssertionError: where the results are not the same: bit for bit, but for products whose sums may be taken in
            another order, and for query blocks that an order names twice.
    """
    spec = kernel.spec
    if isinstance(spec, AttentionSpec):
        dtype = TORCH_DTYPES[result_type(spec)]
        outs = [torch.full_like(garbage.given[0], float("nan"), dtype=dtype) for _ in range(2)]
        lses = [
            kernel(*arguments, **named, out=out).lse
            for arguments, out in zip((garbage.given, garbage.proper), outs, strict=True)
        ]
        if garbage.named is not None:
            written = garbage.named.expand(*outs[0].shape[:3])
            assert all(bool(out[written].isfinite().all()) for out in outs), "a query block that is named has no result"
            assert all(bool(out[~written].isnan().all()) for out in outs), "a query block that is not named was written"
            torch.testing.assert_close(*(out[written] for out in outs), rtol=0, atol=ABSOLUTE[spec.dtype])
            return
        assert torch.equal(*outs), "garbage changes the result"
        assert lses[0] is None or torch.equal(*lses), "garbage changes the LSE"
        return
    if isinstance(spec, AttentionBackwardSpec):
        gradients = [kernel(*arguments, **named)[:3] for arguments in (garbage.given, garbage.proper)]
        for name, given, proper in zip(("dq", "dk", "dv"), *gradients, strict=True):
            if name == "dq" and not spec.deterministic:
                close = ABSOLUTE[spec.dtype] * float(proper.abs().max())
                torch.testing.assert_close(given, proper, rtol=0, atol=close)
            else:
                assert (given is None and proper is None) or torch.equal(given, proper), "garbage changes a gradient"
        return
    results = [product(kernel, arguments, named) for arguments in (garbage.given, garbage.proper)]
    if garbage.zeros is not None:
        found = results[0].values()
        assert not bool(found[garbage.zeros].any()), "a block whose column is out of range is not zeros"
        results = [found, torch.where(garbage.zeros[:, None, None], 0, results[1].values())]
    largest = float(results[1].abs().max())
    allowed = 4 * ROUNDOFF[result_type(spec)] * largest
    torch.testing.assert_close(*(result.float() for result in results), rtol=0, atol=allowed)


def is_product(spec: Spec) -> bool:
    """Whether a kernel multiplies sparse matrices."""
    return isinstance(spec, BsrSpmmSpec | BsrSddmmSpec | BsrSpgemmSpec)


def product(kernel: Any, positional: list[Any], named: dict[str, Any]) -> torch.Tensor:
    """Return a product; of a kernel that gathers block rows, which takes a prepared matrix only, with one."""
    a, *rest = positional
    spec = kernel.spec
    result: torch.Tensor = kernel(
        kernel.prepare(a) if isinstance(spec, BsrSpmmSpec) and gathers_rows(spec) else a, *rest, **named
    )
    return result
