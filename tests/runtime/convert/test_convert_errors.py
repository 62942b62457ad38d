"""Converters refuse what they cannot take, naming the argument, what it was and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention.flex_attention import BlockMask  # noqa: E402

from runtime import ArgumentError, convert  # noqa: E402
from runtime.patterns import BlockLists, Causal, TopK  # noqa: E402

B64 = (64, 64)
COUNT, LIST = torch.zeros(1, 2, 3).int(), torch.zeros(1, 2, 3, 4).int()
MASK = torch.ones(3, 4, dtype=torch.bool)
TOKENS = torch.zeros(2, 5, 4).int()
FLEX = BlockMask.from_kv_blocks(COUNT, LIST, BLOCK_SIZE=64, seq_lengths=(192, 256))
CAUSAL = BlockLists(COUNT, LIST, block=B64, mask="causal")
WHOLE = TopK(LIST, block=B64)

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no tensor": (lambda: convert.from_token_mask([[True]]), "mask: is list, expected a torch.Tensor"),
    "additive mask": (
        lambda: convert.from_token_mask(torch.zeros(9, 9)),
        "mask: is torch.float32, expected torch.bool",
    ),
    "three dimensions": (lambda: convert.from_token_mask(torch.ones(1, 9, 9).bool()), "mask: has 3 dimensions"),
    "no queries": (lambda: convert.from_token_mask(torch.ones(0, 9).bool()), "mask: its q_len: is 0"),
    "block of no kernel": (
        lambda: convert.from_token_mask(MASK, block=(128, 96)),
        "block: is (128, 96), allowed are with mask_bits queries 1, 2, 4, 8, 16, 32, 64, 128; keys 32, 64, 128",
    ),
    "half a word": (
        lambda: convert.from_key_mask(MASK, q_len=9, block=(64, 16)),
        "block: is (64, 16), allowed are with",
    ),
    "one number": (
        lambda: convert.from_csr(COUNT, COUNT, block=64, kv_len=9),
        "block: is 64, expected (queries, keys)",
    ),
    "no width": (lambda: convert.from_token_mask(MASK, max_blocks=0), "max_blocks: is 0, expected a whole number, 1"),
    "half a width": (lambda: convert.from_token_mask(MASK, max_partial_blocks=0.5), "max_partial_blocks: is 0.5"),
    "no BlockMask": (lambda: convert.from_block_mask(MASK), "block_mask: is Tensor, expected a BlockMask"),
    "more queries": (
        lambda: convert.from_block_mask(FLEX, q_len=193),
        "q_len: is 193, but the mask is for at most 192",
    ),
    "more heads": (
        lambda: convert.from_block_mask(
            BlockMask.from_kv_blocks(COUNT, LIST, mask_mod=lambda b, h, q, k: q >= k), heads=3
        ),
        "heads: is 3, but the mask has lists for 2",
    ),
    "slice": (lambda: convert.from_block_mask(FLEX[:, :1]), "block_mask: is a slice without mask_mod"),
    "half a word of FlexAttention": (
        lambda: convert.from_block_mask(FLEX, target=(64, 96)),
        "target: is (64, 96), allowed are with mask_bits",
    ),
    "blocks of a mask": (
        lambda: convert.from_bool_blocks(MASK, block=B64, q_len=100),
        "mask: has shape (3, 4): query_blocks is 3, expected 2",
    ),
    "counts": (
        lambda: convert.from_q2k(LIST, COUNT[..., :2], block=B64),
        "q2k_block_nums: has shape (1, 2, 2): query_blocks is 2, expected 3",
    ),
    "sizes": (
        lambda: convert.from_q2k(LIST, COUNT, torch.ones(3, 4).int().expand(3, 4)[:, None].expand(3, 5, 4), block=B64),
        "block_sizes: has shape (3, 5, 4): heads is 5, expected 2",
    ),
    "nothing short": (
        lambda: convert.from_q2k(LIST, COUNT, block=B64, max_partial_blocks=1),
        "max_partial_blocks: is given, but block_sizes is not",
    ),
    "layout": (
        lambda: convert.from_token_lists(TOKENS, block=(1, 64), heads=4, layout="hkq"),
        "layout: is 'hkq', expected each of h, t, k once",
    ),
    "heads": (
        lambda: convert.from_token_lists(TOKENS, block=(1, 64), heads=5),
        "heads: is 5, expected a multiple of 2",
    ),
    "width of tokens": (
        lambda: convert.from_token_lists(TOKENS, block=(1, 64), heads=4, max_blocks=2),
        "max_blocks: is 2, but lists of single queries keep their width",
    ),
    "queries of a block": (
        lambda: convert.to_token_lists(WHOLE),
        "pattern: has blocks of 64 queries, expected 1",
    ),
    "batches without b": (
        lambda: convert.to_token_lists(TopK(torch.zeros(2, 1, 3, 1).int(), block=(1, 64))),
        "layout: is 'htk', but the pattern has 2 batches",
    ),
    "pointers": (
        lambda: convert.from_csr(torch.zeros(1).int(), torch.zeros(4).int(), block=B64, kv_len=64),
        "indptr: its length: is 1, expected a whole number, 2 or more",
    ),
    "batches of pointers": (
        lambda: convert.from_csr(torch.zeros(1, 2, 3).int(), torch.zeros(1, 1, 3).int(), block=B64, kv_len=64),
        "indices: has shape (1, 1, 3): heads is 1, expected 2",
    ),
    "stops": (
        lambda: convert.from_key_ranges(COUNT, COUNT[..., :2], kv_len=9),
        "stops: has shape (1, 2, 2): q_len is 2, expected 3",
    ),
    "one boundary": (
        lambda: convert.from_cu_seqlens(torch.zeros(1).int(), total=9, causal=True),
        "cu_seqlens: its length: is 1",
    ),
    "lengths": (lambda: convert.mask_from_kv_lengths(torch.zeros(2), 9), "kv_lengths: is torch.float32"),
    "mask in a list of whole blocks": (
        lambda: convert.to_q2k(CAUSAL),
        "pattern: has mask='causal', but a q2k list has only full blocks: mask='none'",
    ),
    "no lists": (lambda: convert.to_csr(Causal()), "pattern: is Causal, expected TopK or BlockLists: it has no lists"),
    "no lists for FlexAttention": (
        lambda: convert.to_block_mask(Causal(), q_len=9, kv_len=9),
        "pattern: is Causal, expected TopK or BlockLists",
    ),
    "rows of FlexAttention": (
        lambda: convert.to_block_mask(WHOLE, q_len=64, kv_len=256),
        "pattern: has shape (1, 2, 3): query_blocks is 3, expected 1",
    ),
    "heads of FlexAttention": (
        lambda: convert.to_block_mask(WHOLE, q_len=192, kv_len=256, heads=3),
        "heads: is 3, expected a multiple of 2",
    ),
    "no pattern": (lambda: convert.to_token_mask(LIST, q_len=9, kv_len=9), "pattern: is Tensor, expected one of"),
    "rows": (lambda: convert.to_token_mask(WHOLE, q_len=64, kv_len=256), "q_len: is 64, which makes 1 query blocks"),
    "batches": (
        lambda: convert.to_token_mask(TopK(LIST.expand(2, -1, -1, -1), block=B64), q_len=192, kv_len=256, batch=4),
        "batch: is 4, but the pattern has lists for 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value).startswith(message)
