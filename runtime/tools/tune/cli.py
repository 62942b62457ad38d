"""The command ``codegen tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from codegen.cli import app, complete
from codegen.errors import CodegenError
from codegen.freshness import display_path
from codegen.library import find_spec
from codegen.select.candidates import MOST
from codegen.select.proposal import check_writable
from codegen.tools.report import JsonOption, report
from runtime.tools.bench.required import require_gpu
from runtime.tools.tune.search import Sampler


@app.command("tune")
def tune_command(
    *,
    problems: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROBLEM...", help="FIELD=VALUE,...: see docs/reference/select.md.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="Problems as JSON, one a line.", show_default=False),
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(
            "--spec",
            metavar="SPEC",
            help="The current spec: it says what is computed, and problems only their sizes. Else codegen.select's.",
            autocompletion=complete,
            show_default=False,
        ),
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="FIELD=VALUE,...",
            help="The space: values of a field in turn, as tile.m=64,128; may be said again. Other fields are the "
            "current spec's.",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(min=1, help="Candidates of a space to try, proposed by optuna; else all.", show_default=False),
    ] = None,
    sampler: Annotated[Sampler, typer.Option(help="What proposes them.")] = Sampler.TPE,
    database: Annotated[Path, typer.Option("--db", metavar="FILE", help="What was found, candidate by candidate.")] = (
        Path("tune.sqlite")
    ),
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile the candidates into the cache; needs no GPU.")
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write a faster spec into the file of the current one.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Write rows of the table of measurements.", show_default=False),
    ] = None,
    most: Annotated[
        int, typer.Option("--most", min=0, help="Without --over: variations of a problem, beside shipped specs.")
    ] = MOST,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Compilations at a time.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest kernels of problems: candidates are compiled, verified, timed.

    Candidates are shipped specs and variations of them, or a space given by hand. One whose result is wrong gets no
    time. Each one is kept in the database as soon as it is timed: a run that was interrupted goes on where it ended.
    Problems need their sizes. A spec that is faster than the current one by more than noise is shown as a diff.

    [bold]Examples[/bold]
      codegen tune op=bsr_spmm,block=64,m=14336,n=16,k=4096,density=0.3 --compile-only
      codegen tune op=bsr_spmm,block=64,m=14336,n=16,k=4096,density=0.3
      codegen tune heads=16,q_len=8192,kv_len=8192 --spec h100_dense --over tile.m=128,192 --over stages=2,3,4
      codegen tune --file problems.jsonl --db tune.sqlite --export rows.jsonl
      codegen tune --db tune.sqlite --export rows.jsonl
    """
    from runtime.tools.tune.command import Options, export_rows, read_problems, run, task_of  # noqa: PLC0415
    from runtime.tools.tune.database import Database  # noqa: PLC0415

    options = Options(compile_only, most, jobs, tuple(over or ()), trials, sampler, write)
    options.check()
    current = None if spec is None else find_spec(spec)
    asked = read_problems(problems or (), file, current)
    if not asked and export is None:
        raise CodegenError("name a problem or more, or a file of them with --file")
    if write and len(asked) > 1:
        raise CodegenError(f"--write takes one problem, and there are {len(asked)}: a spec has one tuning")
    with report(as_json=as_json) as told:
        steps = told.steps("finding candidates", asked, str)
        tasks = [task_of(problem, current, options) for problem in steps]
        if write:
            check_writable(tasks[0].current)
        if tasks and not compile_only:
            require_gpu("tune", "timed")
        found = Database(database)
        if tasks:
            run(told, found, tasks, options)
        if export is not None:
            count = export_rows(found, export)
            told.note("exported", {"rows": count, "file": str(export)}, f"wrote {count} rows to {display_path(export)}")
