"""Commands of ``codegen`` that need neither CUDA nor a GPU. ``runtime.cli`` adds the others to ``app``.

A module named ``cli`` contains names, options and help texts of commands, and has no slow imports: each command imports
its modules when it runs, so that help and completion respond at once.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from codegen import __version__, index
from codegen.errors import CodegenError
from codegen.tools.report import BAD_INPUT, INTERRUPTED, JsonOption

USE = "Use kernels"
LOOK = "Look inside"
MAINTAIN = "Verify, tune, maintain"
PANELS = (USE, LOOK, MAINTAIN)
"""Panels of ``codegen --help``, in order."""

Function = TypeVar("Function", bound=Callable[..., Any])


@contextmanager
def reported_errors() -> Iterator[None]:
    """Print an error in the user's input as one line on stderr and exit with code 2; on Ctrl-C, exit with code 130."""
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo(str(error) or "interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except CodegenError as error:
        message = "\n".join(lines_of(error))
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    else:
        return
    for line in message.splitlines() or [""]:
        typer.echo(f"error: {line}", err=True)
    raise typer.Exit(BAD_INPUT)


def lines_of(error: CodegenError) -> list[str]:
    """Lines of an error: one for each mistake of a spec."""
    return [str(error), *(str(each) for each in getattr(error, "others", ()))]


def _without_types(params: list[Any]) -> list[Any]:
    """Parameters without Python types in their help: flags take no value, and arguments have names."""
    for param in params:
        if param.param_type_name == "argument":
            vars(param)["display_type_rich"] = lambda ctx: None
        elif param.metavar is None and getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Commands(TyperGroup):
    """A group of commands in the order of their panels, with plain help of its options."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Parameters, without Python types."""
        return _without_types(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands, panel by panel."""
        panels: dict[Any, int] = {panel: i for i, panel in enumerate(PANELS)}
        return sorted(
            super().list_commands(ctx),
            key=lambda name: panels.get(getattr(self.commands[name], "rich_help_panel", None), len(panels)),
        )


class _Main(Commands):
    """Root group of the commands; reports errors like ``reported_errors``."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with reported_errors():  # prints --help and --version
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with reported_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Main,
    name="codegen",
    help="Specialized CUDA kernels for block-sparse attention and BSR GEMM: from a YAML spec to a verified cubin.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(name: str, panel: str, group: typer.Typer = app) -> Callable[[Function], Function]:
    """Register a function as a command: a decorator.

    The help text is the function's docstring, with each paragraph joined into one line that the terminal wraps. Lines
    that begin with spaces, such as examples, are kept.

    Args:
        name: the command's name.
        panel: its panel in ``codegen --help``; "" for none.
        group: the group that it belongs to.
    """

    def register(function: Function) -> Function:
        text = re.sub(r"(?<=[^\n])\n(?=[^\s])", " ", inspect.cleandoc(function.__doc__ or ""))
        return group.command(name, help=text, cls=_Command, rich_help_panel=panel or None)(function)

    return register


def complete(incomplete: str) -> list[str]:
    """Names of shipped specs that begin with the incomplete word of a command line."""
    return [name for name in index.names() if name.startswith(incomplete)]


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"codegen {__version__}")
        raise typer.Exit


@app.callback()
def codegen_command(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Handle the options that do not belong to a command."""


SPEC_HELP = "A YAML file, the name of a shipped spec, or the fields of a spec as JSON: {...}."
SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help=SPEC_HELP, autocompletion=complete)]
SpecsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="SPEC", help=SPEC_HELP, autocompletion=complete, show_default=False)
]
AllOption = Annotated[bool, typer.Option("--all", help="All shipped specs.")]


@command("render", USE)
def render_command(
    specs: SpecsArgument = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="The folder to write to; - prints to standard output. By default, shipped specs of a source tree go "
            "to its generated/, and others to the current folder.",
            show_default=False,
        ),
    ] = None,
    every: AllOption = False,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a file would change.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Render specs to CUDA sources.

    Each spec becomes one self-contained .cu file. The output is deterministic, and files that are up to date are not
    rewritten.
    The bf16 kernel of a spec with two types, such as h100_topk32_bf16, has no file of its own, except with --out. If a
    spec has errors, the command prints all of them, renders the other specs, and exits with code 1.

    [bold]Examples[/bold]
      codegen render h100_topk32
      codegen render my_kernel.yaml --out build
      codegen render --all --check
    """
    from codegen import commands

    commands.render_specs(specs, out, every=every, check=check, as_json=as_json)


@command("check", MAINTAIN)
def check_command(
    strict: Annotated[
        bool, typer.Option("--strict", help="Also fail if a receipt is missing, failed, or older than its source.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare generated/ with the shipped specs.

    Renders every shipped spec and lists files of generated/ that are missing, stale, edited by hand, or without a spec.
    Each problem comes with the command that fixes it. The exit code is 1 if there are problems.

    [bold]Examples[/bold]
      codegen check
      codegen check --strict
    """
    from codegen import commands

    commands.check(strict=strict, as_json=as_json)


@command("list", LOOK)
def list_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Names or patterns of shipped specs, such as 'h100_topk*'. By default, all.",
            autocompletion=complete,
            show_default=False,
        ),
    ] = None,
    *,
    op: Annotated[
        str | None, typer.Option("--op", metavar="OP", help="Only this operator, such as bsr_spmm.", show_default=False)
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option("--arch", metavar="ARCH", help="Only this architecture, such as sm_90a.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="TYPE", help="Only this type, such as bf16.", show_default=False)
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print tiles, instructions and the receipt's summary.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List shipped specs and the state of their receipts, one line each.

    On a terminal, lines are cut at its width. In a pipe, fields are whole and separated by tabs.

    [bold]Examples[/bold]
      codegen list
      codegen list 'h100_topk*' --dtype bf16
      codegen list --op bsr_spmm --arch sm_89 -v
    """
    from codegen.tools import listing
    from codegen.tools.report import report

    rows = listing.selected(listing.current_rows(), names or (), operator=op, arch=arch, type=dtype)
    with report(as_json=as_json) as out:
        for row in rows:
            out.row(listing.public(row))
        for line in listing.lines_of(rows, listing.terminal_width(), verbose=verbose):
            out.say(line)


@command("explain", LOOK)
def explain_command(
    context: typer.Context,
    spec: Annotated[
        str | None, typer.Argument(metavar="SPEC", help=SPEC_HELP, autocompletion=complete, show_default=False)
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(
            "--problem",
            metavar="FIELD=VALUE,...",
            help="Without SPEC: explain the kernel that is chosen for this problem. With SPEC: sizes of a call.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the plan of a kernel: tiles, pipeline, shared memory, registers, parameters.

    Also prints the state of its receipt and the path of its source. For a kernel without a receipt, it prints the
    nearest shipped kernel and the differences. With --problem, it prints which kernel is chosen and why, and whether
    a dense product was faster in measurements.

    [bold]Examples[/bold]
      codegen explain h100_topk32
      codegen explain h100_causal --problem heads=16,q_len=1024,kv_len=1024
      codegen explain --problem op=bsr_spmm,block=64,m=4096,n=16,k=4096
    """
    from codegen import commands

    commands.explain(spec, problem, context.obj, as_json=as_json)


@command("schema", LOOK)
def schema_command(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The file to write.", show_default="stdout")
    ] = None,
) -> None:
    """Print the JSON schema of spec files, for completion and checks in editors.

    [bold]Examples[/bold]
      codegen schema --out spec.schema.json
    """
    from codegen import commands

    commands.schema(out)
