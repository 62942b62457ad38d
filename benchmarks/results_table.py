"""Writes the tables of README.md and of pages in docs/ (results, measuring, select, expressions, fp8, scale-out) from
the receipts in generated/ and what benchmarks/attention.py, bsr.py, data.py, host.py, host_calls.py, few_columns.py,
selection.py, expressions.py and fp8.py wrote, and from nothing else.

python benchmarks/results_table.py            # rewrites what is between the markers
python benchmarks/results_table.py --check    # exits 1 if that would change a page
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import data_cells
import distributed_page
import expressions_page
import few_columns_page
import fp8_page
import host_page
import models_page
import selection_page
import speed_picture
import tuning_page
from records import (
    BACK_TO_BACK,
    DASH,
    OURS,
    SINGLE,
    absent_peers,
    best_peer,
    both,
    failures,
    ratio_to_best,
    speeds,
)
from stale_rows import is_current

from codegen.errors import CodegenError
from codegen.files import holds
from codegen.library import GENERATED, ROOT, NamedSpec, shipped_specs
from codegen.migrations import migrated
from codegen.parse import parse_spec
from codegen.receipts import MeasurementRecord, Receipt, ReceiptStatus, read_receipt, receipt_path, state
from codegen.render import render

MEASURED = ROOT / "benchmarks" / "results"
ATTENTION = MEASURED / "attention_h200.json"
BSR = MEASURED / "bsr_h200.json"
# Other devices: the markers of docs/notebook/results.md and what stands between them.
OTHER_DEVICES = {"attention-h100": MEASURED / "attention_h100.json", "bsr-h100": MEASURED / "bsr_h100.json"}
HOST = MEASURED / "host_h200.json"
HOST_CALLS = MEASURED / "host_calls.json"
EXPRESSIONS = MEASURED / "expressions_h100.json"
FEW_COLUMNS = MEASURED / "few_columns_h200.json"
FP8 = MEASURED / "fp8_h100.json"
DISTRIBUTED = [MEASURED / f"distributed_2xh200{name}.json" for name in ("_gradients", "", "_fp16")]
"""The first one is of gradients before rows of all heads were copied by one call."""
DISTRIBUTED_FOUR = MEASURED / "distributed_4xh200.json"
DISTRIBUTED_BEFORE = [MEASURED / f"distributed_2xh100{name}.json" for name in ("", "_fp16", "_barriers", "_heads")]
"""The third one is of window and causal alone, once barriers had one order; the last one of heads instead of keys."""
SELECTION = MEASURED / "selection_h100.json"
TUNING = MEASURED / "tuning_h100.json"
CELLS = MEASURED / "attention_data_h100.jsonl"
MODELS = MEASURED / "models_h200.jsonl"
PICTURES = {theme: Path("docs", "notebook", f"speed-{theme}.svg") for theme in speed_picture.COLORS}
HEADINGS = ("kernel", "workload", "TFLOPS", "best peer, same run", "its TFLOPS", "ratio", "worst error")
UNVERIFIED = ["unverified", DASH, DASH, DASH, DASH, DASH]
FULL_HEADINGS = ("row", "kernel", "workload", "ms", "TFLOPS", "error", "peers: TFLOPS (error)", "ratio to the best")
FULL_ALIGNMENT = ["---", "---", "---", "---:", "---:", "---:", "---", "---:"]
OVERVIEW = (
    *("flux1-dev-4608", "siglip-so400m-4096", "pixart-sigma-cross-4096x300-b2", "llama3-8b-8192", "phi2-2048-b4"),
    *("gpt-oss-full-8192", "gemma3-12b-global-8192", "mistral-7b-16384", "gpt-oss-window-8192"),
    *("llama3-8b-documents-8192", "vsa-wan21-1.3b-23296", "sta-hunyuanvideo-115200", "moba-llama3-8b-32768"),
    *("minicpm4-8b-32768", "llama3-8b-up-b64-50-n512", "mistral-7b-up-b32-50-n1", "mistral-7b-down-b16-70-n64"),
    *("llama3-8b-8192-backward", "dit-xl-2-1024-b16-backward", "mistral-7b-16384-backward"),
    *("vsa-wan21-1.3b-23296-backward", "moba-llama3-8b-32768-backward"),
)
"""Rows of benchmarks/models.py in the first table: one of each kind, those behind a peer too."""
# Whose errors stand beside ours and FA4's: the first of these that computes the row.
OTHERS = ("SDPA cuDNN", "SDPA flash", "cuDNN BSA", "FlexAttention")
NO_CELLS = "No cell has been measured."
NO_TIME = "no time"
OLDER = "†"
BELOW = "(below)"
NO_BREAK = "\0"  # stands for a space at which no line ends
PAGE_WIDTH = 120
LONGEST_LINE = 200  # bytes of a line in docs/: what a reader of the text can follow
OLDER_MEANS = f"{OLDER}: measured with an earlier source of this kernel."
UNSHIPPED = "‡"
UNSHIPPED_MEANS = (
    f"{UNSHIPPED}: a spec that is not shipped: a part of this result was compared, it has no receipt of its cases."
)
STALE = "its tables differ from the measurements; run: python benchmarks/results_table.py"
UNMEASURED = "No row has been measured: every kernel's speed is unverified."
FAMILIES = (
    ("sm_90a", "attention"),
    ("sm_90a", "bsr_spmm"),
    ("sm_90a", "bsr_sddmm"),
    ("sm_90a", "bsr_spgemm"),
    ("sm_89", "attention"),
    ("sm_89", "bsr_spmm"),
    ("sm_89", "bsr_sddmm"),
    ("sm_89", "bsr_spgemm"),
)


def table(specs: list[NamedSpec], folder: Path, page_folder: Path = ROOT) -> str:
    """Caption and table: a row per spec, in families, with numbers only if a GPU verified this source."""
    verified = verified_receipts(specs, folder)
    rows = [
        line([f"`{named.stem}`", *(numbers(verified[named.stem]) if named.stem in verified else UNVERIFIED)])
        for named in sorted(specs, key=lambda named: (family(named), named.stem))
    ]
    alignment = ["---", "---", "---:", "---", "---:", "---:", "---:"]
    return "\n".join([wrapped(caption(verified, page_folder)), "", line([*HEADINGS]), line(alignment), *rows])


def verified_receipts(specs: list[NamedSpec], folder: Path) -> dict[str, Receipt]:
    """The receipts, by stem, that say that a GPU verified today's source."""
    found = {}
    for named in specs:
        if state(named, render(named), folder).standing is ReceiptStatus.OK:
            found[named.stem] = read_receipt(named, receipt_path(named, folder))
    return found


def family(named: NamedSpec) -> int:
    """Sort key of a kernel's group in the table; an unlisted family comes last."""
    kind = (named.spec.arch, named.spec.op)
    return FAMILIES.index(kind) if kind in FAMILIES else len(FAMILIES)


def line(texts: list[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(texts)} |"


def is_long(text: str) -> bool:
    """Whether a line is too long to read."""
    return len(text.encode()) > LONGEST_LINE


def wrapped(text: str) -> str:
    """A paragraph, or an item of a list, in lines of the pages' width; none begins as an item of a list does."""
    indent = "  " if text.startswith("- ") else ""
    bound = re.sub(r"(?<=\S) (?=(?:[-+*•]|\d+[.)]) )", NO_BREAK, text)
    filled = textwrap.fill(bound, PAGE_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return filled.replace(NO_BREAK, " ")


def numbers(receipt: Receipt) -> list[str]:
    """Figures of a receipt's first workload, and of its fastest peer."""
    assert receipt.verification is not None
    error = f"{receipt.verification.worst_error:.1e}"
    if not receipt.measurement:
        return [DASH, DASH, DASH, DASH, DASH, error]
    own = receipt.measurement[0]
    best = min((m for m in receipt.measurement if m.shape == own.shape), key=lambda m: m.peer_milliseconds)
    ratio = f"{best.peer_milliseconds / best.milliseconds:.2f}"
    speeds = [f"{own.tflops:.0f}", f"{useful_tflops(best):.0f}"] if own.tflops else [DASH, DASH]  # a copy has none
    return [own.shape, speeds[0], best.peer, speeds[1], ratio, error]


def useful_tflops(record: MeasurementRecord) -> float:
    """The peer's speed, counting the work that the kernel had to do (a dense peer does more than that)."""
    return record.tflops * record.milliseconds / record.peer_milliseconds


def caption(verified: dict[str, Receipt], page_folder: Path) -> str:
    """One line about the source and meaning of the numbers."""
    records = [receipt.verification for receipt in verified.values() if receipt.verification]
    if not records:
        return "No kernel has been verified since its source last changed."
    devices = " and ".join(sorted({f"{record.device}, driver {record.driver}" for record in records}))
    measuring = "measuring.md" if page_folder.name == "notebook" else "docs/notebook/measuring.md"
    text = f"{devices}; effective TFLOPS, medians ([how they are taken]({measuring})); error against float64."
    through_ptx = sorted({record.target for record in records if record.target.endswith(" PTX")})
    for target in through_ptx:
        arch = target.removesuffix(" PTX").replace("compute_", "sm_")
        text += f" {arch} kernels (`l4_*`) ran there through {target}: no speed on an L4 is claimed."
    return text


def overview(rows: Mapping[str, Mapping[str, Any]], names: Sequence[str] = OVERVIEW, notebook: str = "") -> str:
    """A table of rows of benchmarks/models.py, without those whose kernels have changed since.

    Args:
        rows: all rows by name.
        names: those of the table.
        notebook: path of docs/notebook from the page of the table, with a slash at its end.
    """
    records = [rows[name] for name in names if models_page.is_current(rows[name])]
    older = [f"`{name}`" for name in names if not models_page.is_current(rows[name])]
    name = partial(models_page.row_name, is_current=models_page.is_current)
    cells = [
        [row[0], record["model"], record["dtype"], *row[1:]]
        for record, row in zip(records, models_page.speed_rows(records, name), strict=True)
    ]
    devices = " and ".join(sorted({f"{record['device']}, driver {record['driver']}" for record in records}))
    text = (
        f"{devices}; normal inputs; medians in microseconds, single calls / back to back ([how they are "
        f"taken]({notebook}measuring.md)). A ratio is the time of the best peer over ours; bold: behind a peer. [All "
        f"rows of models]({notebook}models.md)."
    )
    if older:
        text += (
            " Rows that were measured with an earlier source of a kernel, or with another kernel than calls take now, "
            f"are left out: {', '.join(older)}."
        )
    lines = [line(row) for row in cells]
    headings = ("row", "model", "dtype", "ours", "best peer", "its time", "ratio")
    return "\n".join([with_note(text, lines), "", *models_page.table(headings, cells)])


def gradients_of_models(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of the rows that are gradients of attention."""
    return [name for name, record in rows.items() if record["backward"] and "pattern" in record["shape"]]


def readme_picture(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The README's picture, one file for each color scheme, and its caption."""
    shown = [rows[name] for name in speed_picture.ROWS]
    told = {name: row for name, row in rows.items() if name in speed_picture.ROWS or models_page.is_current(row)}
    caption = speed_picture.caption(told, changed=not all(map(models_page.is_current, shown)))
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{PICTURES["dark"].as_posix()}">'
    light = f'<img src="{PICTURES["light"].as_posix()}" alt="{speed_picture.TITLE}">'
    return f"<picture>{dark}{light}</picture>\n\n{wrapped(caption)}"


def model_rows() -> dict[str, Mapping[str, Any]]:
    """The rows of benchmarks/models.py by name."""
    return {record["name"]: record for record in models_page.read(MODELS)}


def update_picture(path: Path, text: str, *, check: bool) -> int:
    """Write a picture; with ``check`` only say whether that would change it. Return 0 if all is well."""
    if holds(path, text):
        return 0
    print(f"{path.name}: {STALE if check else 'rewritten'}")
    if not check:
        path.write_text(text, encoding="utf-8")
    return int(check)


def emphasized(text: str, ratios: Iterable[float | None]) -> str:
    """A text, bold if one of the ratios says that we are behind."""
    return f"**{text}**" if any(ratio is not None and ratio < 1 for ratio in ratios) else text


def ratios(record: Mapping[str, Any]) -> str:
    """Speedup over the best peer, in both modes; bold if we are slower."""
    found = [ratio_to_best(record, figure) for figure in (SINGLE, BACK_TO_BACK)]
    return emphasized(both(*found, ".2f"), found)


def data_words(key: data_cells.Key) -> str:
    """The data set of a cell, and its type unless it is fp16."""
    _, data, dtype = key
    return data if dtype == "fp16" else f"{data}, {dtype}"


def data_tables(measured: Mapping[data_cells.Key, data_cells.Cell]) -> dict[str, str]:
    """The tables of benchmarks/data.py by the names of their markers: ratios, TFLOPS and errors."""
    devices = " and ".join(sorted({f"{cell['device']}, driver {cell['driver']}" for cell in measured.values()}))
    sets = [(data, dtype) for dtype, every in data_cells.DATA.items() for data in every]
    tables = {}
    for name, (told, means) in DATA_TABLES.items():
        first = ["data", "---", *(data_words((DASH, *each)) for each in sets)]
        others = [[f"`{row}`", "---:", *(told(measured.get((row, *each))) for each in sets)] for row in data_cells.ROWS]
        columns = narrow_tables(first, others)
        text = with_note(f"{devices}; {means}" if devices else NO_CELLS, columns)
        tables[name] = "\n\n".join([text, *columns])
    named = {"rows": [{**cell, "name": f"{key[0]}, {data_words(key)}"} for key, cell in measured.items()]}
    tables["data-ratio-h100"] = "\n".join([tables["data-ratio-h100"], *listed_below(without_time(named))])
    return tables


def narrow_tables(first: Sequence[str], others: Sequence[Sequence[str]]) -> list[str]:
    """A table, given by its columns, as several: each with the first column, and lines of the pages' length."""
    tables: list[list[Sequence[str]]] = [[first]]
    for column in others:
        if len(tables[-1]) > 1 and any(is_long(line([*cells])) for cells in zip(*tables[-1], column, strict=True)):
            tables.append([first])
        tables[-1].append(column)
    return ["\n".join(line([*cells]) for cells in zip(*columns, strict=True)) for columns in tables]


def ratio_cell(cell: Mapping[str, Any] | None) -> str:
    """Both ratios to the best peer."""
    if cell is None:
        return DASH
    return (ratios(cell) if OURS in cell["results"] else f"**{NO_TIME}**") + mark_of(cell)


def tflops_cell(cell: Mapping[str, Any] | None) -> str:
    """Our speeds, and in brackets those of the fastest peer back to back."""
    if cell is None:
        return DASH
    peer = best_peer(cell, BACK_TO_BACK)
    own = speeds(cell["results"].get(OURS)) + mark_of(cell)
    return own + (f" ({peer} {speeds(cell['results'][peer])})" if peer else "")


def error_cell(cell: Mapping[str, Any] | None) -> str:
    """Absolute errors: ours, FA4's and another peer's."""
    if cell is None:
        return DASH
    other = next((label for label in OTHERS if label in cell["results"]), None)
    found = [cell["results"].get(label) for label in (OURS, "FA4", other)]
    return " / ".join(f"{result['absolute_error']:.1e}" if result else DASH for result in found)


# Markers of docs/notebook/results.md, how a cell is told there, and what that means.
DATA_TABLES = {
    "data-ratio-h100": (
        ratio_cell,
        "our TFLOPS over those of the best peer of the same run, single calls / back to back; bold: behind a peer.",
    ),
    "data-tflops-h100": (
        tflops_cell,
        "effective TFLOPS, single calls / back to back; in brackets those of the peer that is the best back to back.",
    ),
    "data-error-h100": (
        error_cell,
        "the largest absolute error against float64: ours / FA4's / that of SDPA (cuDNN), of cuDNN BSA where rows have "
        "lists, of FlexAttention in `block_lists`.",
    ),
}


def listed_below(lines: Sequence[str]) -> list[str]:
    """Lines after a table."""
    return ["", *map(wrapped, lines)] if lines else []


def without_time(report: Mapping[str, Any]) -> list[str]:
    """List of calls without a time, with the reasons."""
    lines = []
    for (label, why), missed in failures(report).items():
        lines.append(f"- {', '.join(f'`{row}`' for row in missed)}: {label} has no time: {why}")
    if report.get("not_run"):
        lines.append(f"- not run: {', '.join(f'`{name}`' for name in report['not_run'])}")
    for name, missed in absent_peers(report).items():
        lines.append(f"- peer not installed: `{name}`, for {', '.join(f'`{row}`' for row in missed)}")
    return lines


def full_table(report: Mapping[str, Any]) -> str:
    """A whole benchmark: every row, every peer, errors, and what has no time."""
    rows = []
    for record in report["rows"]:
        own, results = record["results"].get(OURS), record["results"]
        peers = sorted((label for label in results if label != OURS), key=lambda label: -results[label][SINGLE])
        told = [f"{label} {peer_speeds(results[label])} ({results[label]['error']:.0e})" for label in peers]
        times = [DASH, DASH, DASH]
        if own:
            times = [f"{own['milliseconds']:.3f}", f"{speeds(own)}{mark_of(record)}", f"{own['error']:.0e}"]
        stem = shipped_stem(record)
        names = [row_name(record), f"`{stem}`" if stem else DASH]
        rows += lines_of_a_row([*names, workload(record), *times], told or [DASH], ratios(record))
    text = (
        f"{report['device']}, driver {report['driver']}; effective TFLOPS and ratios of single calls / back to back, "
        "medians, each row of one run ([how they are taken](measuring.md)); ms of single calls; error against float64, "
        "of the largest element; bold: behind a peer."
    )
    table = [with_note(text, rows), "", line([*FULL_HEADINGS]), line(FULL_ALIGNMENT), *rows]
    return "\n".join([*table, *listed_below(without_time(report))])


def lines_of_a_row(cells: Sequence[str], peers: Sequence[str], ratio: str) -> list[str]:
    """A row of a whole benchmark. Peers for which its line has no room are in rows below, with nothing else."""
    told = len(peers)
    while told and is_long(line([*cells, ", ".join(peers[:told]), ratio])):
        told -= 1
    row = line([*cells, ", ".join(peers[:told]) or BELOW, ratio])
    return [row, *lines_of_a_row([""] * len(cells), peers[told:], "")] if peers[told:] else [row]


def peer_speeds(result: Mapping[str, Any]) -> str:
    """Both TFLOPS of a peer, or the one that was measured."""
    return speeds(result) if BACK_TO_BACK in result else f"{result[SINGLE]:.0f}"


def with_note(text: str, rows: list[str]) -> str:
    """A caption that explains the marks that rows have."""
    marks = {OLDER: OLDER_MEANS, UNSHIPPED: UNSHIPPED_MEANS}
    return wrapped(" ".join([text, *(means for mark, means in marks.items() if any(mark in row for row in rows))]))


@cache
def shipped_stems() -> Mapping[str, str]:
    """The names of the shipped specs, those that receipts are of, by their hashes."""
    return {named.spec.hash: named.stem for named in shipped_specs()}


def shipped_stem(record: Mapping[str, Any]) -> str | None:
    """The name of the shipped spec that a row was measured with, under any name of its fields, if it is one."""
    try:
        return shipped_stems().get(parse_spec(migrated(record["spec"])[0]).hash)
    except CodegenError:  # a field that a spec no longer has
        return None


def row_name(record: Mapping[str, Any]) -> str:
    """A row's name, marked if its spec is not shipped."""
    return f"`{record['name']}`{'' if shipped_stem(record) else UNSHIPPED}"


def workload(record: Mapping[str, Any]) -> str:
    """A row's shape and pattern, as receipts write them."""
    spec = record["spec"]
    return attention_workload(record) if spec["op"] == "attention" else bsr_workload(record)


def attention_workload(record: Mapping[str, Any]) -> str:
    """A row of benchmarks/attention.py in words."""
    spec = record["spec"]
    heads = f"H{record['heads']}" + (f":{record['kv_heads']}" if record["kv_heads"] != record["heads"] else "")
    pattern, block = spec["pattern"], spec["pattern"].get("block")
    words = {"topk": "topk{k}", "sliding_window": "window{left}_{right}"}.get(pattern["kind"], "{kind}")
    blocks = f" of {block['q']}x{block['kv']}" if block else ""
    return f"B{record['batch']} {heads} S{record['length']} d{spec['head_dim']}, {words.format(**pattern)}{blocks}"


def bsr_workload(record: Mapping[str, Any]) -> str:
    """A row of benchmarks/bsr.py in words."""
    spec, size, columns = record["spec"], record["size"], record["columns"]
    n, k = (size, columns) if spec["op"] == "bsr_sddmm" else (columns, size)
    of = ""
    if spec["op"] == "bsr_spgemm":
        of = " of A, B and C" if spec.get("output") == "bsr" else " of A and B"
    pattern = {"random": "", "clustered": ", clustered", "power_law": " on average, power law"}[record["pattern"]]
    block = f"{spec['block']['rows']}x{spec['block']['cols']}"
    packed = ", packed beforehand" if record.get("packed") else ""
    return f"M{record.get('height', size)} K{k} N{n}, {record['row_blocks']} blocks {block} a row{of}{pattern}{packed}"


def speed(record: Mapping[str, Any]) -> str:
    """Our TFLOPS in a row, marked if the kernel's source has changed."""
    own = record["results"].get(OURS)
    return f"{own[SINGLE]:.0f}{mark_of(record)}" if own else DASH


def mark_of(record: Mapping[str, Any]) -> str:
    """A mark if the kernel's source has changed since."""
    return "" if is_current(record) else OLDER


def rewritten(page: str, name: str, table: str) -> str:
    """A page with another table between the markers of that name.

    Raises:
        ValueError: unless each marker is there once, in order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed) or begin in rest or end in before + after:
        raise ValueError(f"{begin} and {end} must be there once each, in this order")
    return f"{before}{begin}\n{table}\n{end}{after}"


def update(page: Path, texts: Mapping[str, str], *, check: bool = False, stale: str = STALE) -> int:
    """Rewrite what is between the markers of a page; return 0 if all is well.

    Args:
        page: a Markdown file.
        texts: what is to stand there, by the names of the markers.
        check: only say whether that would change the page.
        stale: what is said if it would.
    """
    found = fresh = page.read_text(encoding="utf-8")
    try:
        for name, text in texts.items():
            fresh = rewritten(fresh, name, text)
    except ValueError as error:
        print(f"error: {page.name}: {error}")
        return 1
    if fresh == found:
        print(f"{page.name} is up to date")
        return 0
    if check:
        print(f"{page.name}: {stale}")
        return 1
    page.write_text(fresh, encoding="utf-8")
    print(f"{page.name}: rewritten")
    return 0


def read(path: Path) -> Any:
    """A report, or None if it is missing."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    check = parser.parse_args().check
    specs, attention = shipped_specs(), json.loads(ATTENTION.read_text(encoding="utf-8"))
    bsr = json.loads(BSR.read_text(encoding="utf-8")) if BSR.is_file() else None
    measured = data_cells.read(CELLS)
    models = model_rows()
    reference, notebook = (ROOT / "docs" / part for part in ("reference", "notebook"))
    pages = {
        ROOT / "README.md": {"picture": readme_picture(models)},
        notebook / "results.md": {
            "overview": overview(models),
            "attention": full_table(attention),
            "bsr": full_table(bsr) if bsr else UNMEASURED,
            **{name: full_table(json.loads(path.read_text(encoding="utf-8"))) for name, path in OTHER_DEVICES.items()},
            **data_tables(measured),
            "results": table(specs, GENERATED, notebook),
        },
        ROOT / "docs" / "guide" / "training.md": {
            "model-gradients": overview(models, gradients_of_models(models), "../notebook/")
        },
        notebook / "measuring.md": {
            "host": host_page.table(read(HOST)),
            "host-calls": host_page.calls_table(read(HOST_CALLS)),
            "few-columns": few_columns_page.table(read(FEW_COLUMNS)),
        },
        reference / "expressions.md": {"speed": expressions_page.table(read(EXPRESSIONS))},
        notebook / "fp8.md": {"fp8-speed": fp8_page.table(read(FP8))},
        notebook / "scale-out.md": {
            "measured": distributed_page.table([read(path) for path in DISTRIBUTED]),
            "measured-four": distributed_page.table([read(DISTRIBUTED_FOUR)]),
            "measured-before": distributed_page.table([read(path) for path in DISTRIBUTED_BEFORE]),
        },
        reference / "select.md": {
            "selection": selection_page.table(read(SELECTION)),
            "tuning": tuning_page.table(read(TUNING)),
        },
    }
    pictures = {ROOT / path: speed_picture.picture(models, theme) for theme, path in PICTURES.items()}
    return max(
        *(update(page, tables, check=check) for page, tables in pages.items()),
        *(update_picture(path, text, check=check) for path, text in pictures.items()),
    )


if __name__ == "__main__":
    raise SystemExit(main())
