"""The ``codegen`` command: what codegen.cli has, plus the commands that compile, verify and look after the cache."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from codegen.cli import CHECK_FAILED, AllOption, SpecsArgument, app, chosen, home_of, place_of, verify_line
from codegen.errors import MOST_OF_MESSAGE, MOST_OF_PLACE, CodegenError
from codegen.files import holds
from codegen.freshness import display_path, render_command, render_to
from codegen.library import NamedSpec
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
from codegen.tools import new_command as _new_command  # noqa: F401 - its command
from codegen.tools.report import JsonOption, Report, report
from codegen.wording import in_shell, one_line
from runtime.compile import compilers, prebuilt, toolchain
from runtime.compile import rows as compile_rows
from runtime.compile.cache import KernelCache
from runtime.compile.cache_environment import default_folder
from runtime.compile.compiler import Compiled, compile_spec
from runtime.compile.inspection import usage
from runtime.errors import SpillError
from runtime.receipts import own, permit
from runtime.tools.analysis import cli as _analysis  # noqa: F401 - its commands
from runtime.tools.attest import cli as _attest  # noqa: F401 - its commands
from runtime.tools.baselines import cli as _baselines  # noqa: F401 - its command
from runtime.tools.bench.required import require_gpu
from runtime.tools.report import cli as _report  # noqa: F401 - its command
from runtime.tools.tune import cli as _tune  # noqa: F401 - its command
from runtime.tools.warm import cli as _warm  # noqa: F401 - its command

if TYPE_CHECKING:
    from runtime.verify.receipts import Comparison

OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Where sources and receipts are; else where render puts them.", show_default=False
    ),
]

NOT_COMPARED = 3
"""The exit code of ``compile --check`` where nothing differs, and receipts are of another compiler."""

cache_app = typer.Typer(name="cache", help="Look after the cache of compiled kernels.", no_args_is_help=True)
app.add_typer(cache_app)


def main() -> None:
    """Run the command line."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may have what a terminal does not print
    app(obj=permit.provenance)


@app.command("compile")
def compile_command(
    specs: SpecsArgument = None,
    every: AllOption = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the receipts; fail if a cubin is not the one they name.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compile specs to cubins with NVRTC and report what they use. Needs no GPU.

    The exit code is 1 if a shipped kernel spills registers with this compiler, or with --check if a cubin is not that
    of its receipt; else 3 if a receipt is of another compiler, so that its cubin was not compared.

    [bold]Examples[/bold]
      codegen compile h100_topk32
      codegen compile --all --check
    """
    named_specs = chosen(specs, every)
    names = max(len(named.stem) for named in named_specs)
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
        for compiled, row in zip(made, told.rows, strict=True):  # an entry may have had to go for a later one
            row |= {"source": source_place(compiled.named), "cubin": cubin_place(compiled)}
            source, cubin = one_line(row["source"], MOST_OF_PLACE), one_line(row["cubin"], MOST_OF_PLACE)
            told.say(f"{compiled.named.stem}: source {source}, cubin {cubin}")
        if check:
            _conclude(told, comparisons)
        elif caveat:
            typer.echo(caveat, err=True)
        _leave(any(row["refused"] for row in told.rows), comparisons)


@app.command("export")
def export_command(
    specs: SpecsArgument = None,
    every: AllOption = False,
    *,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where to write: a folder for each kernel, by its name.")
    ],
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="FIELD=NUMBER,...",
            help="Also tell the launch of a problem of this shape: grid, numbers, memory (docs/guide/export.md).",
            show_default=False,
        ),
    ] = None,
    sm_count: Annotated[
        int | None,
        typer.Option("--sm-count", metavar="N", help="Multiprocessors of the device it is for.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write kernels for hosts without a compiler: source, cubin, receipt, kernel.json, C header. Needs no GPU.

    load_kernel("DIR/NAME") loads one and never compiles. A folder is whole or not there; one that holds anything else
    is not written over.

    [bold]Examples[/bold]
      codegen export h100_topk32 h100_dense --out exported
      codegen export h100_causal --out exported --shape batch=1,heads=8,kv_heads=8,q_len=1024,kv_len=1024 --sm-count 132
    """
    from runtime.export import check_places, export, launches_of, parse_sizes  # noqa: PLC0415 - not for other commands

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
    """Compare a cubin with its receipt, and tell what differs."""
    from runtime.verify.receipts import compared  # noqa: PLC0415 - not for those who only compile

    named = compiled.named
    found = compared(compiled, receipt_path(named, own.folder()) if named.path is None else place_of(named, ".json"))
    _tell_differences(found)
    return found


def _tell_differences(comparison: Comparison) -> None:
    for difference in comparison.differences:
        typer.echo(difference, err=True)


def _refused(compiled: Compiled) -> str:
    """Why this compiler's code of a kernel is not run, told on standard error; "" if it is."""
    try:
        compilers.check_spills(compiled)
    except SpillError as error:
        typer.echo(str(error), err=True)
        return str(error)
    return ""


def _conclude(told: Report, comparisons: Sequence[Comparison]) -> None:
    """Say how many cubins were compared with their receipts, and with which compiler the others can be."""
    count = sum(not comparison.of_other for comparison in comparisons)
    told.note("differences", [line for comparison in comparisons for line in comparison.differences])
    told.note("compared", count, f"{count} of {len(comparisons)} compared with their receipts")
    told.note("not_compared", len(comparisons) - count)
    others = sorted({comparison.of_other for comparison in comparisons} - {""})
    if not others:
        return
    _, package = toolchain.compiler_version()
    known = compilers.record().compiler
    mends = [compilers.MEND if each == known else f"pip install {in_shell(each.replace(' ', '=='))}" for each in others]
    typer.echo(
        f"{'not all were' if count else 'nothing was'} compared: {package} is not the compiler of the receipts, "
        f"{', '.join(map(one_line, others))}: code differs, cases were not run on it; to compare: {' or '.join(mends)}",
        err=True,
    )


def _leave(refused: bool, comparisons: Sequence[Comparison]) -> None:
    """Leave with an exit code if not all is well."""
    if refused or any(comparison.differences for comparison in comparisons):
        raise typer.Exit(CHECK_FAILED)
    if any(comparison.of_other for comparison in comparisons):
        raise typer.Exit(NOT_COMPARED)


def source_place(named: NamedSpec) -> str:
    """Return where the rendered source of a spec lies, if it was written."""
    path = place_of(named, ".cu")
    if not holds(path, render(named.main)):
        return f"not written ({render_command(named)})"
    return str(path) if named.twin_of is None else f"{path} with words replaced ({render_command(named)} --out DIR)"


def cubin_place(compiled: Compiled) -> str:
    """Return where a cubin lies in the cache, if it is still there."""
    cache = KernelCache()
    path = cache.file_of(compiled.key)
    return str(path or f"no longer in the cache, which keeps at most {cache.max_bytes} bytes (CODEGEN_CACHE_MAX_BYTES)")


def tell_timings(told: Report, timings: Iterable[MeasurementRecord]) -> None:
    """Say what was timed."""
    for timing in timings:
        told.say(
            f"    {timing.shape}: {timing.milliseconds} ms, {timing.tflops} TFLOPS; "
            f"{timing.peer}: {timing.peer_milliseconds} ms, {timing.peer_tflops} TFLOPS"
        )


@app.command("verify")
def verify_command(
    specs: SpecsArgument = None,
    every: AllOption = False,
    *,
    measure: Annotated[bool, typer.Option("--measure", help="Also time the kernel beside its peers.")] = False,
    problem: Annotated[
        str | None,
        typer.Option(
            "--problem",
            metavar="FIELD=VALUE,...",
            help="In place of SPEC: the kernel that is chosen for a problem.",
            show_default=False,
        ),
    ] = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run every case of a kernel on the GPU against a float64 oracle, and write its receipt.

    A spec with a list of types stands for both kernels; NAME_bf16 is the second alone. What was measured of the same
    source and cubin on the same GPU and driver stays in it. The receipt of the kernel of a problem, and of a spec that
    is given as JSON, goes to your own folder, where the runtime finds it (docs/guide/receipts.md).

    [bold]Examples[/bold]
      codegen verify h100_topk32
      codegen verify --all --measure
      codegen verify --problem op=attention,head_dim=96,dtype=bf16,pattern=causal,heads=16,q_len=4096,kv_len=4096
    """
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
            timings = measure_kernel(kernel) if measure else ()
            folder = out or (own.folder() if to_own else receipts_home(named))
            own.make(folder / named.subfolder)
            render_to(folder, [named.main])
            written, path = receipt(named, record, timings), receipt_path(named, folder)
            written = written if measure else with_measurement_in(path, named, written)
            write_receipt(named, written, path, partial(receipt, named.main, None))
            own.protect(path)
            fields = {"kernel": named.stem, "receipt": str(path), "passed": not record.failed}
            measured = [timing.model_dump(mode="json") for timing in timings]
            told.row(fields | {"verification": record.model_dump(mode="json"), "measurement": measured})
            tell_verified(told, named, record)
            tell_timings(told, timings)
            failed += bool(record.failed)
        if failed:
            raise typer.Exit(CHECK_FAILED)


def _of_problem(problem: str, specs: Sequence[str] | None, every: bool) -> list[NamedSpec]:
    """Return the kernel that a call takes for a problem on the current GPU.

    Raises:
        CodegenError: beside specs.
        SpecError: for what is no problem, or no kernel computes.
    """
    if specs or every:
        raise CodegenError("name specs, or a problem with --problem, not both")
    asked = parse_problem(problem_fields(problem))
    require_gpu("verify", "verified")
    import torch  # noqa: PLC0415

    return [planned(choose(asked, device=torch.cuda.get_device_name(), general=True)).named]


def receipts_home(named: NamedSpec) -> Path:
    """Return the folder of a kernel's receipt: of a spec without a file the user's own; else that of its source."""
    return own.folder() if named.path is None else home_of(named)


def tell_verified(told: Report, named: NamedSpec, record: VerificationRecord) -> None:
    """Say what a GPU made of a kernel, and which cases failed."""
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


@app.command("measure")
def measure_command(
    specs: SpecsArgument = None, every: AllOption = False, out: OutOption = None, as_json: JsonOption = False
) -> None:
    """Time a verified kernel on the GPU beside its peers, and put that in its receipt.

    A spec with a list of types stands for both kernels. The receipt must be that of the source and of the cubin as they
    are now.

    [bold]Examples[/bold]
      codegen measure h100_topk32
      codegen measure --all
    """
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
                found = Comparison((f"{named.stem}: its receipt is of another source; run: {verify_line(named)}",))
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
        if unverified:
            raise typer.Exit(CHECK_FAILED)


@app.command("migrate")
def migrate_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC|FILE...",
            help="A YAML file, the name of a shipped spec, or a .json or .jsonl file with rows of a benchmark.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every shipped spec; in the source tree also the rows of benchmarks/results/.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if something would change.")] = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Carry specs, receipts and rows over a change of names or comments.

    A spec file gets the names of today; its comments and its layout stay. A receipt follows its spec and its source if
    the spec differs by renamed fields and values alone, and if machine code and launch are the same byte for byte; the
    source is written with it. Needs no GPU, but for another source the compiler that the receipt names. What cannot be
    carried over is left as it is and told, and the exit code is 1.

    [bold]Examples[/bold]
      codegen migrate my_kernel.yaml
      codegen migrate --all --check
      codegen migrate benchmarks/results/attention_h200.json
    """
    from runtime.verify.migrate_files import Migration, files  # noqa: PLC0415

    with report(as_json=as_json) as told:
        migration = Migration(told, out, check=check)
        for path in told.steps("migrating", files(names, every), lambda path: path.name):
            migration.file(path)
        if migration.refused or (check and migration.changed):
            raise typer.Exit(CHECK_FAILED)


@app.command("doctor")
def doctor_command(as_json: JsonOption = False) -> None:
    """Look at what the machine has for rendering, compiling and running kernels, and say what mends what is wrong.

    The exit code is 1 if something is wrong. What only some commands need is noted where it is not there.

    [bold]Examples[/bold]
      codegen doctor
      codegen doctor --json
    """
    from runtime.doctor import LOOKS, look  # noqa: PLC0415 - not for those who only compile

    wrong = 0
    with report(as_json=as_json) as told:
        for name in told.steps("looking at", LOOKS, str):
            found = look(name)
            remedy = f"\n{'':17}-> {found.remedy}" if found.remedy else ""
            line = f"{found.state:5}  {name:9} {one_line(found.told, MOST_OF_MESSAGE)}{remedy}"
            told.row({"name": name, **asdict(found)}, line)
            wrong += found.state == "wrong"
        if wrong:
            raise typer.Exit(CHECK_FAILED)


@cache_app.command("path")
def cache_path(as_json: JsonOption = False) -> None:
    """Print the folder of the cache."""
    with report(as_json=as_json) as told:
        told.note("folder", str(default_folder()), str(default_folder()))


@cache_app.command("list")
def cache_list(as_json: JsonOption = False) -> None:
    """List the compiled kernels in the cache."""
    cache, total = KernelCache(), 0
    with report(as_json=as_json) as told:
        for stored in cache.entries():
            total += stored.size
            of = stored.entry.identity if stored.entry else None
            what = f"{of.stem} ({of.arch} {of.target})" if of else "corrupt: will be rebuilt when it is needed"
            fields = {"file": str(stored.path), "bytes": stored.size, **(asdict(of) if of else {"corrupt": True})}
            told.row(fields, f"{one_line(stored.path.name[:16])}  {stored.size:>9}  {one_line(what)}")
        told.note("bytes", total, f"{total} bytes in {display_path(cache.folder)}")


@cache_app.command("clear")
def cache_clear(as_json: JsonOption = False) -> None:
    """Remove every compiled kernel."""
    with report(as_json=as_json) as told:
        count = KernelCache().clear()
        told.note("removed", count, f"removed {count} entries")
