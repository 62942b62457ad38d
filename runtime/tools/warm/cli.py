"""The command that compiles kernels before they are called."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from codegen.cli import USE, command
from codegen.errors import CodegenError, FileError
from codegen.tools.report import CHECK_FAILED, JsonOption, report
from codegen.wording import one_line

if TYPE_CHECKING:
    from runtime.tools.warm.requests import Request

WAYS = {"receipt": "receipt's cubin", "cache": "in the cache", "folder": "from the folder", "NVRTC": "compiled"}
"""Origins of a kernel's code: the cubin of its receipt, the cache, the folder of ``--cubins``, or the compiler."""


@command("warm", USE)
def warm_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Problems and specs: a YAML list, or the JSON lines that CODEGEN_RECORD=FILE records during a run.",
            show_default=False,
        ),
    ],
    cubins: Annotated[
        Path | None,
        typer.Option(
            "--cubins", metavar="DIR", help="Take cubins of shipped kernels from this folder first.", show_default=False
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, max=256, help="Parallel compilations.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Fill the cache with the kernels of a program before it runs.

    A cubin from --cubins is used if it equals that of the receipt byte for byte. Kernels that are in the cache or in
    the wheel of cubins are skipped, and all others are compiled. Needs no GPU. The exit code is 1 if a kernel failed.

    [bold]Examples[/bold]
      CODEGEN_RECORD=run.jsonl python train.py; codegen warm run.jsonl
      codegen warm problems.yaml --jobs 8
    """
    from runtime.tools.warm.requests import read_requests

    if cubins is not None and not cubins.is_dir():
        raise FileError(cubins, "is not a folder; --cubins takes a folder with cubins of shipped kernels")
    requests = read_requests(file)
    failed = 0
    with report(as_json=as_json) as told, ThreadPoolExecutor(jobs) as pool:
        made = pool.map(lambda request: _made(request, cubins), requests)
        for request in told.steps("warming", requests, lambda request: request.named.stem):
            way, why = next(made)
            failed += not way
            fields = {"kernel": request.named.stem, "target": request.target, "from": way, "error": why}
            told.row(fields, f"{WAYS.get(way, 'FAILED'):20}  {request.named.stem}{f': {one_line(why)}' if why else ''}")
        told.note("failed", failed)
        if failed:
            raise typer.Exit(CHECK_FAILED)


def _made(request: Request, cubins: Path | None) -> tuple[str, str]:
    """Prepare a kernel for its first call; return its origin (see ``WAYS``), or "" and the error."""
    from codegen.render import generate
    from runtime.compile import loading, prebuilt

    untaken = ""
    try:
        generated = generate(request.named)
        if cubins is not None:
            try:
                code = prebuilt.read(generated, request.target, cubins)
                return ("receipt" if prebuilt.keep(generated, request.target, code) else "folder"), ""
            except CodegenError as error:
                untaken = f"{error}; "
        return loading.obtained(generated, request.target)[1], ""
    except CodegenError as error:
        return "", f"{untaken}{error}"
