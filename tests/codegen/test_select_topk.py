"""The definition of the selection of key blocks, beside plain loops."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from runtime import ArgumentError  # noqa: E402
from runtime.ops.select_topk import select_topk_blocks  # noqa: E402


def selected(scores: list[float], last: int, block_keys: int, topk: int, causal: bool, always: list[int]) -> list[int]:
    """The blocks of one query block, whose last query stands at key ``last``."""
    blocks = [n for n in range(len(scores)) if not causal or n * block_keys <= last]
    own = max(last, -1) // block_keys
    first = [n for n in blocks if n in always or n - own - 1 in [a for a in always if a < 0]]
    others = sorted((n for n in blocks if n not in first), key=lambda n: (-scores[n], n))
    found = sorted([*first, *others][:topk])
    return found + [-1] * (topk - len(found))


@settings(max_examples=60)
@given(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.tuples(*[st.tuples(st.integers(0, 5), st.sampled_from([1, 2, 4]))] * 2),
    st.sampled_from([(8, 8), (4, 16), (16, 4)]),
    st.integers(1, 8),
    st.booleans(),
    st.lists(st.integers(-3, 3), max_size=3, unique=True),
    st.integers(0, 2**31 - 1),
)
def test_the_largest_products_of_means(
    batch: int, counts: Any, lengths: Any, block: tuple[int, int], topk: int, causal: bool, always: Any, seed: int
) -> None:
    always = always[:topk]
    generator = torch.Generator().manual_seed(seed)
    # Small whole numbers, and a power of 2 in each block, so that many scores are equal and all are exact.
    q_len, kv_len = (whole * size + rest for (whole, rest), size in zip(lengths, block, strict=True))
    q, k = (
        torch.randint(-1, 2, (batch, heads, length, 4), generator=generator).float()
        for heads, length in zip(counts, (q_len, kv_len), strict=True)
    )
    found = select_topk_blocks(q, k, block=block, topk=topk, causal=causal, always=always)
    rows = range(0, q_len, block[0])
    assert found.dtype == torch.int32 and found.shape == (batch, counts[0], len(rows), topk)
    for b in range(batch):
        for h in range(counts[0]):
            keys = k[b, h // (counts[0] // counts[1])].split(block[1])
            for row, first in enumerate(rows):
                mean = q[b, h, first : first + block[0]].mean(0)
                scores = [float((mean * some.mean(0)).sum()) for some in keys]
                last = min(first + block[0], q_len) - 1 + kv_len - q_len
                assert found[b, h, row].tolist() == selected(scores, last, block[1], topk, causal, always)


def test_ties_go_to_the_lower_block_and_nan_is_least() -> None:
    q, k = torch.ones(1, 1, 2, 4), torch.zeros(1, 1, 12, 4)
    assert select_topk_blocks(q, k, block=(2, 2), topk=3, causal=False).flatten().tolist() == [0, 1, 2]
    k[..., 0, :] = torch.nan
    assert select_topk_blocks(q, k, block=(2, 2), topk=3, causal=False).flatten().tolist() == [1, 2, 3]
    k[..., 8:, :] = -torch.inf
    assert select_topk_blocks(q, k, block=(2, 2), topk=5, causal=False).flatten().tolist() == [0, 1, 2, 3, 4]


def test_blocks_that_are_hidden_are_never_selected() -> None:
    q, k = torch.ones(1, 1, 8, 4), torch.arange(8.0).view(1, 1, 8, 1).expand(1, 1, 8, 4)
    found = select_topk_blocks(q, k, block=(2, 2), topk=2, causal=True, always=(0, 3))
    assert found.tolist() == [[[[0, -1], [0, 1], [0, 2], [0, 3]]]]
    # 8 queries at the end of 4 keys: the first ones stand before any key.
    found = select_topk_blocks(q, k[:, :, :4], block=(2, 2), topk=2, causal=True, always=(-1,))
    assert found.tolist() == [[[[-1, -1], [-1, -1], [0, -1], [0, 1]]]]


def test_means_are_taken_in_float32() -> None:
    q = torch.full((1, 1, 64, 8), 300.0, dtype=torch.float16)
    k = torch.full((1, 1, 128, 8), 300.0, dtype=torch.float16)  # a sum of 64 is 19200, the product 720000
    k[:, :, :64] -= 0.25
    assert select_topk_blocks(q, k, block=(64, 64), topk=1, causal=False).tolist() == [[[[1]]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 2, 3)}, "q: has 3 dimensions (1, 2, 3), expected 4"),
        ({"q": torch.zeros(1, 2, 0, 4)}, "q: is empty"),
        ({"k": torch.zeros(1, 3, 9, 4)}, "k: has shape (1, 3, 9, 4), which does not fit"),
        ({"k": torch.zeros(1, 2, 9, 4).half()}, "k: is torch.float16, expected torch.float32"),
        ({"block": 64}, "block: is 64, expected (queries, keys)"),
        ({"topk": 0}, "topk: is 0, expected a whole number, 1 or more"),
        ({"always": (0, -1, 1)}, "always: has 3 blocks, topk is 2"),
        ({"always": (0.5,)}, "always: has 0.5, expected whole numbers"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    call = {"q": torch.zeros(1, 2, 9, 4), "k": torch.zeros(1, 2, 9, 4), "block": (4, 4), "topk": 2, "causal": True}
    with pytest.raises(ArgumentError) as caught:
        select_topk_blocks(**{**call, **change})
    assert str(caught.value).startswith(message)
