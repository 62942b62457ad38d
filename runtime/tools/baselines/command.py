"""``codegen bench``, after option parsing."""

from __future__ import annotations

import datetime
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from codegen.errors import CodegenError
from codegen.files import display_path
from codegen.library import NamedSpec
from codegen.tools.report import Report
from runtime.tools.baselines import run
from runtime.tools.baselines.compared import Compared, compare, times
from runtime.tools.baselines.run import Measured
from runtime.tools.baselines.stored import (
    WAYS,
    Baseline,
    Machine,
    Row,
    check_comparable,
    check_may_save,
    read_baseline,
    save,
)
from runtime.tools.bench.noise import Interval

WORDS = {"single": "single calls", "back_to_back": "back to back"}
VERDICTS = {
    "faster": "faster, beyond the noise of both",
    "slower": "SLOWER, beyond the noise of both",
    "noise": "within noise",
    "machine": "as much as a peer: the machine has changed, not the kernel",
}


@dataclass(frozen=True)
class Files:
    """Files that a run is compared with and stored in.

    Attributes:
        here: the machine of the run.
        before: the baseline, or None.
        target: the file to store the run in, or None.
        stored: contents of that file; its other rows are kept.
    """

    here: Machine
    before: Baseline | None
    target: Path | None
    stored: Baseline | None


def read(path: Path | None) -> Baseline | None:
    """The baseline in a file; None without a file."""
    return None if path is None else read_baseline(path)


def files_of(before: Baseline | None, baseline: Path | None, target: Path | None) -> Files:
    """The files of a run on this machine.

    Raises:
        BaselineError: for a baseline of another machine.
    """
    here = run.machine()
    if before is not None and baseline is not None:
        check_comparable(before, baseline, here)
    return Files(here, before, target, None if target is None else check_may_save(target, here))


def bench(
    told: Report,
    asked: Sequence[tuple[NamedSpec, Mapping[str, int]]],
    peers: Collection[str],
    repeats: int,
    files: Files,
) -> bool:
    """Time kernels, print and store results, and return whether no kernel is wrong or slower."""
    here, before, today = files.here, files.before, datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    told.note("machine", here.model_dump(), f"{here.device}, driver {here.driver}, torch {here.torch}")
    if before is not None and (before.machine.torch, before.machine.compiler) != (here.torch, here.compiler):
        there = before.machine
        both = [f"torch {each.torch}, {each.compiler}" for each in (there, here)]
        text = f"the baseline is of {both[0]}; this is {both[1]}"
        told.note("differs", {"torch": there.torch, "compiler": there.compiler}, text)
    bad, rows = 0, []
    for named, sizes in told.steps("timing", asked, lambda each: each[0].stem):
        try:
            found = run.measure(named, sizes, peers, repeats)
        except CodegenError as error:
            bad += 1
            told.row({"kernel": named.stem, "failure": str(error)})
            typer.echo(f"error: {error}", err=True)
            continue
        rows.append(found.row)
        if files.target is not None:  # after each kernel, so that an interruption loses no finished one
            save(files.target, files.stored, here, today, rows)
        bad += _tell(told, found, None if before is None else before.row(found.row), compared=before is not None)
    if files.target is not None and rows:
        told.note("saved", str(files.target), f"saved {len(rows)} rows to {display_path(files.target)}")
    return not bad


def _tell(told: Report, found: Measured, before: Row | None, *, compared: bool) -> bool:
    """Print timings and changes since the baseline; return whether the kernel is slower."""
    row = found.row
    _tell_timings(told, found)
    fields = {**row.model_dump(mode="json"), "missing": found.missing}
    changes: list[Compared] = [] if before is None else compare(row, before)
    if compared:
        fields["baseline"] = None if before is None else [asdict(each) | {"ratio": each.ratio} for each in changes]
        if before is None:
            told.say("    the baseline does not have this kernel and workload")
        elif before.source_sha256 != row.source_sha256:
            told.say("    the baseline was measured with another source of this kernel")
        for each in changes:
            moved = "".join(f"; {name} is {verdict}" for name, verdict in each.peers.items())
            text = f"{WORDS[each.way]}: {each.ratio:.3f} x as fast as before ({_spelt(each.before)} ms): "
            told.say(_fill(f"{text}{VERDICTS[each.verdict]}{moved}"))
    told.row(fields)
    return any(each.verdict == "slower" for each in changes)


def _tell_timings(told: Report, found: Measured) -> None:
    """Print the timings of a kernel and its peers."""
    row = found.row
    told.say(f"{row.kernel}: {row.workload}")
    ours = [times(row.own, way) for way in WAYS]
    for label, timings in {"ours": row.own, **row.peers}.items():
        flops = row.flops if label == "ours" else row.peer_flops.get(label, row.flops)
        both = [times(timings, way) for way in WAYS]
        speed = " / ".join(f"{flops / each.middle / 1e9:.0f}" for each in both)
        ratio = " / ".join(f"{each.middle / own.middle:.2f}" for each, own in zip(both, ours, strict=True))
        beside = [f"{speed} TFLOPS"] if flops else []
        beside += [f"{ratio} x our time"] if label != "ours" else []
        told.say(f"    {label}: {', '.join(beside)}".rstrip(": "))
        told.say(f"        {' / '.join(map(_spelt, both))} ms")
    for label, why in found.missing.items():
        told.say(_fill(f"{label}: no time: {why}"))


def _fill(text: str) -> str:
    return textwrap.fill(text, 80, initial_indent=" " * 4, subsequent_indent=" " * 8, break_long_words=False)


def _spelt(found: Interval) -> str:
    return f"{found.middle:.4g} ({found.low:.4g} to {found.high:.4g})"
