"""Shared code of the benchmarks: arguments, checks of results before timing, a budget, tables and pictures."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import gc
import importlib.metadata
import importlib.util
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from records import (
    BACK_TO_BACK,
    DASH,
    OURS,
    PLAIN,
    SINGLE,
    absent_peers,
    best_peer,
    both,
    failures,
    ratio_to_best,
    speeds,
)
from rich.console import Console
from rich.table import Table

from codegen.json_rows import json_rows
from runtime.compile import toolchain
from runtime.tools.bench.timing import ROUNDS, Call, back_to_back, single_calls
from runtime.verify.run import driver_version

Fields = dict[str, Any]
TOLERANCE = 1e-2  # of the largest element of a part; a correct fp16 result is within about 2e-3
WAYS = "single calls / back to back"
OWN_STYLE = {"color": "#1b7f5c", "linewidth": 2.5}


@dataclass(frozen=True)
class Peer:
    """How a peer is called, and when it can be.

    Attributes:
        make: takes a problem, returns its calls by label; what cannot compute the problem raises.
        packages: it needs one of these beside torch; none by default.
        opt_in: only where --peers names it.
    """

    make: Callable[[Any], dict[str, Call]]
    packages: tuple[str, ...] = ()
    opt_in: bool = False

    @property
    def installed(self) -> bool:
        """Whether its packages are there."""
        return not self.packages or any(map(importlib.util.find_spec, self.packages))


class Row(Protocol):
    """What every benchmark's rows have."""

    @property
    def name(self) -> str: ...
    @property
    def peers(self) -> tuple[str, ...]: ...
    @property
    def groups(self) -> tuple[str, ...]: ...
    @property
    def quick(self) -> bool: ...


class Named(Protocol):
    """What the rows of :func:`measure_rows` have."""

    @property
    def name(self) -> str: ...


AnyRow = TypeVar("AnyRow", bound=Row)


def reason(error: Exception) -> str:
    """An exception in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def make_calls(
    makers: Sequence[Callable[[Any], dict[str, Call]]], problem: Any
) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls of ours and of the peers, and why others of them cannot compute the problem."""
    calls: dict[str, Call] = {}
    failed: dict[str, str] = {}
    for make in makers:
        try:
            calls |= make(problem)
        except Exception as error:
            failed[make.__name__] = reason(error)
    return calls, failed


def check_calls(
    calls: Mapping[str, Call],
    error_of: Callable[[str, Any], float],
    tolerance: float = TOLERANCE,
    of: str = "the largest element",
) -> tuple[dict[str, float], dict[str, str]]:
    """The errors of the calls whose results are right, and what is wrong with the others.

    Args:
        calls: by label.
        error_of: takes a label and a result; returns its error.
        tolerance: the largest error of a right result.
        of: what errors are relative to.
    """
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    for label, call in calls.items():
        try:
            error = error_of(label, call())
        except Exception as failure:
            failed[label] = reason(failure)
            continue
        if error <= tolerance:
            errors[label] = error
        else:
            failed[label] = f"wrong result: off by {error:.1e} of {of}"
    return errors, failed


def time_calls(calls: dict[str, Call], work: float, repeats: int, rounds: int = ROUNDS) -> dict[str, Fields]:
    """Time calls in both ways; return milliseconds and effective TFLOPS by label."""
    single, long = single_calls(calls, repeats=repeats), back_to_back(calls, rounds=rounds)
    return {
        label: {
            "milliseconds": round(single[label], 4),
            SINGLE: round(work / single[label] / 1e9, 1),
            "back_to_back_milliseconds": round(long[label], 4),
            BACK_TO_BACK: round(work / long[label] / 1e9, 1),
        }
        for label in calls
    }


def check_and_time(
    makers: Sequence[Callable[[Any], dict[str, Call]]],
    problem: Any,
    error_of: Callable[[str, Any], float],
    work: float,
    quick: bool,
) -> Fields:
    """Make every call, check its result, and time those that are right, in both ways.

    Args:
        makers: of ours and of the peers.
        problem: their argument.
        error_of: takes a call's label and its result; returns the worst error, relative to the largest element.
        work: FLOPs that the problem needs.
        quick: fewer repeats.

    Returns:
        ``results`` by label (milliseconds, effective TFLOPS, error), and why the ``failed`` ones have none.
    """
    calls, failed = make_calls(makers, problem)
    errors, wrong = check_calls(calls, error_of)
    right = {label: calls[label] for label in errors}
    times = time_calls(right, work, 7 if quick else 21, 1 if quick else ROUNDS)
    results = {label: {**time, "error": float(f"{errors[label]:.2e}")} for label, time in times.items()}
    return {"results": results, "failed": failed | wrong}


def free_memory() -> None:
    """Give back what a row held, and let what is compiled for each row be compiled as often as it likes."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


class Of(Protocol):
    """What ``run_rows`` needs of a row."""

    @property
    def name(self) -> str: ...


AnyNamed = TypeVar("AnyNamed", bound=Of)


def matching(rows: Sequence[AnyNamed], globs: Sequence[str] | None) -> list[AnyNamed]:
    """The rows whose names match one of the globs; all of them without globs."""
    return [row for row in rows if any(fnmatch.fnmatch(row.name, glob) for glob in globs or ["*"])]


def run_rows(
    rows: Sequence[AnyNamed],
    record: Callable[[AnyNamed], Fields],
    failed: Callable[[AnyNamed], Fields],
    *,
    line: Callable[[Fields], str],
    about: Fields,
    path: Path | None,
    budget: float | None,
    after: Callable[[AnyNamed], None],
) -> None:
    """Run rows until the budget is spent; each is appended to the file when it is done.

    Args:
        rows: rows of a benchmark.
        record: measures a row. If it raises an error, the other rows run.
        failed: fields of a record whose inputs could not be made, without its results.
        line: a record in a line, which is printed.
        about: conditions of the measurement, which each record gets.
        path: a file of JSON lines, or None.
        budget: seconds after which no row starts, or None.
        after: called behind each row.
    """
    began = time.monotonic()
    about = {**about, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
    for number, row in enumerate(rows):
        if budget is not None and time.monotonic() - began > budget:
            print(f"not run: {', '.join(each.name for each in rows[number:])}")
            break
        try:
            found = {**record(row), **about}
        except Exception as error:
            found = {**failed(row), "kernels": [], "results": {}, "failed": {OURS: reason(error)}, **about}
        if path:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found, allow_nan=False) + "\n")
        print(line(found), flush=True)
        after(row)
    print(f"{time.monotonic() - began:.0f} s")


def environment(packages: Sequence[str]) -> Fields:
    """The conditions of the measurement."""
    versions = {"compiler": toolchain.compiler_version()[1], "cuDNN": str(torch.backends.cudnn.version())}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"device": torch.cuda.get_device_name(), "driver": driver_version(), "versions": versions}


def target(record: Fields) -> str:
    """Target of a row: TFLOPS, or a multiple of the best peer's."""
    if record.get("target_ratio"):
        return f"{record['target_ratio']}x"
    return f"{record['target_tflops']:.0f}" if record["target_tflops"] else DASH


def cells(record: Fields) -> list[str]:
    """A row of the printed table."""
    results = record["results"]
    own, best = results.get(OURS), [best_peer(record, figure) for figure in (SINGLE, BACK_TO_BACK)]
    of_best = [results.get(peer, {}).get(figure) for peer, figure in zip(best, (SINGLE, BACK_TO_BACK), strict=True)]
    return [
        record["name"],
        both(own["milliseconds"], own.get("back_to_back_milliseconds"), ".3f") if own else DASH,
        speeds(own),
        target(record),
        both(*of_best),
        " / ".join(dict.fromkeys(peer for peer in best if peer)) or DASH,
        both(*(ratio_to_best(record, figure) for figure in (SINGLE, BACK_TO_BACK)), ".2f"),
        f"{own['error']:.0e}" if own else DASH,
    ]


def show(report: Fields, remarks: Sequence[str] = ()) -> None:
    """Print the table, below it some remarks, what failed and what was not run."""
    table = Table(title=f"{report['device']}, driver {report['driver']}; effective TFLOPS, medians of one run, {WAYS}")
    for heading in ("row", "ms", "ours", "target", "best peer", "which", "ratio", "error"):
        table.add_column(heading, justify="left" if heading in ("row", "which") else "right")
    for record in report["rows"]:
        table.add_row(*cells(record))
    print_report(table, report, remarks)


def show_cells(report: Fields, headings: Sequence[str], rows: Sequence[Sequence[str]], unit: str = "") -> None:
    """Print a table of cells, below it what failed and what was not run.

    Args:
        report: with device, driver and date.
        headings: of the columns.
        rows: the cells.
        unit: what its title says beside the machine.
    """
    table = Table(title=f"{report['device']}, driver {report['driver']}, {report['date']}{unit}")
    for heading in headings:
        table.add_column(heading)
    for each in rows:
        table.add_row(*each)
    print_report(table, report, width=180)


def print_report(table: Table, report: Fields, remarks: Sequence[str] = (), width: int = 120) -> None:
    """Print a table, below it some remarks, what failed and what was not run."""
    console = Console(width=None if Console().is_terminal else width, highlight=False)
    console.print(table)
    lines = list(remarks)
    for (label, why), rows in failures(report).items():
        lines.append(f"{', '.join(rows)}: {label} has no time: {why}")
    lines += [f"peer not installed: {name}, for {', '.join(rows)}" for name, rows in absent_peers(report).items()]
    if report.get("not_run"):
        lines.append(f"rows not run: {', '.join(report['not_run'])}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def of_group(report: Fields, group: str) -> list[Fields]:
    """The records of a group; a report that is older than groups has main rows only."""
    return [record for record in report["rows"] if group in record.get("groups", ("main",))]


def can_plot() -> bool:
    """Prepare matplotlib for files; say so and return False if it is missing."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        print("no plot: matplotlib is not installed; draw it elsewhere with --from FILE --plot FILE")
        return False
    mpl.use("agg")
    return True


def plot_rows(report: Fields, records: list[Fields], path: Path, subject: str) -> None:
    """Draw ours, the best peer and the target of each row as bars."""
    from matplotlib import pyplot

    records = records[::-1]  # the first row on top
    own = [record["results"].get(OURS, {}).get("tflops", 0) for record in records]
    best = [record["results"].get(best_peer(record), {}).get("tflops", 0) for record in records]
    figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.42 * len(records)), layout="constrained")
    places = range(len(records))
    axes.barh([place + 0.2 for place in places], own, height=0.38, label="this project", color="#1b7f5c")
    axes.barh([place - 0.2 for place in places], best, height=0.38, label="best peer", color="#b5b5b5")
    # A target may be so many times what the best peer has.
    ratios = [(record.get("target_ratio") or 0) * tflops for record, tflops in zip(records, best, strict=True)]
    targets = [record["target_tflops"] or ratio or None for record, ratio in zip(records, ratios, strict=True)]
    axes.plot(targets, [place + 0.2 for place in places], "|", markersize=14, color="black", label="target")
    for place, record in zip(places, records, strict=True):
        axes.text(4, place - 0.2, best_peer(record) or "no peer", va="center", fontsize=7)
    axes.margins(y=0.01)
    axes.set_yticks(places, [record["name"] for record in records])
    axes.set_xlabel("effective TFLOPS")
    axes.set_title(f"{subject} on {report['device']}, driver {report['driver']}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a picture as SVG, the same bytes at any time."""
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    print(f"wrote {path.with_suffix('.svg')}")


def peer_names(peers: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of NAME,... for --peers."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in peers]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(peers)}")
        return names

    return read


def report_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser of what every benchmark with a report of rows takes."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw, allow_abbrev=False)
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no row after this time; skipped rows are listed"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every median")
    parser.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="show earlier runs' JSON; several runs on equal machines are merged, and later rows replace earlier ones",
    )
    return parser


def parse_arguments(
    doc: str | None,
    rows: Sequence[Row],
    groups: Sequence[str],
    peers: Mapping[str, Peer],
    arguments: list[str] | None = None,
    data: Collection[str] = (),
) -> argparse.Namespace:
    """The options that every benchmark takes, and ``--data`` if there are data sets to choose from."""
    parser = report_parser(doc)
    names = [row.name for row in rows]
    parser.add_argument("--rows", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--groups", nargs="+", choices=groups, metavar="NAME", help=f"of {', '.join(groups)}")
    parser.add_argument("--quick", action="store_true", help="a few rows, fewer repeats")
    usual = [name for name, peer in peers.items() if not peer.opt_in]
    opt_in = ", ".join(name for name in peers if name not in usual)
    every = f"of {','.join(peers)}" + (f"; {opt_in} only if named here" if opt_in else "")
    parser.add_argument("--peers", type=peer_names(peers), default=usual, metavar="NAME,...", help=every)
    if data:
        add_data_option(parser, data)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw them, as .svg")
    options = parser.parse_args(arguments)
    if data:
        options.data = chosen_data(options, data)
    return options


def add_data_option(parser: argparse.ArgumentParser, data: Collection[str], default: str = PLAIN) -> None:
    """Let a benchmark take names of data sets, or "all"."""
    choices = (*data, "all")
    told = f"of {', '.join(choices)}; by default {default}"
    parser.add_argument("--data", nargs="+", choices=choices, default=[default], metavar="NAME", help=told)


def chosen_data(options: argparse.Namespace, data: Collection[str]) -> list[str]:
    """The data sets that --data asks for, each once."""
    return list(data if "all" in options.data else dict.fromkeys(options.data))


def chosen_rows(options: argparse.Namespace, rows: Sequence[AnyRow]) -> list[AnyRow]:
    """The rows that --rows, --groups or --quick ask for; without any of them, all."""
    if options.rows or options.groups:
        names, groups = options.rows or (), set(options.groups or ())
        return [row for row in rows if row.name in names or groups.intersection(row.groups)]
    return [row for row in rows if row.quick or not options.quick]


def measure(
    options: argparse.Namespace,
    rows: Sequence[AnyRow],
    peers: Mapping[str, Peer],
    run_row: Callable[[AnyRow, list[str], bool], Fields],
    begin: Fields,
    between: Callable[[], None],
) -> Fields:
    """Run rows until the budget is spent; the JSON is written after each, so that a crash costs no finished one.

    Args:
        options: from the command line.
        rows: to run, in this order.
        peers: all there are.
        run_row: takes a row, the names of the installed peers among the requested ones, and whether to be quick.
        begin: the first entries of the report.
        between: called after each row.
    """
    begun = time.monotonic()
    absent = [name for name in options.peers if not peers[name].installed]
    present = [name for name in options.peers if name not in absent]
    report: Fields = {**begin, "rows": [], "not_run": [row.name for row in rows]}
    for row in rows:
        if options.budget is not None and time.monotonic() - begun > options.budget:
            break
        missed = [name for name in absent if name in row.peers]
        report["rows"].append({**run_row(row, present, options.quick), "not_installed": missed})
        report["not_run"].remove(row.name)
        print(" ".join(cells(report["rows"][-1])), flush=True)
        if options.json:
            options.json.write_text(json_rows(report))
        between()
    return report


def measure_rows(
    options: argparse.Namespace,
    rows: Sequence[Named],
    record_of: Callable[[Any], Fields],
    packages: Sequence[str],
) -> Fields:
    """Run rows that have no peers to choose from, as :func:`measure` does.

    Args:
        options: from the command line of :func:`report_parser`.
        rows: to run, in this order.
        record_of: takes a row, returns its record.
        packages: whose versions the report has.
    """
    begun = time.monotonic()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    report: Fields = {**environment(packages), "date": date, "rows": [], "not_run": [row.name for row in rows]}
    for row in rows:
        if options.budget is not None and time.monotonic() - begun > options.budget:
            break
        report["rows"].append(record_of(row))
        report["not_run"].remove(row.name)
        if options.json:
            options.json.write_text(json_rows(report), encoding="utf-8")
        free_memory()
    return report


def merged(reports: Sequence[Fields]) -> Fields:
    """The rows of several runs as one report; each row's results are those of one run.

    Raises:
        SystemExit: if the runs were not on machines with the same GPU, driver and packages.
    """
    for entry in ("device", "driver"):
        _check_same(entry, [report.get(entry) for report in reports])
    versions: dict[str, str] = {}  # of a package that some runs did without, the others'
    for report in reports:
        for package, version in report.get("versions", {}).items():
            _check_same(package, [versions.setdefault(package, version), version])
    rows = {record["name"]: record for report in reports for record in report["rows"]}
    left = {name: None for report in reports for name in report.get("not_run", ()) if name not in rows}
    return {**reports[0], "versions": versions, "rows": list(rows.values()), "not_run": list(left)}


def _check_same(what: str, found: Sequence[Any]) -> None:
    """Refuse runs whose rows do not belong in one table."""
    if any(value != found[0] for value in found):
        raise SystemExit(f"error: the runs differ in {what}: {'; '.join(map(str, found))}")


def report_of(options: argparse.Namespace, measure: Callable[[argparse.Namespace], Fields]) -> Fields:
    """An earlier run's report, that of several put together, or measure one."""
    if options.sources:
        earlier = merged([json.loads(source.read_text()) for source in options.sources])
        if options.json:
            options.json.write_text(json_rows(earlier))
        return earlier
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; --from FILE shows an earlier run")
    return measure(options)


def check_own(report: Fields, own: str = OURS) -> None:
    """Fail if a row has no time of ours, or of what else a benchmark is about."""
    if any(own not in record["results"] for record in report["rows"]):
        raise SystemExit(f"error: rows without a time of {own}, see above")
