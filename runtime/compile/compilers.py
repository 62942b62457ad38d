"""What is known of compilers: that of the receipts, and what others make of the shipped kernels.

``compilers.json`` is the record of it. ``scripts/compilers.py`` writes it, from a compilation of every shipped kernel
with each version.
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

    compiler: str = Field(description="of the receipts")
    versions: tuple[Version, ...] = Field(description="of NVRTC's package, with which every kernel was compiled")
    spills: dict[Version, dict[str, Count]] = Field(description="bytes, of the kernels that spill")
    refused: dict[Version, dict[str, str]] = Field(description="the first error, of the kernels that do not compile")
    code: dict[str, Sha256] = Field(description="of each kernel's source without comments, as it was compiled")

    def troubles(self, version: Version) -> dict[str, str]:
        """What a version makes of the kernels that it does not compile as the receipts' compiler does, in words."""
        spilled = {stem: f"spills {count} bytes" for stem, count in self.spills.get(version, {}).items()}
        return spilled | {stem: "does not compile" for stem in self.refused.get(version, {})}


@lru_cache(maxsize=1)
def record() -> CompilerRecord:
    """The record of this package."""
    return json_model(CompilerRecord, read_text(RECORD))


def numbers(version: Version) -> tuple[int, ...]:
    """The parts of a version, by which versions are sorted."""
    return tuple(map(int, version.split(".")))


def caveat(package: str | None = None) -> str:
    """What a compiler's code is not, in a sentence with the command that mends it; "" for that of the receipts.

    Args:
        package: the compiler, as ``compiler_version`` names it; by default the one that is installed, of which there
            is nothing to say where there is none.
    """
    try:
        found = compiler_version()[1] if package is None else package
    except ToolchainError:
        return ""
    return f"{difference(found)}: {mend()}" if found != record().compiler else ""


def difference(package: str) -> str:
    """What the code of another compiler than that of the receipts is not, in a sentence."""
    cuda = "" if " 13." in package else " (for drivers of CUDA 13, 580 or later)"
    return (
        f"{package} is not the compiler of the receipts, {record().compiler}{cuda}: code differs, cases were not run "
        "on it"
    )


def troubles(package: str) -> str:
    """Which shipped kernels are refused with a compiler, as far as the record has its version; "" for none."""
    name, _, version = package.partition(" ")
    if not name.startswith("nvidia-"):
        return ""
    found = record().troubles(version)
    return ", ".join(f"{stem} {what}" for stem, what in found.items())


def check_spills(compiled: Compiled) -> None:
    """Refuse code of a shipped kernel that spills where the code of its receipt does not.

    Raises:
        SpillError: naming kernel, compiler, and the command that mends it.
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
