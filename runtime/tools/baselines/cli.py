"""The command ``codegen bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from codegen.cli import CHECK_FAILED, AllOption, SpecsArgument, app, chosen
from codegen.tools.report import JsonOption, report
from runtime.tools.bench.noise import REPEATS
from runtime.tools.bench.required import require_gpu


@app.command("bench")
def bench_command(
    *,
    specs: SpecsArgument = None,
    every: AllOption = False,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="NAME",
            help="A peer: sdpa, flex, fa4, cublas, torch, triton; may be said again. Else all that are installed.",
            show_default=False,
        ),
    ] = None,
    workloads: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            metavar="SIZE=N,...",
            help="Sizes in place of the reference workload's, as heads=32,length=8192; may be said again.",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Of each timing: noise is their range.")] = REPEATS,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline",
            metavar="FILE",
            help="Compare with stored timings of this device and driver.",
            show_default=False,
        ),
    ] = None,
    save_baseline: Annotated[
        Path | None,
        typer.Option(
            "--save-baseline",
            metavar="FILE",
            help="Store the timings; rows of other kernels in the file stay.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time kernels on workloads beside named peers, in one process; receipts are neither read nor written.

    Each timing is repeated; its noise is the range of the repeats. With a baseline, a kernel is called faster or slower
    only if no repeat of the one run is as short as any of the other, and no peer has moved alike. The exit code is 1 if
    a kernel is slower. A kernel whose plain case is wrong gets no time.

    [bold]Examples[/bold]
      codegen bench h100_dense h100_causal --peer sdpa --peer fa4
      codegen bench h100_topk32 --workload heads=8,length=16384 --json
      codegen bench --all --save-baseline before.json
      codegen bench --all --baseline before.json
    """
    named_specs = chosen(specs, every)
    require_gpu("bench", "timed")
    from runtime.tools.baselines.command import bench, files_of, read  # noqa: PLC0415
    from runtime.tools.baselines.peers import check_names  # noqa: PLC0415
    from runtime.tools.baselines.run import sizes_of  # noqa: PLC0415

    asked = [(named, sizes_of(named, text)) for named in named_specs for text in workloads or [""]]
    check_names(peers or ())
    before = read(baseline)
    files = files_of(before, baseline, save_baseline)
    with report(as_json=as_json) as told:
        if not bench(told, asked, peers or (), repeats, files):
            raise typer.Exit(CHECK_FAILED)
