"""The command that compiles kernels before they are called."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from codegen.cli import CHECK_FAILED, app
from codegen.errors import CodegenError, FileError
from codegen.tools.report import JsonOption, report
from codegen.wording import one_line

if TYPE_CHECKING:
    from runtime.tools.warm.requests import Request

WAYS = {"receipt": "there, the receipt's", "cache": "in the cache", "folder": "from the folder", "NVRTC": "compiled"}
"""How a kernel was had: its receipt's code was there already, or another's in the cache; taken, or compiled."""


@app.command("warm")
def warm_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Problems and specs: a list in YAML, or JSON lines, as CODEGEN_RECORD=FILE records those of a run.",
            show_default=False,
        ),
    ],
    cubins: Annotated[
        Path | None,
        typer.Option(
            "--cubins", metavar="DIR", help="Take cubins of shipped kernels from this folder first.", show_default=False
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, max=256, help="Compilations at a time.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Put the kernels of a program into the cache before it calls them. Needs no GPU.

    What --cubins has is taken if it is the code of the receipt, byte for byte. What the wheel of cubins or the cache
    has stays as it is. The rest is compiled. The exit code is 1 if a kernel could not be had.

    [bold]Examples[/bold]
      CODEGEN_RECORD=run.jsonl python train.py; codegen warm run.jsonl
      codegen warm problems.yaml --jobs 8
    """
    from runtime.tools.warm.requests import read_requests  # noqa: PLC0415 - the choice of kernels

    if cubins is not None and not cubins.is_dir():
        raise FileError(cubins, "is no folder; --cubins names one with cubins of shipped kernels")
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
    """Have a kernel where its first call finds it; return a word of ``WAYS``, or "" and why it cannot be had."""
    from codegen.render import generate  # noqa: PLC0415
    from runtime.compile import loading, prebuilt  # noqa: PLC0415

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
