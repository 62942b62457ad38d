"""Child processes that compile one kernel: start, answer and exit status."""

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
# With a driver, NVRTC uses its own cache, whose results have no log and hence no registers and spills.
_ENVIRONMENT = {"CUDA_CACHE_DISABLE": "1"}
TIME_LIMIT = "CODEGEN_COMPILE_TIMEOUT"
"""Environment variable: seconds that one compilation may take, 0 for no limit."""
SECONDS = 1800.0
"""Default limit. The slowest kernels take less than a minute, and some minutes on a loaded machine."""
_SHELL = 128  # a shell wrapper of Python exits with this plus the signal's number


def text_of(path: str | os.PathLike[str]) -> str:
    """A path as requests encode it: its bytes as Latin-1, since the child's file system encoding may differ."""
    return os.fsencode(path).decode("latin-1")


def ask(request: Mapping[str, Any], name: str) -> tuple[dict[str, Any], bytes]:
    """Run :func:`runtime.compile.nvrtc_child.answer` on a request in a new process.

    Args:
        request: fields of the request.
        name: name of the source, for messages.

    Raises:
        ToolchainError: if the process cannot be started, is not Python, exits without an answer, or exceeds the time
            limit, which ends it.
    """
    python, limit = _python(), time_limit()
    # The child needs nothing from the caller's Python: no site (-S), no modules on its paths (-P and the environment).
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
            f"the compilation of {name} was stopped after {limit:g} s; {TIME_LIMIT} is the limit "
            "in seconds; 0 disables it"
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
    """Time limit of one compilation in seconds; None for no limit.

    Raises:
        ToolchainError: if the value is not a number of seconds.
    """
    given = os.environ.get(TIME_LIMIT, "")
    try:
        seconds = float(given) if given else SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise ToolchainError(f"{TIME_LIMIT} is {shown(given)}; expected a number of seconds, or 0 for no limit")
    return seconds or None


def _python() -> str:
    """The Python that runs child processes. An embedding program sets it through ``multiprocessing``."""
    python = multiprocessing.spawn.get_executable()
    if not python:
        raise ToolchainError(
            f"no Python executable is known that could run the compilation (sys.executable is empty); {EXECUTABLE}"
        )
    return os.fsdecode(python)


def _parsed(stdout: bytes) -> tuple[dict[str, Any] | None, bytes]:
    """An answer and its code; None without an answer. A wrapper of Python may have printed before it."""
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
    """Description of how a failed process ended."""
    number = _signal(status)
    if not number:
        return f"ended with exit code {status}"
    memory = ", possibly by the system because memory ran out: free some, or compile fewer kernels at a time"
    return f"was ended by {signal.Signals(number).name}{memory if number == signal.SIGKILL else ''}"


def _signal(status: int) -> int:
    """The number of the signal that ended a process, or 0."""
    number = -status if status < 0 else status - _SHELL
    return number if number in set(signal.Signals) else 0
