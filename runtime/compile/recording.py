"""The record of a run: the kernels that a program loaded, for ``codegen warm``."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from codegen.files import errors_of
from codegen.library import NamedSpec

RECORD = "CODEGEN_RECORD"
"""Environment variable: the file that gets a line of JSON for each kernel that a process loads."""

_lock = threading.Lock()


def line_of(named: NamedSpec, target: Literal["cubin", "ptx"]) -> dict[str, Any]:
    """Fields of a line, from which a kernel's source and code follow."""
    spec = json.loads(named.spec.canonical_json())
    return {"name": named.stem, "origin": named.origin, "target": target, "spec": spec}


def note(named: NamedSpec, target: Literal["cubin", "ptx"]) -> None:
    """Append a kernel to the file in CODEGEN_RECORD, if set: once per process.

    Raises:
        FileError: if the file cannot be written.
    """
    given = os.environ.get(RECORD, "")
    if given:
        with _lock:
            _append_once(given, named, target)


@lru_cache(maxsize=4096)  # beyond that, kernels may have several lines, and `codegen warm` reads one of them
def _append_once(file: str, named: NamedSpec, target: Literal["cubin", "ptx"]) -> None:
    text = json.dumps(line_of(named, target)) + "\n"
    _append(Path(file).expanduser(), text.encode())


def _append(path: Path, line: bytes) -> None:
    """Append a line atomically with respect to other threads and processes."""
    with errors_of(path, "recording"), _held(path) as descriptor:
        while line:
            line = line[os.write(descriptor, line) :]


@contextlib.contextmanager
def _held(path: Path) -> Iterator[int]:
    """Open a file for appending under a lock, which keeps lines of several processes apart on any file system."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):  # without locks, appending writes are atomic on local file systems
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
