"""The command ``codegen tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from codegen.cli import MAINTAIN, command, complete
from codegen.errors import CodegenError
from codegen.files import display_path
from codegen.select.limits import MOST
from codegen.tools.report import JsonOption, report
from codegen.wording import plural
from runtime.tools.bench.required import require_gpu
from runtime.tools.tune.sampler import Sampler


@command("tune", MAINTAIN)
def tune_command(
    *,
    problems: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROBLEM", help="Fields and sizes: FIELD=VALUE,...", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="A file of problems, one JSON object a line.", show_default=False),
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(
            "--spec",
            metavar="SPEC",
            help="The spec to improve: PROBLEM then has sizes only. By default, the spec chosen for the problem.",
            autocompletion=complete,
            show_default=False,
        ),
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="FIELD=VALUE,...",
            help="Values of a field to try, such as tile.m=64,128. Can be repeated. Other fields are those of the "
            "current spec.",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            metavar="N",
            min=1,
            help="With --over: number of candidates to try, proposed by optuna. By default, all.",
            show_default=False,
        ),
    ] = None,
    sampler: Annotated[Sampler, typer.Option("--sampler", help="The method that proposes them.")] = Sampler.TPE,
    database: Annotated[Path, typer.Option("--db", metavar="FILE", help="The database of results.")] = (
        Path("tune.sqlite")
    ),
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Only compile the candidates into the cache. Needs no GPU.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write a faster spec to the file of the current one.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            metavar="FILE",
            help="Write the results as rows of the table of measurements.",
            show_default=False,
        ),
    ] = None,
    most: Annotated[
        int, typer.Option("--most", metavar="N", min=0, help="Without --over: variations to try beside shipped specs.")
    ] = MOST,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            metavar="N",
            min=1,
            help="Parallel compilations. By default, one for each core.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest kernel for a problem: compile, verify and time candidates.

    Candidates are shipped specs and variations of them, or the values of --over. A candidate with a wrong result is not
    timed. Each result is stored at once, so an interrupted run continues where it stopped. Problems need their sizes. A
    spec that is faster than the current one by more than the noise is shown as a diff.

    [bold]Examples[/bold]
      codegen tune op=bsr_spmm,block=64,m=14336,n=16,k=4096,density=0.3
      codegen tune heads=16,q_len=8192,kv_len=8192 --spec h100_dense \\
        --over tile.m=128,192 --over stages=2,3,4
      codegen tune --file problems.jsonl --db tune.sqlite --export rows.jsonl
      codegen tune --db tune.sqlite --export rows.jsonl
    """
    from codegen.library import find_spec
    from codegen.select.proposal import check_writable
    from runtime.tools.tune.command import Options, export_rows, read_problems, run, task_of
    from runtime.tools.tune.database import Database

    options = Options(compile_only, most, jobs, tuple(over or ()), trials, sampler, write)
    options.check()
    current = None if spec is None else find_spec(spec)
    asked = read_problems(problems or (), file, current)
    if not asked and export is None:
        raise CodegenError("name one problem or more, or a file of problems with --file")
    if write and len(asked) > 1:
        raise CodegenError(f"--write takes one problem, not {len(asked)}: a spec has one tuning")
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
            told.note(
                "exported",
                {"rows": count, "file": str(export)},
                f"wrote {plural(count, 'row')} to {display_path(export)}",
            )
