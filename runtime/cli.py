"""The ``codegen`` command: what codegen.cli has, plus the commands that compile, verify and look after the cache."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from codegen.cli import CHECK_FAILED, AllOption, SpecsArgument, app, chosen, home_of, verify_line
from codegen.errors import CodegenError
from codegen.files import holds
from codegen.freshness import display_path, render_to
from codegen.library import NamedSpec
from codegen.receipts import MeasurementRecord, Receipt, receipt_path, source_sha256
from codegen.render import render
from codegen.select.candidates import MOST
from codegen.wording import in_shell
from runtime.compile.cache import KernelCache
from runtime.compile.compiler import Compiled, compile_spec
from runtime.compile.inspection import INSTRUCTIONS, usage
from runtime.errors import DeviceError, ToolchainError

OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Where sources and receipts are; else where render puts them.", show_default=False
    ),
]

cache_app = typer.Typer(name="cache", help="Look after the cache of compiled kernels.", no_args_is_help=True)
app.add_typer(cache_app)


def main() -> None:
    """Run the command line."""
    app()


@app.command("compile")
def compile_command(
    specs: SpecsArgument = None,
    every: AllOption = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the receipts; fail if a cubin is not the one they name.")
    ] = False,
) -> None:
    """Compile specs to cubins with NVRTC and report what they use. Needs no GPU.

    [bold]Examples[/bold]
      codegen compile h100_topk32
      codegen compile --all --check
    """
    table = Table(box=None, pad_edge=False, header_style="cyan")
    for title in ("kernel", "arch", "regs", "spill B", "stack", "shared KB", *INSTRUCTIONS, "from"):
        table.add_column(title, justify="left" if title in ("kernel", "arch", "from") else "right")
    made, differences = [], []
    for named in chosen(specs, every):
        compiled = compile_spec(named)
        made.append(compiled)
        used = usage(compiled)
        counts = [str(used.instructions[name]) for name in INSTRUCTIONS]
        memory = [used.spill_bytes, used.stack_bytes, f"{used.dynamic_shared_bytes / 1024:.1f}"]
        row = [named.stem, named.spec.arch, used.registers, *memory]
        table.add_row(*map(str, row), *counts, "cache" if compiled.was_cached else "NVRTC")
        if check:
            differences += receipt_differences(compiled)
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)
    for compiled in made:  # after all of them: an entry may have had to go for a later one
        typer.echo(f"{compiled.named.stem}: source {source_place(compiled.named)}, cubin {cubin_place(compiled)}")
    for difference in differences:
        typer.echo(difference, err=True)
    if differences:
        raise typer.Exit(CHECK_FAILED)


def source_place(named: NamedSpec) -> str:
    """Return where the rendered source of a spec lies, if it was written."""
    path = home_of(named) / named.subfolder / f"{named.stem}.cu"
    if holds(path, render(named)):
        return display_path(path)
    return f"not written (codegen render {in_shell(named.place or named.stem)})"


def cubin_place(compiled: Compiled) -> str:
    """Return where a cubin lies in the cache, if it is still there."""
    cache = KernelCache()
    path = cache.file_of(compiled.code)
    return str(path or f"no longer in the cache, which keeps at most {cache.max_bytes} bytes (CODEGEN_CACHE_MAX_BYTES)")


def receipt_differences(compiled: Compiled, folder: Path | None = None, *, strict: bool = False) -> list[str]:
    """Return what a receipt says differently about a cubin that has just been made.

    Cubins of another compiler are not compared, unless ``strict``: then they differ.
    """
    from runtime.verify.receipts import cubin_record, differences  # noqa: PLC0415

    named = compiled.named
    path = receipt_path(named.stem, home_of(named) / named.subfolder if folder is None else folder)
    if not path.is_file():
        return [f"{named.stem}: has no receipt; run: {verify_line(named)}"]
    receipt = Receipt.read(path)
    told, found = receipt.cubin, cubin_record(compiled)
    if told.compiler_package != found.compiler_package and not strict:
        typer.echo(
            f"{named.stem}: not compared, the receipt is of {told.compiler_package}, this is {found.compiler_package}"
        )
        return []
    if receipt.schema_version == 1:  # its launch hash is another one: nothing to compare
        told = told.model_copy(update={"launch_sha256": found.launch_sha256})
    found_differences = differences(told, found)
    if receipt.schema_version == 1:
        found_differences.append(f"its receipt is of version 1; run: codegen migrate {named.stem}")
    return [f"{named.stem}: {difference}" for difference in found_differences]


def require_gpu(verb: str, undone: str) -> None:
    """Raise an error where there is no GPU; nothing was ``undone`` then."""
    try:
        import torch  # noqa: PLC0415
    except ModuleNotFoundError:
        raise ToolchainError(f"{verb} needs torch: pip install 'sparse-kernel-codegen[torch]'") from None
    if not torch.cuda.is_available():
        raise DeviceError(f"{verb} needs a GPU, and torch sees none; nothing was {undone}")


def print_timings(timings: Iterable[MeasurementRecord]) -> None:
    """Print what was timed."""
    for timing in timings:
        typer.echo(
            f"    {timing.shape}: {timing.milliseconds} ms, {timing.tflops} TFLOPS; "
            f"{timing.peer}: {timing.peer_milliseconds} ms, {timing.peer_tflops} TFLOPS"
        )


@app.command("verify")
def verify_command(
    specs: SpecsArgument = None,
    every: AllOption = False,
    measure: Annotated[bool, typer.Option("--measure", help="Also time the kernel beside its peers.")] = False,
    out: OutOption = None,
) -> None:
    """Run every case of a kernel on the GPU against a float64 oracle, and write its receipt.

    What was measured of the same source and cubin on the same GPU and driver stays in it.

    [bold]Examples[/bold]
      codegen verify h100_topk32
      codegen verify --all --measure
    """
    named_specs = chosen(specs, every)
    require_gpu("verify", "verified")
    from runtime.bench.measurement import measure as measure_kernel  # noqa: PLC0415
    from runtime.verify.receipts import receipt  # noqa: PLC0415
    from runtime.verify.run import verify  # noqa: PLC0415

    failed = 0
    for named in named_specs:
        kernel, record = verify(named)
        timings = measure_kernel(kernel) if measure else ()
        folder = home_of(named) if out is None else out
        render_to(folder, [named])
        written, path = receipt(named, record, timings), receipt_path(named.stem, folder / named.subfolder)
        (written if measure else written.with_measurement_at(path)).write(path)
        verdict = "FAILED" if record.failed else "ok"
        typer.echo(
            f"{verdict:6} {named.stem}: {len(record.cases)} cases on {record.device} ({record.target}), "
            f"worst error {record.worst_error:.2g}"
        )
        for case in record.cases:
            if not case.passed:
                typer.echo(
                    f"    {case.name} ({case.description}): error {case.max_error:.3g}, allowed {case.tolerance:.3g}, "
                    f"torch {case.torch_error}; repeat: {verify_line(named)}"
                )
        print_timings(timings)
        failed += bool(record.failed)
    if failed:
        raise typer.Exit(CHECK_FAILED)


@app.command("measure")
def measure_command(specs: SpecsArgument = None, every: AllOption = False, out: OutOption = None) -> None:
    """Time a verified kernel on the GPU beside its peers, and put that in its receipt.

    The receipt must be that of the source and of the cubin as they are now.

    [bold]Examples[/bold]
      codegen measure h100_topk32
      codegen measure --all
    """
    named_specs = chosen(specs, every)
    require_gpu("measure", "measured")
    from runtime.bench.measurement import measure  # noqa: PLC0415
    from runtime.kernel import load_kernel  # noqa: PLC0415

    unverified = []
    for named in named_specs:
        path = receipt_path(named.stem, (home_of(named) if out is None else out) / named.subfolder)
        kernel, compiled = load_kernel(named, forward_compatible=True), compile_spec(named)
        differences = receipt_differences(compiled, path.parent, strict=True)
        if not differences and Receipt.read(path).source.sha256 != source_sha256(compiled.source):
            differences = [f"{named.stem}: its receipt is of another source; run: {verify_line(named)}"]
        if differences:
            unverified += differences
            continue
        timings = measure(kernel)
        Receipt.read(path).model_copy(update={"measurement": timings}).write(path)
        typer.echo(f"{named.stem}:")
        print_timings(timings)
    for difference in unverified:
        typer.echo(difference, err=True)
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

    migration = Migration(out, check=check)
    for path in files(names, every):
        migration.file(path)
    if migration.refused or (check and migration.changed):
        raise typer.Exit(CHECK_FAILED)


@app.command("tune")
def tune_command(
    *,
    problems: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROBLEM...", help="FIELD=VALUE,...: see docs/select.md.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="Problems as JSON, one a line.", show_default=False),
    ] = None,
    database: Annotated[Path, typer.Option("--db", metavar="FILE", help="What was found, candidate by candidate.")] = (
        Path("tune.sqlite")
    ),
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile the candidates into the cache; needs no GPU.")
    ] = False,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Write rows of the table of measurements.", show_default=False),
    ] = None,
    most: Annotated[int, typer.Option("--most", min=0, help="Variations of a problem, beside shipped specs.")] = MOST,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Compilations at a time.")] = None,
) -> None:
    """Find the fastest kernels of problems: shipped specs and variations, compiled, verified, timed.

    A candidate whose result is wrong gets no time. Each one is kept in the database as soon as it is timed: a run that
    was interrupted goes on where it ended. Problems need their sizes.

    [bold]Examples[/bold]
      codegen tune op=bsr_spmm,block=64,m=14336,n=16,k=4096,density=0.3 --compile-only
      codegen tune op=bsr_spmm,block=64,m=14336,n=16,k=4096,density=0.3
      codegen tune --file problems.jsonl --db tune.sqlite --export rows.jsonl
      codegen tune --db tune.sqlite --export rows.jsonl
    """
    from runtime.tune.command import export_rows, read_problems, run  # noqa: PLC0415
    from runtime.tune.database import Database  # noqa: PLC0415

    asked = read_problems(problems or (), file)
    if not asked and export is None:
        raise CodegenError("name a problem or more, or a file of them with --file")
    if asked and not compile_only:
        require_gpu("tune", "timed")
    found = Database(database)
    if asked:
        run(found, asked, compile_only=compile_only, most=most, jobs=jobs)
    if export is not None:
        typer.echo(f"wrote {export_rows(found, export)} rows to {display_path(export)}")


@cache_app.command("path")
def cache_path() -> None:
    """Print the folder of the cache."""
    typer.echo(KernelCache().folder)


@cache_app.command("list")
def cache_list() -> None:
    """List the compiled kernels in the cache."""
    total = 0
    for path, entry in KernelCache().entries():
        size = path.stat().st_size
        total += size
        what = f"{entry.stem} ({entry.target})" if entry else "corrupt: will be rebuilt when it is needed"
        typer.echo(f"{path.name[:16]}  {size:>9}  {what}")
    typer.echo(f"{total} bytes in {KernelCache().folder}")


@cache_app.command("clear")
def cache_clear() -> None:
    """Remove every compiled kernel."""
    typer.echo(f"removed {KernelCache().clear()} entries")
