"""One compilation with NVRTC, in a process of its own (``python -m runtime.compile.nvrtc_child``).

Reads a JSON object from stdin: source, name, target and arguments. Writes one line of JSON (error, log) to stdout, and
behind it the code. The same source and options then give the same bytes whatever else the calling process compiled:
NVRTC keeps state that some options change for every later compilation of a process.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def compile_source(source: str, name: str, target: str, arguments: list[str]) -> tuple[str, str, bytes]:
    """Return NVRTC's error ("" if there was none), its log, and the code."""
    from cuda.bindings import nvrtc  # noqa: PLC0415 - importing this module needs no CUDA

    def call(function: Any, *values: Any) -> Any:
        status, *results = function(*values)
        if int(status) != 0:
            raise RuntimeError(f"{function.__name__}: {status!s}")
        return results[0] if results else None

    def read(size_of: Any, get: Any) -> bytes:
        buffer = bytes(call(size_of, program))
        call(get, program, buffer)
        return buffer

    program = call(nvrtc.nvrtcCreateProgram, source.encode(), name.encode(), 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), [a.encode() for a in arguments])
    log = read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace").rstrip("\0")
    if int(status) != 0:
        return str(status), log, b""
    if target == "cubin":
        return "", log, read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    return "", log, read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)


def main() -> None:
    """Compile what stdin describes."""
    error, log, code = compile_source(**json.load(sys.stdin))
    sys.stdout.buffer.write(json.dumps({"error": error, "log": log}).encode() + b"\n" + code)


if __name__ == "__main__":
    main()
