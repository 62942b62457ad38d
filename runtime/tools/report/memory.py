"""A drawing of a thread block's shared memory."""

from __future__ import annotations

from markupsafe import Markup

from codegen.arch import KIB
from codegen.plan import Plan
from runtime.tools.report.svg import WIDTH, Drawing

ROW = 24
LABELS, SIZES = 90, 60  # columns beside the bars
LEAST = 2  # minimum width of a bar


def picture(plan: Plan) -> Markup:
    """A bar per region at its offset, on the scale of a thread block's maximum.

    Overlapping regions are used at different times.
    """
    limit = plan.arch.shared_memory_per_block
    told = f"Shared memory: {len(plan.shared)} regions, {plan.shared_bytes} of {limit} bytes"
    drawing, room = Drawing(told), WIDTH - LABELS - SIZES
    height = 18 + ROW * len(plan.shared)
    for kib in _ticks(limit // KIB):
        x = LABELS + room * kib * KIB / limit
        drawing.line(x, 14, x, height, "grid")
        drawing.text(x, 10, str(kib) if kib else "0 KB", "small", "middle")
    for i, region in enumerate(plan.shared):
        y = 18 + ROW * i
        x, width = LABELS + room * region.offset / limit, max(LEAST, room * region.bytes / limit)
        where = f"{region.name}: {region.bytes} bytes from {region.offset}; {region.doc}"
        drawing.text(LABELS - 8, y + 15, region.name, "", "end")
        drawing.rect(x, y + 4, width, ROW - 8, "alias" if region.aliases else "region", hint=where)
        drawing.text(WIDTH - 2, y + 15, size(region.bytes), "", "end")
    drawing.rect(LABELS, 14, room, height - 14, "frame")
    return drawing.picture(height + 2)


def size(count: int) -> str:
    """A number of bytes in words, in KB from 1 KB."""
    return f"{count} B" if count < KIB else f"{count / KIB:.1f} KB".replace(".0 KB", " KB")


def _ticks(kib: int) -> list[int]:
    step = 64 if kib > 128 else 32
    return list(range(0, kib + 1, step))
