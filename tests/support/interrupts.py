"""Commands in processes of their own that get SIGINT at a moment."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
BEGIN = "from sparse_kernel_codegen import command; print('begun', flush=True); command.main()"
LONGEST = 120


def interrupted(arguments: list[str], seconds: float, folder: Path) -> str:
    """Return what is wrong about the end of a command that gets SIGINT so many seconds after it began, or ""."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "CODEGEN_CACHE_DIR": str(folder / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
        env=environment,
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, children too
    _, told = process.communicate(timeout=LONGEST)
    lines = [line for line in told.splitlines() if not re.match(r"\w+ \d+ of \d+.* \(\d+ s\)$", line)]
    if (process.returncode, lines) in ((130, ["interrupted"]), (0, [])):  # the second one where it was done before
        return ""
    return f"{arguments} at {seconds:.3f} s: {process.returncode}: {told}"
