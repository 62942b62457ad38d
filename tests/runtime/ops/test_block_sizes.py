"""Lists of other block sizes: what becomes of them lets each query see the keys that it saw before, as often."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attention_oracle import times_seen  # noqa: E402

from codegen.arch import ARCHS  # noqa: E402
from codegen.block_sizes import common_key_sizes, key_sizes, query_sizes  # noqa: E402
from codegen.errors import SpecError  # noqa: E402
from codegen.planning import plan_of  # noqa: E402
from codegen.select import choose  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.ops.block_sizes import block_fit, mask_block  # noqa: E402
from runtime.patterns import BlockLists, TopK, scored_of  # noqa: E402

BATCH, HEADS = 2, 2


def drawn(rows: int, blocks: int, entries: int, heads: int = HEADS, batch: int = BATCH) -> Any:
    """Return lists of different blocks, of which some entries name none."""
    order = torch.rand(batch, heads, rows, max(blocks, entries)).argsort(-1)[..., :entries].to(torch.int32)
    return torch.where(order < blocks, order, -1)


def lists(block: tuple[int, int], lengths: tuple[int, int], mask: str, full: bool) -> BlockLists:
    rows, blocks = -(-lengths[0] // block[0]), -(-lengths[1] // block[1])
    every = drawn(rows, blocks, blocks, batch=1)
    counts = torch.randint(0, blocks // 2 + 1, (1, HEADS, rows), dtype=torch.int32)
    counts[:, 0, -1] = blocks // 2  # some pair is seen: the last queries see keys of every block
    more: dict[str, Any] = {}
    if full:
        rest = [torch.randint(0, blocks - blocks // 2 + 1, (1, HEADS, rows), dtype=torch.int32), every.flip(3)]
        more = dict(zip(("full_kv_num_blocks", "full_kv_indices"), rest, strict=True))
    if mask == "bits":
        words = block[0] * block[1] // 32
        more["mask_bits"] = torch.randint(-(2**31), 2**31, (BATCH, 1, rows, blocks, words)).to(torch.int32)
    return BlockLists(counts, every, block=block, mask=mask, **more)  # type: ignore[arg-type]


def assert_same(pattern: Any, lengths: tuple[int, int], arch: str, pack_gqa: int = 1) -> Any:
    fit = block_fit(scored_of(pattern), arch, pack_gqa)
    assert fit is not None
    q_len, kv_len = lengths
    made, shape = fit.apply(pattern.index_tensors(), q_len, kv_len), (BATCH, HEADS, q_len, kv_len)
    fitted = fit.fitted(scored_of(pattern))
    block = fitted.block
    assert block is not None
    for tensor in made:
        assert tensor is None or (tensor.dtype == torch.int32 and tensor.shape[2] == -(-q_len // block.q))
    seen = times_seen(fitted.text, made, shape)
    assert seen.any() and torch.equal(seen, times_seen(pattern.spec_json, pattern.index_tensors(), shape))
    return fit


@pytest.mark.parametrize(
    ("block", "arch"),
    [
        ((256, 64), "sm_90a"),
        ((192, 128), "sm_90a"),
        ((128, 192), "sm_90a"),
        ((384, 384), "sm_90a"),
        ((64, 16), "sm_90a"),
        ((128, 32), "sm_90a"),
        ((1, 64), "sm_90a"),
        ((8, 16), "sm_90a"),
        ((256, 32), "sm_90a"),
        ((4, 16), "sm_89"),
        ((96, 48), "sm_89"),
    ],
)
@pytest.mark.parametrize("kind", ["topk", "none", "causal", "causal, full"])
def test_the_same_pairs_are_seen(block: tuple[int, int], arch: str, kind: str) -> None:
    lengths = 200 if block[0] < 16 else 600, 700
    if kind == "topk":
        blocks = -(-lengths[1] // block[1])
        pattern: Any = TopK(drawn(-(-lengths[0] // block[0]), blocks, max(1, blocks // 3)), block=block)
    else:
        pattern = lists(block, lengths, kind.partition(",")[0], full="full" in kind)
    assert_same(pattern, lengths, arch)


@pytest.mark.parametrize("block", [(256, 64), (192, 192), (128, 384), (64, 32), (8, 64), (4, 32), (256, 32)])
@pytest.mark.parametrize("full", [False, True])
def test_bits_go_with_their_blocks(block: tuple[int, int], full: bool) -> None:
    lengths = 100 if block[0] < 16 else 500, 600
    assert_same(lists(block, lengths, "bits", full=full), lengths, "sm_90a")


def test_lists_made_of_masks_have_blocks_of_every_device() -> None:
    made = {block: mask_block(block) for block in [(128, 128), (64, 64), (256, 192), (1, 16), (100, 100), (48, 32)]}
    assert made == {
        (128, 128): (128, 128),
        (64, 64): (64, 64),
        (256, 192): (128, 64),
        (1, 16): (16, 64),
        (100, 100): (128, 128),
        (48, 32): (16, 64),
    }


def test_a_block_that_is_split_counts_as_often_as_it_is_listed() -> None:
    fit = assert_same(TopK(torch.ones(1, 1, 2, 3, dtype=torch.int32), block=(256, 128)), (300, 300), "sm_90a")
    assert not fit.merges and "256 x 128 are split into blocks of 128 x 128" in str(fit)


def test_entries_far_out_of_range_name_no_block() -> None:
    wild = torch.tensor([2**31 - 1, -(2**31), 5, 2**30, 1], dtype=torch.int32).expand(1, 1, 2, 5)
    assert_same(TopK(wild, block=(384, 192)), (600, 500), "sm_90a")
    assert_same(TopK(wild, block=(384, 32)), (600, 500), "sm_90a")


def test_packed_heads_need_fewer_queries_to_a_block() -> None:
    pattern = TopK(drawn(200, 11, 3), block=(1, 64))
    assert block_fit(scored_of(pattern), "sm_90a", 16) is None
    assert block_fit(scored_of(pattern), "sm_90a", 8).merged == (2, 64)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("block", "mask", "message"),
    [
        ((128, 96), None, r"block: is \(128, 96\); allowed are 16 queries, 64 keys and multiples of them; smaller"),
        ((12, 64), None, r"block: is \(12, 64\)"),
        ((128, 8), None, r"of 16 keys or more"),
        ((64, 16), "bits", r"block: is \(64, 16\), expected a multiple of 32 keys"),
    ],
)
def test_what_no_blocks_make_up_is_refused(block: tuple[int, int], mask: str | None, message: str) -> None:
    if mask:
        pattern: Any = lists(block, (300, 300), mask, full=False)
    else:
        pattern = TopK(drawn(9, 9, 3), block=block)
    with pytest.raises(ArgumentError, match=message):
        block_fit(scored_of(pattern), "sm_90a", 1)


def test_blocks_of_masks_have_a_kernel_on_every_architecture() -> None:
    assert common_key_sizes() == (64, 128)
    assert all(set(common_key_sizes()) <= set(key_sizes(arch)) for arch in ARCHS)


@pytest.mark.parametrize("arch", list(ARCHS))
def test_sizes_are_those_that_kernels_are_made_for(arch: str) -> None:
    def has_kernel(queries: int, keys: int, pack: int) -> bool:
        fields = {"op": "attention", "arch": arch, "head_dim": 128, "pack_gqa": pack}
        fields["pattern"] = {"kind": "topk", "block": {"q": queries, "kv": keys}}
        try:
            plan_of(choose(fields, {"q_len": 4096}).spec, "tried")
        except SpecError:
            return False
        return True

    for pack in (1, 8):
        assert [size for size in (1, 2, 4, 8, 16, 128) if has_kernel(size, 64, pack)] == [
            size for size in query_sizes(pack) if size not in (32, 64)
        ]
    assert [size for size in (16, 32, 64, 128) if has_kernel(64, size, 1)] == list(key_sizes(arch))
