"""Writes the table that kernels are chosen by, codegen/select/measurements.jsonl, from committed results.

    python benchmarks/measurement_rows.py              # rewrites the rows that are from results and receipts
    python benchmarks/measurement_rows.py --check      # exits 1 if that would change the table
    python benchmarks/measurement_rows.py --tuned rows.jsonl ...   # and adds rows of `codegen tune --export`

From benchmarks/results/ come the rows of attention.py, data.py (plain data) and bsr.py, from generated/*.json the
reference workload of each receipt. Rows of kernels for sm_89, which ran through PTX on another GPU, say nothing of that
architecture and are left out. A row's date is that of the last commit of its file. Where two devices agree in the
choice, the table has the row of one. Rows of the tuner that the table has already are kept.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attention
import bsr
from records import OURS, PLAIN

from codegen.dtypes import FP8
from codegen.errors import CodegenError
from codegen.library import ROOT, NamedSpec, find_spec, shipped_specs
from codegen.migrations import migrated
from codegen.parse import parse_spec
from codegen.receipts import ReceiptError, read_receipt, receipt_path, source_sha256
from codegen.render import render
from codegen.select.problem import Problem, is_chosen, parse_problem, preparation_of, problem_of, said_by, tuning_of
from codegen.select.table import TABLE, Dense, Measurement, Timing, merged, place_of, read_rows, shared, written
from codegen.spec import Spec
from runtime.tools.tune.command import read_problems

Fields = dict[str, Any]
RESULTS = ROOT / "benchmarks" / "results"
REPORTS = ("attention_h200.json", "attention_h100.json", "bsr_h200.json", "bsr_h100.json")
DATA = "attention_data_h100.jsonl"
DENSE_PEERS = ("SDPA flash", "SDPA cuDNN", "cuBLAS, dense", "cuBLAS, dense A", "cuBLAS, dense C")
TUNED = ("codegen tune", "candidates of tiles")  # how the sources of rows of the tuner, or like them, begin
STALE = "the table is not what results say; run: python benchmarks/measurement_rows.py"


def microseconds(result: Mapping[str, Any]) -> Fields:
    """Both figures of a result."""
    found = {"single_us": round(1e3 * result["milliseconds"], 4)}
    if "back_to_back_milliseconds" in result:
        found["back_to_back_us"] = round(1e3 * result["back_to_back_milliseconds"], 4)
    return found


def dense_of(results: Mapping[str, Mapping[str, Any]]) -> Dense | None:
    """The fastest dense product, or dense attention, among the peers of a row."""
    found = [Dense(name=name, **microseconds(results[name])) for name in DENSE_PEERS if name in results]
    return min(found, key=lambda each: each.single_us, default=None)


NOT_CHOSEN = "kernels in FP8 are chosen by no table"
HELD_OUT = Path(__file__).with_name("selection_problems.jsonl")
"""Problems on which benchmarks/selection.py judges choices: the table has none of them."""


@cache
def _shipped() -> dict[str, list[NamedSpec]]:
    found: dict[str, list[NamedSpec]] = {}
    for named in sorted(shipped_specs(), key=lambda each: len(each.subfolder.parts)):
        found.setdefault(json.dumps(tuning_of(named.spec), sort_keys=True), []).append(named)
    return found


def spec_in_row(spec: Spec) -> str | Fields:
    """The shipped spec that computes as this one, its own name if it has one; else the fields that say how."""
    tuning = tuning_of(spec)
    alike = _shipped().get(json.dumps(tuning, sort_keys=True), [])
    exact = [named.stem for named in alike if named.spec == spec]
    key = problem_of(spec).key()
    return next(iter([*exact, *(n.stem for n in alike if _key(n.spec) == key)]), tuning)


def _key(spec: Spec) -> object:
    return problem_of(spec).key() if is_chosen(spec) else None


def timing(spec: Spec, figures: Fields, source: str | None, packed: bool = False) -> Timing:
    """A kernel's entry; ``source`` is the hash of the source that was measured."""
    today = source_sha256(render(find_spec(spec)))
    return Timing(
        spec=spec_in_row(spec),
        prepared=preparation_of(spec, packed),
        earlier_source=source not in (None, today),
        **figures,
    )


@cache
def date_of(path: Path) -> str:
    """The date of the last commit of a file."""
    command = ["git", "log", "-1", "--format=%as", "--", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def bsr_problem(record: Mapping[str, Any], spec: Spec) -> Problem:
    """The problem of a row of bsr.py."""
    said, size = said_by(spec), record["size"]
    shape = (record.get("height", size), record["columns"], record["row_blocks"], record["pattern"])
    return parse_problem({**said, **bsr.problem_sizes(spec.op, said["block"], *shape, size)})


def attention_problem(record: Mapping[str, Any], spec: Spec) -> Problem:
    """The problem of a row of attention.py or data.py."""
    said = said_by(spec)
    overlap = next((row.overlap for row in attention.ROWS if row.name == record["name"]), None)
    shape = (record["batch"], record["heads"], record["kv_heads"], record["length"], overlap)
    return parse_problem({**said, **attention.problem_sizes(said["pattern"], *shape)})


def rows_of_report(report: Mapping[str, Any], path: Path, left: dict[str, str]) -> Iterator[Measurement]:
    """The rows of one report; ``left`` gets the names of others, with the reason."""
    for record in report["rows"]:
        own = record["results"].get(OURS)
        if own is None or record.get("data", PLAIN) != PLAIN or record["spec"]["arch"] != "sm_90a":
            continue
        try:
            spec = parse_spec(migrated(record["spec"])[0])
        except CodegenError as error:
            left[f"{path.name}: {record['name']}"] = str(error)
            continue
        if spec.dtype in FP8:
            left[f"{path.name}: {record['name']}"] = NOT_CHOSEN
            continue
        problem = (attention_problem if spec.op == "attention" else bsr_problem)(record, spec)
        packed = record.get("packed", False)
        measured = timing(spec, microseconds(own), record["source_sha256"], packed)
        if measured.earlier_source and not isinstance(measured.spec, str):
            left[f"{path.name}: {record['name']}"] = "of an earlier source, and no shipped spec computes so today"
            continue
        yield Measurement(
            problem=problem,
            device=report["device"],
            date=date_of(path),
            source=f"{path.relative_to(ROOT).as_posix()} {record['name']}",
            kernels=(measured,),
            dense=dense_of(record["results"]),
        )


SHAPES = (
    re.compile(r"B(?P<batch>\d+) H(?P<heads>\d+) S(?P<length>\d+) d\d+, "),
    re.compile(r"M(?P<m>\d+) (?:K(?P<k>\d+) N(?P<n>\d+)|N(?P<n2>\d+) K(?P<k2>\d+)), (?P<row_blocks>\d+) blocks "),
)


def receipt_problem(shape: str, spec: Spec) -> Problem:
    """The problem of the reference workload of a receipt.

    Raises:
        CodegenError: for a shape that no reference workload has.
    """
    found = next((match for each in SHAPES if (match := each.match(shape))), None)
    if found is None:
        raise CodegenError(f"no reference workload has the shape {shape!r}")
    told = {name: int(value) for name, value in found.groupdict().items() if value is not None}
    if spec.op == "attention":
        record = {"name": "", **told, "kv_heads": told["heads"] // spec.pack_gqa}
        return attention_problem(record, spec)
    sizes = {"m": told["m"], "n": told.get("n", told.get("n2")), "k": told.get("k", told.get("k2"))}
    said = said_by(spec)
    across = sizes["n"] if spec.op == "bsr_sddmm" else sizes["k"]
    density = round(told["row_blocks"] * said["block"]["cols"] / across, 6)
    return parse_problem({**said, **sizes, "density": density, "evenness": 1.0, "overlap": 0.0})


def rows_of_receipts(left: dict[str, str]) -> Iterator[Measurement]:
    """The row of each receipt of a kernel that ran on its own architecture."""
    for named in shipped_specs():
        path = receipt_path(named)
        try:
            receipt = read_receipt(named, path)
        except ReceiptError as error:
            left[named.stem] = str(error)
            continue
        if named.spec.dtype in FP8:
            left[named.stem] = NOT_CHOSEN
            continue
        ran = receipt.verification
        if ran is None or not receipt.measurement or ran.target != f"{named.spec.arch} cubin":
            continue
        first = receipt.measurement[0]
        peers = {each.peer: {"milliseconds": each.peer_milliseconds} for each in receipt.measurement}
        own = timing(named.spec, microseconds({"milliseconds": first.milliseconds}), None)
        if receipt.source.sha256 != source_sha256(render(named)):
            own = own.model_copy(update={"earlier_source": True})
        yield Measurement(
            problem=receipt_problem(first.shape, named.spec),
            device=ran.device,
            date=date_of(path),
            source=path.relative_to(ROOT).as_posix(),
            kernels=(own,),
            dense=dense_of(peers),
        )


def converted(left: dict[str, str]) -> list[Measurement]:
    """All rows of receipts and results, one per problem and device."""
    rows = list(rows_of_receipts(left))
    for name in REPORTS:
        path = RESULTS / name
        rows += rows_of_report(json.loads(path.read_text(encoding="utf-8")), path, left)
    path = RESULTS / DATA
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        rows += rows_of_report({"device": record["device"], "rows": [record]}, path, left)
    held_out = set(read_problems((), HELD_OUT))
    left |= {row.source: f"{HELD_OUT.name} has its problem" for row in rows if row.problem in held_out}
    return merged([row for row in rows if row.problem not in held_out])


def table(tuned: list[Path], left: dict[str, str]) -> str:
    """The text of the table."""
    kept = [row for row in read_rows(TABLE) if row.source.startswith(TUNED)] if TABLE.is_file() else []
    added = [row for path in tuned for row in read_rows(path)]
    # A tuner times every shipped spec and more: its rows take the place of those of a few kernels.
    rows = {place_of(row): row for row in converted(left)}
    for row in merged([*kept, *added]):
        earlier = rows.get(place_of(row))
        dense = row.dense or (earlier.dense if earlier else None)
        rows[place_of(row)] = row.model_copy(update={"dense": dense})
    return written(shared(list(rows.values())))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the table would change")
    parser.add_argument("--tuned", type=Path, nargs="+", default=[], metavar="FILE", help="rows of codegen tune")
    options = parser.parse_args(arguments)
    left: dict[str, str] = {}
    text = table(options.tuned, left)
    for name, why in left.items():
        print(f"left out: {name}: {why}")
    if options.check:
        same = TABLE.read_text(encoding="utf-8") == text
        print("the table is what results say" if same else STALE)
        return not same
    TABLE.write_text(text, encoding="utf-8")
    print(f"wrote {len(text.splitlines())} rows to {TABLE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
