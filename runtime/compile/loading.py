"""The code of kernels that run, wherever it comes from."""

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
    """Return the code of a kernel that is about to run, and note in the record of the run that it was asked for.

    Raises:
        ToolchainError, CompileError, CacheError, NoJitError, SpillError: as ``obtained`` does.
        FileError: when CODEGEN_RECORD names a file that cannot be written.
    """
    recording.note(generated.named, target)
    return obtained(generated, target, cache)[0]


def obtained(generated: Generated, target: Target, cache: KernelCache | None = None) -> tuple[Compiled, Way]:
    """Return the code of a kernel and where it comes from: that of its receipt first, then the cache's, then NVRTC's.

    Raises:
        ToolchainError, CompileError, CacheError, NoJitError: as ``compile_generated`` does.
        SpillError: for code of a shipped kernel that spills registers, which that of its receipt does not.
    """
    found = prebuilt.find(generated, target, cache)
    if found is not None:
        return found, "receipt"
    compiled = compile_generated(generated, target, cache)
    if compiled.was_cached:
        logger().debug("%s: from the cache, entry %s", generated.named.stem, compiled.key)
    check_spills(compiled)
    return compiled, "cache" if compiled.was_cached else "NVRTC"
