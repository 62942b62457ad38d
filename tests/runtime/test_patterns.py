"""Patterns as text and picture, their sparsity, and their intersections and unions."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from each import looped  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402

from runtime import ArgumentError, convert, create_block_mask, patterns  # noqa: E402
from runtime import pattern_sets as sets  # noqa: E402
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

BATCH, HEADS, Q_LEN, KV_LEN = 2, 2, 90, 150
PREFIX = torch.tensor([20, 140], dtype=torch.int32)
NUMBERS: dict[str, Callable[[], Any]] = {
    "dense": Dense,
    "causal": Causal,
    "top left": lambda: Causal(align="top_left"),
    "window 7": lambda: SlidingWindow(7),
    "window 3, 9": lambda: SlidingWindow(3, 9),
    "sinks 4, 12": lambda: SinkWindow(4, 12),
    "sinks 9, 12": lambda: SinkWindow(9, 12),
    "sinks 9, 5, 2": lambda: SinkWindow(9, 5, 2),
    "strided": lambda: Strided(2, 0, 64),
    "strided, both": lambda: Strided(3, 1, 64, causal=False),
    "prefix": lambda: PrefixLM(PREFIX),
}


def ints(*shape: int, most: int, seed: int = 0) -> Any:
    return torch.randint(0, most, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def drawn(heads: int, seed: int, columns: int = 5, entries: int = 4) -> Any:
    """Lists of different blocks of 32 keys, some of them shorter."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(BATCH, heads, 3, columns, generator=generator).argsort(-1)[..., :entries].int()
    return torch.where(torch.arange(entries) < 1 + seed % entries, order, -1).contiguous()


MAP = torch.rand(KV_LEN, generator=torch.Generator().manual_seed(7)) > 0.4


def lists(seed: int, mask: str = "none", full: bool = True, aux: Any = None) -> Any:
    partial, whole = drawn(HEADS, seed, 5, 2), drawn(1, seed + 5, 5, 3)
    whole = torch.where((whole[..., None] == partial.amax(1, keepdim=True)[..., None, :]).any(-1), -1, whole)
    counts = (partial >= 0).sum(-1, dtype=torch.int32)
    lists = convert.blocks.ascending(whole)
    more = (lists.counts, lists.indices) if full else ()
    return BlockLists(counts, partial, *more, block=(32, 32), mask=mask, aux=aux)


LISTS: dict[str, Callable[[], Any]] = {
    "topk": lambda: TopK(drawn(HEADS, 1), block=(32, 32)),
    "topk, shared": lambda: TopK(drawn(1, 2), block=(32, 32)),
    "lists": lambda: lists(3),
    "causal lists": lambda: lists(4, "causal"),
    "causal lists without full ones": lambda: lists(6, "causal", full=False),
    "expression": lambda: lists(8, "seen[kv_idx]", aux={"seen": MAP}),
    "the same expression": lambda: lists(9, "seen[kv_idx]", aux={"seen": MAP}),
    "expression without full ones": lambda: lists(10, "seen[kv_idx]", full=False, aux={"seen": MAP}),
}
ALL = {**NUMBERS, **LISTS}


def pairs_of(pattern: Any) -> Any:
    return convert.to_token_mask(pattern, q_len=Q_LEN, kv_len=KV_LEN, batch=BATCH, heads=HEADS)


def test_combinations_show_the_pairs_of_both_or_any() -> None:
    """Every pair of patterns: what is combined is exact, what is not is refused by name."""
    exact = {"&": set(), "|": set()}  # type: ignore[var-annotated]
    for (name, make), (other, make_other), sign in product(ALL.items(), ALL.items(), "&|"):
        one, two = make(), make_other()
        try:
            found = one & two if sign == "&" else one | two
        except ArgumentError as error:
            assert error.argument == "pattern", (name, other)
            continue
        masks = pairs_of(one), pairs_of(two)
        right = masks[0] & masks[1] if sign == "&" else masks[0] | masks[1]
        assert torch.equal(pairs_of(found), right), f"{name} {sign} {other}: {found!r}"
        exact[sign].add((name, other))
    assert {("causal", "window 3, 9"), ("topk", "topk, shared"), ("topk", "prefix"), ("lists", "strided")} <= exact["&"]
    assert {("causal lists", "topk"), ("expression", "the same expression"), ("causal", "causal lists")} <= exact["&"]
    assert {("expression without full ones", "sinks 4, 12")} <= exact["&"]
    assert {("causal", "prefix"), ("window 7", "sinks 9, 5, 2"), ("topk", "causal lists")} <= exact["|"]
    for sign, names in exact.items():
        assert {(other, name) for name, other in names} == names, f"{sign} depends on the order"


@looped
@pytest.mark.parametrize(
    ("found", "right"),
    [
        (Causal() & SlidingWindow(8, 3), SlidingWindow(8)),
        (SlidingWindow(8, 3) & SlidingWindow(2, 9), SlidingWindow(2, 3)),
        (SlidingWindow(8, 3) | SlidingWindow(2, 9), SlidingWindow(8, 9)),
        (Causal() | SlidingWindow(5), Causal()),
        (SinkWindow(4, 100) & SinkWindow(4, 30), SinkWindow(4, 30)),
        (SinkWindow(4, 100) | SlidingWindow(300), SinkWindow(4, 300)),
        (Dense() & Strided(4, 1), Strided(4, 1)),
        (Dense() | Causal(), Dense()),
        (Strided(4, 1, causal=False) & Causal(), Strided(4, 1)),
        (Causal() & PrefixLM(PREFIX), Causal()),
    ],
)
def test_combined_numbers_are_the_simplest_pattern(found: Any, right: Any) -> None:
    assert type(found) is type(right) and found.spec_json == right.spec_json


@looped
@pytest.mark.parametrize("name", NUMBERS)
def test_expressions_of_patterns_show_their_pairs(name: str) -> None:
    """What an error proposes for ``create_block_mask`` is the same mask."""
    pattern = NUMBERS[name]()
    text, aux = sets.expression_of(pattern)
    made = create_block_mask(text, BATCH, HEADS, Q_LEN, KV_LEN, device="cpu", BLOCK_SIZE=32, aux=aux)
    assert torch.equal(pairs_of(made), pairs_of(pattern))


def test_the_mask_that_an_error_proposes_is_right() -> None:
    one, other = SinkWindow(9, 3), SinkWindow(4, 7)
    with pytest.raises(
        ArgumentError, match="pattern: SinkWindow & SinkWindow: no pattern of numbers says that"
    ) as error:
        one & other
    text = re.search(r"create_block_mask\('(.*)', B, H, Q_LEN, KV_LEN\)", str(error.value))
    assert text is not None
    made = create_block_mask(text.group(1), 1, 1, Q_LEN, KV_LEN, device="cpu")
    assert torch.equal(pairs_of(made), pairs_of(one) & pairs_of(other))


@looped
@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (Causal(), 3, "is combined by & with int, expected a pattern"),
        (LISTS["topk"](), TopK(drawn(1, 1), block=(32, 64)), r"has blocks of another size, \(32, 32\) and \(32, 64\)"),
        (LISTS["topk"](), TopK(ints(1, 1, 4, 2, most=3), block=(32, 32)), "has lists of . query blocks"),
        (
            LISTS["expression"](),
            LISTS["causal lists"](),
            "their masks of partial blocks differ; for lists of all blocks",
        ),
        (LISTS["expression"](), Causal(), "full blocks would have another mask than partial ones"),
        (
            convert.from_token_mask(torch.rand(96, 160) > 0.5, block=(32, 32)),
            LISTS["topk"](),
            "has mask='bits', which is not combined by &",
        ),
    ],
)
def test_combinations_that_are_refused(one: Any, other: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^pattern: .*{message}"):
        one & other


def test_a_shortage_of_entries_is_kept() -> None:
    short = convert.from_bool_blocks(torch.ones(3, 5, dtype=torch.bool), block=(32, 32), max_blocks=2)
    found: Any = short & TopK(drawn(1, 3), block=(32, 32))
    assert int(found.overflow) == 3


@looped
@pytest.mark.parametrize("name", ALL)
def test_sparsity_is_that_of_the_pairs(name: str) -> None:
    pattern = ALL[name]()
    pairs = pairs_of(pattern)
    if name in NUMBERS:
        blocks = torch.nn.functional.pad(pairs, (0, -KV_LEN % 20, 0, -Q_LEN % 40)).unflatten(3, (-1, 20))
        seen = blocks.unflatten(2, (-1, 40)).any(-1).any(3)
        assert pattern.sparsity(Q_LEN, KV_LEN, block=(40, 20)) == pytest.approx(100 * (1 - seen.double().mean().item()))
    elif pattern.kind == "topk":
        seen = (
            torch.nn.functional.pad(pairs, (0, 10, 0, 6)).unflatten(3, (-1, 32)).unflatten(2, (-1, 32)).any(-1).any(3)
        )
        assert pattern.sparsity(kv_len=KV_LEN) == pytest.approx(100 * (1 - seen.double().mean().item()))


def test_sparsity_and_picture_are_those_of_torch() -> None:
    mask_mod = lambda b, h, q, kv: (q >= kv) & (q // 300 == kv // 300)  # noqa: E731
    ours: Any = create_block_mask(mask_mod, None, None, 1024, 1024, device="cpu", BLOCK_SIZE=64)
    theirs = flex.create_block_mask(mask_mod, None, None, 1024, 1024, device="cpu", BLOCK_SIZE=64)
    assert ours.sparsity() == pytest.approx(theirs.sparsity())
    head, size, *rows = str(ours).split("\n")
    assert head == repr(ours)
    assert size == f"16 x 16 blocks of 64 x 64, sparsity={theirs.sparsity():.2f}%:"
    of_torch = [line for line in theirs.to_string(grid_size=32).split("\n") if set(line) & set("█░")]
    assert [row.replace("░", "█") for row in rows] == [row.replace("░", "█") for row in of_torch]
    assert rows[1] == 2 * "█" + 2 * "░" + 28 * " "  # torch's picture has no blocks of full ones alone


def test_pictures_of_many_blocks_and_of_heads() -> None:
    lines = Causal().picture(4000, 8000).split("\n")
    assert lines[0] == "Causal(align='bottom_right')" and lines[1].startswith("32 x 63 blocks of 128 x 128, sparsity=")
    assert len(lines) == 34 and {len(line) for line in lines[2:]} == {64}
    assert Causal().picture(64, 64, block=(16, 32)).split("\n")[2:] == ["░░  ", "░░  ", "██░░", "██░░"]
    top = TopK(drawn(HEADS, 1), block=(32, 32))
    assert "batch 1 of 2, head 0 of 2" in top.picture(batch=1)
    for arguments, message in (
        ({"batch": 2}, "batch: is 2, expected 0 to 1"),
        ({"block": (64, 64)}, r"block: is \(64, 64\), the blocks of the lists"),
        ({"q_len": 1000}, "q_len: is 1000, and the lists are of 3 blocks of 32 queries"),
        ({"kv_len": 0}, "kv_len: is 0"),
    ):
        with pytest.raises(ArgumentError, match=f"^{message}"):
            top.picture(**arguments)
    with pytest.raises(ArgumentError, match=r"^kv_len: is missing: causal is for any length"):
        Causal().sparsity(64)


def test_texts_are_short_and_have_no_values() -> None:
    assert repr(SlidingWindow(3)) == str(SlidingWindow(3)) == "SlidingWindow(left=3, right=0)"
    assert repr(TopK(ints(1, 2, 3, 4, most=3))) == "TopK(kv_indices=int32[1, 2, 3, 4], block=(128, 128))"
    found = repr(LISTS["expression"]())
    assert "mask='seen[kv_idx]'" in found and "aux={'seen': bool[150]}" in found and "tensor" not in found
    assert (
        repr(Score("score + t[kv_idx]", aux={"t": torch.ones(5)}))
        == "Score('score + t[kv_idx]', aux={'t': float32[5]})"
    )
    on_meta = TopK(torch.zeros(1, 1, 2, 2, dtype=torch.int32, device="meta"))
    assert str(on_meta) == repr(on_meta) == "TopK(kv_indices=int32[1, 1, 2, 2] meta, block=(128, 128))"
    for name in patterns.__all__:
        if name in ("Pattern", "Score"):
            continue
        assert "__repr__" not in vars(getattr(patterns, name)), "a dataclass prints its tensors"
