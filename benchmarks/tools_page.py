"""Writes the samples of docs/guide/tools.md: what the commands print, each run in an empty folder.

    python benchmarks/tools_page.py            # rewrites what is between the markers
    python benchmarks/tools_page.py --check    # exits 1 if that would change the page

It needs NVRTC and nvdisasm, in the versions that receipts name, and no GPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from results_table import update
from typer.testing import CliRunner

from codegen.library import ROOT
from runtime.cli import app

PAGE = ROOT / "docs" / "guide" / "tools.md"
STALE = "its samples are not what the commands print today; run: python benchmarks/tools_page.py"
MOST_LINES = 45  # of a sample
SAMPLES: dict[str, tuple[str, ...]] = {
    "disasm": ("codegen disasm h100_topk32 --show summary",),
    "diff": ("codegen diff h100_topk32 h100_topk64",),
    "profile": ("codegen profile h100_topk32 --static",),
    "new": ("codegen new my_kernel.yaml --device L4 --head-dim 128 --pattern causal --problem heads=16,q_len=8192",),
}
"""Commands of a sample, run one after the other; what is printed is that of all."""


def sample(commands: tuple[str, ...]) -> str:
    """Output of commands, as a fenced block."""
    lines = []
    for command in commands:
        lines.append(f"$ {command}")
        result = CliRunner().invoke(app, command.split()[1:])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        lines += result.stdout.rstrip("\n").splitlines()
    if len(lines) > MOST_LINES:
        lines = [*lines[: MOST_LINES - 1], "..."]
    return "\n".join(["```text", *lines, "```"])


def samples() -> dict[str, str]:
    """The samples by the names of their markers."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return {name: sample(commands) for name, commands in SAMPLES.items()}
        finally:
            os.chdir(here)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    check = parser.parse_args(arguments).check
    return update(PAGE, samples(), check=check, stale=STALE)


if __name__ == "__main__":
    raise SystemExit(main())
