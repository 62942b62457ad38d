"""The page of benchmarks/models.py: tables and a picture of its results; read without torch.

The page and the picture are written from a file of JSON lines. Rows that were measured with numbers that the table of
problems has no longer are marked.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from model_limits import limits
from records import DASH, DETERMINISTIC, OURS, failures
from stale_rows import is_current as is_current_row

from runtime.tools.report.svg import Drawing

Record = Mapping[str, Any]
SINGLE, BACK_TO_BACK = "milliseconds", "back_to_back_milliseconds"
GRAPH, HOST = "graph_milliseconds", "host_microseconds"
"""Figures of a result, beside its TFLOPS."""
ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "notebook" / "models.md"
WIDTH = 120
NO_RECEIPT, OLDER, OTHER_NUMBERS = "‡", "†", "§"
CALLS_TAKE = "calls_take"
"""Field of a row that was measured with another kernel than calls take now: that kernel's name."""
LEAST_RATIO, WIDEST_RATIO = 0.7, 2.0
"""Ends of the picture; ratios beyond the right one are written beside their row."""
TICKS = (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
LEFT, SPAN, TOP, STEP = 280, 440, 52, 18
"""Units of the picture: of its names, of the ratios, above the first row, and of a row."""
STYLE = (
    "text{font:12px system-ui,sans-serif}.text{fill:#1f2328}.muted{fill:#59636e}.single{fill:#0969da}"
    ".long{fill:#bc4c00}.grid{stroke:#d1d9e0}.one{stroke:#1f2328;stroke-width:1.5}@media(prefers-color-scheme:dark){.text{fill:#f0f6fc}"
    ".muted{fill:#9198a1}.single{fill:#4493f8}.long{fill:#db6d28}.grid{stroke:#3d444d}.one{stroke:#f0f6fc}}"
)


def read(path: Path) -> list[dict[str, Any]]:
    """Records of a file; of two with one name the later one, in the place of the first."""
    found: dict[str, dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        if text.strip():
            record = json.loads(text)
            found[record["name"]] = record
    return list(found.values())


def best_peer(record: Record, figure: str) -> str | None:
    """The peer with the least time of a kind, if one has it."""
    others = {label: times for label, times in record["results"].items() if label not in (OURS, DETERMINISTIC)}
    times = {label: times[figure] for label, times in others.items() if figure in times}
    return min(times, key=lambda label: times[label], default=None)


def ratio(record: Record, figure: str) -> float | None:
    """By how much we are faster than the best peer; None if one of both has no time."""
    own, peer = record["results"].get(OURS, {}).get(figure), best_peer(record, figure)
    if own is None or peer is None:
        return None
    found: float = record["results"][peer][figure] / own
    return found


def microseconds(milliseconds: float | None) -> str:
    """A time in microseconds, with three digits or more."""
    if milliseconds is None:
        return DASH
    value = 1e3 * milliseconds
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def pair(record: Record, label: str | None, figures: Sequence[str] = (SINGLE, BACK_TO_BACK)) -> str:
    """Two times of a call."""
    times = record["results"].get(label, {})
    return " / ".join(microseconds(times.get(figure)) for figure in figures)


def ratios(record: Record, figures: Sequence[str] = (SINGLE, BACK_TO_BACK)) -> str:
    """The ratios to the best peers; bold if one is below 1."""
    found = [ratio(record, figure) for figure in figures]
    if all(value is None for value in found):
        return DASH
    text = " / ".join(map(written, found))
    return f"**{text}**" if is_behind(record, figures) else text


def is_behind(record: Record, figures: Sequence[str] = (SINGLE, BACK_TO_BACK)) -> bool:
    """Whether a peer is faster in one of these timings."""
    return any((value := ratio(record, figure)) is not None and value < 1 for figure in figures)


def written(value: float | None) -> str:
    """A ratio with two digits; with three if it is below 1 and would be written as 1."""
    if value is None:
        return DASH
    return f"{value:.3f}" if 0.995 <= value < 1 else f"{value:.2f}"


def is_current(record: Record) -> bool:
    """Whether calls take the kernels of a record, and these render to the sources that were measured."""
    return CALLS_TAKE not in record and all(map(is_current_row, record["kernels"]))


def line(record: Record) -> str:
    """A record in a line, as the benchmark prints it."""
    peers = [best_peer(record, figure) for figure in (SINGLE, BACK_TO_BACK)]
    told = " / ".join(dict.fromkeys(peer for peer in peers if peer)) or DASH
    host = record["results"].get(OURS, {}).get(HOST)
    parts = [
        record["name"],
        f"{pair(record, OURS)} us",
        ratios(record),
        f"of {told}",
        f"host {host} us" if host is not None else "",
        f"failed: {', '.join(record['failed'])}" if record["failed"] else "",
        f"{record.get('seconds', 0)} s",
    ]
    return "; ".join(part for part in parts if part)


def has_other_numbers(record: Record, today: Mapping[str, Record]) -> bool:
    """Whether the table of problems has other sizes for a row, or lacks it."""
    return record["name"] not in today or bool(today[record["name"]]["shape"] != record["shape"])


def row_name(record: Record, is_current: Callable[[Record], bool], today: Mapping[str, Record] | None = None) -> str:
    """A row's name, marked if it is of an earlier source or kernel, of one without a receipt, or of other numbers."""
    older = OLDER if not is_current(record) else ""
    other = OTHER_NUMBERS if today is not None and has_other_numbers(record, today) else ""
    unverified = NO_RECEIPT if not all(kernel["receipt"] for kernel in record["kernels"]) else ""
    return f"`{record['name']}`{older}{unverified}{other}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table whose first column is text and whose others are numbers."""
    marks = ["---", *["---:"] * (len(headings) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (headings, marks, *rows)]


def wrapped(text: str) -> str:
    """A paragraph, or an item of a list, in lines of the page's width."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def speed_rows(records: Sequence[Record], name: Callable[[Record], str]) -> list[list[str]]:
    """Cells of the first table."""
    rows = []
    for record in records:
        single, many = best_peer(record, SINGLE), best_peer(record, BACK_TO_BACK)
        peers = " / ".join(dict.fromkeys(peer for peer in (single, many) if peer)) or DASH
        theirs = " / ".join(
            microseconds(record["results"].get(peer, {}).get(figure))
            for peer, figure in ((single, SINGLE), (many, BACK_TO_BACK))
        )
        rows.append([name(record), pair(record, OURS), peers, theirs, ratios(record)])
    return rows


def host_rows(records: Sequence[Record], name: Callable[[Record], str]) -> list[list[str]]:
    """Cells of the second table: times in a graph, and of the host."""
    rows = []
    for record in records:
        results, peers = record["results"], {}
        for figure in (GRAPH, HOST):
            peers[figure] = best_peer(record, figure)
        own = results.get(OURS, {})
        graph_peer = results.get(peers[GRAPH], {}).get(GRAPH)
        host_peer = results.get(peers[HOST], {}).get(HOST)
        hosts = [f"{value:.1f}" if value is not None else DASH for value in (own.get(HOST), host_peer)]
        graphs = [microseconds(own.get(GRAPH)), microseconds(graph_peer)]
        rows.append([name(record), *graphs, ratios(record, (GRAPH,)), *hosts])
    return rows


def deterministic_rows(records: Sequence[Record], name: Callable[[Record], str]) -> list[list[str]]:
    """Cells of the table of gradients beside FlashAttention 4's deterministic ones."""
    rows = []
    for record in records:
        own, theirs = (record["results"].get(label, {}) for label in (OURS, DETERMINISTIC))
        if own and theirs:
            ratios = " / ".join(written(theirs[figure] / own[figure]) for figure in (SINGLE, BACK_TO_BACK))
            rows.append([name(record), pair(record, OURS), pair(record, DETERMINISTIC), ratios])
    return rows


def summary(records: Sequence[Record]) -> str:
    """How many rows are ahead, and which are not."""
    timed = [record for record in records if OURS in record["results"] and best_peer(record, SINGLE)]
    behind = [record for record in timed if is_behind(record)]
    ahead = f"{len(timed) - len(behind)} of {len(timed)} rows are as fast as the best peer, or faster, in both timings."
    if not behind:
        return ahead
    named = ", ".join(f"`{record['name']}` {ratios(record)}" for record in behind)
    return f"{ahead} Slower in one: {named}."


def limit_items(records: Sequence[Record]) -> list[str]:
    """One item for each explanation of rows that are slower than a peer in a timing."""
    behind = [record["name"] for record in records if OURS in record["results"] and is_behind(record)]
    return [wrapped(f"- {where}: {', '.join(f'`{row}`' for row in rows)}") for where, rows in limits(behind).items()]


def problem_items(records: Sequence[Record], today: Mapping[str, Record] | None = None) -> list[str]:
    """One item for each problem: its model, layer, source and what is assumed, from the table if it is given."""
    items: dict[str, str] = {}
    for record in ((today or {}).get(each["name"], each) for each in records):
        assumed = f" Assumed: {'; '.join(record['assumed'])}." if record["assumed"] else ""
        text = f"{record['model']}, {record['layer']} ([source]({record['source']})).{assumed}"
        items.setdefault(text, record["name"])
    return [wrapped(f"- `{name}`: {text}") for text, name in items.items()]


def kernel_items(records: Sequence[Record]) -> list[str]:
    """One item for each set of kernels: the rows that run them."""
    rows: dict[str, list[str]] = {}
    for record in records:
        stems = ", ".join(f"`{each['name']}`{'' if each['receipt'] else NO_RECEIPT}" for each in record["kernels"])
        rows.setdefault(stems or DASH, []).append(f"`{record['name']}`")
    return [wrapped(f"- {stems}: {', '.join(found)}") for stems, found in rows.items()]


def text_of(
    records: Sequence[Record],
    is_current: Callable[[Record], bool],
    today: Mapping[str, Record] | None = None,
    wider: Sequence[Record] = (),
) -> str:
    """The page.

    Args:
        today: what the table of problems says of each row, by name.
        wider: records of rows with larger logits.

    Raises:
        SystemExit: if the records are of several machines, or there are none.
    """
    about = {f"{record['device']}, driver {record['driver']}" for record in records}
    if len(about) != 1:
        raise SystemExit(f"error: the rows are of {' and of '.join(sorted(about)) or 'no machine'}: of one, please")
    dates = sorted({record["date"] for record in records})
    versions = ", ".join(f"{name} {version}" for name, version in sorted(records[-1]["versions"].items()))
    name = partial(row_name, is_current=is_current, today=today)
    headline = [record for record in records if record["headline"]]
    others = [record for record in records if not record["headline"]]
    parts = [
        "# Shapes of published models",
        "Written by `python benchmarks/models.py --page FILE`. Do not edit this page by hand.",
        f"{about.pop()}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; {versions}.",
        "Each row is one call of `block_sparse_attention` or `bsr_matmul`, or the gradients of one (`-backward`), on "
        "normal inputs. `benchmarks/models.yaml` names where the numbers of each problem were read: mostly the model's "
        "own repository or a library's copy of its configuration, not the page that is linked as its source. Numbers "
        "that were found nowhere are [assumed](#problems). Times are medians in microseconds: single calls after a "
        "pause / calls back to back "
        "([how times are taken](measuring.md)). A ratio is the time of the best peer of that timing over ours; it "
        "is bold where a peer is faster. Peers are called in their own layouts; one that fails, or computes something "
        "else, has no time. FlexAttention is not run on dense and causal rows that SDPA, FA3 and FA4 compute.",
        summary(records),
        "![Ratio to the best peer of each headline row](models.svg)",
    ]
    marks = {
        OLDER: "measured with an earlier source of a kernel, or with another kernel than calls take now.",
        NO_RECEIPT: "a kernel of this row has no receipt: only the sample of this row was compared.",
        OTHER_NUMBERS: "measured before numbers of its problem were corrected: the time is of the earlier numbers.",
    }
    shown = " ".join(map(name, records))
    parts += [f"{mark}: {means}" for mark, means in marks.items() if mark in shown]
    speed = ("row", "ours", "best peer", "its time", "ratio")
    graph = ("row", "in a graph", "best peer's", "ratio", "host time", "least of a peer")
    lines = [*map(wrapped, parts), "## Speed", "\n".join(table(speed, speed_rows(headline, name)))]
    if others:
        lines += ["Other sizes:", "\n".join(table(speed, speed_rows(others, name)))]
    if steady := deterministic_rows(records, name):
        lines += [
            "## Deterministic gradients",
            wrapped(
                "Ours are deterministic in every row. FlashAttention 4's are with an option, which the tables above "
                "do not have."
            ),
            "\n".join(table(("row", "ours", DETERMINISTIC, "ratio"), steady)),
        ]
    if wider:
        lines += [
            "## Logits with a standard deviation of 4",
            wrapped("The same with `--std 4`: normal inputs, q times 4."),
            "\n".join(table(speed, speed_rows(wider, name))),
        ]
    if items := limit_items([*records, *wider]):
        lines += [
            "## Limits",
            wrapped("What limits the rows above that are slower than a peer, with the ideas that were tried:"),
            "\n".join(items),
        ]
    lines += [
        "## In a CUDA graph, and on the host",
        wrapped("Gradients are not captured. The host time of a call is the time until it returns, in microseconds."),
        "\n".join(table(graph, host_rows(records, name))),
        "## Problems",
        "\n".join(problem_items(records, today)),
        "## Kernels",
        "\n".join(kernel_items(records)),
    ]
    if missing := failures({"rows": records}):
        items = [f"- {', '.join(f'`{row}`' for row in rows)}: {label}: {why}" for (label, why), rows in missing.items()]
        lines += ["## No time", "\n".join(map(wrapped, items))]
    return "\n\n".join(lines) + "\n"


def bars(records: Sequence[Record]) -> list[tuple[str, list[float | None]]]:
    """Rows of the picture, from the top: names, and both ratios."""
    shown = [record for record in records if record["headline"] and OURS in record["results"]]
    return [(record["name"], [ratio(record, figure) for figure in (SINGLE, BACK_TO_BACK)]) for record in shown]


def picture(records: Sequence[Record]) -> str:
    """Both ratios of each headline row as dots, in an SVG file for light and dark pages."""
    rows, drawing = bars(records), Drawing("Ratio to the best peer of each headline row")
    right, foot = LEFT + SPAN, TOP + STEP * len(rows)

    def place(ratio: float) -> float:
        return LEFT + (min(max(ratio, LEAST_RATIO), WIDEST_RATIO) - LEAST_RATIO) / (WIDEST_RATIO - LEAST_RATIO) * SPAN

    for i, (kind, label) in enumerate((("single", "single calls"), ("long", "back to back"))):
        drawing.circle(LEFT + 4 + 110 * i, 12, 4, kind)
        drawing.text(LEFT + 14 + 110 * i, 16, label, "text")
    for tick in TICKS:
        drawing.line(place(tick), TOP - 6, place(tick), foot, "one" if tick == 1 else "grid")
        drawing.text(place(tick), TOP - 10, f"{tick:g}", "muted", "middle")
    for number, (name, ratios) in enumerate(rows):
        y = TOP + STEP * (number + 0.5)
        drawing.text(LEFT - 10, y + 4, name, "text", "end")
        for kind, value in zip(("single", "long"), ratios, strict=True):
            if value is not None:
                drawing.circle(place(value), y, 4, kind, written(value))
        if beyond := [value for value in ratios if value is not None and value > WIDEST_RATIO]:
            drawing.text(right + 8, y + 4, f"{max(beyond):.1f}", "muted")
    drawing.text(LEFT, foot + 16, "time of the best peer over ours: right of 1 this package is faster", "muted")
    head, rest = str(drawing.picture(foot + 24, right + 40)).split(">", 1)
    size = f'xmlns="http://www.w3.org/2000/svg" width="{right + 40}"'
    return f"{head.replace('<svg', f'<svg {size}')}><style>{STYLE}</style>{rest}\n"


def write(source: Path, page: Path = PAGE, today: Mapping[str, Record] | None = None) -> None:
    """Write the page and its picture.

    Args:
        today: what the table of problems says of each row, by name.
    """
    records = read(source)
    of_wider = source.with_name(source.name.replace("models_", "models_std4_"))
    wider = read(of_wider) if of_wider != source and of_wider.is_file() else []
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text_of(records, is_current, today, wider), encoding="utf-8")
    print(f"wrote {page}")
    page.with_suffix(".svg").write_text(picture(records), encoding="utf-8")
    print(f"wrote {page.with_suffix('.svg')}")
