"""The commands of ``codegen`` that need neither CUDA nor a GPU. ``runtime.cli`` adds the others to ``app``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from typer.core import TyperGroup

from codegen import freshness
from codegen.errors import CodegenError, SpecError
from codegen.explain import explain
from codegen.files import write_if_changed
from codegen.library import GENERATED, NamedSpec, find_spec, shipped_names, shipped_specs
from codegen.plans import plan_for
from codegen.receipts import ReceiptStatus, state
from codegen.render import render
from codegen.select.choice import choose
from codegen.select.problem import parse_problem, problem_fields, said_by
from codegen.spec import AttentionSpec, Epilogue, Spec, TileCopySpec, json_schema
from codegen.wording import in_shell

BAD_INPUT = 2
CHECK_FAILED = 1


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turn an error that the user's input caused into one line on stderr and exit code 2."""
    try:
        yield
    except CodegenError as error:
        message = str(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    else:
        return
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(BAD_INPUT)


class _Commands(TyperGroup):
    """A group whose commands, wherever they are defined, report errors as ``reported_errors`` does."""

    def invoke(self, ctx: Any) -> Any:
        with reported_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    name="codegen",
    help="Specialised CUDA kernels for block-sparse attention and BSR GEMM: from a YAML spec to a verified cubin.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _complete(incomplete: str) -> list[str]:
    return [name for name in shipped_names() if name.startswith(incomplete)]


SPEC_HELP = "A YAML file, or the name of a shipped spec."
SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help=SPEC_HELP, autocompletion=_complete)]
SpecsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="SPEC...", help=SPEC_HELP, autocompletion=_complete, show_default=False)
]
AllOption = Annotated[bool, typer.Option("--all", help="Every shipped spec.")]


def chosen(specs: Sequence[str] | None, every: bool) -> list[NamedSpec]:
    """Return the specs that a command line names.

    Raises:
        CodegenError: when it names none, or names some and says ``--all`` too.
    """
    if every == bool(specs):
        raise CodegenError("name one spec or more, or say --all" if not specs else "name specs or say --all, not both")
    if every:
        return shipped_specs()
    found = [find_spec(spec) for spec in dict.fromkeys(specs or ())]
    for i, named in enumerate(found):
        if any((named.subfolder, named.stem) == (other.subfolder, other.stem) for other in found[:i]):
            raise CodegenError(f"two of the specs are called {named.stem}: their files would have the same names")
    return found


@app.command("render")
def render_command(
    specs: SpecsArgument = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where to write; - prints. Without it the project's own specs go to its generated/, "
            "others to the current folder.",
            show_default=False,
        ),
    ] = None,
    every: AllOption = False,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a file would change.")] = False,
) -> None:
    """Render specs to CUDA sources: one self-contained .cu a spec, the same bytes every time.

    Files that are up to date are left alone.

    [bold]Examples[/bold]
      codegen render h100_topk32
      codegen render my_kernel.yaml --out build
      codegen render --all --check
    """
    named_specs = chosen(specs, every)
    if out == "-":
        for named in named_specs:
            typer.echo(render(named), nl=False)
        return
    by_folder: dict[Path, list[NamedSpec]] = defaultdict(list)
    for named in named_specs:
        by_folder[Path(out) if out is not None else home_of(named)].append(named)
    if check:
        _report([p for folder, group in by_folder.items() for p in freshness.check_sources(folder, group)])
        return
    for folder, group in by_folder.items():
        for path, changed in freshness.render_to(folder, group).items():
            typer.echo(f"{'wrote' if changed else 'up to date'}  {freshness.display_path(path)}")


@app.command("check")
def check_command(
    strict: Annotated[
        bool, typer.Option("--strict", help="Also fail on a receipt that is missing, failed or older than its source.")
    ] = False,
) -> None:
    """Re-render every shipped spec and compare with generated/: missing, stale, hand-edited and orphaned files.

    Each problem comes with the command that mends it; the exit code is 1 if there is one.

    [bold]Examples[/bold]
      codegen check
      codegen check --strict
    """
    _report(freshness.check(GENERATED, shipped_specs(), strict=strict))


@app.command("list")
def list_command() -> None:
    """List the shipped specs and what their receipts say."""
    table = Table(box=None, pad_edge=False, header_style="cyan")
    for title in ("spec", "operator", "arch", "type", "what", "tile", "how", "receipt"):
        table.add_column(title, overflow="fold", no_wrap=title == "spec")  # a name can be copied
    colours = {ReceiptStatus.OK: "green", ReceiptStatus.FAILED: "red", ReceiptStatus.UNREADABLE: "red"}
    for named in shipped_specs():
        spec = named.spec
        found = state(named, render(named))
        how = f"{spec.mma}, {spec.copy_}, {spec.schedule}"
        standing = f"[{colours.get(found.standing, 'yellow')}]{found.standing}[/]"
        tile = " x ".join(map(str, spec.tile.model_dump().values()))
        table.add_row(named.stem, spec.op, spec.arch, spec.dtype, _what(spec), tile, how, standing)
    _print(table)


@app.command("explain")
def explain_command(
    spec: Annotated[
        str | None, typer.Argument(metavar="[SPEC]", help=SPEC_HELP, autocompletion=_complete, show_default=False)
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(
            "--problem",
            metavar="FIELD=VALUE,...",
            help="The problem, or beside SPEC its sizes: which kernel is chosen for it is told too.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the plan of a kernel: tiles, pipeline, shared-memory map, registers, FLOPs, index tensors.

    Which kernel is chosen for its problem, why, by which measured row, and where that row has a dense product that is
    faster, is told too. Without SPEC it is the chosen kernel's plan.

    [bold]Examples[/bold]
      codegen explain h100_topk32
      codegen explain h100_causal --problem heads=16,q_len=1024,kv_len=1024
      codegen explain --problem op=bsr_spmm,block=64,m=4096,n=16,k=4096,density=0.3
    """
    sizes = {} if problem is None else problem_fields(problem)
    if spec is None:
        if problem is None:
            raise CodegenError("name a spec, or a problem with --problem")
        choice = choose(parse_problem(sizes))
        _print(explain(plan_for(choice.named), choice))
        return
    named = find_spec(spec)
    if isinstance(named.spec, TileCopySpec):
        choose(named, sizes or None)  # has no choice: refuses sizes
        _print(explain(plan_for(named)))
        return
    said = said_by(named.spec)
    wrong = [name for name in sizes if name in said]
    if wrong:
        raise SpecError(f"problem.{wrong[0]}", "is said by the spec: leave it out")
    _print(explain(plan_for(named), choose(parse_problem({**said, **sizes}))))


@app.command("schema")
def schema_command(
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write.", show_default="stdout")] = None,
) -> None:
    """Print the JSON schema of spec files, by which editors complete and check them.

    [bold]Examples[/bold]
      codegen schema --out spec.schema.json
    """
    text = json.dumps(json_schema(), indent=2) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_if_changed(out, text)


def home_of(named: NamedSpec) -> Path:
    """Return where a source goes unless the user says otherwise."""
    in_source_tree = not GENERATED.is_relative_to(Path(__file__).resolve().parent)
    return GENERATED if in_source_tree and named.is_shipped else Path()


def verify_line(named: NamedSpec) -> str:
    """Return the command that verifies a spec."""
    by_name = named.path is None or named.is_shipped
    return f"codegen verify {named.stem if by_name else in_shell(str(named.path))}"


def _print(table: RenderableType) -> None:
    """Print to the width of the terminal; a pipe or a file gets lines that need not be wrapped."""
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)


BY_DEFAULT = ("stream_k_tail", "warp_rows")  # options that follow from other fields, unless a spec says otherwise


def _what(spec: Spec) -> str:
    """Return what a kernel computes, and the options that it has."""
    if isinstance(spec, AttentionSpec):
        what = [f"{spec.pattern.stem()}, d {spec.head_dim}"]
    else:
        what = ["copy"] if isinstance(spec, TileCopySpec) else [f"blocks {spec.block.rows} x {spec.block.cols}"]
    for name in spec.options:
        value = getattr(spec, name)
        if value == type(spec).model_fields[name].default or name in BY_DEFAULT:
            continue
        if isinstance(value, Epilogue):
            value = " ".join(["bias"] * value.bias + [value.activation] * (value.activation != "none"))
        what.append(name if value is True else f"{name} {value}")
    return ", ".join(what)


def _report(problems: list[freshness.Problem]) -> None:
    """Print the problems and leave with exit code 1 if there are any."""
    for problem in problems:
        typer.echo(f"{freshness.display_path(problem.path)}: {problem.message}\n    run: {problem.fix}")
    if problems:
        typer.echo(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}", err=True)
        raise typer.Exit(CHECK_FAILED)
    typer.echo("every file is up to date")
