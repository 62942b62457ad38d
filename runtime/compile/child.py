"""The process of a compilation: its start, its answer, its end."""

from __future__ import annotations

import json
import math
import multiprocessing.spawn
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from typing import Any

from codegen.wording import shown
from runtime.compile import nvrtc_child
from runtime.errors import ToolchainError

EXECUTABLE = "multiprocessing.set_executable(PATH) names the Python that is started"
# Where there is a driver, NVRTC has a cache of its own, and what comes from it has no log: no registers, no spills.
_ENVIRONMENT = {"CUDA_CACHE_DISABLE": "1"}
TIME_LIMIT = "CODEGEN_COMPILE_TIMEOUT"
"""Environment variable: seconds that one compilation may take, 0 for no limit."""
SECONDS = 1800.0
"""What it is by default: the slowest kernels take less than a minute, on a loaded machine some."""
_SHELL = 128  # a shell that starts Python ends with this and the signal's number


def text_of(path: str | os.PathLike[str]) -> str:
    """Return a path as requests have it: its bytes, as Latin-1. The child may have another file system encoding."""
    return os.fsencode(path).decode("latin-1")


def ask(request: Mapping[str, Any], name: str) -> tuple[dict[str, Any], bytes]:
    """Answer a request by :func:`runtime.compile.nvrtc_child.answer` in a new process.

    Args:
        request: its fields.
        name: of the source, for messages.

    Raises:
        ToolchainError: when the process cannot be started, is no Python, ends without an answer, or takes longer than
            the time limit, which ends it.
    """
    python, limit = _python(), time_limit()
    # Nothing of the caller's Python is needed: no site (-S), no modules of its paths (-P and the environment).
    environment = {key: value for key, value in os.environ.items() if key == "PYTHONHOME" or key[:6] != "PYTHON"}
    try:
        result = subprocess.run(
            [python, "-S", "-P", nvrtc_child.__file__],
            input=json.dumps(request).encode(),
            capture_output=True,
            check=False,
            env={**environment, **_ENVIRONMENT},
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        raise ToolchainError(
            f"the process that compiles {name} was ended: it took longer than {limit:g} s; {TIME_LIMIT} is the limit "
            "in seconds, 0 for none"
        ) from None
    except OSError as error:
        raise ToolchainError(
            f"Python cannot be started for the compilation of {name}: {python}: {error.strerror}; {EXECUTABLE}"
        ) from None
    told, code = _parsed(result.stdout) if result.returncode == 0 else (None, b"")
    if told is None:
        raise _no_answer(python, name, result.returncode, result.stderr)
    if "failure" in told:
        raise ToolchainError(f"NVRTC cannot be used for {name}: {told['failure']}")
    return told, code


def time_limit() -> float | None:
    """Return the seconds that one compilation may take; None for any.

    Raises:
        ToolchainError: for what is no number of seconds.
    """
    given = os.environ.get(TIME_LIMIT, "")
    try:
        seconds = float(given) if given else SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise ToolchainError(f"{TIME_LIMIT} is {shown(given)}; a number of seconds is expected, 0 for no limit")
    return seconds or None


def _python() -> str:
    """Return the Python that processes are started with, which ``multiprocessing`` lets an embedding program set."""
    python = multiprocessing.spawn.get_executable()
    if not python:
        raise ToolchainError(f"no Python is known to run a compilation in (sys.executable is empty); {EXECUTABLE}")
    return os.fsdecode(python)


def _parsed(stdout: bytes) -> tuple[dict[str, Any] | None, bytes]:
    """Return an answer and its code; None if there is none: a wrapper of Python may have printed before it."""
    head, _, code = stdout.partition(nvrtc_child.ANSWER)[2].partition(b"\n")
    return (json.loads(head), code) if head else (None, b"")


def _no_answer(python: str, name: str, status: int, stderr: bytes) -> ToolchainError:
    if _signal(status):
        return ToolchainError(f"the process that compiles {name} {ending(status)}")
    said = (stderr.decode(errors="replace").strip().splitlines() or [ending(status)])[-1]
    return ToolchainError(
        f"the process that compiles {name} gave no answer ({said}): is {python} Python 3.11 or later? {EXECUTABLE}"
    )


def ending(status: int) -> str:
    """Return in words how a process ended that did not do its part."""
    number = _signal(status)
    if not number:
        return f"ended with exit code {status}"
    memory = ", as the system does where memory runs out: free some, or compile fewer kernels at a time"
    return f"was ended by {signal.Signals(number).name}{memory if number == signal.SIGKILL else ''}"


def _signal(status: int) -> int:
    """Return the number of the signal that ended a process, or 0."""
    number = -status if status < 0 else status - _SHELL
    return number if number in set(signal.Signals) else 0
