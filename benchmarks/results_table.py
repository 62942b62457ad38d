"""Writes the tables of results (README.md, docs/results.md) from the receipts in generated/ and the JSON that
benchmarks/attention.py and benchmarks/bsr.py wrote, and from nothing else.

python benchmarks/results_table.py            # rewrites what is between the markers
python benchmarks/results_table.py --check    # exits 1 if that would change a page
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Container, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from records import OURS, absent_peers, best_peer, failures

from codegen.errors import CodegenError
from codegen.library import GENERATED, ROOT, NamedSpec, find_spec, shipped_specs
from codegen.receipts import MeasurementRecord, Receipt, Standing, receipt_path, source_sha256, state
from codegen.render import render
from codegen.spec import parse_spec

MEASURED = ROOT / "benchmarks" / "results"
ATTENTION = MEASURED / "attention_h200.json"
BSR = MEASURED / "bsr_h200.json"
# Other devices: the markers of docs/results.md and what stands between them.
OTHER_DEVICES = {"attention-h100": MEASURED / "attention_h100.json", "bsr-h100": MEASURED / "bsr_h100.json"}
HEADINGS = ("kernel", "workload", "TFLOPS", "best peer, same run", "its TFLOPS", "ratio", "worst error")
DASH = "-"
UNVERIFIED = ["unverified", DASH, DASH, DASH, DASH, DASH]
COMPACT_HEADINGS = ("kernel", "workload", "TFLOPS", "best peer, same run", "its TFLOPS", "ratio")
COMPACT_ALIGNMENT = ["---", "---", "---:", "---", "---:", "---:"]
FULL_HEADINGS = ("row", "kernel", "workload", "ms", "TFLOPS", "error", "peers: TFLOPS (error)", "ratio to the best")
FULL_ALIGNMENT = ["---", "---", "---", "---:", "---:", "---:", "---", "---:"]
# Whose receipts the README shows as long as no benchmark has a row of them; docs/results.md shows every kernel.
HEADLINE = ("h100_bsr_spmm_b128", "h100_bsr_spmm_b64")
# One row of each kind for the README's one screen, the slower ones too; docs/results.md has every row.
HEADLINE_ROWS = (
    *("topk32", "topk32_d64", "topk32_b64", "topk64_b128x64", "gqa_topk32_b64"),
    *("window2k", "dense", "causal", "dense_d64", "causal_d64"),
    *("spmm_b128", "spmm_b64", "spmm_b64_clustered", "spmm_b32", "spmm_b16_gathered"),
    *("spgemm_b128_balanced", "sddmm_b128"),
)
OLDER = "†"
OLDER_MEANS = f"{OLDER}: measured with an earlier source of this kernel."
UNSHIPPED = "‡"
UNSHIPPED_MEANS = (
    f"{UNSHIPPED}: a spec that is not shipped: a part of this result was compared, it has no receipt of its cases."
)
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
    """Return caption and table: a row for each spec, in families, with numbers only if a GPU verified this source."""
    verified = verified_receipts(specs, folder)
    rows = [
        line([f"`{named.stem}`", *(numbers(verified[named.stem]) if named.stem in verified else UNVERIFIED)])
        for named in sorted(specs, key=lambda named: (family(named), named.stem))
    ]
    alignment = ["---", "---", "---:", "---", "---:", "---:", "---:"]
    return "\n".join([caption(verified, page_folder), "", line([*HEADINGS]), line(alignment), *rows])


def verified_receipts(specs: list[NamedSpec], folder: Path) -> dict[str, Receipt]:
    """Return the receipts, by stem, that say that a GPU verified today's source."""
    found = {}
    for named in specs:
        if state(named, render(named), folder).standing is Standing.OK:
            found[named.stem] = Receipt.read(receipt_path(named.stem, folder / named.subfolder))
    return found


def family(named: NamedSpec) -> int:
    """Return where a kernel's group stands in the table; a family not listed comes last."""
    kind = (named.spec.arch, named.spec.op)
    return FAMILIES.index(kind) if kind in FAMILIES else len(FAMILIES)


def line(texts: list[str]) -> str:
    """Return one line of a table."""
    return f"| {' | '.join(texts)} |"


def numbers(receipt: Receipt) -> list[str]:
    """Return what a receipt says of its kernel's first workload, beside the peer that took the least time for it."""
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
    """Return the peer's speed, counting the work that the kernel had to do (a dense peer does more than that)."""
    return record.tflops * record.milliseconds / record.peer_milliseconds


def caption(verified: dict[str, Receipt], page_folder: Path) -> str:
    """Return in one line where the numbers come from and what they mean."""
    records = [receipt.verification for receipt in verified.values() if receipt.verification]
    if not records:
        return "No kernel has been verified since its source last changed."
    devices = " and ".join(sorted({f"{record.device}, driver {record.driver}" for record in records}))
    measuring = "measuring.md" if page_folder.name == "docs" else "docs/measuring.md"
    text = f"{devices}; effective TFLOPS, medians ([how they are taken]({measuring})); error against float64."
    through_ptx = sorted({record.target for record in records if record.target.endswith(" PTX")})
    for target in through_ptx:
        arch = target.removesuffix(" PTX").replace("compute_", "sm_")
        text += f" {arch} kernels (`l4_*`) ran there through {target}: no speed on an L4 is claimed."
    return text


def compact_table(
    reports: Sequence[Mapping[str, Any]], specs: list[NamedSpec], folder: Path, names: Container[str] | None = None
) -> str:
    """Return what the README shows: main rows of the benchmarks, then the receipts of kernels that have none.

    Args:
        reports: of the benchmarks.
        specs: whose receipts are shown where no report has a main row of them.
        folder: of the receipts.
        names: which main rows; all by default.
    """
    verified = verified_receipts(specs, folder)
    # A report that is older than groups has main rows only.
    records = [r for report in reports for r in report["rows"] if "main" in r.get("groups", ("main",))]
    measured = {shipped_stem(record) for record in records}
    records = [record for record in records if names is None or record["name"] in names]
    rows, devices = [], {f"{report['device']}, driver {report['driver']}" for report in reports}
    for record in records:
        own, peer = record["results"].get(OURS), best_peer(record)
        best = record["results"].get(peer)
        speeds = [
            speed(record),
            (peer or DASH).partition(",")[0],
            f"{best['tflops']:.0f}" if best else DASH,
            ratio(own, best),
        ]
        stem = shipped_stem(record)
        rows.append(line([f"`{stem}`" if stem else row_name(record), workload(record), *speeds]))
    for named in (named for named in specs if named.stem not in measured):
        cells = numbers(verified[named.stem]) if named.stem in verified else UNVERIFIED
        rows.append(line([f"`{named.stem}`", *cells[:5]]))
    devices |= {f"{r.verification.device}, driver {r.verification.driver}" for r in verified.values() if r.verification}
    text = (
        f"{' and '.join(sorted(devices))}; effective TFLOPS, medians ([how they are taken, what the names "
        "mean](docs/measuring.md)). Every kernel, every peer and the errors: [docs/results.md](docs/results.md)."
    )
    return "\n".join([with_note(text, rows), "", line([*COMPACT_HEADINGS]), line(COMPACT_ALIGNMENT), *rows])


def full_table(report: Mapping[str, Any]) -> str:
    """Return a whole benchmark: every row, every peer, errors, and what has no time."""
    rows, without = [], []
    for record in report["rows"]:
        own, results = record["results"].get(OURS), record["results"]
        peers = sorted((label for label in results if label != OURS), key=lambda label: -results[label]["tflops"])
        told = ", ".join(f"{label} {results[label]['tflops']:.0f} ({results[label]['error']:.0e})" for label in peers)
        times = [f"{own['milliseconds']:.3f}", speed(record), f"{own['error']:.0e}"] if own else [DASH, DASH, DASH]
        best = results.get(best_peer(record))
        stem = shipped_stem(record)
        names = [row_name(record), f"`{stem}`" if stem else DASH]
        rows.append(line([*names, workload(record), *times, told or DASH, ratio(own, best)]))
    for (label, why), missed in failures(report).items():
        without.append(f"- {', '.join(f'`{row}`' for row in missed)}: {label} has no time: {why}")
    if report.get("not_run"):
        without.append(f"- not run: {', '.join(f'`{name}`' for name in report['not_run'])}")
    for name, missed in absent_peers(report).items():
        without.append(f"- peer not installed: `{name}`, for {', '.join(f'`{row}`' for row in missed)}")
    text = (
        f"{report['device']}, driver {report['driver']}; effective TFLOPS, medians, each row of one run "
        "([how they are taken](measuring.md)); error against float64, of the largest element."
    )
    table = [with_note(text, rows), "", line([*FULL_HEADINGS]), line(FULL_ALIGNMENT), *rows]
    return "\n".join([*table, "", *without] if without else table)


def with_note(text: str, rows: list[str]) -> str:
    """Return a caption that explains the marks that rows have."""
    marks = {OLDER: OLDER_MEANS, UNSHIPPED: UNSHIPPED_MEANS}
    return " ".join([text, *(means for mark, means in marks.items() if any(mark in row for row in rows))])


@cache
def shipped_stems() -> Mapping[str, str]:
    """Return the names of the shipped specs, those that receipts are of, by their hashes."""
    return {named.spec.hash: named.stem for named in shipped_specs()}


def shipped_stem(record: Mapping[str, Any]) -> str | None:
    """Return the name of the shipped spec that a row was measured with, if it is one."""
    try:
        return shipped_stems().get(parse_spec(record["spec"]).hash)
    except CodegenError:  # a field that a spec no longer has
        return None


def row_name(record: Mapping[str, Any]) -> str:
    """Return a row's name, marked if its spec is not shipped."""
    return f"`{record['name']}`{'' if shipped_stem(record) else UNSHIPPED}"


def workload(record: Mapping[str, Any]) -> str:
    """Return a row's shape and pattern, as receipts write them."""
    spec = record["spec"]
    return attention_workload(record) if spec["op"] == "attention" else bsr_workload(record)


def attention_workload(record: Mapping[str, Any]) -> str:
    """Return a row of benchmarks/attention.py in words."""
    spec = record["spec"]
    heads = f"H{record['heads']}" + (f":{record['kv_heads']}" if record["kv_heads"] != record["heads"] else "")
    pattern, block = spec["pattern"], spec["pattern"].get("block")
    words = {"topk": "topk{k}", "sliding_window": "window{left}_{right}"}.get(pattern["kind"], "{kind}")
    blocks = f" of {block['q']}x{block['kv']}" if block else ""
    return f"B{record['batch']} {heads} S{record['length']} d{spec['head_dim']}, {words.format(**pattern)}{blocks}"


def bsr_workload(record: Mapping[str, Any]) -> str:
    """Return a row of benchmarks/bsr.py in words."""
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
    """Return our TFLOPS in a row, marked if the kernel's source has changed since."""
    own = record["results"].get(OURS)
    return f"{own['tflops']:.0f}{'' if is_current(record) else OLDER}" if own else DASH


def ratio(own: Mapping[str, Any] | None, best: Mapping[str, Any] | None) -> str:
    """Return by how much we are faster than the best peer."""
    return f"{own['tflops'] / best['tflops']:.2f}" if own and best else DASH


def is_current(record: Mapping[str, Any]) -> bool:
    """Return whether a row's spec renders to the source that was measured."""
    try:
        spec = parse_spec(record["spec"])
    except CodegenError:  # a field that a spec no longer has
        return False
    return source_sha256(render(find_spec(spec))) == record["source_sha256"]


def rewritten(page: str, name: str, table: str) -> str:
    """Return a page with another table between the markers of that name.

    Raises:
        ValueError: unless each marker is there once, in order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed) or begin in rest or end in before + after:
        raise ValueError(f"{begin} and {end} must be there once each, in this order")
    return f"{before}{begin}\n{table}\n{end}{after}"


def update(page: Path, tables: Mapping[str, str], *, check: bool = False) -> int:
    """Rewrite a page's tables, named by their markers; return 0 if all is well.

    With ``check``, only say whether that would change the page.
    """
    found = fresh = page.read_text(encoding="utf-8")
    try:
        for name, table in tables.items():
            fresh = rewritten(fresh, name, table)
    except ValueError as error:
        print(f"error: {page.name}: {error}")
        return 1
    if fresh == found:
        print(f"{page.name} is up to date")
        return 0
    if check:
        print(f"{page.name}: its results are not those measured; run: python benchmarks/results_table.py")
        return 1
    page.write_text(fresh, encoding="utf-8")
    print(f"{page.name}: results rewritten")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    check = parser.parse_args().check
    specs, attention = shipped_specs(), json.loads(ATTENTION.read_text(encoding="utf-8"))
    bsr = json.loads(BSR.read_text(encoding="utf-8")) if BSR.is_file() else None
    reports = [attention, bsr] if bsr else [attention]
    headline = [named for named in specs if named.stem in HEADLINE]
    docs = ROOT / "docs"
    pages = {
        ROOT / "README.md": {"results": compact_table(reports, headline, GENERATED, HEADLINE_ROWS)},
        docs / "results.md": {
            "attention": full_table(attention),
            "bsr": full_table(bsr) if bsr else UNMEASURED,
            **{name: full_table(json.loads(path.read_text(encoding="utf-8"))) for name, path in OTHER_DEVICES.items()},
            "results": table(specs, GENERATED, docs),
        },
    }
    return max([update(page, tables, check=check) for page, tables in pages.items()])


if __name__ == "__main__":
    raise SystemExit(main())
