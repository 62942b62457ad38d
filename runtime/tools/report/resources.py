"""Resources of a cubin, from its receipt, from the record of its compilation, or from a compilation now."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from codegen.errors import CodegenError
from codegen.wording import one_line
from runtime.tools.report.kernels import Kernel

FIELDS = ("registers", "spill_bytes", "stack_bytes", "static_shared_bytes", "dynamic_shared_bytes")


@dataclass(frozen=True)
class Resources:
    """Resource usage of the machine code of a source.

    Attributes:
        source: source of the information.
        compiler: package of the compiler.
        cubin_sha256: hash of the cubin.
        registers: registers per thread at launch.
        spill_bytes: bytes of spill stores and loads.
        stack_bytes: bytes of stack per thread.
        static_shared_bytes: bytes of static shared memory.
        dynamic_shared_bytes: bytes of dynamic shared memory per launch.
        instructions: number of occurrences in the cubin of each opcode that receipts count.
    """

    source: str
    compiler: str
    cubin_sha256: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    instructions: Mapping[str, int]


def resources_of(kernel: Kernel) -> tuple[Resources | None, str]:
    """The resources of a kernel's machine code; or None, and the reason."""
    if kernel.receipt is not None and kernel.is_of_receipt:
        cubin = kernel.receipt.cubin
        used = {name: getattr(cubin, name) for name in FIELDS}
        found = Resources(
            "the receipt", cubin.compiler_package, cubin.sha256, instructions=_present(cubin.instructions), **used
        )
        return found, ""
    if kernel.record is not None:
        record = kernel.record
        found = Resources(
            "the record of a compilation (tests/records/kernels.json); no receipt matches this source",
            record.compiler_package,
            record.cubin,
            instructions=_present(record.instructions),
            **{name: getattr(record, name) for name in FIELDS},
        )
        return found, ""
    return _compiled(kernel)


def _compiled(kernel: Kernel) -> tuple[Resources | None, str]:
    from runtime.compile import toolchain  # noqa: PLC0415 - not needed if everything is on record
    from runtime.compile.compiler import compile_spec  # noqa: PLC0415
    from runtime.compile.inspection import usage  # noqa: PLC0415

    try:
        compiled = compile_spec(kernel.named)
        used = usage(compiled)
        package = toolchain.compiler_version()[1]
    except CodegenError as error:
        return None, f"No receipt or record matches this source, and it could not be compiled: {one_line(str(error))}"
    found = Resources(
        "a compilation for this report; no receipt or record matches this source",
        package,
        hashlib.sha256(compiled.code).hexdigest(),
        instructions=_present(used.instructions),
        **{name: getattr(used, name) for name in FIELDS},
    )
    return found, ""


def _present(instructions: Mapping[str, int]) -> dict[str, int]:
    """The opcodes that occur, the most frequent first."""
    return {name: count for name, count in sorted(instructions.items(), key=lambda item: (-item[1], item[0])) if count}
