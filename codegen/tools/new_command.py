"""The command ``codegen new``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer

from codegen.cli import app
from codegen.devices import device_names
from codegen.files import write_if_changed
from codegen.freshness import display_path
from codegen.patterns import PATTERNS
from codegen.tools.report import JsonOption, report

WIDTH = 80  # columns of printed text


def _complete_device(incomplete: str) -> list[str]:
    names = (name.replace(" ", "") for name in device_names())  # a shell would take two words
    return [name for name in names if name.startswith(incomplete)]


def _complete_pattern(incomplete: str) -> list[str]:
    return [name for name in PATTERNS if name.startswith(incomplete)]


@app.command("new")
def new_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The spec file: its stem is the kernel's name.")],
    *,
    device: Annotated[
        str | None,
        typer.Option(help="The GPU (H100, L4, ...), or an architecture.", autocompletion=_complete_device),
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", metavar="N", help="Elements of a head, of attention.")
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            metavar="KIND,FIELD=VALUE,...",
            help="Keys that a query sees, of attention.",
            autocompletion=_complete_pattern,
        ),
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(
            "--problem",
            metavar="FIELD=VALUE,...",
            help="Sizes, type, options; or a BSR product: see docs/reference/select.md.",
        ),
    ] = None,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Ask for what is not given.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the spec of a kernel for a device and a problem, as codegen.select chooses it, and tell the reasons.

    Sizes decide between kernels of one problem; without them it is the one that loses least over the measured ones. A
    file that is there is not written over unless --force says so.

    [bold]Examples[/bold]
      codegen new my_kernel.yaml --device H100 --head-dim 128 --pattern causal
      codegen new lists.yaml --device H100 --head-dim 64 --pattern topk,k=16,block=64 --problem heads=16,kv_len=32768
      codegen new product.yaml --device L4 --problem op=bsr_spmm,block=64
      codegen new my_kernel.yaml --interactive
    """
    from codegen.tools import wizard  # noqa: PLC0415
    from codegen.tools.new import check_may_write, new_spec, problem_asked_for  # noqa: PLC0415

    if interactive:
        check_may_write(file, None, force=force)  # before the questions
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
