"""Code of kernels for execution: prebuilt, cached or compiled."""

from __future__ import annotations

from typing import Literal

from codegen.render import Generated
from runtime.compile import prebuilt, recording
from runtime.compile.cache import KernelCache
from runtime.compile.compiler import Compiled, Target, compile_generated
from runtime.compile.compilers import check_spills
from runtime.log import logger

Way = Literal["receipt", "cache", "NVRTC"]
"""Where code comes from: it lay there compiled and is that of the receipt; it was in the cache; it was compiled now."""


def code_of(generated: Generated, target: Target, cache: KernelCache | None = None) -> Compiled:
    """Get the code of a kernel for execution, and add the kernel to the record of the run.

    Raises:
        ToolchainError, CompileError, CacheError, NoJitError, SpillError: as ``obtained`` does.
        FileError: if the file in CODEGEN_RECORD cannot be written.
    """
    recording.note(generated.named, target)
    return obtained(generated, target, cache)[0]


def obtained(generated: Generated, target: Target, cache: KernelCache | None = None) -> tuple[Compiled, Way]:
    """Get the code of a kernel and its origin: the receipt's code, else the cache's, else NVRTC's.

    Raises:
        ToolchainError, CompileError, CacheError, NoJitError: as ``compile_generated`` does.
        SpillError: if the code of a shipped kernel spills registers and its receipt's code does not.
    """
    found = prebuilt.find(generated, target, cache)
    if found is not None:
        return found, "receipt"
    compiled = compile_generated(generated, target, cache)
    if compiled.was_cached:
        logger().debug("%s: from the cache, entry %s", generated.named.stem, compiled.key)
    check_spills(compiled)
    return compiled, "cache" if compiled.was_cached else "NVRTC"
