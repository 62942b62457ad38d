"""The commands that look at machine code."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from codegen.cli import LOOK, SpecArgument, command, complete
from codegen.errors import CodegenError
from codegen.tools.report import CHECK_FAILED, JsonOption, Report, report
from runtime.tools.analysis.options import WIDTH, Section, Show

if TYPE_CHECKING:
    from codegen.library import NamedSpec
    from runtime.tools.analysis.findings import Finding

SIDE_HELP = "A spec, as for other commands, or COMMIT:NAME for a kernel of a git commit."
OneArgument = Annotated[str, typer.Argument(metavar="ONE", help=SIDE_HELP, autocompletion=complete, show_default=False)]
OtherArgument = Annotated[
    str, typer.Argument(metavar="OTHER", help=SIDE_HELP, autocompletion=complete, show_default=False)
]


@command("disasm", LOOK)
def disasm_command(
    spec: SpecArgument,
    show: Annotated[Show, typer.Option("--show", help="Instructions to list below the summary.")] = Show.ALL,
    as_json: JsonOption = False,
) -> None:
    """Print the machine code (SASS) of a kernel.

    Starts with a summary: registers, barriers, and the instructions of the main loop by kind, by stage and by opcode.
    A stage is the function of the source that an instruction was inlined from, with its line. Needs no GPU.

    [bold]Examples[/bold]
      codegen disasm h100_topk32 --show summary
      codegen disasm h100_topk32 --show loop
      codegen disasm l4_topk32 --json
    """
    from codegen.library import find_spec
    from runtime.tools.analysis.disasm import fields_of, lines_of
    from runtime.tools.analysis.disassembly import disassemble

    named = find_spec(spec)
    with report(as_json=as_json) as told:
        for each in told.steps("disassembling", [named], lambda named: named.stem):
            found = disassemble(each)
            told.row(fields_of(found, show), "\n".join(lines_of(found, show)))


@command("diff", LOOK)
def diff_command(
    one: OneArgument,
    other: OtherArgument,
    only: Annotated[
        list[Section] | None,
        typer.Option("--only", help="Compare only this part. Can be repeated.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the specs, plans, sources and machine code of two kernels.

    Machine code is compared by the opcodes of the main loops: a single changed instruction changes registers and
    addresses everywhere. Needs no GPU. The exit code is 1 if the kernels differ.

    [bold]Examples[/bold]
      codegen diff h100_topk32 h100_topk64
      codegen diff h100_dense my_dense.yaml --only plan --only sass
      codegen diff HEAD~3:h100_topk32 h100_topk32
    """
    from runtime.tools.analysis.diff import compare, lines_of
    from runtime.tools.analysis.sides import side_of

    sides = side_of(one), side_of(other)
    sections = [section for section in Section if not only or section in only]
    with report(as_json=as_json) as told:
        for section in told.steps("comparing", sections, str):
            found = compare(*sides, section)
            told.row({"section": section.value, **found}, "\n".join(lines_of(section, found)))
        if not all(row["same"] for row in told.rows):
            raise typer.Exit(CHECK_FAILED)


@command("profile", LOOK)
def profile_command(
    spec: SpecArgument,
    counters: Annotated[
        Path | None,
        typer.Option(
            "--counters", metavar="FILE", help="Counters that ncu --csv wrote on another machine.", show_default=False
        ),
    ] = None,
    static: Annotated[bool, typer.Option("--static", help="Static analysis only, even if ncu is installed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find what limits the speed of a kernel.

    The static analysis reads the plan and the machine code. With Nsight Compute (ncu) and a GPU, it adds counters of
    one launch of the reference workload, which is that of codegen measure. Power and clocks come from nvidia-smi during
    back-to-back launches.

    [bold]Examples[/bold]
      codegen profile h100_topk32
      codegen profile h100_topk32 --static --json
    """
    from codegen.library import find_spec
    from runtime.tools.analysis import ncu, power, profile
    from runtime.tools.analysis.disassembly import disassemble
    from runtime.tools.analysis.findings import counted_findings, static_findings

    if static and counters is not None:
        raise CodegenError("--static and --counters exclude each other: use one of them")
    named = find_spec(spec)
    read = None if counters is None else profile.Counted(ncu.read(counters, named.stem), f"from {counters}")
    with report(as_json=as_json) as told:
        told.note("kernel", named.stem, f"{named.stem}, by plan and machine code:")
        _tell(told, static_findings(disassemble(named)))
        if not (static or read):
            _tell_power(told, named, power.missing())
        why = "--static" if static else "" if read else profile.missing()
        if why:
            part = "no counters" if told.document.get("power") else "static analysis only"
            told.note("counters", None, f"{part}: {why}")
            told.note("no_counters", why)
            return
        counted = read or profile.count(named)
        told.note("counters", counted.source, f"counted, {counted.source}:")
        told.note("metrics", dict(counted.counters.values))
        _tell(told, counted_findings(counted.counters, counted.flops))


def _tell_power(told: Report, named: NamedSpec, why: str) -> None:
    """Report power and clocks, or the reason that they cannot be measured."""
    from runtime.tools.analysis import power

    if not why:
        try:
            drawn = power.draw(named)
        except CodegenError as error:
            why = str(error)
            told.say(f"no power: {why}")
        else:
            told.note("power", asdict(drawn), "measured, by nvidia-smi:")
            _tell(told, drawn.findings())
            return
    told.note("power", None)
    told.note("no_power", why)


def _tell(told: Report, findings: Iterable[Finding]) -> None:
    """Report findings, a paragraph each."""
    for each in findings:
        line = textwrap.fill(each.text, WIDTH, initial_indent=f"  {each.about:18}", subsequent_indent=" " * 20)
        told.row(asdict(each), line)
