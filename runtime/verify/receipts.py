"""Assembly of receipts. Needs a compiler, no GPU."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from codegen.library import NamedSpec
from codegen.places import verify_line
from codegen.receipts import (
    CubinRecord,
    MeasurementRecord,
    MissingReceipt,
    Receipt,
    ReceiptError,
    SourceRecord,
    SpecRecord,
    VerificationRecord,
    read_receipt,
    source_sha256,
)
from runtime.compile import toolchain
from runtime.compile.compiler import Compiled, compile_spec
from runtime.compile.inspection import usage


def cubin_record(compiled: Compiled, *, with_ptx: bool = True) -> CubinRecord:
    """Record of a cubin, with the PTX for newer GPUs unless ``with_ptx`` is False."""
    used = usage(compiled)
    compiler, package = toolchain.compiler_version()
    has_ptx = with_ptx and compiled.plan.arch.forward_compatible
    ptx = compile_spec(compiled.named, "ptx").code if has_ptx else None
    return CubinRecord(
        sha256=hashlib.sha256(compiled.code).hexdigest(),
        ptx_sha256=None if ptx is None else hashlib.sha256(ptx).hexdigest(),
        launch_sha256=compiled.plan.launch_sha256,
        arch=compiled.plan.arch.name,
        compiler=compiler,
        compiler_package=package,
        options=compiled.options,
        registers=used.registers,
        spill_bytes=used.spill_bytes,
        stack_bytes=used.stack_bytes,
        static_shared_bytes=used.static_shared_bytes,
        dynamic_shared_bytes=used.dynamic_shared_bytes,
        instructions=used.instructions,
    )


def receipt(
    named: NamedSpec, verification: VerificationRecord | None, measurement: tuple[MeasurementRecord, ...] = ()
) -> Receipt:
    """Receipt of a spec, compiled now, with the given verification."""
    compiled = compile_spec(named)
    return unverified(compiled, cubin_record(compiled)).model_copy(
        update={"verification": verification, "measurement": measurement}
    )


def with_measurement_in(path: Path, named: NamedSpec, receipt: Receipt) -> Receipt:
    """Receipt with the measurement of the receipt in its file, if that describes the same kernel."""
    try:
        return receipt.with_measurement_of(read_receipt(named, path))
    except ReceiptError:
        return receipt


def unverified(compiled: Compiled, cubin: CubinRecord) -> Receipt:
    """Receipt without GPU results."""
    named = compiled.named
    return Receipt(
        spec=SpecRecord(file=named.origin, hash=named.spec.hash),
        source=SourceRecord(file=named.source_file, sha256=source_sha256(compiled.source)),
        cubin=cubin,
    )


def differences(recorded: CubinRecord, found: CubinRecord) -> list[str]:
    """Descriptions of the differences between a cubin and its receipt."""
    fields = [name for name in CubinRecord.model_fields if getattr(recorded, name) != getattr(found, name)]
    return [f"{name} is {getattr(found, name)}, the receipt says {getattr(recorded, name)}" for name in fields]


@dataclass(frozen=True)
class Comparison:
    """Comparison of a new cubin with its receipt.

    Attributes:
        differences: one line each; () if the cubin matches the receipt.
        of_other: the receipt's compiler if it is another one, in which case nothing was compared.
    """

    differences: tuple[str, ...] = ()
    of_other: str = ""

    @property
    def outcome(self) -> str:
        """Summary: ``same``, ``differs`` (or has no receipt) or ``other compiler``."""
        return "other compiler" if self.of_other else "differs" if self.differences else "same"


def compared(compiled: Compiled, path: Path, *, strict: bool = False) -> Comparison:
    """Compare a cubin with the receipt at ``path``.

    Cubins of another compiler are not compared, or count as different if ``strict``.

    Raises:
        ReceiptError: if the receipt cannot be read.
    """
    named = compiled.named
    try:
        receipt = read_receipt(named, path)
    except MissingReceipt:
        return Comparison((f"{named.stem}: has no receipt; run: {verify_line(named)}",))
    told, found = receipt.cubin, cubin_record(compiled)
    if told.compiler_package != found.compiler_package and not strict:
        return Comparison(of_other=told.compiler_package)
    if receipt.schema_version == 1:  # its launch hash has another definition: nothing to compare
        told = told.model_copy(update={"launch_sha256": found.launch_sha256})
    found_differences = differences(told, found)
    if receipt.schema_version == 1:
        found_differences.append(f"its receipt has version 1; run: codegen migrate {named.stem}")
    return Comparison(tuple(f"{named.stem}: {difference}" for difference in found_differences))
