"""Puts a receipt together. Needs a compiler, not a GPU."""

from __future__ import annotations

import hashlib

from codegen.library import NamedSpec
from codegen.receipts import (
    CubinRecord,
    MeasurementRecord,
    Receipt,
    SourceRecord,
    SpecRecord,
    VerificationRecord,
    source_sha256,
)
from runtime.compile import toolchain
from runtime.compile.compiler import Compiled, compile_spec
from runtime.compile.inspection import usage


def cubin_record(compiled: Compiled) -> CubinRecord:
    """Return what a receipt says about a cubin."""
    used = usage(compiled)
    compiler, package = toolchain.compiler_version()
    ptx = compile_spec(compiled.named, "ptx").code if compiled.plan.arch.forward_compatible else None
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
    """Return the receipt of a spec: compiled now, verified as given."""
    compiled = compile_spec(named)
    return Receipt(
        spec=SpecRecord(file=named.origin, hash=named.spec.hash),
        source=SourceRecord(file=named.source_file, sha256=source_sha256(compiled.source)),
        cubin=cubin_record(compiled),
        verification=verification,
        measurement=measurement,
    )


def differences(recorded: CubinRecord, found: CubinRecord) -> list[str]:
    """Return in words what a receipt says differently about a cubin."""
    fields = [name for name in CubinRecord.model_fields if getattr(recorded, name) != getattr(found, name)]
    return [f"{name} is {getattr(found, name)}, the receipt says {getattr(recorded, name)}" for name in fields]
