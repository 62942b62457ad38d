"""Implementation of the commands in ``runtime.cli``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from codegen import indexing
from codegen.commands import chosen
from codegen.errors import MOST_OF_MESSAGE, MOST_OF_PLACE, CodegenError
from codegen.files import holds
from codegen.freshness import render_command, render_to
from codegen.library import NamedSpec
from codegen.places import home_of, place_of, verify_line
from codegen.project import GENERATED
from codegen.receipts import (
    MeasurementRecord,
    VerificationRecord,
    read_receipt,
    receipt_path,
    source_sha256,
    write_receipt,
)
from codegen.render import render
from codegen.select.choice import choose, planned
from codegen.select.problem import parse_problem, problem_fields
from codegen.tools.report import CHECK_FAILED, Report, report
from codegen.wording import in_shell, one_line
from runtime.compile import compilers, prebuilt, toolchain
from runtime.compile import rows as compile_rows
from runtime.compile.cache import KernelCache
from runtime.compile.compiler import Compiled, compile_spec
from runtime.compile.inspection import usage
from runtime.errors import SpillError
from runtime.receipts import own
from runtime.tools.bench.required import require_gpu

if TYPE_CHECKING:
    from runtime.verify.receipts import Comparison

WIDTH = 100
"""Columns of a finding of ``codegen doctor``."""
WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}
NOT_COMPARED = 3
"""Exit code of ``compile --check`` if nothing differs but a receipt names another compiler."""


def compile_specs(specs: Sequence[str] | None, *, every: bool, check: bool, as_json: bool) -> None:
    """``codegen compile``."""
    named_specs = chosen(specs, every)
    names = max(len(title) for title in (compile_rows.NAMES, *(named.stem for named in named_specs)))
    made: list[Compiled] = []
    comparisons: list[Comparison] = []
    with report(as_json=as_json) as told:
        compiler = toolchain.compiler_version()[1]
        caveat = compilers.caveat(compiler)
        told.note("compiler", compiler)
        told.note("compiler_of_receipts", compilers.record().compiler)
        told.note("caveat", caveat, compile_rows.header(names))
        for named in told.steps("compiling", named_specs, lambda named: named.stem):
            compiled = compile_spec(named)
            used = usage(compiled)
            made.append(compiled)
            fields = {**compile_rows.fields_of(compiled, used), "refused": _refused(compiled)}
            told.row(fields, compile_rows.lines_of(compiled, used, names))
            if check:
                comparisons.append(_compared(compiled))
                told.rows[-1] |= {"compared": comparisons[-1].outcome}
        for compiled, row in zip(made, told.rows, strict=True):  # a newer entry may have evicted it
            row |= {"source": source_place(compiled.named), "cubin": cubin_place(compiled)}
            source, cubin = one_line(row["source"], MOST_OF_PLACE), one_line(row["cubin"], MOST_OF_PLACE)
            told.say(f"{compiled.named.stem}: source {source}, cubin {cubin}")
        if check:
            _conclude(told, comparisons)
        elif caveat:
            typer.echo(caveat, err=True)
        _leave(any(row["refused"] for row in told.rows), comparisons)


def export_specs(
    specs: Sequence[str] | None, out: Path, shape: str | None, sm_count: int | None, *, every: bool, as_json: bool
) -> None:
    """``codegen export``."""
    from runtime.export import check_places, export, launches_of, parse_sizes  # noqa: PLC0415 - unused by others

    named_specs = chosen(specs, every)
    check_places(named_specs, out)
    launches = launches_of(named_specs, None if shape is None else parse_sizes(shape), sm_count)
    with report(as_json=as_json) as told:
        pairs = list(zip(named_specs, launches, strict=True))
        for named, sized in told.steps("exporting", pairs, lambda pair: pair[0].stem):
            done = export(named, out, sized)
            fields = {
                "kernel": named.stem,
                "folder": str(done.folder),
                "changed": done.changed,
                "spec_hash": named.spec.hash,
                "was_cached": done.compiled.was_cached,
                "verified": done.is_verified,
            }
            state = "wrote" if done.changed else "up to date"
            told.row(fields, f"{state}  {one_line(str(done.folder), MOST_OF_PLACE)}: {done.standing}")


def _compared(compiled: Compiled) -> Comparison:
    """Compare a cubin with its receipt, and print the differences."""
    from runtime.verify.receipts import compared  # noqa: PLC0415 - `compile` does not need it

    named = compiled.named
    found = compared(compiled, receipt_path(named, own.folder()) if named.path is None else place_of(named, ".json"))
    _tell_differences(found)
    return found


def _tell_differences(comparison: Comparison) -> None:
    for difference in comparison.differences:
        typer.echo(difference, err=True)


def _refused(compiled: Compiled) -> str:
    """Reason to refuse this compiler's code of a kernel, also printed to standard error; "" without one."""
    try:
        compilers.check_spills(compiled)
    except SpillError as error:
        typer.echo(str(error), err=True)
        return str(error)
    return ""


def _conclude(told: Report, comparisons: Sequence[Comparison]) -> None:
    """Report the number of cubins that were compared with their receipts, and the compilers that the others need."""
    count = sum(not comparison.of_other for comparison in comparisons)
    told.note("differences", [line for comparison in comparisons for line in comparison.differences])
    told.note("compared", count, f"{count} of {len(comparisons)} compared with their receipts")
    told.note("not_compared", len(comparisons) - count)
    others = sorted({comparison.of_other for comparison in comparisons} - {""})
    if not others:
        return
    _, package = toolchain.compiler_version()
    known = compilers.record().compiler
    mends = [
        compilers.mend() if each == known else f"pip install {in_shell(each.replace(' ', '=='))}" for each in others
    ]
    typer.echo(
        f"{'not all cubins were' if count else 'nothing was'} compared: {package} is not the compiler of the receipts, "
        f"{', '.join(map(one_line, others))}: its code differs and was not tested; to compare: {' or '.join(mends)}",
        err=True,
    )


def _leave(refused: bool, comparisons: Sequence[Comparison]) -> None:
    """Exit with a code if a kernel was refused, differs, or was not compared."""
    if refused or any(comparison.differences for comparison in comparisons):
        raise typer.Exit(CHECK_FAILED)
    if any(comparison.of_other for comparison in comparisons):
        raise typer.Exit(NOT_COMPARED)


def source_place(named: NamedSpec) -> str:
    """File of the rendered source of a spec, or the command that writes it."""
    path = place_of(named, ".cu")
    if not holds(path, render(named.main)):
        return f"not written ({render_command(named)})"
    return str(path) if named.twin_of is None else f"{path} with replaced words ({render_command(named)} --out DIR)"


def cubin_place(compiled: Compiled) -> str:
    """File of a cubin in the cache, or the reason why it is missing."""
    cache = KernelCache()
    path = cache.file_of(compiled.key)
    return str(path or f"evicted from the cache, which keeps at most {cache.max_bytes} bytes (CODEGEN_CACHE_MAX_BYTES)")


def tell_timings(told: Report, timings: Iterable[MeasurementRecord]) -> None:
    """Print times of a kernel and of its peer."""
    for timing in timings:
        told.say(
            f"    {timing.shape}: {timing.milliseconds} ms, {timing.tflops} TFLOPS; "
            f"{timing.peer}: {timing.peer_milliseconds} ms, {timing.peer_tflops} TFLOPS"
        )


def verify_specs(
    specs: Sequence[str] | None, problem: str | None, out: Path | None, *, every: bool, timed: bool, as_json: bool
) -> None:
    """``codegen verify``."""
    named_specs = chosen(specs, every, all_types=True) if problem is None else _of_problem(problem, specs, every)
    require_gpu("verify", "verified")
    to_own = problem is not None
    from runtime.tools.bench.measurement import measure as measure_kernel  # noqa: PLC0415
    from runtime.verify.receipts import receipt, with_measurement_in  # noqa: PLC0415
    from runtime.verify.run import verify  # noqa: PLC0415

    failed = 0
    with report(as_json=as_json) as told:
        for named in told.steps("verifying", named_specs, lambda named: named.stem):
            kernel, record = verify(named)
            timings = measure_kernel(kernel) if timed else ()
            folder = out or (own.folder() if to_own else receipts_home(named))
            own.make(folder / named.subfolder)
            render_to(folder, [named.main])
            written, path = receipt(named, record, timings), receipt_path(named, folder)
            written = written if timed else with_measurement_in(path, named, written)
            write_receipt(named, written, path, partial(receipt, named.main, None))
            own.protect(path)
            fields = {"kernel": named.stem, "receipt": str(path), "passed": not record.failed}
            measured = [timing.model_dump(mode="json") for timing in timings]
            told.row(fields | {"verification": record.model_dump(mode="json"), "measurement": measured})
            tell_verified(told, named, record)
            tell_timings(told, timings)
            indexing.update(folder, ())
            failed += bool(record.failed)
        if failed:
            raise typer.Exit(CHECK_FAILED)


def _of_problem(problem: str, specs: Sequence[str] | None, every: bool) -> list[NamedSpec]:
    """Kernel that a call chooses for a problem on the current GPU.

    Raises:
        CodegenError: if the command line also names specs.
        SpecError: if the problem is invalid or has no kernel.
    """
    if specs or every:
        raise CodegenError("name specs, or a problem with --problem, not both")
    asked = parse_problem(problem_fields(problem))
    require_gpu("verify", "verified")
    import torch  # noqa: PLC0415

    return [planned(choose(asked, device=torch.cuda.get_device_name(), general=True)).named]


def receipts_home(named: NamedSpec) -> Path:
    """Folder of a kernel's receipt: the user's folder for a spec without a file, else the source's folder."""
    return own.folder() if named.path is None else home_of(named)


def tell_verified(told: Report, named: NamedSpec, record: VerificationRecord) -> None:
    """Print the test results of a kernel, and each case that failed."""
    verdict = "FAILED" if record.failed else "ok"
    told.say(
        f"{verdict:6} {named.stem}: {len(record.cases)} cases on {record.device} ({record.target}), "
        f"worst error {record.worst_error:.2g}"
    )
    for case in record.cases:
        if not case.passed:
            told.say(
                f"    {case.name} ({case.description}): error {case.max_error:.3g}, allowed {case.tolerance:.3g}, "
                f"torch {case.torch_error}; repeat: {verify_line(named)}"
            )


def measure_specs(specs: Sequence[str] | None, out: Path | None, *, every: bool, as_json: bool) -> None:
    """``codegen measure``."""
    named_specs = chosen(specs, every, all_types=True)
    require_gpu("measure", "measured")
    from runtime.kernel import load_kernel  # noqa: PLC0415
    from runtime.tools.bench.measurement import measure  # noqa: PLC0415
    from runtime.verify.receipts import Comparison, compared  # noqa: PLC0415

    unverified = 0
    with report(as_json=as_json) as told:
        for named in told.steps("measuring", named_specs, lambda named: named.stem):
            path = receipt_path(named, receipts_home(named) if out is None else out)
            with prebuilt.ignored():
                kernel, compiled = load_kernel(named, forward_compatible=True), compile_spec(named)
            found = compared(compiled, path, strict=True)
            if not found.differences and read_receipt(named, path).source.sha256 != source_sha256(compiled.source):
                found = Comparison((f"{named.stem}: its receipt describes another source; run: {verify_line(named)}",))
            if found.differences:
                unverified += 1
                told.row({"kernel": named.stem, "differences": found.differences})
                _tell_differences(found)
                continue
            timings = measure(kernel)
            write_receipt(named, read_receipt(named, path).model_copy(update={"measurement": timings}), path)
            measured = [timing.model_dump(mode="json") for timing in timings]
            told.row({"kernel": named.stem, "receipt": str(path), "measurement": measured}, f"{named.stem}:")
            tell_timings(told, timings)
            indexing.update(receipts_home(named) if out is None else out, ())
        if unverified:
            raise typer.Exit(CHECK_FAILED)


def migrate(names: Sequence[str] | None, out: Path | None, *, every: bool, check: bool, as_json: bool) -> None:
    """``codegen migrate``."""
    from runtime.verify.migrate_files import Migration, files  # noqa: PLC0415

    with report(as_json=as_json) as told:
        migration = Migration(told, out, check=check)
        for path in told.steps("migrating", files(names, every), lambda path: path.name):
            migration.file(path)
        if not check:
            indexing.update(GENERATED if out is None else out, ())
        if migration.refused or (check and migration.changed):
            raise typer.Exit(CHECK_FAILED)


def doctor(*, as_json: bool) -> None:
    """``codegen doctor``."""
    from runtime.doctor import LOOKS, look  # noqa: PLC0415 - other commands do not need it

    wrong = 0
    with report(as_json=as_json) as told:
        for name in told.steps("looking at", LOOKS, str):
            found = look(name)
            remedy = f"\n{'':17}-> {found.remedy}" if found.remedy else ""
            head, text = f"{found.state:5}  {name:9} ", one_line(found.told, MOST_OF_MESSAGE)
            line = textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * 17, **WHOLE_WORDS) + remedy
            told.row({"name": name, **asdict(found)}, line)
            wrong += found.state == "wrong"
        if wrong:
            raise typer.Exit(CHECK_FAILED)
