"""The commands of ``codegen`` that need neither CUDA nor a GPU. ``runtime.cli`` adds the others to ``app``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from codegen import __version__, freshness
from codegen.errors import CodegenError, SpecError
from codegen.files import is_file, write_if_changed
from codegen.library import (
    GENERATED,
    IN_SOURCE_TREE,
    NamedSpec,
    find_spec,
    find_specs,
    shipped_names,
    shipped_specs,
)
from codegen.planning import plan_for
from codegen.provenance import provenance_of
from codegen.receipts import state
from codegen.render import render
from codegen.select.choice import Choice, choose
from codegen.select.problem import is_chosen, parse_problem, problem_fields, said_by
from codegen.spec import json_schema
from codegen.tools.explain import explain, explained
from codegen.tools.listing import row_of, table_of
from codegen.tools.progress import progress
from codegen.tools.report import JsonOption, Report, console, report
from codegen.twins import WORDS

INTERRUPTED = 130
BAD_INPUT = 2
CHECK_FAILED = 1


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turn an error that the user's input caused into one line on stderr and exit code 2, Ctrl-C into one and 130."""
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo(str(error) or "interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
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

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with reported_errors():  # --help and --version are printed here
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with reported_errors():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    name="codegen",
    help="Specialized CUDA kernels for block-sparse attention and BSR GEMM: from a YAML spec to a verified cubin.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def complete(incomplete: str) -> list[str]:
    """Return the shipped specs that a word of a command line may become."""
    return [name for name in shipped_names() if name.startswith(incomplete)]


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"codegen {__version__}")
        raise typer.Exit


@app.callback()
def codegen_command(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_tell_version, help="Print the version and leave.")
    ] = False,
) -> None:
    """Take the options that belong to no command."""


SPEC_HELP = "A YAML file, the name of a shipped spec, or the fields of a spec as JSON: {...}."
SpecArgument = Annotated[str, typer.Argument(metavar="SPEC", help=SPEC_HELP, autocompletion=complete)]
SpecsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="SPEC...", help=SPEC_HELP, autocompletion=complete, show_default=False)
]
AllOption = Annotated[bool, typer.Option("--all", help="Every shipped spec.")]


def chosen(specs: Sequence[str] | None, every: bool, *, all_types: bool = False) -> list[NamedSpec]:
    """Return the specs that a command line names.

    Args:
        specs: names and files.
        every: whether ``--all`` is said.
        all_types: whether a file, or the name of its first type, stands for all types that it lists.

    Raises:
        CodegenError: when it names none, or names some and says ``--all`` too.
    """
    if every == bool(specs):
        raise CodegenError("name one spec or more, or say --all" if not specs else "name specs or say --all, not both")
    if every:
        return shipped_specs()
    found: list[NamedSpec] = []
    for spec in dict.fromkeys(specs or ()):
        found += find_specs(spec) if all_types else [find_spec(spec)]
    if all_types:
        found = list(dict.fromkeys(found))  # of a kernel and its twin, both named
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
            "--out",
            metavar="DIR",
            help="Where to write; - prints. Without it the project's own specs go to its generated/, "
            "others to the current folder.",
            show_default=False,
        ),
    ] = None,
    every: AllOption = False,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a file would change.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Render specs to CUDA sources: one self-contained .cu a spec, the same bytes every time.

    Files that are up to date are left alone. The source of a twin, such as h100_topk32_bf16, is that of its first type
    with words replaced: it is written with --out only.

    [bold]Examples[/bold]
      codegen render h100_topk32
      codegen render my_kernel.yaml --out build
      codegen render --all --check
    """
    named_specs = [named for named in chosen(specs, every) if specs or named.twin_of is None]
    if out == "-":
        if as_json:
            raise CodegenError("--out - prints sources, --json a report: say one of them")
        for named in named_specs:
            typer.echo(render(named), nl=False)
        return
    twins = [named for named in named_specs if named.twin_of is not None and out is None]
    by_folder: dict[Path, list[NamedSpec]] = defaultdict(list)
    for named in dict.fromkeys(named.main if out is None else named for named in named_specs):
        by_folder[Path(out) if out is not None else home_of(named)].append(named)
    _render_once(named_specs)
    if check:
        problems = [p for folder, group in by_folder.items() for p in freshness.check_files(folder, group)]
        problems += [p for named in twins for p in freshness.check_twins(home_of(named), [named])]
        _report_problems(problems, as_json=as_json)
    else:
        _write_sources(by_folder, twins, as_json=as_json)


def _write_sources(by_folder: Mapping[Path, list[NamedSpec]], twins: Iterable[NamedSpec], *, as_json: bool) -> None:
    """Write the sources that are not up to date, and say where those of twins are."""
    with report(as_json=as_json) as told:
        for folder, group in by_folder.items():
            for path, changed in freshness.render_to(folder, group).items():
                line = f"{'wrote' if changed else 'up to date'}  {freshness.display_path(path)}"
                told.row({"path": str(path), "changed": changed}, line)
        for named in twins:
            tell_twin(told, named)


def tell_twin(told: Report, named: NamedSpec) -> None:
    """Say where the source of a twin is."""
    words = ", ".join(map(" -> ".join, WORDS.items()))
    told.say(
        f"{named.stem}: its source is {named.source_file} with the name of the kernel and words replaced ({words}); "
        f"to write it: codegen render {named.stem} --out DIR"
    )


@app.command("check")
def check_command(
    strict: Annotated[
        bool, typer.Option("--strict", help="Also fail on a receipt that is missing, failed or older than its source.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Re-render every shipped spec and compare with generated/: missing, stale, hand-edited and orphaned files.

    Each problem comes with the command that mends it; the exit code is 1 if there is one.

    [bold]Examples[/bold]
      codegen check
      codegen check --strict
    """
    _render_once(shipped_specs())
    _report_problems(freshness.check(GENERATED, shipped_specs(), strict=strict), as_json=as_json)


@app.command("list")
def list_command(as_json: JsonOption = False) -> None:
    """List the shipped specs and what their receipts say.

    [bold]Examples[/bold]
      codegen list
      codegen list --json
    """
    with report(as_json=as_json) as told:
        rows = []
        for named in told.steps("reading", shipped_specs(), lambda named: named.stem):
            rows.append(row_of(named, state(named, render(named))))
            told.row(rows[-1])
        told.show(table_of(rows, console().width))


@app.command("explain")
def explain_command(
    context: typer.Context,
    spec: Annotated[
        str | None, typer.Argument(metavar="[SPEC]", help=SPEC_HELP, autocompletion=complete, show_default=False)
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
    as_json: JsonOption = False,
) -> None:
    """Print the plan of a kernel: tiles, pipeline, shared-memory map, registers, FLOPs, index tensors.

    The receipt and the place of the source come with it; for a kernel without a receipt the nearest shipped one, and
    what differs. Which kernel is chosen for its problem, why, by which measured row, and where that row has a dense
    product that is faster, is told too. Without SPEC it is the chosen kernel's plan.

    [bold]Examples[/bold]
      codegen explain h100_topk32
      codegen explain h100_causal --problem heads=16,q_len=1024,kv_len=1024
      codegen explain --problem op=bsr_spmm,block=64,m=4096,n=16,k=4096,density=0.3
    """
    named, choice = _kernel_asked_for(spec, problem)
    provenance = (context.obj or provenance_of)(named)  # the runtime also knows receipts outside of the package
    plan = plan_for(named)
    if as_json:
        typer.echo(json.dumps(explained(plan, provenance, choice), indent=2))
    else:
        console().print(explain(plan, provenance, choice))


def _kernel_asked_for(spec: str | None, problem: str | None) -> tuple[NamedSpec, Choice | None]:
    """The kernel that ``explain`` describes, and the kernel chosen for its problem."""
    sizes = {} if problem is None else problem_fields(problem)
    if spec is None:
        if problem is None:
            raise CodegenError("name a spec, or a problem with --problem")
        choice = choose(parse_problem(sizes))
        return choice.named, choice
    named = find_spec(spec)
    if not is_chosen(named.spec):
        choose(named, sizes or None)  # has no choice: refuses sizes
        return named, None
    said = said_by(named.spec)
    wrong = [name for name in sizes if name in said]
    if wrong:
        raise SpecError(f"problem.{wrong[0]}", "is said by the spec: leave it out")
    return named, choose(parse_problem({**said, **sizes}))


@app.command("schema")
def schema_command(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write.", show_default="stdout")
    ] = None,
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
    return GENERATED if IN_SOURCE_TREE and named.is_shipped else Path()


def _render_once(specs: Sequence[NamedSpec]) -> None:
    """Render specs, and tell how far it is: what asks for a source later has it at once."""
    with progress("rendering", len(specs)) as at:
        for named in specs:
            at(named.stem)
            render(named)


def place_of(named: NamedSpec, suffix: str) -> Path:
    """Return where a kernel's source or receipt is: at its home or, of a shipped spec, where the package has it.

    Those of a twin are in the files of its first type.
    """
    inside = named.subfolder / f"{named.main.stem}{suffix}"
    own = home_of(named) / inside
    return GENERATED / inside if named.is_shipped and not is_file(own) else own


def verify_line(named: NamedSpec) -> str:
    """Return the command that verifies a spec."""
    return f"codegen verify {named.argument}"


def _report_problems(problems: list[freshness.Problem], *, as_json: bool) -> None:
    """Report the problems and leave with exit code 1 if there are any."""
    with report(as_json=as_json) as told:
        for problem in problems:
            fields = {"path": str(problem.path), "kind": problem.kind, "message": problem.message, "fix": problem.fix}
            place = freshness.display_path(problem.path)
            told.row(fields, f"{place}: {problem.message}\n    run: {problem.fix}")
        if problems:
            typer.echo(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}", err=True)
            raise typer.Exit(CHECK_FAILED)
        told.say("every file is up to date")
