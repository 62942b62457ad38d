"""The record of a run: which kernels a program loaded, for ``codegen warm``."""

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
    """The fields of a line: what a kernel's source and code follow from."""
    spec = json.loads(named.spec.canonical_json())
    return {"name": named.stem, "origin": named.origin, "target": target, "spec": spec}


def note(named: NamedSpec, target: Literal["cubin", "ptx"]) -> None:
    """Append a kernel to the file that CODEGEN_RECORD names, if one is named: once in a process.

    Raises:
        FileError: if the file cannot be written.
    """
    given = os.environ.get(RECORD, "")
    if given:
        with _lock:
            _append_once(given, named, target)


@lru_cache(maxsize=4096)  # of more kernels some have several lines, of which `codegen warm` takes one
def _append_once(file: str, named: NamedSpec, target: Literal["cubin", "ptx"]) -> None:
    text = json.dumps(line_of(named, target)) + "\n"
    _append(Path(file).expanduser(), text.encode())


def _append(path: Path, line: bytes) -> None:
    """Append a line whole, whatever other threads and processes append."""
    with errors_of(path, "recording"), _held(path) as descriptor:
        while line:
            line = line[os.write(descriptor, line) :]


@contextlib.contextmanager
def _held(path: Path) -> Iterator[int]:
    """Open a file to append to, locked: writes of several processes do not run into each other on any file system."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):  # without locks, appending writes are whole on local file systems
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
