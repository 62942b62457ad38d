"""The commands that look at machine code."""

from __future__ import annotations

from typing import Annotated

import typer

from codegen.cli import SpecArgument, app
from codegen.library import find_spec
from codegen.report import JsonOption, report
from runtime.analysis.disasm import Show


@app.command("disasm")
def disasm_command(
    spec: SpecArgument,
    show: Annotated[Show, typer.Option("--show", help="Which instructions are listed, below the summary.")] = Show.ALL,
    as_json: JsonOption = False,
) -> None:
    """Print the machine code of a kernel (SASS), with the stages of its source. Needs no GPU.

    Above it: registers, barriers, and the instructions of the main loop by kind, by stage and by opcode. A stage is
    the function of the source that an instruction was inlined from, with the line there.

    [bold]Examples[/bold]
      codegen disasm h100_topk32 --show summary
      codegen disasm h100_topk32 --show loop
      codegen disasm l4_topk32 --json
    """
    from runtime.analysis.disasm import fields_of, lines_of  # noqa: PLC0415
    from runtime.analysis.disassembly import disassemble  # noqa: PLC0415

    named = find_spec(spec)
    with report(as_json=as_json) as told:
        for each in told.steps("disassembling", [named], lambda named: named.stem):
            found = disassemble(each)
            told.row(fields_of(found, show), "\n".join(lines_of(found, show)))
