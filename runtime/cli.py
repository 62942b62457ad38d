"""The ``codegen`` command: the commands of ``codegen.cli``, and those that compile, verify and manage the cache."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from codegen.cli import MAINTAIN, USE, AllOption, Commands, SpecsArgument, app, command
from codegen.tools import new_cli as _new  # noqa: F401 - its command
from codegen.tools.report import JsonOption
from runtime.tools.analysis import cli as _analysis  # noqa: F401 - its commands
from runtime.tools.attest import cli as _attest  # noqa: F401 - its commands
from runtime.tools.baselines import cli as _baselines  # noqa: F401 - its command
from runtime.tools.report import cli as _report  # noqa: F401 - its command
from runtime.tools.tune import cli as _tune  # noqa: F401 - its command
from runtime.tools.warm import cli as _warm  # noqa: F401 - its command

if TYPE_CHECKING:
    from codegen.library import NamedSpec
    from codegen.provenance import Provenance

OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Folder of sources and receipts. By default, the one that codegen render writes to.",
        show_default=False,
    ),
]

cache_app = typer.Typer(
    name="cache", cls=Commands, help="Show or clear the cache of compiled kernels.", no_args_is_help=True
)
app.add_typer(cache_app, rich_help_panel=USE)


def main() -> None:
    """Run the command line."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may have characters that a terminal lacks
    app(obj=_provenance, prog_name="codegen")


def _provenance(named: NamedSpec) -> Provenance:
    """What vouches for a kernel, in the package or in the user's folder."""
    from runtime.receipts import permit

    return permit.provenance(named)


@command("compile", USE)
def compile_command(
    specs: SpecsArgument = None,
    every: AllOption = False,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the receipts; fail if a cubin differs from its receipt's.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compile specs to cubins with NVRTC.

    Prints registers, spills, shared memory and instruction counts of each. Needs no GPU. The exit code is 1 if a
    shipped kernel spills registers with the installed compiler, or if a cubin differs from that of its receipt
    (--check). It is 3 if a cubin was not compared because its receipt is of another compiler.

    [bold]Examples[/bold]
      codegen compile h100_topk32
      codegen compile --all --check
    """
    from runtime import commands

    commands.compile_specs(specs, every=every, check=check, as_json=as_json)


@command("export", USE)
def export_command(
    specs: SpecsArgument = None,
    every: AllOption = False,
    *,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The folder to write to. Each kernel gets a folder in it.")
    ],
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            metavar="FIELD=NUMBER,...",
            help="Also write the launch for this shape: grid, values of parameters, bytes of memory.",
            show_default=False,
        ),
    ] = None,
    sm_count: Annotated[
        int | None,
        typer.Option(
            "--sm-count", metavar="N", help="Multiprocessors of the target device, for --shape.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Export kernels for hosts without a compiler.

    Writes the source, cubin, receipt, kernel.json and C header of each kernel. Needs no GPU. load_kernel("DIR/NAME")
    loads one and never compiles. A kernel's folder is written as a whole; a folder with other files is not overwritten.

    [bold]Examples[/bold]
      codegen export h100_topk32 h100_dense --out exported
      codegen export h100_causal --out exported --sm-count 132 \\
        --shape batch=1,heads=8,kv_heads=8,q_len=1024,kv_len=1024
    """
    from runtime import commands

    commands.export_specs(specs, out, shape, sm_count, every=every, as_json=as_json)


@command("verify", MAINTAIN)
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
            help="Instead of SPEC: verify the kernel that is chosen for this problem.",
            show_default=False,
        ),
    ] = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Test kernels on the GPU and write their receipts.

    Compares every test case of a kernel with a float64 reference. If a spec has two types, both kernels are tested;
    NAME_bf16 names the second one alone. Earlier measurements of the same source and cubin on the same GPU and driver
    are kept. Receipts of --problem, and of specs given as JSON, go to your own folder of receipts
    (CODEGEN_RECEIPTS).

    [bold]Examples[/bold]
      codegen verify h100_topk32
      codegen verify --all --measure
      codegen verify --problem op=attention,head_dim=96,pattern=causal,q_len=4096,kv_len=4096
    """
    from runtime import commands

    commands.verify_specs(specs, problem, out, every=every, timed=measure, as_json=as_json)


@command("measure", MAINTAIN)
def measure_command(
    specs: SpecsArgument = None, every: AllOption = False, out: OutOption = None, as_json: JsonOption = False
) -> None:
    """Time verified kernels on the GPU and add the times to their receipts.

    Each kernel is timed beside its peers. If a spec has two types, both kernels are timed. The receipt must be of the
    current source and cubin.

    [bold]Examples[/bold]
      codegen measure h100_topk32
      codegen measure --all
    """
    from runtime import commands

    commands.measure_specs(specs, out, every=every, as_json=as_json)


@command("migrate", MAINTAIN)
def migrate_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC|FILE",
            help="A YAML file, the name of a shipped spec, or a .json or .jsonl file with benchmark rows.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Every shipped spec; in a source tree also the rows of benchmarks/results/."),
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a file would change.")] = False,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Update specs, receipts and benchmark rows after a change of names.

    Rewrites renamed fields and values of a spec file and keeps its comments and layout. Carries a receipt over to the
    new source if machine code and launch are the same byte for byte, and writes the source with it. Needs no GPU; a
    changed source needs the compiler of its receipt. A file that cannot be migrated is left as it is and reported; the
    exit code is then 1.

    [bold]Examples[/bold]
      codegen migrate my_kernel.yaml
      codegen migrate --all --check
      codegen migrate benchmarks/results/attention_h200.json
    """
    from runtime import commands

    commands.migrate(names, out, every=every, check=check, as_json=as_json)


@command("doctor", USE)
def doctor_command(as_json: JsonOption = False) -> None:
    """Check that this machine can render, compile and run kernels.

    Prints a fix for each problem. The exit code is 1 if something is wrong. A tool that only some commands need is
    noted if it is missing.

    [bold]Examples[/bold]
      codegen doctor
      codegen doctor --json
    """
    from runtime import commands

    commands.doctor(as_json=as_json)


@command("path", "", cache_app)
def cache_path(as_json: JsonOption = False) -> None:
    """Print the folder of the cache.

    [bold]Examples[/bold]
      codegen cache path
    """
    from codegen.tools.report import report
    from runtime.compile.cache_environment import default_folder

    with report(as_json=as_json) as told:
        told.note("folder", str(default_folder()), str(default_folder()))


@command("list", "", cache_app)
def cache_list(as_json: JsonOption = False) -> None:
    """List the compiled kernels in the cache.

    [bold]Examples[/bold]
      codegen cache list
    """
    from runtime import cache_commands

    cache_commands.list_entries(as_json=as_json)


@command("clear", "", cache_app)
def cache_clear(as_json: JsonOption = False) -> None:
    """Remove every compiled kernel from the cache.

    [bold]Examples[/bold]
      codegen cache clear
    """
    from runtime import cache_commands

    cache_commands.clear(as_json=as_json)
