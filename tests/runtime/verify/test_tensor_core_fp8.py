"""The model of the tensor core's FP8 accumulator, by sums worked out by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from runtime.verify.tensor_core_fp8 import FRACTION_BITS, STEP, products  # noqa: E402


def row(*terms: tuple[int, float], length: int = 2 * STEP) -> torch.Tensor:
    found = torch.zeros((1, length))
    for place, value in terms:
        found[0, place] = value
    return found


ONES = torch.ones((1, 2 * STEP))


@pytest.mark.parametrize("place", [1, STEP])  # of the same step, and beside the sum of the one before
def test_what_is_below_the_unit_is_cut_off(place: int) -> None:
    largest = 2.0**FRACTION_BITS
    assert products(row((0, largest), (place, 1.75)), ONES) == largest + 1
    assert products(row((0, -largest), (place, 1.75)), ONES) == -largest + 1
    assert products(row((0, largest), (place, -0.75)), ONES) == largest


def test_sums_that_are_flushed_keep_their_bits() -> None:
    a = row((0, 2.0**FRACTION_BITS), (STEP, 0.5))
    assert products(a, ONES) == 2.0**FRACTION_BITS
    assert products(a, ONES, flush_every=STEP) == 2.0**FRACTION_BITS + 0.5


def test_small_integers_are_exact() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (2, 3, length, 100), generator=draw).float() for length in (37, 41))
    assert torch.equal(products(a, b), a @ b.mT)
    assert products(torch.zeros((3, 40)), torch.ones((2, 40))).eq(0).all()


def test_the_example_of_the_page_allows_what_the_accumulation_differs_by() -> None:
    """docs/reference/specs.md compares sums that are promoted every 2 steps of 128 with those of every step."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "specs.md").read_text(encoding="utf-8")
    (absolute,) = re.findall(r"assert_close\(scaled, c, atol=([\d.]+), rtol=2\*\*-7\)", page)
    draw = torch.Generator().manual_seed(0)
    a, b = ((torch.randn(256, 384, generator=draw) * 16).to(torch.float8_e4m3fn).float() for _ in range(2))
    rare, often = (products(a, b, flush_every=steps * 128) / 16**2 for steps in (2, 1))
    assert 0.02 < float((rare - often).abs().max()) < float(absolute)
    torch.testing.assert_close(often.bfloat16(), rare.bfloat16(), atol=float(absolute), rtol=2**-7)
