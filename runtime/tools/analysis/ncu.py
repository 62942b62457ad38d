"""Nsight Compute: counters of a kernel's launch, read from its CSV output."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from codegen.errors import CodegenError, FileError
from codegen.files import read_bytes
from codegen.wording import alternatives, one_line

SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables"),
    *("SchedulerStats", "WarpStateStats", "LaunchStats", "Occupancy"),
)
MOST_BYTES = 16 << 20
_NUMBER = re.compile(r"-?(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d+)?(?:[eE][+-]?\d+)?")


@dataclass(frozen=True)
class Counters:
    """Counters of one launch.

    Attributes:
        kernel: name of the kernel.
        values: numeric metrics by name, in base units (ns, byte, %).
    """

    kernel: str
    values: Mapping[str, float]

    def first(self, *names: str) -> float | None:
        """The first available metric of several names; names differ between versions."""
        return next((self.values[name] for name in names if name in self.values), None)


def options(kernel: str, log: Path, skip: int) -> list[str]:
    """Options of ncu that profile one launch of a kernel, after skipping some."""
    return [
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)),
        *(option for section in SECTIONS for option in ("--section", section)),
        *("--clock-control", "none"),  # keep the clocks of an unprofiled run
        *("--kernel-name-base", "function", "--kernel-name", f"regex:^{re.escape(kernel)}$"),
        *("--launch-skip", str(skip), "--launch-count", "1"),
    ]


def read(path: Path, kernel: str) -> Counters:
    """Read the output of ncu ``--csv``.

    Raises:
        FileError: if the file is not such a table, or has no launch of the kernel.
    """
    try:
        return parse(read_bytes(path, MOST_BYTES).decode("utf-8", errors="replace"), kernel)
    except FileError:
        raise
    except CodegenError as error:
        raise FileError(path, str(error)) from None


def parse(text: str, kernel: str) -> Counters:
    """The last launch of a kernel in a table of ncu.

    Both formats are supported: one line per metric (``Metric Name``, ``Metric Value``), and one column per metric with
    units in the second line (``--page raw``).

    Raises:
        CodegenError: if the text is not such a table, or has no launch of the kernel.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("==")]
    start = next((i for i, line in enumerate(lines) if '"Kernel Name"' in line or line.startswith("ID,")), None)
    if start is None:
        raise CodegenError(f"is no table of ncu --csv{complaint(text)}")
    try:
        rows = list(csv.reader(io.StringIO("\n".join(lines[start:])), strict=True))
    except csv.Error as error:
        raise CodegenError(f"is no table of ncu --csv: {error}") from None
    header, *rest = rows
    launches = dict(_long(header, rest) if "Metric Name" in header else _wide(header, rest))
    names = dict.fromkeys(name for _, name in launches)
    found = [values for (_, name), values in launches.items() if _base(name) == kernel]
    if not found:
        raise CodegenError(
            f"has no launch of {kernel}; {alternatives(kernel, names) if names else 'it has none at all'}"
        )
    return Counters(kernel, found[-1])


def complaint(text: str) -> str:
    """The error in the output of ncu, or ""; with a remedy if only administrators may read counters."""
    told = re.search(r"^==ERROR== (.*)$", text, re.MULTILINE)
    if "ERR_NVGPUCTRPERM" in text:
        return (
            ": only administrators may read counters (ERR_NVGPUCTRPERM): run as root, or load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    return f": {one_line(told[1])}" if told else ""


def _base(name: str) -> str:
    """A kernel's name without arguments."""
    return name.partition("(")[0].split()[-1] if name.strip() else ""


Launch = tuple[str, str]
"""Number and kernel."""


def _long(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[tuple[Launch, dict[str, float]]]:
    names = ("ID", "Kernel Name", "Metric Name", "Metric Value")
    if missing := [name for name in names if name not in header]:
        raise CodegenError(f"is no table of ncu --csv: {' and '.join(missing)} is no column of it")
    launches: dict[Launch, dict[str, float]] = {}
    for row in rows:
        if len(row) != len(header):
            raise CodegenError(f"ends within a line, or was changed: {len(row)} of {len(header)} cells")
        number, kernel, metric, value = (row[header.index(name)] for name in names)
        values = launches.setdefault((number, kernel), {})
        if (found := _number(value)) is not None:
            values[metric] = found
    yield from launches.items()


def _wide(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[tuple[Launch, dict[str, float]]]:
    if "ID" not in header or "Kernel Name" not in header:
        raise CodegenError("is no table of ncu --csv: ID or Kernel Name is no column of it")
    for row in rows:
        if len(row) != len(header):
            raise CodegenError(f"ends within a line, or was changed: {len(row)} of {len(header)} cells")
        cells = dict(zip(header, row, strict=True))
        if cells["ID"]:  # the line of units has none
            numbers = {name: found for name, value in cells.items() if (found := _number(value)) is not None}
            yield (cells["ID"], cells["Kernel Name"]), numbers


def _number(text: str) -> float | None:
    """A value; None if it is unavailable or not a number."""
    return float(text.replace(",", "")) if _NUMBER.fullmatch(text.strip()) else None
