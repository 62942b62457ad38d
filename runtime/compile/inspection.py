"""Resources of a compiled kernel: registers, spills, shared memory, instructions by kind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from codegen.errors import CodegenError
from codegen.plain import json_value
from runtime.compile import child, toolchain
from runtime.compile.cache import KernelCache
from runtime.compile.compiler import Compiled
from runtime.errors import CacheError, ToolchainError

# SASS opcode -> description.
INSTRUCTIONS = {
    "HGMMA": "wgmma",
    "QGMMA": "wgmma of FP8",
    "HMMA": "mma.sync / WMMA",
    "QMMA": "mma.sync of FP8",
    "UTMALDG": "TMA load",
    "UTMASTG": "TMA store",
    "LDGSTS": "cp.async",
    "LDSM": "ldmatrix",
    "MUFU": "special functions (ex2)",
    "LDL": "local load (spill)",
    "STL": "local store (spill)",
}
LEFT_OUT = frozenset({"QGMMA", "QMMA"})
"""Opcodes that receipts leave out where a kernel has none: the receipts are older than these entries."""

_COUNTS = TypeAdapter(dict[str, Annotated[int, Field(ge=0)]])
_INSTRUCTION_BYTES = 16  # of all architectures since sm_70


@dataclass(frozen=True)
class Usage:
    """Resources of one kernel, from ptxas and the disassembly.

    Spills, stack and instructions include those of the kernel's prologue, if it has one.

    Attributes:
        registers: registers of a thread at launch.
        spill_bytes: bytes of spill stores and loads.
        stack_bytes: bytes of stack of a thread.
        static_shared_bytes: shared memory known to the compiler.
        dynamic_shared_bytes: dynamic shared memory of a launch.
        instructions: SASS opcode -> how many of them.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    instructions: dict[str, int]


def usage(compiled: Compiled, cache: KernelCache | None = None) -> Usage:
    """The resources of a compiled cubin.

    A kernel is disassembled once: its cache entry stores the instruction counts.

    Raises:
        ToolchainError: when the disassembler is missing or fails.
    """
    counts = _counted(compiled.findings, compiled.code)
    if counts is None:
        counts = count_instructions(compiled.code)
        with contextlib.suppress(CacheError):  # a read-only cache still serves its entries
            (cache or KernelCache()).keep_findings(compiled.identity, json.dumps(counts))
    told = {name: count for name, count in counts.items() if count or name not in LEFT_OUT}
    return replace(resources(compiled), instructions=told)


def _counted(findings: str, code: bytes) -> dict[str, int] | None:
    """The counts in a cache entry; None if they are missing or belong to other opcodes or other code."""
    try:
        counts = _COUNTS.validate_python(json_value(findings), strict=True)
    except (CodegenError, ValidationError):  # "" or invalid JSON
        return None
    fit = sum(counts.values()) * _INSTRUCTION_BYTES <= len(code)
    return counts if fit and counts.keys() == INSTRUCTIONS.keys() else None


def resources(compiled: Compiled) -> Usage:
    """Resources of a cubin from the compiler's log: all except instructions, which need a disassembler."""
    told = told_by_compiler(compiled.plan.stem, compiled.log)
    return replace(told, dynamic_shared_bytes=compiled.plan.shared_bytes)


def told_by_compiler(symbol: str, log: str) -> Usage:
    """Resources of a kernel from a compiler log, without instructions and dynamic shared memory."""
    own = _told_of(symbol, log)
    return Usage(
        registers=_number(r"Used (\d{1,9}) registers", own),
        spill_bytes=_number(r"(\d{1,9}) bytes spill stores", log) + _number(r"(\d{1,9}) bytes spill loads", log),
        stack_bytes=_number(r"(\d{1,9}) bytes stack frame", log),
        static_shared_bytes=_number(r"(\d{1,9}) bytes smem", own),
        dynamic_shared_bytes=0,
        instructions={},
    )


def count_instructions(cubin: bytes) -> dict[str, int]:
    """Count each opcode of INSTRUCTIONS in a cubin."""
    opcodes = Counter(mnemonic.partition(".")[0] for mnemonic in mnemonics(cubin))
    return {name: opcodes[name] for name in INSTRUCTIONS}


def mnemonics(cubin: bytes) -> list[str]:
    """Instructions of a cubin by address, without operands: ``HGMMA.64x128x16.F32``."""
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)", disassemble(cubin), re.M)


def disassemble(cubin: bytes) -> str:
    """Return the SASS of a cubin.

    Raises:
        ToolchainError: when the disassembler is missing or fails.
    """
    return printed(toolchain.cuobjdump(), ("--dump-sass",), cubin)


def printed(tool: str, options: Sequence[str], cubin: bytes) -> str:
    """Run a CUDA tool on a cubin and return its output.

    Raises:
        ToolchainError: when it cannot be started or fails.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(cubin)
            # The tool's own temporary files go there too: TMPDIR may name a missing folder.
            environment = {**os.environ, "TMPDIR": folder}
            result = subprocess.run([tool, *options, str(path)], capture_output=True, check=False, env=environment)
    except OSError as error:
        where = error.filename or tool
        raise ToolchainError(
            f"a cubin cannot be disassembled: {where}: {error.strerror or error}; "
            "TMPDIR names a folder for temporary files"
        ) from None
    if result.returncode != 0:
        said = (result.stderr or result.stdout).decode(errors="replace").strip()
        raise ToolchainError(f"{Path(tool).stem} failed: {said or child.ending(result.returncode)}")
    return result.stdout.decode(errors="replace")


def _told_of(symbol: str, log: str) -> str:
    """Section of a compiler log about one kernel of a source; the whole log if it names no kernel."""
    told = log.partition(f"Compiling entry function '{symbol}'")[2].partition("Compiling entry function")[0]
    return told or log


def _number(pattern: str, log: str) -> int:
    """Sum of a number that the log has for each kernel."""
    return sum(int(number) for number in re.findall(pattern, log))
