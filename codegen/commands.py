"""Implementations of the commands in ``codegen.cli``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from codegen import freshness, indexing
from codegen.errors import CodegenError, SpecError
from codegen.files import display_path, write_if_changed
from codegen.library import NamedSpec, find_spec, find_specs, shipped_specs
from codegen.places import home_of
from codegen.planning import plan_for
from codegen.project import GENERATED
from codegen.provenance import Provenance, provenance_of
from codegen.render import render
from codegen.select.choice import Choice, choose
from codegen.select.problem import is_chosen, parse_problem, problem_fields, said_by
from codegen.spec import json_schema
from codegen.tools.explain import explain as explanation
from codegen.tools.explain import explained
from codegen.tools.progress import progress
from codegen.tools.report import CHECK_FAILED, Report, report
from codegen.twins import WORDS


def chosen(specs: Sequence[str] | None, every: bool, *, all_types: bool = False) -> list[NamedSpec]:
    """Specs that are named on a command line.

    Args:
        specs: names and files.
        every: whether ``--all`` is given.
        all_types: whether a file, or the name of its first type, stands for all types that it lists.

    Raises:
        CodegenError: if the command line names no spec, or has both names and ``--all``.
    """
    check_named(specs, every)
    if every:
        return shipped_specs()
    found, mistakes = _readable(specs or (), all_types=all_types)
    if mistakes:
        raise _joined(mistakes)
    if all_types:
        found = list(dict.fromkeys(found))  # a kernel and its twin may both be named
    check_distinct(found)
    return found


def check_named(specs: Sequence[str] | None, every: bool) -> None:
    """Reject a command line that names no spec, or has both names and ``--all``.

    Raises:
        CodegenError: in these cases.
    """
    if every == bool(specs):
        raise CodegenError("name one spec or more, or use --all" if not specs else "name specs or use --all, not both")


def check_distinct(specs: Sequence[NamedSpec]) -> None:
    """Reject two specs with the same name.

    Raises:
        CodegenError: for the first such pair.
    """
    seen: set[tuple[Path, str]] = set()
    for named in specs:
        if (named.subfolder, named.stem) in seen:
            raise CodegenError(f"two specs are named {named.stem}: their files would have the same names")
        seen.add((named.subfolder, named.stem))


def render_specs(specs: Sequence[str] | None, out: str | None, *, every: bool, check: bool, as_json: bool) -> None:
    """``codegen render``."""
    check_named(specs, every)
    if out == "-" and as_json:
        raise CodegenError("--out - prints sources, --json prints a report: use one of them")
    found, mistakes = _readable(specs or ()) if not every else (shipped_specs(), [])
    if not found:
        raise _joined(mistakes)
    named_specs = [named for named in found if not every or named.twin_of is None]
    check_distinct(named_specs)
    if out == "-":
        for named in named_specs:
            typer.echo(render(named), nl=False)
        _leave_with(mistakes)
        return
    twins = [named for named in named_specs if named.twin_of is not None and out is None]
    by_folder = _by_folder(named_specs, out)
    _render_once(named_specs)
    if check:
        problems = _problems_of(by_folder, twins)
        if every and out is None:
            problems += indexing.problems(GENERATED, shipped_specs())
        _report_problems(problems, mistakes, as_json=as_json)
    else:
        _write_sources(by_folder, twins, None if every else named_specs, mistakes, as_json=as_json)


def _by_folder(specs: Iterable[NamedSpec], out: str | None) -> dict[Path, list[NamedSpec]]:
    """Specs, grouped by the folder of their sources. Without ``--out``, a twin uses the source of its first type."""
    found: dict[Path, list[NamedSpec]] = defaultdict(list)
    for named in dict.fromkeys(named.main if out is None else named for named in specs):
        found[Path(out) if out is not None else home_of(named)].append(named)
    return found


def _problems_of(by_folder: Mapping[Path, list[NamedSpec]], twins: Iterable[NamedSpec]) -> list[freshness.Problem]:
    """Problems of the sources of specs and twins."""
    problems = [p for folder, group in by_folder.items() for p in freshness.check_files(folder, group)]
    return problems + [p for named in twins for p in freshness.check_twins(home_of(named), [named])]


def _readable(specs: Iterable[str], *, all_types: bool = False) -> tuple[list[NamedSpec], list[SpecError]]:
    """The specs that can be read, and the errors of the others."""
    found: list[NamedSpec] = []
    mistakes: list[SpecError] = []
    for spec in dict.fromkeys(specs):
        try:
            found += find_specs(spec) if all_types else [find_spec(spec)]
        except SpecError as error:
            mistakes.append(error)
    return found, mistakes


def _joined(mistakes: Iterable[SpecError]) -> SpecError:
    """One error for the mistakes of several specs."""
    first, *others = [each for mistake in mistakes for each in (mistake, *mistake.others)]
    return SpecError(first.field, first.reason, first.location, tuple(others))


def _leave_with(mistakes: Sequence[SpecError]) -> None:
    """Print the errors of specs, and exit with code 1 if there are any."""
    for mistake in mistakes:
        for each in (mistake, *mistake.others):
            typer.echo(f"error: {each}", err=True)
    if mistakes:
        raise typer.Exit(CHECK_FAILED)


def _write_sources(
    by_folder: Mapping[Path, list[NamedSpec]],
    twins: Iterable[NamedSpec],
    renewed: Sequence[NamedSpec] | None,
    mistakes: Sequence[SpecError],
    *,
    as_json: bool,
) -> None:
    """Write the sources that are not up to date and the index of shipped kernels; print the sources of twins."""
    with report(as_json=as_json) as told:
        for folder, group in by_folder.items():
            for path, changed in freshness.render_to(folder, group).items():
                line = f"{'wrote' if changed else 'up to date'}  {display_path(path)}"
                told.row({"path": str(path), "changed": changed}, line)
            indexing.update(folder, renewed)
        for named in twins:
            tell_twin(told, named)
        _leave_with(mistakes)


def tell_twin(told: Report, named: NamedSpec) -> None:
    """Print the path of a twin's source."""
    words = ", ".join(map(" -> ".join, WORDS.items()))
    told.say(
        f"{named.stem}: its source is {named.source_file} with the kernel's name and some words replaced ({words}); "
        f"to write it, run: codegen render {named.stem} --out DIR"
    )


def check(*, strict: bool, as_json: bool) -> None:
    """``codegen check``."""
    specs = shipped_specs()
    _render_once(specs)
    problems = freshness.check(GENERATED, specs, strict=strict) + indexing.problems(GENERATED, specs)
    _report_problems(problems, as_json=as_json)


def explain(
    spec: str | None, problem: str | None, provenance: Callable[[NamedSpec], Provenance] | None, *, as_json: bool
) -> None:
    """``codegen explain``; ``provenance``, if given, also finds receipts outside of the package."""
    named, choice = _kernel_asked_for(spec, problem)
    vouched = (provenance or provenance_of)(named)
    plan = plan_for(named)
    with report(as_json=as_json) as told:
        told.document |= explained(plan, vouched, choice)
        told.show(explanation(plan, vouched, choice))


def _kernel_asked_for(spec: str | None, problem: str | None) -> tuple[NamedSpec, Choice | None]:
    """The kernel that ``explain`` describes, and the kernel chosen for its problem."""
    sizes: Any = {} if problem is None else problem_fields(problem)
    if spec is None:
        if problem is None:
            raise CodegenError("name a spec, or a problem with --problem")
        choice = choose(parse_problem(sizes))
        return choice.named, choice
    named = find_spec(spec)
    if not is_chosen(named.spec):
        choose(named, sizes or None)  # an explicit kernel has no choice: rejects sizes
        return named, None
    said = said_by(named.spec)
    wrong = [name for name in sizes if name in said]
    if wrong:
        raise SpecError(f"problem.{wrong[0]}", "is set by the spec: leave it out")
    return named, choose(parse_problem({**said, **sizes}))


def schema(out: Path | None) -> None:
    """``codegen schema``."""
    text = json.dumps(json_schema(), indent=2) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_if_changed(out, text)


def _render_once(specs: Sequence[NamedSpec]) -> None:
    """Render specs with a progress bar; later calls use the cached sources."""
    with progress("rendering", len(specs)) as at:
        for named in specs:
            at(named.stem)
            render(named)


def _report_problems(problems: list[freshness.Problem], mistakes: Sequence[SpecError] = (), *, as_json: bool) -> None:
    """Print problems, and exit with code 1 if there are any."""
    with report(as_json=as_json) as told:
        for problem in problems:
            fields = {"path": str(problem.path), "kind": problem.kind, "message": problem.message, "fix": problem.fix}
            place = display_path(problem.path)
            told.row(fields, f"{place}: {problem.message}\n    run: {problem.fix}")
        _leave_with(mistakes)
        if problems:
            typer.echo(f"{len(problems)} problem{'s' if len(problems) > 1 else ''}", err=True)
            raise typer.Exit(CHECK_FAILED)
        told.say("every file is up to date")
