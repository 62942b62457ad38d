"""Writes docs/guide/gallery.md and its pictures: each pattern as code, as a mask of tokens, and as blocks.

python benchmarks/gallery.py            # rewrites the page and the pictures; runs on a CPU
python benchmarks/gallery.py --check    # exits 1 if that would change one of them
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import torch

from codegen.files import holds, write_if_changed
from runtime.convert import to_token_mask

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "guide"
STALE = "is not what the patterns draw; run: python benchmarks/gallery.py"
LENGTH, BLOCK = 512, 64  # tokens of queries and keys, tokens of a block
STEP, CELL = 4, 2  # tokens from one drawn row or column to the next, units of a drawn token
SIZE = LENGTH // STEP * CELL
IMPORTS = """\
import torch
from torch.nn.attention.flex_attention import create_block_mask

from sparse_kernel_codegen import convert
from sparse_kernel_codegen.patterns import Causal, PrefixLM, SinkWindow, SlidingWindow, Strided, TopK
"""
INTRODUCTION = """\
Find the pattern for your mask, and pass it to `block_sparse_attention(q, k, v, pattern)`. This page makes the tensors
of patterns on the CPU; for a call, make them on the device of q.

Each picture is a mask of 512 queries (down) and 512 keys (across). It shows every fourth token. Visible pairs are blue.
The lines are the edges of blocks of 64 x 64 tokens. Kernels skip blocks without a visible pair, and evaluate the mask
only in blocks that are visible in part.

`convert.to_token_mask(pattern, q_len=512, kv_len=512)` returns a mask as a tensor of bool, on the CPU too. The notebook
[masks.ipynb](../../examples/masks.ipynb) draws masks step by step.
"""


class Mask(NamedTuple):
    """A mask of the gallery.

    Attributes:
        name: of its picture.
        title: heading on the page.
        text: what a query sees, and who uses the mask.
        code: Python that assigns ``pattern``.
    """

    name: str
    title: str
    text: str
    code: str


MASKS = (
    Mask("causal", "Causal", "A query sees its own key and all earlier keys.", "pattern = Causal()"),
    Mask(
        "sliding-window",
        "Sliding window",
        "A query sees its own key and the 127 keys before it (Mistral, Gemma).",
        "pattern = SlidingWindow(127)",
    ),
    Mask(
        "two-sided-window",
        "Window on both sides",
        "A query sees 64 keys before it and 64 after it (Longformer, encoders).",
        "pattern = SlidingWindow(64, 64)",
    ),
    Mask(
        "sink-window",
        "Window with the first tokens",
        "A window of 128 keys, and the first 16 keys of the sequence (StreamingLLM).",
        "pattern = SinkWindow(sink=16, left=127)",
    ),
    Mask(
        "strided",
        "Strided",
        "A query sees its own block, the block before it, and every fourth block (Sparse Transformer).",
        "pattern = Strided(stride=4, local=1, block=64)",
    ),
    Mask(
        "prefix-lm",
        "Prefix",
        "All queries see the first 160 keys; after that the mask is causal (PrefixLM, PaliGemma). The tensor has one "
        "length per batch, or one for all.",
        "pattern = PrefixLM(torch.tensor([160], dtype=torch.int32))",
    ),
    Mask(
        "top-k",
        "Top-k blocks",
        "Each block of queries sees the key blocks of its list. `select_topk_blocks` makes such lists from scores.",
        "indices = torch.tensor([[0, 1], [0, 1], [0, 2], [1, 3], [3, 4], [0, 5], [2, 6], [4, 7]], dtype=torch.int32)\n"
        "pattern = TopK(indices[None, None], block=(64, 64))",
    ),
    Mask(
        "documents",
        "Documents in one sequence",
        "Four documents lie one after the other. A query sees its own key and earlier keys of its own document.",
        "ends = torch.tensor([0, 100, 160, 400, 512], dtype=torch.int32)\n"
        "pattern = convert.from_cu_seqlens(ends, total=512, causal=True, block=(64, 64))",
    ),
    Mask(
        "block-map",
        "A map of blocks",
        "A boolean mask with one entry per block is converted to lists.",
        "blocks = torch.eye(8).bool() | (torch.arange(8) % 3 == 0)\n"
        "pattern = convert.from_bool_blocks(blocks, block=(64, 64))",
    ),
    Mask(
        "ranges",
        "A range of keys for each query",
        "Each query sees one run of keys, as in beam search over shared prefixes or token trees.",
        "query = torch.arange(512)\n"
        "pattern = convert.from_key_ranges((query // 128 * 64)[None, None], (query + 1)[None, None], kv_len=512, "
        "block=(64, 64))",
    ),
    Mask(
        "dilated",
        "Dilated window",
        "A query sees every eighth key of a causal window (LongNet). A FlexAttention `BlockMask` becomes lists.",
        "def dilated(b, h, q, k):\n"
        "    return (q >= k) & (q - k < 256) & ((q - k) % 8 == 0)\n\n\n"
        'block_mask = create_block_mask(dilated, None, None, 512, 512, device="cpu", BLOCK_SIZE=64)\n'
        "pattern = convert.from_block_mask(block_mask)",
    ),
    Mask(
        "neighborhood",
        "Neighborhood of an image",
        "Tokens are the pixels of an image, 16 rows of 32. A query sees the pixels at most 4 rows and 8 columns away "
        "(NATTEN).",
        "def neighborhood(b, h, q, k):\n"
        "    return ((q // 32 - k // 32).abs() <= 4) & ((q % 32 - k % 32).abs() <= 8)\n\n\n"
        'block_mask = create_block_mask(neighborhood, None, None, 512, 512, device="cpu", BLOCK_SIZE=64)\n'
        "pattern = convert.from_block_mask(block_mask)",
    ),
)


def token_mask(code: str) -> torch.Tensor:
    """The pairs that a pattern lets see each other, bool (LENGTH, LENGTH)."""
    names: dict[str, Any] = {}
    exec(f"{IMPORTS}\n{code}", names)
    return to_token_mask(names["pattern"], q_len=LENGTH, kv_len=LENGTH)[0, 0]


def picture(mask: torch.Tensor, title: str) -> str:
    """The drawing of a mask, in colors that are seen on light and on dark pages."""
    rows = [runs(row) for row in mask[::STEP, ::STEP].tolist()]
    cells = "".join(
        f"M{first * CELL} {y * CELL}h{count * CELL}v{CELL}h-{count * CELL}z"
        for y, row in enumerate(rows)
        for first, count in row
    )
    edge = BLOCK // STEP * CELL
    lines = "".join(f"M{at} 0V{SIZE}M0 {at}H{SIZE}" for at in range(0, SIZE + 1, edge))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SIZE}" height="{SIZE}" viewBox="-1 -1 {SIZE + 2} {SIZE + 2}">'
        f'<title>{title}</title><path d="{cells}" fill="#4493f8"/>'
        f'<path d="{lines}" fill="none" stroke="#8b949e" stroke-width="0.6"/></svg>\n'
    )


def runs(row: list[bool]) -> list[tuple[int, int]]:
    """Start and length of each run of visible keys."""
    found: list[tuple[int, int]] = []
    for at, visible in enumerate(row):
        if visible and found and sum(found[-1]) == at:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        elif visible:
            found.append((at, 1))
    return found


def counts(mask: torch.Tensor) -> str:
    """A sentence with the share of visible pairs, and the numbers of full, partial and empty blocks."""
    blocks = mask.view(LENGTH // BLOCK, BLOCK, LENGTH // BLOCK, BLOCK)
    some, every = blocks.any(dim=3).any(dim=1), blocks.all(dim=3).all(dim=1)
    full, partial = int(every.sum()), int((some & ~every).sum())
    return (
        f"{100 * mask.float().mean():.0f}% of the pairs are visible; of {some.numel()} blocks {full} are full, "
        f"{partial} partial and {some.numel() - full - partial} empty."
    )


def files() -> dict[Path, str]:
    """The page and its pictures by path."""
    found, parts = {}, ["# Gallery of masks", "<!-- written by benchmarks/gallery.py -->", INTRODUCTION.rstrip()]
    parts.append(f"```python\n{IMPORTS}```")
    for each in MASKS:
        mask = token_mask(each.code)
        found[GUIDE / "masks" / f"{each.name}.svg"] = picture(mask, each.title)
        text = textwrap.fill(f"{each.text} {counts(mask)}", 120)
        parts += [f"## {each.title}", text, f"```python\n{each.code}\n```", f"![{each.title}](masks/{each.name}.svg)"]
    return {GUIDE / "gallery.md": "\n\n".join(parts) + "\n", **found}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is not up to date")
    check = parser.parse_args(arguments).check
    written = files()
    left = sorted(set((GUIDE / "masks").glob("*.svg")) - set(written))
    stale = [path for path, text in written.items() if not holds(path, text)]
    for path in (*stale, *left):
        print(f"{path.relative_to(ROOT)} {STALE if check else 'rewritten'}")
    if check:
        return int(bool(stale or left))
    (GUIDE / "masks").mkdir(exist_ok=True)
    for path, text in written.items():
        write_if_changed(path, text)
    for path in left:
        path.unlink()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
