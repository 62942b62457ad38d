"""Drawings of small examples of sparsity patterns: visible pairs, stored blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from markupsafe import Markup

from codegen.patterns.base import PatternBase
from codegen.plan import Plan
from codegen.spec import AttentionBackwardSpec, AttentionSpec, BlockShape, BsrSddmmSpec, BsrSpgemmSpec, BsrSpmmSpec
from runtime.operators import operator_of, part
from runtime.tools.report.svg import Drawing, number

ROWS = 32  # cells on each side
SAMPLES = 8  # sampled pairs along each side of a cell
LISTED_ROWS, MOST_COLUMNS = 32, 128  # blocks of an example with lists
LISTED = 8  # blocks per row, if the call determines their number
SIDE = 300  # side of a picture
DENSITY = 0.25  # share of stored blocks of a BSR matrix
SEED = 47


@dataclass(frozen=True)
class Example:
    """An example of a pattern.

    Attributes:
        picture: the drawing.
        caption: description of the example and its random parts.
        key: legend, darkest shade first: class and description of each shade.
    """

    picture: Markup
    caption: str
    key: tuple[tuple[str, str], ...]


Shade = Callable[[int, int], int]
"""A function of row and column that returns 0, 1 or 2: none, some, all."""


def example(plan: Plan) -> Example | None:
    """An example of the pattern of a kernel; None without a pattern."""
    place = operator_of(plan.spec).example
    found: Example | None = None if place is None else part(place)(plan.spec)
    return found


def pattern_example(spec: AttentionSpec | AttentionBackwardSpec) -> Example:
    """An example of the pairs of queries and keys that a pattern selects."""
    return _listed(spec.pattern) if spec.pattern.fixed_block else _positional(spec.pattern.example())


def stored_example(spec: BsrSpmmSpec) -> Example:
    """An example of A in BSR."""
    return _stored(spec.block, "A")


def sampled_example(spec: BsrSddmmSpec) -> Example:
    """An example of the computed blocks of C."""
    return _stored(spec.block, "the computed blocks of C")


@cache
def _positional(pattern: PatternBase) -> Example:
    """Example of a positional pattern: a square with enough keys to show its shape."""
    length = _length(pattern)
    values = {tensor.name: length // 4 for tensor in pattern.index_tensors if tensor.per_batch}
    step = length // ROWS
    at = [step * i // SAMPLES for i in range(SAMPLES)]

    def shade(row: int, column: int) -> int:
        seen = [
            bool(pattern.visible(row * step + q, column * step + k, length, length, values)) for q in at for k in at
        ]
        return 2 if all(seen) else 1 if any(seen) else 0

    given = "".join(f", {name} {value}" for name, value in values.items())
    caption = (
        f"{pattern.describe()}. Here {length} queries and keys{given}; a cell has {step} x {step} pairs, "
        f"{SAMPLES * SAMPLES} of them sampled."
    )
    key = (("all", "all pairs of a cell"), ("some", "some of them"), ("none", "none"))
    return Example(_grid(ROWS, ROWS, shade, pattern.describe()), caption, key)


def _length(pattern: PatternBase) -> int:
    """Sequence length at which the parts of a pattern are distinguishable."""
    # Fields are in keys, those of patterns with blocks in blocks.
    fields = [value for name, value in pattern if type(value) is int and name != "block"]
    reach = max(fields, default=0) * (pattern.block_keys or 1)
    length = ROWS * SAMPLES
    while length < 3 * reach:
        length *= 2
    return length


@cache
def _listed(pattern: PatternBase) -> Example:
    """Example of a pattern with lists from the call: here they are random."""
    block = pattern.fixed_block
    assert block is not None
    source = random.Random(SEED)
    count = pattern.list_length or LISTED
    columns = min(MOST_COLUMNS, max(LISTED_ROWS, 4 * count))
    count = min(count, columns)
    lists = [sorted(range(columns), key=lambda _: source.random())[:count] for _ in range(LISTED_ROWS)]
    two = pattern.lists == 2
    partial = [set(each[: count // 4 + 1]) if two else set() for each in lists]
    every = [set(each) for each in lists]
    key = [("all", "listed" if not two else "listed as full")]
    key += [("some", "listed as partial: some pairs are hidden")] if two else []
    size = f"{LISTED_ROWS} x {columns} blocks"
    caption = (
        f"{pattern.describe()}. The call passes the lists; these are random. Here {size} of {block.q} queries x "
        f"{block.kv} keys, {count} in each row."
    )
    return Example(
        _grid(LISTED_ROWS, columns, lambda r, c: 0 if c not in every[r] else 1 if c in partial[r] else 2, caption),
        caption,
        (*key, ("none", "not listed")),
    )


def _matrix(rows: int, columns: int, source: random.Random) -> list[set[int]]:
    return [{c for c in range(columns) if source.random() < DENSITY} for _ in range(rows)]


@cache
def _stored(block: BlockShape, which: str) -> Example:
    """An example of a BSR matrix."""
    stored = _matrix(ROWS, ROWS, random.Random(SEED))
    size = f"{ROWS} x {ROWS} blocks of {block.rows} x {block.cols}"
    caption = f"BSR: {which}. Here {size}, a quarter of them stored, at random."
    return Example(
        _grid(ROWS, ROWS, lambda r, c: 2 * (c in stored[r]), caption),
        caption,
        (("all", "stored"), ("none", "not stored: zeros that are never read")),
    )


@cache
def product_example(spec: BsrSpgemmSpec) -> Example:
    """Example of a product of two BSR matrices: the number of pairs of blocks for each block of C."""
    source, size = random.Random(SEED), 16
    a, b = _matrix(size, size, source), _matrix(size, size, source)

    def shade(row: int, column: int) -> int:
        return min(2, sum(column in b[k] for k in a[row]))

    caption = (
        f"BSR x BSR: C. Here {size} x {size} blocks of {spec.block.rows} x {spec.block.cols}; of A and B a quarter are "
        "stored, at random."
    )
    key = (("all", "two or more pairs of blocks meet"), ("some", "one pair"), ("none", "none: zeros"))
    return Example(_grid(size, size, shade, caption), caption, key)


def _grid(rows: int, columns: int, shade: Shade, title: str) -> Markup:
    """Draw cells; neighbors in a row are merged into one shape."""
    drawing, height = Drawing(title), SIDE
    width, tall = SIDE / columns, height / rows
    drawing.rect(0, 0, SIDE, height, "none frame")
    for value, kind in ((1, "some"), (2, "all")):
        steps = "".join(
            f"M{number(first * width)} {number(row * tall)}h{number((last - first) * width)}v{number(tall)}"
            f"h{number((first - last) * width)}z"
            for row in range(rows)
            for first, last in _runs([shade(row, column) for column in range(columns)], value)
        )
        if steps:
            drawing.path(steps, kind)
    return drawing.picture(height, SIDE)


def _runs(shades: Sequence[int], value: int) -> list[tuple[int, int]]:
    """Start and end of the runs of a shade."""
    found: list[tuple[int, int]] = []
    for i, each in enumerate(shades):
        if each == value and found and found[-1][1] == i:
            found[-1] = (found[-1][0], i + 1)
        elif each == value:
            found.append((i, i + 1))
    return found
