"""Stored timings, with which a later run on the same device and driver is compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from codegen.errors import MOST_OF_PLACE, CodegenError
from codegen.files import is_file, read_text, write_if_changed
from codegen.plain import json_model
from codegen.wording import one_line

WAYS = ("single", "back_to_back")
"""Timing modes: single calls after a pause, and calls back to back (docs/notebook/measuring.md)."""
Milliseconds = Annotated[float, Field(gt=0)]
Samples = Annotated[tuple[Milliseconds, ...], Field(min_length=2, strict=False)]


class BaselineError(CodegenError):
    """An invalid baseline, or one of another device or driver."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Timings(_Model):
    """Repeats of a call's timings, in milliseconds."""

    single: Samples
    back_to_back: Samples


class Row(_Model):
    """A kernel on a workload, beside its peers.

    Attributes:
        kernel: name of the kernel.
        spec_hash: hash of its spec.
        source_sha256: hash of its source.
        workload: in words.
        flops: floating-point operations of the kernel; 0 if it has none.
        own: timings of the kernel.
        peers: timings of peers by name.
        peer_flops: floating-point operations of peers with a different amount of work.
    """

    kernel: str
    spec_hash: str
    source_sha256: str
    workload: str
    flops: float
    own: Timings
    peers: dict[str, Timings]
    peer_flops: dict[str, float]

    @property
    def key(self) -> tuple[str, str]:
        """Key that matches rows of two runs."""
        return self.kernel, self.workload


class Machine(_Model):
    """The machine and software that timings depend on."""

    device: str
    driver: str
    torch: str
    compiler: str


class Baseline(_Model):
    """The file."""

    format: Literal[1]
    machine: Machine
    date: str
    rows: Annotated[tuple[Row, ...], Field(strict=False)]

    def row(self, like: Row) -> Row | None:
        """The row of the same kernel and workload."""
        return next((row for row in self.rows if row.key == like.key), None)


def read_baseline(path: Path) -> Baseline:
    """Read a baseline.

    Raises:
        BaselineError: if the file is not a baseline.
        FileError: if the file cannot be read.
    """
    text, place = read_text(path), one_line(str(path), MOST_OF_PLACE)
    try:
        return json_model(Baseline, text)
    except CodegenError as error:
        raise BaselineError(f"{place}: is not a baseline of codegen bench: {error}; nothing was changed") from None


def check_comparable(baseline: Baseline, path: Path, here: Machine) -> None:
    """Refuse a baseline of another device or driver.

    Raises:
        BaselineError: with a remedy.
    """
    there = baseline.machine
    if (there.device, there.driver) != (here.device, here.driver):
        raise BaselineError(
            f"{one_line(str(path), MOST_OF_PLACE)}: was measured on {_told(there)}; this is {_told(here)}, whose "
            "timings are not comparable: measure a baseline here, with --save-baseline and another file"
        )


def _told(machine: Machine) -> str:
    return f"{one_line(machine.device)}, driver {one_line(machine.driver)}"


def check_may_save(path: Path, here: Machine) -> Baseline | None:
    """The baseline to which rows will be added; None for a new file.

    Raises:
        BaselineError: if the file holds anything else, or timings of another device, driver, torch or compiler.
    """
    if not is_file(path):
        return None
    found = read_baseline(path)
    check_comparable(found, path, here)
    there = found.machine
    if (there.torch, there.compiler) != (here.torch, here.compiler):
        raise BaselineError(
            f"{one_line(str(path), MOST_OF_PLACE)}: holds timings of torch {one_line(there.torch)}, "
            f"{one_line(there.compiler)}; this is torch {here.torch}, {here.compiler}: "
            "use --save-baseline with another file"
        )
    return found


def save(path: Path, before: Baseline | None, here: Machine, date: str, rows: Sequence[Row]) -> None:
    """Write rows; rows of other kernels and workloads are kept."""
    new = {row.key for row in rows}
    kept = [] if before is None else [row for row in before.rows if row.key not in new]
    ordered = sorted([*kept, *rows], key=lambda row: row.key)
    found = Baseline(format=1, machine=here, date=date, rows=tuple(ordered))
    write_if_changed(path, found.model_dump_json(indent=1) + "\n")
