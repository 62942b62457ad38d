"""The command ``codegen new``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer

from codegen.cli import USE, command
from codegen.files import display_path, write_if_changed
from codegen.tools.report import JsonOption, report

WIDTH = 80  # columns of printed text


def _complete_device(incomplete: str) -> list[str]:
    from codegen.devices import device_names

    names = (name.replace(" ", "") for name in device_names())  # no blanks, which a shell would split
    return [name for name in names if name.startswith(incomplete)]


def _complete_pattern(incomplete: str) -> list[str]:
    from codegen.patterns import PATTERNS

    return [name for name in PATTERNS if name.startswith(incomplete)]


@command("new", USE)
def new_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The spec file to write; its stem names the kernel.")],
    *,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="A GPU, such as H100 or L4, or an architecture.",
            autocompletion=_complete_device,
            show_default=False,
        ),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", metavar="N", help="Attention: elements per head.", show_default=False)
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            metavar="KIND,FIELD=VALUE,...",
            help="Attention: the pattern, such as causal or topk,k=16,block=64.",
            show_default=False,
            autocompletion=_complete_pattern,
        ),
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(
            "--problem",
            metavar="FIELD=VALUE,...",
            help="Sizes, dtype and options of the problem; op=bsr_spmm for a BSR product.",
            show_default=False,
        ),
    ] = None,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Ask for each missing value.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the spec of the fastest known kernel for a problem.

    Prints the reasons of the choice. The sizes of the problem matter: without them, the kernel that is best on average
    over the measured sizes is chosen.

    [bold]Examples[/bold]
      codegen new my_kernel.yaml --device H100 --head-dim 128 --pattern causal
      codegen new lists.yaml --device H100 --head-dim 64 --pattern topk,k=16,block=64
      codegen new product.yaml --device L4 --problem op=bsr_spmm,block=64
      codegen new my_kernel.yaml --interactive
    """
    from codegen.tools import wizard
    from codegen.tools.new import check_may_write, new_spec, problem_asked_for

    if interactive:
        check_may_write(file, None, force=force)  # before asking
        device = device or wizard.ask_device()
        head_dim = head_dim or wizard.ask_head_dim()
        pattern = pattern or wizard.ask_pattern(head_dim)
        problem = problem or wizard.ask_sizes()
    asked, measured = problem_asked_for(device, head_dim, pattern, problem)
    new = new_spec(file, asked, measured)
    check_may_write(file, new.text, force=force)
    with report(as_json=as_json) as told:
        changed = write_if_changed(file, new.text)
        reasons = new.reasons()
        fields = {"file": str(file), "changed": changed, "spec_hash": new.named.spec.hash, "shipped": new.shipped}
        place = display_path(file)
        told.row({**fields, "reasons": reasons}, f"{'wrote' if changed else 'up to date'}  {place}")
        for name, reason in reasons.items():
            told.say(textwrap.fill(reason, WIDTH, initial_indent=f"  {name:14}", subsequent_indent=" " * 16))
        told.say(f"next: codegen explain {new.named.argument}; codegen compile {new.named.argument}")
