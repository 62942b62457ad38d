"""Converters: the pairs of tokens that see each other are the same before and after, whatever the format."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from convert_cases import BATCH, CASES, Case  # noqa: E402

from runtime import block_maps, convert  # noqa: E402
from runtime.convert import bits  # noqa: E402
from runtime.patterns import BlockLists, Causal, PrefixLM, TopK  # noqa: E402

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
few = settings(max_examples=25)
seeds = st.integers(0, 2**31 - 1)
BLOCKS = [(128, 128), (64, 64), (16, 32), (32, 128)]


def token_mask(pattern: Any, mask: Any) -> Any:
    """The pairs of a pattern, as many as a mask has."""
    batch, heads, q_len, kv_len = mask.shape
    return convert.to_token_mask(pattern, q_len=q_len, kv_len=kv_len, batch=batch, heads=heads)


@st.composite
def masks(draw: st.DrawFn) -> Any:
    """Masks of tokens with runs of hidden and of visible keys, so that some blocks are empty and some full."""
    batch, heads, q_len, kv_len = (draw(st.integers(1, most)) for most in (2, 2, 150, 200))
    generator = torch.Generator().manual_seed(draw(seeds))
    coarse = torch.randint(0, 3, (batch, heads, q_len // 40 + 1, kv_len // 40 + 1), generator=generator) / 2
    share = coarse.repeat_interleave(40, 2).repeat_interleave(40, 3)[:, :, :q_len, :kv_len]
    return torch.rand((batch, heads, q_len, kv_len), generator=generator) < share


@st.composite
def block_lists(draw: st.DrawFn) -> tuple[BlockLists, int]:
    """Lists of whole blocks, in random order, with rubbish behind the last one; and the number of keys."""
    generator = torch.Generator().manual_seed(draw(seeds))
    batch, heads, rows, columns = (draw(st.integers(1, most)) for most in (2, 3, 4, 6))
    numbers = torch.rand((batch, heads, rows, columns), generator=generator).argsort(-1).int()
    width = draw(st.integers(1, columns))
    counts = torch.randint(0, width + 1, (batch, heads, rows), generator=generator).int()
    full = torch.randint(0, columns - width + 1, (batch, heads, rows), generator=generator).int()
    block = draw(st.sampled_from([*BLOCKS, (1, 64)]))
    more = (full, numbers[..., width:]) if width < columns and draw(st.booleans()) else (None, None)
    return BlockLists(counts, numbers[..., :width], *more, block=block), columns * block[1] - draw(st.integers(0, 9))


def assert_only_partial_blocks_are_masked(pattern: BlockLists, mask: Any) -> None:
    """No block that is all visible is masked, and none that is all hidden is listed."""
    assert pattern.mask_bits is not None and pattern.full_kv_num_blocks is not None
    rows, columns = (range(0, size, step) for size, step in zip(mask.shape[2:], pattern.block, strict=True))
    tiles = [mask[:, :, q : q + pattern.block[0], k : k + pattern.block[1]].flatten(2) for q in rows for k in columns]
    assert pattern.full_kv_num_blocks.sum() == sum(int(tile.all(2).sum()) for tile in tiles)
    assert pattern.kv_num_blocks.sum() == sum(int((tile.any(2) & ~tile.all(2)).sum()) for tile in tiles)


@every_case
def test_the_same_pairs_see_each_other(case: Case) -> None:
    pattern = case.pattern(*case.tensors())
    q_len, kv_len = case.lengths
    found = convert.to_token_mask(pattern, q_len=q_len, kv_len=kv_len, batch=BATCH, heads=case.heads)
    assert torch.equal(found, case.expected())


@every_case
def test_lists_ascend_and_end_in_minus_one(case: Case) -> None:
    pattern = case.pattern(*case.tensors())
    lists = [(pattern.kv_indices, None if isinstance(pattern, TopK) else pattern.kv_num_blocks)]
    if isinstance(pattern, BlockLists) and pattern.full_kv_indices is not None:
        lists.append((pattern.full_kv_indices, pattern.full_kv_num_blocks))
    for indices, counts in lists:
        assert indices.dtype == torch.int32 and indices.stride(-1) in (0, 1)
        for row, count in zip(
            indices.flatten(0, 2), [None] * 10**6 if counts is None else counts.flatten(), strict=False
        ):
            blocks = [block for block in row.tolist() if block >= 0]
            assert row.tolist() == sorted(set(blocks)) + [-1] * (len(row) - len(blocks))
            assert count is None or len(blocks) == count
    if isinstance(pattern, BlockLists):
        assert pattern.overflow is None or pattern.overflow.tolist() == [0]
    if isinstance(pattern, BlockLists) and pattern.mask_bits is not None:
        # No block is listed of which nothing is visible; what is not listed has no bits.
        assert torch.equal((pattern.mask_bits != 0).any(-1), pattern.kv_indices >= 0)
        # For torch and cuDNN the last block of a sequence, if it is not whole, is a partial one.
        if not case.name.startswith(("flex", "q2k")):
            batch, heads = pattern.kv_indices.shape[:2]
            assert_only_partial_blocks_are_masked(pattern, case.expected()[:batch, :: case.heads // heads])


@every_case
def test_nothing_depends_on_what_tensors_hold(case: Case) -> None:
    """Tensors on ``meta`` have shapes and no values: what synchronized on a GPU would fail here."""
    pattern = case.pattern(*(tensor.to("meta") for tensor in case.tensors()))
    real = case.pattern(*case.tensors())
    for there, expected in zip(pattern.index_tensors(), real.index_tensors(), strict=True):
        assert (there is None) == (expected is None)
        assert there is None or (there.is_meta and there.shape == expected.shape and there.dtype == expected.dtype)


@pytest.mark.parametrize("name", ["flex_causal_documents", "token_lists_merged_causal", "csr"])
def test_a_whole_graph_is_compiled(name: str) -> None:
    (case,) = [case for case in CASES if case.name == name]
    compiled = torch.compile(lambda *tensors: case.pattern(*tensors).index_tensors(), fullgraph=True, backend="eager")
    for found, expected in zip(compiled(*case.tensors()), case.pattern(*case.tensors()).index_tensors(), strict=True):
        assert found is expected is None or torch.equal(found, expected)


@few
@given(masks(), st.sampled_from(BLOCKS), st.sampled_from([1 << 24, 5000, 1]))
def test_token_masks(mask: Any, block: tuple[int, int], pairs_at_once: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bits, "PAIRS_AT_ONCE", pairs_at_once)
        patch.setattr(convert.token_masks, "PAIRS_AT_ONCE", pairs_at_once)
        pattern = convert.from_token_mask(mask, block=block)
    assert torch.equal(token_mask(pattern, mask), mask)
    assert_only_partial_blocks_are_masked(pattern, mask)


@few
@given(masks(), st.sampled_from(BLOCKS))
def test_bits_are_where_kernels_read_them(mask: Any, block: tuple[int, int]) -> None:
    pattern = convert.from_token_mask(mask, block=block)
    queries, keys = block
    words = pattern.mask_bits
    assert words is not None and words.dtype == torch.int32 and words.stride(-1) == 1
    assert words.shape == (*pattern.kv_indices.shape, queries * keys // 32)
    for place in torch.argwhere(pattern.kv_indices >= 0)[:3].tolist():
        b, h, row, _ = place
        first = int(pattern.kv_indices[tuple(place)]) * keys
        for r, c in ((0, 0), (queries - 1, keys - 1), (queries // 2, 17)):
            q, k = row * queries + r, first + c
            word = int(words[(*place, r * (keys // 32) + c // 32)])
            inside = q < mask.shape[2] and k < mask.shape[3]
            assert word >> (c % 32) & 1 == (inside and bool(mask[b, h, q, k]))


@few
@given(masks(), st.sampled_from([128, 64, (96, 80), (32, 16), (256, 512), (100, 100), (8, 8), (128, 24)]))
def test_block_masks_of_any_size_and_back(mask: Any, size: Any) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, heads, q_len, kv_len = mask.shape
    lengths = {"q_len": q_len, "kv_len": kv_len}
    given_mask = create_block_mask(
        lambda b, h, q, k: mask[b, h, q, k], batch, heads, q_len, kv_len, device="cpu", BLOCK_SIZE=size
    )
    pattern = convert.from_block_mask(given_mask)
    assert torch.equal(token_mask(pattern, mask), mask)
    back = convert.to_block_mask(pattern, **lengths)
    assert torch.equal(token_mask(convert.from_block_mask(back), mask), mask)
    bigger = convert.to_block_mask(pattern, **lengths)
    assert torch.equal(token_mask(convert.from_block_mask(bigger, target=(64, 128)), mask), mask)


def test_a_block_mask_made_back_is_what_torch_would_compute() -> None:
    """The dense mask of torch's own evaluation of the result, partial blocks by mask_mod and full ones as they are."""
    from torch.nn.attention.flex_attention import create_mask

    mask = torch.rand(1, 2, 150, 200) < 0.5
    mask[:, :, :64, :64] = True
    mask[:, :, 64:, 128:] = False
    found = convert.to_block_mask(convert.from_token_mask(mask, block=(64, 64)), q_len=150, kv_len=200)
    blocks = found.to_dense().bool().repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :150, :200]
    assert torch.equal(blocks, token_mask(convert.from_bool_blocks(found.to_dense(), block=(64, 64)), mask))
    pairs = create_mask(found.mask_mod, 1, 2, 150, 200, device="cpu")
    full = block_maps.map_of(found.full_kv_num_blocks, found.full_kv_indices, 4)
    full = full.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :150, :200]
    assert torch.equal(blocks & (pairs | full), mask) and full.any() and not blocks.all()


def test_a_causal_block_mask_needs_one_partial_block() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
    pattern = convert.from_block_mask(mask, max_partial_blocks=1)
    assert pattern.overflow is not None and pattern.overflow.tolist() == [0]
    assert pattern.mask_bits is not None and pattern.mask_bits.shape == (1, 1, 4, 1, 128)
    assert torch.equal(token_mask(pattern, torch.empty(1, 1, 256, 256)), torch.ones(256, 256).tril().bool()[None, None])


def test_masks_that_tell_heads_apart_beside_lists_for_all() -> None:
    from torch.nn.attention.flex_attention import BlockMask

    lists = torch.tensor([[[2, 2]]]), torch.tensor([[[[0, 1], [0, 1]]]])
    mask = BlockMask.from_kv_blocks(
        *(tensor.int() for tensor in lists), BLOCK_SIZE=64, mask_mod=lambda b, h, q, k: (q + k) % 3 == h
    )
    expected = torch.stack([(torch.arange(128)[:, None] + torch.arange(128)) % 3 == h for h in range(3)])[None]
    assert torch.equal(token_mask(convert.from_block_mask(mask, heads=3), expected), expected)


def test_blocks_that_are_merged_keep_what_their_lists_leave_out() -> None:
    """A mask_mod that is true beyond the listed blocks too."""
    from torch.nn.attention.flex_attention import BlockMask

    indices = torch.rand(1, 2, 4, 6).argsort(-1).int()
    counts = torch.tensor([[[2, 0, 3, 1], [1, 2, 2, 2]]]).int()
    full = torch.ones_like(counts), indices.flip(-1)
    mask = BlockMask.from_kv_blocks(
        counts, indices, *full, BLOCK_SIZE=(32, 32), mask_mod=lambda b, h, q, k: (q + k) % 3 > h
    )
    partial, whole = (
        token_mask(BlockLists(*lists, block=(32, 32)), torch.empty(1, 2, 128, 192))
        for lists in ((counts, indices), full)
    )
    visible = torch.stack([(torch.arange(128)[:, None] + torch.arange(192)) % 3 > h for h in range(2)])[None]
    expected = whole | partial & visible
    for target in ((32, 32), (128, 64)):
        assert torch.equal(token_mask(convert.from_block_mask(mask, target=target), expected), expected)


@pytest.mark.parametrize("mask_heads", [2, 1])
def test_packed_heads_as_flex_attention_has_them(mask_heads: int) -> None:
    mask = torch.rand(2, mask_heads, 64, 128) < 0.5
    pattern = convert.from_token_mask(mask, block=(32, 64))
    expected = token_mask(pattern, torch.empty(2, 6, 64, 128))
    back = convert.from_block_mask(convert.to_block_mask(pattern, q_len=64, kv_len=128, heads=6), heads=6)
    assert torch.equal(token_mask(back, expected), expected)
    assert torch.equal(expected, mask.repeat_interleave(6 // mask_heads, 1))


@few
@given(block_lists())
def test_whole_blocks_there_and_back(case: tuple[BlockLists, int]) -> None:
    pattern, kv_len = case
    shape = (*pattern.kv_indices.shape[:2], pattern.kv_indices.shape[2] * pattern.block[0], kv_len)
    expected = token_mask(pattern, torch.empty(shape, device="meta"))
    blocks = convert.to_bool_blocks(pattern, kv_len=kv_len)
    by_blocks = convert.from_bool_blocks(blocks, block=pattern.block, target=pattern.block, kv_len=kv_len)
    by_q2k = convert.from_q2k(*convert.to_q2k(pattern), block=pattern.block)
    by_csr = convert.from_csr(*convert.to_csr(pattern), block=pattern.block, kv_len=kv_len)
    by_flex = convert.from_block_mask(convert.to_block_mask(pattern, q_len=shape[2], kv_len=kv_len))
    for back in (by_blocks, by_q2k, by_csr, by_flex):
        assert torch.equal(token_mask(back, expected), expected)
    if pattern.block[0] == 1:
        lists = convert.to_token_lists(pattern, layout="bthk")
        back = convert.from_token_lists(lists, block=pattern.block, heads=shape[1], layout="bthk")
        assert torch.equal(token_mask(back, expected), expected)


@pytest.mark.parametrize("layout", ["htk", "thk", "bthk", "bhtk", "kthb"])
def test_orders_of_token_lists(layout: str) -> None:
    lists = torch.tensor([[[[3, -1], [0, 2], [-1, 1]], [[1, 2], [2, 3], [-1, -1]]]])  # (1, heads, queries, entries)
    given_lists = lists.permute(["bhtk".index(letter) for letter in (layout if "b" in layout else "b" + layout)])
    pattern = convert.from_token_lists(
        given_lists if "b" in layout else given_lists[0], block=(1, 64), heads=32, layout=layout
    )
    assert pattern.kv_indices.tolist() == [[[[3, -1], [0, 2], [1, -1]], [[1, 2], [2, 3], [-1, -1]]]]
    back = convert.to_token_lists(pattern, layout=layout)
    assert back.shape == (given_lists.shape if "b" in layout else given_lists.shape[1:])
    assert torch.equal(
        convert.from_token_lists(back, block=(1, 64), heads=32, layout=layout).kv_indices, pattern.kv_indices
    )


def test_heads_that_are_no_pack_get_lists_of_their_own() -> None:
    lists = torch.tensor([[[0]], [[1]]])
    assert convert.from_token_lists(lists, block=(1, 64), heads=6).kv_indices.flatten().tolist() == [0, 0, 0, 1, 1, 1]
    assert convert.from_token_lists(lists, block=(1, 64), heads=8).kv_indices.flatten().tolist() == [0, 1]


@few
@given(st.integers(1, 6), seeds)
def test_what_lists_are_short_of_is_flagged(max_blocks: int, seed: int) -> None:
    blocks = torch.rand((2, 1, 3, 5), generator=torch.Generator().manual_seed(seed)) < 0.6
    missing = max(0, int(blocks.sum(-1).amax()) - max_blocks)
    pattern = convert.from_bool_blocks(blocks, block=(64, 64), max_blocks=max_blocks)
    everything = BlockLists(torch.full((2, 1, 3), 5).int(), torch.arange(5).int().expand(2, 1, 3, 5), block=(64, 64))
    csr = convert.to_csr(convert.from_bool_blocks(blocks, block=(64, 64)))
    for found in (pattern, convert.from_csr(*csr, block=(64, 64), kv_len=320, max_blocks=max_blocks)):
        assert found.kv_indices.shape[3] == min(5, max_blocks) and int(found.kv_num_blocks.amax()) <= max_blocks
        assert (found.overflow is None and max_blocks >= 5) or found.overflow.tolist() == [missing]
        seen = convert.to_bool_blocks(found, kv_len=320)
        assert not (seen & ~blocks).any()
        assert torch.equal(seen, blocks & (blocks.cumsum(-1) <= max_blocks))
    assert convert.to_csr(everything).indptr[0, 0].tolist() == [0, 5, 10, 15]


def test_partial_and_full_lists_are_flagged_together() -> None:
    mask = torch.zeros(1, 1, 64, 256, dtype=torch.bool)
    mask[..., ::2] = True  # four partial blocks
    one = convert.from_token_mask(mask, block=(64, 64), max_partial_blocks=1)
    assert one.overflow is not None and one.overflow.tolist() == [3]
    full = convert.from_token_mask(torch.ones_like(mask), block=(64, 64), max_blocks=2, max_partial_blocks=1)
    assert full.overflow is not None and full.overflow.tolist() == [2]


@pytest.mark.parametrize(("start", "stop"), [(0, 200), (0, 150), (-5, 900), (64, 128), (30, 20), (90, 90), (100, 101)])
def test_runs_of_keys_have_no_block_too_many(start: int, stop: int) -> None:
    runs = [torch.full((1, 1, 100), end) for end in (start, stop)]
    mask = torch.zeros(1, 1, 100, 200, dtype=torch.bool)
    mask[..., max(0, start) : max(0, stop)] = True
    assert_only_partial_blocks_are_masked(convert.from_key_ranges(*runs, kv_len=200, block=(64, 64)), mask)


def test_short_blocks_are_flagged() -> None:
    index, nums = torch.arange(3).view(1, 1, 1, 3).int(), torch.tensor([[[3]]]).int()
    found = convert.from_q2k(index, nums, torch.tensor([9, 9, 64]), block=(64, 64), max_partial_blocks=1)
    assert isinstance(found, BlockLists) and found.overflow is not None and found.overflow.tolist() == [1]


@pytest.mark.parametrize(
    ("mask", "length"),
    [("1110", 3), ("1111", 4), ("0000", 0), ("0111", -1), ("1011", -1), ("1", 1), ("0", 0)],
)
def test_lengths_of_key_padding(mask: str, length: int) -> None:
    keys = torch.tensor([[letter == "1" for letter in mask]])
    lengths = convert.kv_lengths_from_mask(keys)
    assert lengths.dtype == torch.int32 and lengths.tolist() == [length]
    back = convert.mask_from_kv_lengths(lengths, len(mask))
    assert torch.equal(back, keys if length >= 0 else torch.zeros_like(keys))


def test_patterns_without_lists_are_written_out() -> None:
    causal = convert.to_token_mask(Causal(), q_len=3, kv_len=5, batch=2, heads=2)
    assert torch.equal(causal, torch.ones(3, 5).tril(2).bool().expand(2, 2, 3, 5))
    prefix = convert.to_token_mask(PrefixLM(torch.tensor([0, 2]).int()), q_len=4, kv_len=4, batch=2)
    assert prefix[0, 0, 0].tolist() == [True, False, False, False]
    assert prefix[1, 0, 0].tolist() == [True, True, False, False]


def test_lists_without_a_block() -> None:
    empty = convert.from_csr(torch.zeros(3).int(), torch.empty(0).int(), block=(64, 64), kv_len=128)
    assert not convert.to_token_mask(empty, q_len=128, kv_len=128).any()
    assert convert.to_csr(empty).indptr.tolist() == [[[0, 0, 0]]]
