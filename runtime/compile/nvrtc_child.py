"""One compilation with NVRTC in a separate process: a script that :mod:`runtime.compile.child` starts.

Some options change NVRTC's state for every later compilation in the process. With one process per compilation, the same
source and options always give the same bytes. The script needs only the standard library and NVRTC's path, so the
caller's ``sys.path`` and ``sitecustomize`` do not affect it.

It reads a JSON object from stdin, in which paths are bytes read as Latin-1, and writes ``ANSWER``, one line of JSON and
the code to stdout. The answer identifies the loaded NVRTC and the headers, which the caller compares with its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ANSWER = b"\ncodegen: the answer of NVRTC follows\n"
REFUSED = 6
"""NVRTC_ERROR_COMPILATION: the source is at fault. Any other error is one of the installation or of the machine."""


class Nvrtc:
    """The library at a path.

    Raises:
        OSError: if the library cannot be loaded or is not NVRTC.
    """

    def __init__(self, library: bytes) -> None:
        self._library = ctypes.CDLL(os.fsdecode(library))
        if not hasattr(self._library, "nvrtcGetErrorString"):
            raise OSError(f"{os.fsdecode(library)} has no nvrtcGetErrorString")
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        # NVRTC loads its builtins by name. The system finds the ones in NVRTC's own folder only if they are already
        # loaded.
        major, minor = self.version()
        builtins = Path(os.fsdecode(library)).resolve().with_name(f"libnvrtc-builtins.so.{major}.{minor}")
        if builtins.is_file():
            ctypes.CDLL(str(builtins))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library.

        Raises:
            RuntimeError: with NVRTC's name of the error.
        """
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: {self.name_of(status)}")

    def name_of(self, status: int) -> str:
        """NVRTC's name of an error."""
        return str(self._library.nvrtcGetErrorString(status).decode())

    def version(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def compile(
        self, source: bytes, name: bytes, target: str, arguments: Sequence[bytes]
    ) -> tuple[int, str, bytes, bytes]:
        """Compile: NVRTC's status and its name ("" without an error), the log, and the code."""
        program = ctypes.c_void_p()
        self.call("nvrtcCreateProgram", ctypes.byref(program), source, name, 0, None, None)
        options = (ctypes.c_char_p * len(arguments))(*arguments)
        status = self._library.nvrtcCompileProgram(program, len(arguments), options)
        log = self._read(program, "ProgramLog").rstrip(b"\0")
        if status != 0:
            return status, self.name_of(status), log, b""
        return 0, "", log, self._read(program, "CUBIN" if target == "cubin" else "PTX")

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw


def stamp_of(library: bytes) -> list[int]:
    """Size and modification time of a library, which change with its file: NVRTC's version has no patch level."""
    found = Path(os.fsdecode(library)).stat()
    return [found.st_size, found.st_mtime_ns]


def headers_digest(headers: Iterable[str], folders: Sequence[Path]) -> str:
    """SHA-256 over every file in ``folders`` that ``headers`` include, directly or indirectly."""
    digest = hashlib.sha256()
    for name, content in sorted(included(headers, folders).items()):
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def included(headers: Iterable[str], folders: Sequence[Path]) -> dict[str, bytes]:
    """Content by name of the headers reachable by #include, conditional includes too."""
    contents: dict[str, bytes] = {}
    todo = list(headers)
    while todo:
        name = todo.pop()
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None or name in contents:
            continue
        contents[name] = path.read_bytes()
        for include in re.findall(rb'^\s*#\s*include\s*[<"]([^>"]+)[>"]', contents[name], re.MULTILINE):
            inner = include.decode()
            todo += [inner, (Path(name).parent / inner).as_posix()]
    return contents


def answer(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Run the compilation that a request describes; return the answer's fields and the code."""
    library = request["library"].encode("latin-1")
    folders = [folder.encode("latin-1") for folder in request["folders"]]
    nvrtc = Nvrtc(library)
    arguments = [*(option.encode() for option in request["options"]), *(b"--include-path=" + f for f in folders)]
    status, error, log, code = nvrtc.compile(
        request["source"].encode(), request["name"].encode(), request["target"], arguments
    )
    loaded = {
        "version": nvrtc.version(),
        "stamp": stamp_of(library),
        "headers": headers_digest(request["headers"], [Path(os.fsdecode(folder)) for folder in folders]),
    }
    return {"status": status, "error": error, "log": log.decode(errors="replace"), "loaded": loaded}, code


def main() -> None:
    """Run the compilation that stdin describes."""
    with os.fdopen(os.dup(1), "wb") as stdout:
        os.dup2(2, 1)  # other output must not mix with the answer
        try:
            told, code = answer(json.load(sys.stdin.buffer))
        except (OSError, RuntimeError) as error:  # the library cannot be loaded or fails
            told, code = {"failure": str(error)}, b""
        stdout.write(ANSWER + json.dumps(told).encode() + b"\n" + code)


if __name__ == "__main__":
    main()
