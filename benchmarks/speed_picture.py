"""The picture of README.md: bars of TFLOPS beside those of other libraries, as SVG for light and for dark pages.

benchmarks/results_table.py writes it, and its caption, from committed results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from models_page import written
from records import BACK_TO_BACK, OURS, SINGLE

from runtime.tools.report.svg import Drawing

TITLE = "TFLOPS of attention in layers of published models, beside other libraries"
ROWS = {
    "flux1-dev-4608": ("FLUX.1 dev", "dense, 4.6K tokens"),
    "llama3-8b-8192": ("Llama 3 8B", "causal, 8K tokens"),
    "mistral-7b-16384": ("Mistral 7B", "window of 4K keys, 16K tokens"),
    "gpt-oss-window-8192": ("gpt-oss", "window of 128 keys, 8K tokens"),
    "moba-llama3-8b-32768": ("Llama 3 8B, MoBA", "lists of 128 x 128, 32K tokens"),
    "minicpm4-8b-32768": ("MiniCPM4 8B", "lists of 64 x 64, 32K tokens"),
    "llama3-8b-8192-backward": ("Llama 3 8B, gradients", "causal, 8K tokens"),
}
"""Rows of benchmarks/models.py in the picture, and their labels."""
SERIES = {
    OURS: ("this package", ("ours",)),
    "FA4": ("FlashAttention 4", ("FA4",)),
    "FA3": ("FlashAttention 3", ("FA3 (bf16)",)),
    "cuDNN": ("cuDNN", ("SDPA cuDNN", "cuDNN BSA")),
    "FlexAttention": ("FlexAttention", ("FlexAttention",)),
}
"""Bars of a row: label in the legend, and the results that may stand for it."""
COLORS = {
    "light": {"text": "#1f2328", "muted": "#59636e", "ours": "#0969da", "FA4": "#bc4c00", "FA3": "#d4a72c",
              "cuDNN": "#1a7f37", "FlexAttention": "#8250df"},
    "dark": {"text": "#f0f6fc", "muted": "#9198a1", "ours": "#4493f8", "FA4": "#db6d28", "FA3": "#d29922",
             "cuDNN": "#3fb950", "FlexAttention": "#ab7df8"},
}  # fmt: skip
"""Colors of GitHub's light and dark pages."""
WIDTH, LEFT, RIGHT = 760, 236, 44  # of the picture, of the labels, of the largest bar's figure
BAR, STEP, GAP, TOP = 11, 14, 12, 34


class Bar(NamedTuple):
    """A bar: which series, and its TFLOPS in calls back to back."""

    series: str
    tflops: float


def bars(record: Mapping[str, Any]) -> list[Bar]:
    """The bars of a row: those of its series that were timed back to back."""
    found = []
    for series, (_, labels) in SERIES.items():
        figures = [record["results"][label].get(BACK_TO_BACK) for label in labels if label in record["results"]]
        found += [Bar(series, figure) for figure in figures if figure is not None]
    return found


def picture(records: Mapping[str, Mapping[str, Any]], theme: str) -> str:
    """The picture for one theme, ``light`` or ``dark``; rows that are not among the records are left out."""
    rows = {name: bars(records[name]) for name in ROWS if name in records}
    largest = max(bar.tflops for row in rows.values() for bar in row)
    drawing = Drawing(TITLE)
    _legend(drawing)
    y = float(TOP)
    for name, row in rows.items():
        middle = y + len(row) * STEP / 2
        drawing.text(LEFT - 10, middle - 2, ROWS[name][0], "text", "end")
        drawing.text(LEFT - 10, middle + 12, ROWS[name][1], "muted", "end")
        for bar in row:
            width = bar.tflops / largest * (WIDTH - LEFT - RIGHT)
            drawing.rect(LEFT, y, width, BAR, bar.series)
            drawing.text(
                LEFT + width + 5, y + BAR - 1.5, f"{bar.tflops:.0f}", "text" if bar.series == OURS else "muted"
            )
            y += STEP
        y += GAP
    return _styled(str(drawing.picture(y, WIDTH)), theme)


def caption(records: Mapping[str, Mapping[str, Any]], *, changed: bool) -> str:
    """The lines below the picture.

    Args:
        records: the rows.
        changed: whether the source of one of the kernels has changed since it was measured.
    """
    shown = {name: records[name] for name in ROWS if name in records}
    devices, dtypes = ({record[key] for record in shown.values()} for key in ("device", "dtype"))
    told = ("FA4", "FA3", "FlexAttention")
    every = {peer: [_ratio(bars(row), peer) for row in shown.values()] for peer in told}
    ratios = {SERIES[peer][0]: found for peer in told if (found := [ratio for ratio in every[peer] if ratio])}
    ranges = [f"{_range(found)} times those of {label}" for label, found in ratios.items()]
    text = (
        f"TFLOPS of calls of `block_sparse_attention`, and of one backward pass, in {_words(dtypes)} on an "
        f"{_words(devices)}, each row in one run: medians of calls back to back, normal inputs. "
        f"They are {', '.join(ranges[:-1])}, and {ranges[-1]}. {_backward(records)}"
    )
    if changed:
        text += "The sources of some of these kernels have changed since they were measured. "
    return text + (
        "[All rows](docs/notebook/models.md), with dates, also those where another library is faster; "
        "[how they were measured](docs/notebook/measuring.md)."
    )


def _backward(records: Mapping[str, Mapping[str, Any]]) -> str:
    """A sentence about all backward passes of attention that FlashAttention 4 was timed on, in both timings."""
    lead = []
    for record in records.values():
        both = [record["results"].get(label, {}) for label in (OURS, "FA4")]
        if record["backward"] and all(SINGLE in times and BACK_TO_BACK in times for times in both):
            # Both count the same work: our TFLOPS over the others are their time over ours.
            lead.append(max(1 - both[0][figure] / both[1][figure] for figure in (SINGLE, BACK_TO_BACK)))
    if not lead:
        return ""
    faster = [share for share in lead if share > 0]
    most = f", at most {max(faster):.0%} less" if faster else ""
    return (
        f"Of {len(lead)} backward passes, FlashAttention 4 takes less time in {len(faster) or 'none'}, "
        f"in single calls or back to back{most}. "
    )


def _words(names: set[str]) -> str:
    return " and ".join(sorted(names))


def _ratio(row: Sequence[Bar], peer: str) -> float | None:
    found = dict(row)
    return found[OURS] / found[peer] if OURS in found and peer in found else None


def _range(ratios: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys((written(min(ratios)), written(max(ratios)))))


def _legend(drawing: Drawing) -> None:
    x = float(WIDTH - sum(BAR + 30 + 6 * len(label) for label, _ in SERIES.values()))
    for series, (label, _) in SERIES.items():
        drawing.rect(x, 8, BAR, BAR, series)
        drawing.text(x + BAR + 5, 8 + BAR - 1.5, label, "text")
        x += BAR + 30 + 6 * len(label)


def _styled(drawing: str, theme: str) -> str:
    """A drawing as a file of its own."""
    colors = COLORS[theme]
    rules = [f".{escape(name)}{{fill:{color}}}" for name, color in colors.items()]
    style = "<style>text{font:12px system-ui,sans-serif}" + "".join(rules) + "</style>"
    head, rest = drawing.split(">", 1)
    size = f'xmlns="http://www.w3.org/2000/svg" width="{WIDTH}"'
    return f"{head.replace('<svg', f'<svg {size}')}>{style}{rest}\n"
