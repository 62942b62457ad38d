"""Conversion from and to boolean token masks."""

from __future__ import annotations

import torch

from codegen.patterns import PATTERNS
from codegen.patterns.block_lists import NAMED_MASKS
from runtime.block_maps import any_in_blocks, ceil_div, is_listed, map_of
from runtime.convert.bits import PAIRS_AT_ONCE, numbers_of, partial_and_full, unpack
from runtime.convert.checks import BOOLEANS, Shape, check_block, check_count, check_tensor, check_width
from runtime.convert.expressions import visible_pairs
from runtime.errors import ArgumentError
from runtime.patterns import BlockLists, Pattern, TopK


def from_token_mask(
    mask: torch.Tensor,
    *,
    block: Shape = (128, 128),
    max_blocks: int | None = None,
    max_partial_blocks: int | None = None,
) -> BlockLists:
    """Convert a boolean token mask, such as SDPA's ``attn_mask``, to lists.

    Args:
        mask: bool or integers (q_len, kv_len) or (batch or 1, heads or 1, q_len, kv_len), True for visible pairs; every
            non-zero value is True.
        block: queries and keys per block.
        max_blocks: entries per list. Default: the number of key blocks. ``overflow`` has the number of blocks that the
            longest list lacks.
        max_partial_blocks: entries per list of partial blocks. Default: ``max_blocks``.

    Returns:
        Lists of partial blocks, with mask bits, and of full blocks. Memory in addition to the mask: block queries *
        block keys / 8 bytes per entry of each partial list, which is an eighth of the mask with the default width. The
        conversion handles 2^24 pairs at a time, 128 MiB per 64-bit tensor.

    Raises:
        ArgumentError: naming the argument.
    """
    check_tensor("mask", mask, BOOLEANS, (2, 4))
    check_block("block", block, has_bits=True)
    check_width(max_blocks, max_partial_blocks)
    given = mask if mask.dim() == 4 else mask[None, None]
    batch, heads, q_len, kv_len = given.shape
    for name, size in (("q_len", q_len), ("kv_len", kv_len)):
        check_count(f"mask: its {name}", size)
    rows = max(1, PAIRS_AT_ONCE // (batch * heads * kv_len * block[0])) * block[0]
    listed, full = [], []
    for row in range(0, q_len, rows):
        part = given[:, :, row : row + rows] != 0
        listed.append(any_in_blocks(any_in_blocks(part, -1, block[1]), -2, block[0]))
        full.append(~any_in_blocks(any_in_blocks(~part, -1, block[1]), -2, block[0]))
    some, whole = torch.cat(listed, 2), torch.cat(full, 2)
    place = numbers_of(given)
    return partial_and_full(
        some & ~whole,
        whole,
        lambda q, k: given[*place, q, k] != 0,
        block=block,
        lengths=(q_len, kv_len),
        max_blocks=max_blocks,
        max_partial_blocks=max_partial_blocks,
    )


def to_token_mask(pattern: Pattern, *, q_len: int, kv_len: int, batch: int = 1, heads: int = 1) -> torch.Tensor:
    """Convert a pattern to a boolean token mask, for tests and for SDPA.

    Args:
        pattern: any pattern, without duplicates within a list.
        q_len: queries per head.
        kv_len: keys per head.
        batch: batch size.
        heads: number of query heads. If there are fewer lists, consecutive heads share a list, as the heads of a pack
            do.

    Returns:
        bool (batch, heads, q_len, kv_len), on the device of the pattern's tensors, or the CPU if it has none.

    Raises:
        ArgumentError: naming the argument.
    """
    for name, value in (("q_len", q_len), ("kv_len", kv_len), ("batch", batch), ("heads", heads)):
        check_count(name, value)
    if not isinstance(pattern, Pattern):
        raise ArgumentError("pattern", f"is {type(pattern).__name__}, expected one of sparse_kernel_codegen.patterns")
    if isinstance(pattern, TopK | BlockLists):
        pairs = _listed_pairs(pattern, q_len, kv_len, (batch, heads))
    else:
        pairs = _defined_pairs(pattern, q_len, kv_len)
    for name, there, wanted in zip(("batch", "heads"), pairs.shape, (batch, heads), strict=False):
        if wanted % there or (name == "batch" and there not in (1, wanted)):
            raise ArgumentError(name, f"is {wanted}, but the pattern has lists for {there}")
    return pairs.repeat_interleave(heads // pairs.shape[1], 1).expand(batch, heads, q_len, kv_len)


def _defined_pairs(pattern: Pattern, q_len: int, kv_len: int) -> torch.Tensor:
    """Visible pairs of a pattern without lists, by the reference definition that its kernels are tested against."""
    spec = pattern.spec_pattern()
    model = PATTERNS[spec["kind"]].model_validate(spec)
    tensors = pattern.index_tensors()
    device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))
    q, k = torch.arange(q_len, device=device)[:, None], torch.arange(kv_len, device=device)
    values = {name: value.view(-1, 1, 1, 1) for name, value in model.values_of(tensors).items()}
    pairs: torch.Tensor = model.visible(q, k, q_len, kv_len, values)
    batch = pairs.shape[0] if pairs.dim() == 4 else 1
    return pairs.expand(batch, 1, q_len, kv_len)


def _listed_pairs(pattern: TopK | BlockLists, q_len: int, kv_len: int, wanted: tuple[int, int]) -> torch.Tensor:
    """Visible pairs of block lists, for the lists' batches and heads, or for ``wanted`` ones with an expression."""
    columns = ceil_div(kv_len, pattern.block[1])
    indices = pattern.kv_indices
    if indices.shape[2] != ceil_div(q_len, pattern.block[0]):
        rows = ceil_div(q_len, pattern.block[0])
        reason = f"is {q_len}, which makes {rows} query blocks, but the pattern has {indices.shape[2]}"
        raise ArgumentError("q_len", reason)
    if isinstance(pattern, TopK):
        everything = torch.full(indices.shape[:3], indices.shape[3], device=indices.device)
        return _pairs_of(map_of(everything, indices, columns), pattern.block, q_len, kv_len)
    pairs = _pairs_of(map_of(pattern.kv_num_blocks, indices, columns), pattern.block, q_len, kv_len)
    if pattern.mask == "causal":
        q = torch.arange(q_len, device=indices.device)[:, None]
        pairs = pairs & (torch.arange(kv_len, device=indices.device) <= q + (kv_len - q_len))
    elif pattern.mask not in NAMED_MASKS:
        pairs = _of_heads(pairs, wanted[1]) & visible_pairs(pattern, q_len, kv_len, *wanted)
    elif pattern.mask_bits is not None:
        pairs = _bit_pairs(pattern, pattern.mask_bits, columns)[:, :, :q_len, :kv_len]
    if pattern.full_kv_num_blocks is not None and pattern.full_kv_indices is not None:
        full = map_of(pattern.full_kv_num_blocks, pattern.full_kv_indices, columns)
        pairs = pairs | _of_heads(_pairs_of(full, pattern.block, q_len, kv_len), pairs.shape[1])
    return pairs


def _of_heads(pairs: torch.Tensor, heads: int) -> torch.Tensor:
    """Pairs repeated for a multiple of the heads of the lists; other numbers are refused later."""
    there = pairs.shape[1]
    return pairs.repeat_interleave(heads // there, 1) if heads % there == 0 else pairs


def _pairs_of(blocks: torch.Tensor, block: Shape, q_len: int, kv_len: int) -> torch.Tensor:
    """Visible pairs of a block map."""
    return blocks.repeat_interleave(block[0], 2)[:, :, :q_len].repeat_interleave(block[1], 3)[..., :kv_len]


def _bit_pairs(pattern: BlockLists, mask_bits: torch.Tensor, columns: int) -> torch.Tensor:
    """Visible pairs of the partial blocks at their positions, including those beyond the sequence."""
    entries = min(pattern.kv_indices.shape[3], mask_bits.shape[3])
    indices = pattern.kv_indices[..., :entries]
    used = is_listed(pattern.kv_num_blocks, indices) & (indices >= 0) & (indices < columns)
    place = torch.where(used, indices, columns).long()[..., None, None]
    bits = unpack(mask_bits[..., :entries, :], pattern.block)
    shape = torch.broadcast_shapes(place.shape, bits.shape)
    empty = torch.zeros((*shape[:3], columns + 1, *pattern.block), dtype=torch.bool, device=indices.device)
    pairs = empty.scatter(3, place.expand(shape), bits.expand(shape))[:, :, :, :columns]
    return pairs.transpose(3, 4).flatten(4).flatten(2, 3)
