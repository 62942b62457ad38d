"""What was measured of a kernel, beside peers of the same run: rows of benchmarks/results/, and of its receipt."""

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
from codegen.plain import json_value
from codegen.receipts import Receipt, source_sha256
from codegen.render import render
from codegen.wording import one_line, shown
from runtime.report.kernels import Kernel

RESULTS = Path("benchmarks", "results")
OURS = "ours"
SINGLE, BACK_TO_BACK = "tflops", "back_to_back_tflops"
COLD, WARM = "cold_us", "warm_us"  # with nothing of it in the caches, and with all
FIGURES = (SINGLE, BACK_TO_BACK, COLD, WARM, "milliseconds", "error", "absolute_error")
ERRORS = ("error", "absolute_error")
LEAST, MOST = 1e-9, 1e12
"""Of a figure, whatever its unit: what is beyond was not measured."""
SHAPE = ("batch", "heads", "kv_heads", "length", "height", "size", "columns", "row_blocks", "density", "pattern")


@dataclass(frozen=True)
class Call:
    """One call of a row.

    Attributes:
        label: ``ours``, or the peer.
        single: of single calls, and
        back_to_back: of calls one after the other, in TFLOPS; or microseconds with cold and with warm caches. None for
            what was not measured.
        error: against float64; None where the row has none.
    """

    label: str
    single: float | None
    back_to_back: float | None
    error: float | None


@dataclass(frozen=True)
class Row:
    """A workload, on one data set, of one run.

    Attributes:
        file: where it is on record.
        name: of the workload.
        shape: its sizes, in words.
        data: the data set; "" where there is one only.
        device: that it ran on.
        unit: ``TFLOPS``, or ``us``, of which fewer are better.
        calls: ours first, peers as they were measured.
        failed: calls that have no time, and why.
        is_current: whether the kernel's source is that of today.
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
        """Return by how much we are faster than the best peer, by ``single`` or ``back_to_back``."""
        own = getattr(self.ours, figure, None)
        peers = [getattr(call, figure) for call in self.calls if call.label != OURS]
        known = [value for value in peers if value is not None]
        if not own or not known:
            return None
        ratio: float = own / max(known) if self.unit == "TFLOPS" else min(known) / own
        return ratio

    @property
    def best(self) -> str:
        """The peer that is fastest in single calls; "" without one."""
        known = {call.label: call.single for call in self.calls if call.label != OURS and call.single is not None}
        sign = 1 if self.unit == "TFLOPS" else -1
        return max(known, key=lambda label: sign * known[label], default="")


Found = Mapping[str, Sequence[tuple[str, Mapping[str, Any]]]]
"""Files and rows, by the hash of the spec they were measured with."""


def results(root: Path = ROOT) -> dict[str, str]:
    """Return the files of measurements of a tree, by their places; none of an installed package.

    Raises:
        CodegenError: for a file that cannot be read.
    """
    folder = root / RESULTS
    paths = sorted(path for path in folder.glob("*") if path.suffix in (".json", ".jsonl")) if folder.is_dir() else []
    return {path.relative_to(root).as_posix(): read_text(path) for path in paths}


def by_spec(texts: Mapping[str, str]) -> Found:
    """Return the rows of files that name a spec; of a data set measured twice the newest.

    Raises:
        CodegenError: for a file that is not JSON.
    """
    found: dict[str, dict[str, tuple[str, Mapping[str, Any]]]] = defaultdict(dict)
    hashes: dict[str, str] = {}
    for file, text in texts.items():
        lines = text.split("\n")[:-1] if PurePosixPath(file).suffix == ".jsonl" else [text]
        for line in filter(None, lines):
            for row in _rows(_read(file, line), {}):
                spelt = json.dumps(row["spec"], sort_keys=True)
                if spelt not in hashes:
                    hashes[spelt] = hash_of(row["spec"])
                place = json.dumps([file, _name(row), row.get("data"), row.get("device"), _shape(row)])
                found[hashes[spelt]][place] = (file, row)
    return {spec: list(rows.values()) for spec, rows in found.items()}


def _read(file: str, text: str) -> Any:
    try:
        return json_value(text)
    except CodegenError as error:
        raise CodegenError(f"{file}: {error}") from None


def _rows(node: Any, around: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield rows that have a spec and results, with the device that they or the report around them name."""
    if isinstance(node, list):
        for part in node:
            yield from _rows(part, around)
    elif isinstance(node, dict):
        around = {**around, **{name: node[name] for name in ("device",) if isinstance(node.get(name), str)}}
        spec = node.get("spec")
        results = node.get("results", {OURS: node} if "milliseconds" in node else None)
        if isinstance(spec, dict) and isinstance(results, dict):
            inner = spec if isinstance(spec.get("spec"), dict) else {}  # with its hashes beside it
            yield {**around, **node, "results": results, **inner}
        else:
            for part in node.values():
                yield from _rows(part, around)


def hash_of(spec: Mapping[str, Any]) -> str:
    """Return the hash of a row's spec, with the names of today; "" for one that is none any more."""
    try:
        return parse_spec(migrated(spec)[0]).hash
    except CodegenError:
        return ""


def rows_of(kernel: Kernel, found: Found) -> list[Row]:
    """Return what was measured of a kernel: its receipt's workload first."""
    rows = list(_of_receipt(kernel.receipt, is_current=kernel.is_of_receipt)) if kernel.receipt else []
    own = found.get(kernel.named.spec.hash, ())
    # Most rows are of the same spec without a file, whose kernel has another name.
    hashes = {kernel.source_sha256, source_sha256(render(find_spec(kernel.named.spec)))} if own else set()
    rows += [row_of(file, row, is_current=_word(row.get("source_sha256")) in hashes) for file, row in own]
    return [row for row in rows if row.calls]


def current(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of today's source, or all where there are none of it."""
    return [row for row in rows if row.is_current] or list(rows)


def _of_receipt(receipt: Receipt, *, is_current: bool) -> Iterator[Row]:
    """Yield the workloads of a receipt, with all peers of each."""
    device = receipt.verification.device if receipt.verification else ""
    for shape in dict.fromkeys(each.shape for each in receipt.measurement):
        of_shape = [each for each in receipt.measurement if each.shape == shape]
        own = of_shape[0]
        calls = [Call(OURS, own.tflops or own.milliseconds * 1e3, None, None)]
        for each in of_shape:  # by the work that we had to do, where a peer does more
            useful = own.tflops * own.milliseconds / each.peer_milliseconds
            calls.append(Call(each.peer, round(useful, 1) if own.tflops else each.peer_milliseconds * 1e3, None, None))
        unit = "TFLOPS" if own.tflops else "us"
        yield Row("the receipt", "reference workload", shape, "", device, unit, tuple(calls), (), is_current)


def row_of(file: str, row: Mapping[str, Any], *, is_current: bool) -> Row:
    """Return a row as reports have it."""
    results = {label: _numbers(file, f"{_name(row)}: {label}", told) for label, told in row["results"].items()}
    in_tflops = any(SINGLE in result for result in results.values())
    calls = [
        Call(label, *_figures(result, in_tflops), result.get("absolute_error", result.get("error")))
        for label, result in results.items()
    ]
    reasons = row.get("failed")
    failed = tuple((label, _word(why)) for label, why in reasons.items()) if isinstance(reasons, dict) else ()
    return Row(
        file,
        _name(row),
        _shape(row),
        _word(row.get("data", "")),
        _word(row.get("device", "")),
        "TFLOPS" if in_tflops else "us",
        tuple(sorted(calls, key=lambda call: call.label != OURS)),
        failed,
        is_current,
    )


def _numbers(file: str, where: str, result: Any) -> dict[str, float]:
    """Return the figures of a result that pages tell: a time or a rate that nothing has, as 0 or infinity, is none.

    Raises:
        CodegenError: if one of them is no number.
    """
    told = result if isinstance(result, dict) else {"result": result}
    found = {name: told[name] for name in ("result", *FIGURES) if told.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CodegenError(f"{file}: {one_line(where)}: {name} is {shown(value)}; a number is expected")
    return {name: float(value) for name, value in found.items() if _is_measured(name, value)}


def _is_measured(name: str, value: float) -> bool:
    return (name in ERRORS and value == 0) or LEAST <= value <= MOST


def _word(value: Any) -> str:
    """Return a part of a row in words, as pages have it; "" for nothing."""
    return one_line(value) if isinstance(value, str) else "" if value in (None, [], {}) else shown(value)


def _figures(result: Mapping[str, float], in_tflops: bool) -> tuple[float | None, float | None]:
    """Return what is told of a result: of single calls, then back to back."""
    if in_tflops:
        return result.get(SINGLE), result.get(BACK_TO_BACK)
    if "milliseconds" in result:
        return round(result["milliseconds"] * 1e3, 2), None
    return result.get(COLD), result.get(WARM)


def _name(row: Mapping[str, Any]) -> str:
    return _word(row.get("name") or row.get("layer") or "")


def _shape(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {word}" for name in SHAPE if (word := _word(row.get(name))))
