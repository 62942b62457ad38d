"""Exported kernels as compiler results, read without NVRTC and without the cache."""

from __future__ import annotations

from pathlib import Path

from codegen.tools.exports import read_export
from runtime.compile.compiler import Compiled


def read_compiled(folder: Path) -> Compiled:
    """Read the kernel that ``codegen export`` wrote into a folder.

    Its ``key`` is the hash of the cubin, not the key of a cache entry.

    Raises:
        ExportError: if the folder is not an exported kernel, was modified, or would be launched differently by this
            version of the package.
        FileError: if a file cannot be read.
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
