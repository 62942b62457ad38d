"""Measurements of a kernel and its peers in the same run: rows of benchmarks/results/ and of its receipt."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from codegen.errors import CodegenError
from codegen.files import read_text
from codegen.library import ROOT, find_spec
from codegen.migrations import migrated
from codegen.parse import parse_spec
from codegen.receipts import Receipt, source_sha256
from codegen.render import render
from codegen.spec import canonical
from codegen.wording import one_line
from runtime.result_rows import OURS, Result, ResultRow, documents, rows_in
from runtime.tools.report.kernels import Kernel

RESULTS = Path("benchmarks", "results")
SINGLE, BACK_TO_BACK = "tflops", "back_to_back_tflops"
COLD, WARM = "cold_us", "warm_us"  # with cold caches, and with all data in the caches
ERRORS = ("error", "absolute_error")
LEAST, MOST = 1e-9, 1e12
"""Upper bound of a figure in any unit; a larger figure is not a measurement."""
SHAPE = ("batch", "heads", "kv_heads", "length", "height", "size", "columns", "row_blocks", "density", "pattern")


@dataclass(frozen=True)
class Call:
    """One call of a row.

    Attributes:
        label: ``ours``, or the peer.
        single: figure of single calls; see ``back_to_back``.
        back_to_back: figure of calls back to back. Both are TFLOPS, or microseconds with cold and with warm caches;
            None if not measured.
        error: error relative to float64; None if the row has none.
    """

    label: str
    single: float | None
    back_to_back: float | None
    error: float | None


@dataclass(frozen=True)
class Row:
    """A workload on one data set, in one run.

    Attributes:
        file: file that records it.
        name: name of the workload.
        shape: sizes in words.
        data: the data set; "" if there is only one.
        device: device of the run.
        unit: ``TFLOPS``, or ``us``, for which less is better.
        calls: ours first, then peers in the order of measurement.
        failed: calls without a time, and the reasons.
        is_current: whether the row was measured with the current source.
    """

    file: str
    name: str
    shape: str
    data: str
    device: str
    unit: str
    calls: tuple[Call, ...]
    failed: tuple[tuple[str, str], ...]
    is_current: bool

    @property
    def ours(self) -> Call | None:
        """Our call."""
        return next((call for call in self.calls if call.label == OURS), None)

    def ratio(self, figure: str) -> float | None:
        """Speedup over the best peer, by ``single`` or ``back_to_back``."""
        own = getattr(self.ours, figure, None)
        peers = [getattr(call, figure) for call in self.calls if call.label != OURS]
        known = [value for value in peers if value is not None]
        if not own or not known:
            return None
        ratio: float = own / max(known) if self.unit == "TFLOPS" else min(known) / own
        return ratio

    @property
    def best(self) -> str:
        """The fastest peer in single calls; "" without peers."""
        known = {call.label: call.single for call in self.calls if call.label != OURS and call.single is not None}
        sign = 1 if self.unit == "TFLOPS" else -1
        return max(known, key=lambda label: sign * known[label], default="")


Found = Mapping[str, Sequence[tuple[str, ResultRow]]]
"""Files and rows, by the hash of the spec they were measured with."""


def results(root: Path = ROOT) -> dict[str, str]:
    """Measurement files of a tree, by path; none for an installed package.

    Raises:
        CodegenError: for an unreadable file.
    """
    folder = root / RESULTS
    paths = sorted(path for path in folder.glob("*") if path.suffix in (".json", ".jsonl")) if folder.is_dir() else []
    return {path.relative_to(root).as_posix(): read_text(path) for path in paths}


def by_spec(texts: Mapping[str, str]) -> Found:
    """Rows of files; if a file has a data set twice, the newer row.

    Raises:
        CodegenError: for a file that is not JSON, or a row with a missing or invalid field.
    """
    by_hash: dict[str, dict[str, tuple[str, ResultRow]]] = defaultdict(dict)
    hashes: dict[str, str] = {}
    for file, text in texts.items():
        for place, document in documents(file, text, PurePosixPath(file).suffix == ".jsonl"):
            for found in rows_in(place, document):
                row = found.result_row()
                spelt = canonical(row.spec)
                if spelt not in hashes:
                    hashes[spelt] = hash_of(row.spec)
                key = json.dumps([file, row.title, row.data, row.device, _shape(row)])
                by_hash[hashes[spelt]][key] = (file, row)
    return {spec: list(rows.values()) for spec, rows in by_hash.items()}


def hash_of(spec: Mapping[str, Any]) -> str:
    """The hash of a row's spec in the current format; "" for a spec that is no longer valid."""
    try:
        return parse_spec(migrated(spec)[0]).hash
    except CodegenError:
        return ""


def rows_of(kernel: Kernel, found: Found) -> list[Row]:
    """The measurements of a kernel, those of its receipt first."""
    rows = list(_of_receipt(kernel.receipt, is_current=kernel.is_of_receipt)) if kernel.receipt else []
    own = found.get(kernel.named.spec.hash, ())
    # Most rows are of the same spec without a file, whose kernel has another name.
    hashes = {kernel.source_sha256, source_sha256(render(find_spec(kernel.named.spec)))} if own else set()
    rows += [row_of(file, row, is_current=row.source_sha256 in hashes) for file, row in own]
    return [row for row in rows if row.calls]


def current(rows: Sequence[Row]) -> list[Row]:
    """The rows of the current source, or all rows if it has none."""
    return [row for row in rows if row.is_current] or list(rows)


def _of_receipt(receipt: Receipt, *, is_current: bool) -> Iterator[Row]:
    """The workloads of a receipt, each with all peers."""
    device = receipt.verification.device if receipt.verification else ""
    for shape in dict.fromkeys(each.shape for each in receipt.measurement):
        of_shape = [each for each in receipt.measurement if each.shape == shape]
        own = of_shape[0]
        calls = [Call(OURS, own.tflops or own.milliseconds * 1e3, None, None)]
        for each in of_shape:  # by our FLOPs, if a peer does more
            useful = own.tflops * own.milliseconds / each.peer_milliseconds
            calls.append(Call(each.peer, round(useful, 1) if own.tflops else each.peer_milliseconds * 1e3, None, None))
        unit = "TFLOPS" if own.tflops else "us"
        yield Row("the receipt", "reference workload", shape, "", device, unit, tuple(calls), (), is_current)


def row_of(file: str, row: ResultRow, *, is_current: bool) -> Row:
    """Convert a row of a file to a row of a report."""
    results = {label: _measured(result) for label, result in row.results.items()}
    in_tflops = any(SINGLE in result for result in results.values())
    calls = [
        Call(label, *_figures(result, in_tflops), result.get("absolute_error", result.get("error")))
        for label, result in results.items()
    ]
    return Row(
        file,
        one_line(row.title),
        _shape(row),
        one_line(row.data),
        one_line(row.device),
        "TFLOPS" if in_tflops else "us",
        tuple(sorted(calls, key=lambda call: call.label != OURS)),
        tuple((label, one_line(why)) for label, why in row.failed.items()),
        is_current,
    )


def _measured(result: Result) -> dict[str, float]:
    """The measured figures of a result; a time or rate of 0, or beyond any GPU, was not measured."""
    figures = result.model_dump(exclude_none=True)
    return {name: value for name, value in figures.items() if _is_measured(name, value)}


def _is_measured(name: str, value: float) -> bool:
    return (name in ERRORS and value == 0) or LEAST <= value <= MOST


def _figures(result: Mapping[str, float], in_tflops: bool) -> tuple[float | None, float | None]:
    """The figures of single calls, then back to back; in microseconds, with cold, then with warm caches."""
    if in_tflops:
        return result.get(SINGLE), result.get(BACK_TO_BACK)
    if "milliseconds" in result:
        return round(result["milliseconds"] * 1e3, 2), None
    return result.get(COLD), result.get(WARM)


def _shape(row: ResultRow) -> str:
    sizes = [(name, getattr(row, name)) for name in SHAPE]
    return ", ".join(f"{name} {one_line(str(size))}" for name, size in sizes if size not in (None, ""))
