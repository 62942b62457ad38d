"""The command ``codegen bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from codegen.cli import LOOK, AllOption, SpecsArgument, command
from codegen.tools.report import CHECK_FAILED, JsonOption, report
from runtime.tools.bench.noise import REPEATS
from runtime.tools.bench.required import require_gpu


@command("bench", LOOK)
def bench_command(
    *,
    specs: SpecsArgument = None,
    every: AllOption = False,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="NAME",
            help="A peer: sdpa, flex, fa4, cublas, torch or triton. Can be repeated. By default, "
            "all that are installed.",
            show_default=False,
        ),
    ] = None,
    workloads: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            metavar="SIZE=N,...",
            help="Sizes that replace those of the reference workload, such as heads=32,length=8192. Can be repeated.",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", metavar="N", min=2, help="Repeats of each timing. Noise is their range.")
    ] = REPEATS,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline",
            metavar="FILE",
            help="Compare with timings from this file, of the same device and driver.",
            show_default=False,
        ),
    ] = None,
    save_baseline: Annotated[
        Path | None,
        typer.Option(
            "--save-baseline",
            metavar="FILE",
            help="Store the timings in this file. Rows of other kernels stay.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time kernels beside peers on the GPU, in one process.

    Each timing is repeated, and its noise is the range of the repeats. With a baseline, a kernel is called faster or
    slower only if the ranges of the two runs do not overlap and no peer changed in the same way. The exit code is 1 if
    a kernel is slower. A kernel whose result is wrong is not timed. Receipts are neither read nor written.

    [bold]Examples[/bold]
      codegen bench h100_dense h100_causal --peer sdpa --peer fa4
      codegen bench h100_topk32 --workload heads=8,length=16384 --json
      codegen bench --all --save-baseline before.json
      codegen bench --all --baseline before.json
    """
    from codegen.commands import chosen

    named_specs = chosen(specs, every)
    require_gpu("bench", "timed")
    from runtime.tools.baselines.command import bench, files_of, read
    from runtime.tools.baselines.peers import check_names
    from runtime.tools.baselines.run import sizes_of

    asked = [(named, sizes_of(named, text)) for named in named_specs for text in workloads or [""]]
    check_names(peers or ())
    before = read(baseline)
    files = files_of(before, baseline, save_baseline)
    with report(as_json=as_json) as told:
        if not bench(told, asked, peers or (), repeats, files):
            raise typer.Exit(CHECK_FAILED)
