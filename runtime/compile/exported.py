"""Exported kernels as what the compiler returns: nothing is compiled, and neither NVRTC nor the cache is asked."""

from __future__ import annotations

from pathlib import Path

from codegen.tools.exports import read_export
from runtime.compile.compiler import Compiled


def read_compiled(folder: Path) -> Compiled:
    """Return the kernel that ``codegen export`` wrote into a folder.

    Its ``key`` is the hash of the cubin: it is not that of an entry of the cache.

    Raises:
        ExportError: for a folder that is no exported kernel, is not as it was exported, or that this version of the
            package would launch in another way.
        FileError: for a file that cannot be read.
    """
    found = read_export(folder)
    return Compiled(
        generated=found.generated,
        target="cubin",
        code=found.cubin,
        log=found.record.compiler_log,
        options=found.receipt.cubin.options,
        key=found.record.cubin.sha256,
        was_cached=True,
    )
