"""Writes docs/guide/serving.svg: a page table, and the order of a page's elements in memory by layout.

python benchmarks/cache_layouts.py            # rewrites the picture; needs no torch
python benchmarks/cache_layouts.py --check    # exits 1 if that would change it
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import NamedTuple

from codegen.files import holds, write_if_changed
from runtime.tools.report.svg import Drawing

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "guide" / "serving.svg"
STALE = "is not what the script draws; run: python benchmarks/cache_layouts.py"
TABLE = ((6, 2, 0), (6, 4, -1))
"""Pages of two requests, which share one."""
LENGTHS = (10, 7)
POOL = 8
"""Pages of the cache."""
TOKENS, HEADS = 4, 2
"""Of the drawn page."""
WIDTH, LEFT, CELL, ROW = 680, 12, 40, 24
STYLE = (
    "text{font:12px system-ui,sans-serif}.mono{font-family:monospace}.text,.mono{fill:#1f2328}.muted{fill:#59636e}"
    ".a{fill:#0969da33;stroke:#0969da}.b{fill:#bc4c0033;stroke:#bc4c00}.ab{fill:#8250df33;stroke:#8250df}"
    ".none{fill:none;stroke:#8b949e}@media(prefers-color-scheme:dark){.text,.mono{fill:#f0f6fc}.muted{fill:#9198a1}}"
)


class Cell(NamedTuple):
    """head_dim elements of a page: K or V of a token and KV head."""

    what: str
    token: int
    head: int


class Layout(NamedTuple):
    """An order of a page's elements.

    Attributes:
        title: its name, and the shape of its tensors.
        order: letters of the dimensions, the slowest first: n token, h head, c K or V.
        tensors: 2 if K and V are tensors of their own.
    """

    title: str
    order: str
    tensors: int

    def strips(self) -> list[list[Cell]]:
        """Cells of each tensor in the order of memory."""
        sizes = {"n": range(TOKENS), "h": range(HEADS), "c": "KV"}
        places = [dict(zip(self.order, at, strict=True)) for at in itertools.product(*(sizes[d] for d in self.order))]
        cells = [Cell(place["c"], place["n"], place["h"]) for place in places]
        if self.tensors == 1:
            return [cells]
        return [[cell for cell in cells if cell.what == what] for what in "KV"]


LAYOUTS = (
    Layout('layout="NHD": (pages, page_size, kv_heads, head_dim)', "cnh", 2),
    Layout('layout="HND": (pages, kv_heads, page_size, head_dim)', "chn", 2),
    Layout("FlashInfer, from_stacked_cache: (pages, 2, page_size, kv_heads, head_dim)", "cnh", 1),
    Layout("MSA, from_joined_cache: (pages, kv_heads, page_size, 2 * head_dim)", "hnc", 1),
)


def owner(page: int) -> str:
    """The class of a page, or of an entry without one: of the requests that have it."""
    if page < 0:
        return "none"
    return "".join(letter for letter, pages in zip("ab", TABLE, strict=True) if page in pages) or "none"


def draw_table(drawing: Drawing) -> int:
    """Draw the table above the pages of the cache; return the height."""
    drawing.text(LEFT, 16, "block_table", "mono")
    drawing.text(LEFT + 4 * CELL, 16, "seq_lens", "mono")
    drawing.text(LEFT + 6.5 * CELL, 16, f"a cache of {POOL} pages of {TOKENS} tokens", "text")
    for request, pages in enumerate(TABLE):
        y = 26 + ROW * request
        for column, page in enumerate(pages):
            drawing.rect(LEFT + CELL * column, y, CELL, ROW, owner(page))
            drawing.text(LEFT + CELL * (column + 0.5), y + 16, str(page), "text", "middle")
        drawing.text(LEFT + CELL * 4.5, y + 16, str(LENGTHS[request]), "text", "middle")
    for page in range(POOL):
        x = LEFT + CELL * (6.5 + 1.15 * page)
        drawing.rect(x, 26, CELL, ROW, owner(page))
        drawing.text(x + CELL / 2, 42, str(page), "text", "middle")
    drawing.text(LEFT + 6.5 * CELL, 66, "both requests begin with the same 4 tokens: page 6 is shared", "muted")
    return 26 + 2 * ROW


def draw_layout(drawing: Drawing, layout: Layout, y: float) -> float:
    """Draw a layout's strips below y; return the lower end."""
    drawing.text(LEFT, y, layout.title, "text")
    y += 8
    for strip in layout.strips():
        for place, cell in enumerate(strip):
            x = LEFT + CELL * place
            drawing.rect(x, y, CELL, ROW, "ab"[cell.head])
            drawing.text(x + CELL / 2, y + 16, f"{cell.what}{cell.token}", "text", "middle")
        y += ROW + 4
    return y


def picture() -> str:
    """The SVG file, for light and dark pages."""
    drawing = Drawing("A page table, and the order of a page's elements in memory by layout")
    y = draw_table(drawing) + 44.0
    text = f"One page in memory, from left to right: {TOKENS} tokens, KV head 0 in blue and KV head 1 in orange;"
    drawing.text(LEFT, y, "a cell is head_dim elements of K or V of a token", "muted")
    drawing.text(LEFT, y - 16, text, "muted")
    for layout in LAYOUTS:
        y = draw_layout(drawing, layout, y + 24)
    head, rest = str(drawing.picture(y + 8, WIDTH)).split(">", 1)
    size = f'xmlns="http://www.w3.org/2000/svg" width="{WIDTH}"'
    return f"{head.replace('<svg', f'<svg {size}')}><style>{STYLE}</style>{rest}\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is not up to date")
    check = parser.parse_args(arguments).check
    text = picture()
    if holds(PICTURE, text):
        return 0
    print(f"{PICTURE.relative_to(ROOT)} {STALE if check else 'rewritten'}")
    if not check:
        write_if_changed(PICTURE, text)
    return int(check)


if __name__ == "__main__":
    raise SystemExit(main())
