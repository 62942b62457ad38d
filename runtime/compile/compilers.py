"""Known compilers: the compiler of the receipts, and how other versions compile the shipped kernels.

``compilers.json`` is the record. ``scripts/compilers.py`` writes it by compiling every shipped kernel with each
version.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from pydantic import Field

from codegen.files import read_text
from codegen.installation import install_command
from codegen.library import as_shipped
from codegen.patterns.base import SpecModel
from codegen.plain import json_model
from codegen.receipts import Count, MissingReceipt, Sha256, read_receipt, receipt_path
from runtime.compile.compiler import Compiled
from runtime.compile.inspection import resources
from runtime.compile.toolchain import compiler_version
from runtime.errors import SpillError, ToolchainError

RECORD = Path(__file__).with_name("compilers.json")
Version = str


def mend() -> str:
    """The command that installs the compiler of the receipts."""
    return install_command("cu13")


class CompilerRecord(SpecModel):
    """Spills of the shipped kernels by compiler."""

    compiler: str = Field(description="compiler of the receipts")
    versions: tuple[Version, ...] = Field(description="versions of NVRTC's package that compiled every kernel")
    spills: dict[Version, dict[str, Count]] = Field(description="spilled bytes of the kernels that spill")
    refused: dict[Version, dict[str, str]] = Field(description="first error of the kernels that do not compile")
    code: dict[str, Sha256] = Field(description="hash of each compiled kernel's source without comments")

    def troubles(self, version: Version) -> dict[str, str]:
        """Kernels that a version fails to compile or compiles with additional spills, with descriptions."""
        spilled = {stem: f"spills {count} bytes" for stem, count in self.spills.get(version, {}).items()}
        return spilled | {stem: "does not compile" for stem in self.refused.get(version, {})}


@lru_cache(maxsize=1)
def record() -> CompilerRecord:
    """The record of this package."""
    return json_model(CompilerRecord, read_text(RECORD))


def numbers(version: Version) -> tuple[int, ...]:
    """The parts of a version, as a sort key."""
    return tuple(map(int, version.split(".")))


def caveat(package: str | None = None) -> str:
    """Warning about a compiler's code, with the command that fixes it; "" for the compiler of the receipts.

    Args:
        package: the compiler, as ``compiler_version`` names it; by default the installed one. Without one the result is
            "".
    """
    try:
        found = compiler_version()[1] if package is None else package
    except ToolchainError:
        return ""
    return f"{difference(found)}: {mend()}" if found != record().compiler else ""


def difference(package: str) -> str:
    """Warning that the code of another compiler differs from the tested code."""
    cuda = "" if " 13." in package else " (for drivers of CUDA 13, 580 or later)"
    return (
        f"{package} is not the compiler of the receipts, {record().compiler}{cuda}: its code differs and was not tested"
    )


def troubles(package: str) -> str:
    """Shipped kernels that are refused with a compiler, if the record has its version; "" for none."""
    name, _, version = package.partition(" ")
    if not name.startswith("nvidia-"):
        return ""
    found = record().troubles(version)
    return ", ".join(f"{stem} {what}" for stem, what in found.items())


def check_spills(compiled: Compiled) -> None:
    """Refuse code of a shipped kernel that spills where the code of its receipt does not.

    Raises:
        SpillError: naming the kernel, the compiler, and the command that installs another one.
    """
    spilled = resources(compiled).spill_bytes if compiled.target == "cubin" and compiled.log else 0
    named = as_shipped(compiled.named) if spilled else compiled.named
    if not spilled or not named.is_shipped:
        return
    try:
        told = read_receipt(named, receipt_path(named)).cubin
    except MissingReceipt:
        return
    if told.spill_bytes < spilled:
        raise SpillError(named.stem, compiler_version()[1], spilled, told.compiler_package, mend())
