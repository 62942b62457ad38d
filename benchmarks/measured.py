"""Which kernel a row of a benchmark was measured with: its spec, its source and the code compiled from that."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from codegen.arch import ARCHS
from codegen.errors import CodegenError
from codegen.library import NamedSpec
from codegen.receipts import source_sha256
from codegen.render import render
from runtime import toolchain
from runtime.compiler import compile_spec

REBIND = "a row's source is today's, if the code that was measured is compiled from that, byte for byte"


def kernel_fields(named: NamedSpec, ran: bool = True) -> dict[str, Any]:
    """Return what a record says of its kernel; of one that did not run, the spec."""
    return {
        "spec": json.loads(named.spec.canonical_json()),
        "source_sha256": source_sha256(render(named)) if ran else None,
        "code_sha256": code_sha256(named) if ran else None,
    }


def code_sha256(named: NamedSpec) -> str:
    """Return the hash of a kernel's code and of how it is launched.

    The code is the PTX, from which a cubin follows, or the cubin where PTX is not for other devices.
    """
    compiled = compile_spec(named, "ptx" if ARCHS[named.spec.arch].forward_compatible else "cubin")
    return hashlib.sha256(compiled.code + json.dumps(compiled.plan.launch(), sort_keys=True).encode()).hexdigest()


def rebind(
    report: dict[str, Any], records: Iterable[dict[str, Any]], kernel_of: Callable[[dict[str, Any]], NamedSpec]
) -> None:
    """Bind records to the sources of today that the code that was measured is compiled from, byte for byte.

    Their numbers are those of that code: only comments or names of the source have changed. Other records are left as
    they are.

    Args:
        report: holds the compiler's version.
        records: of the report.
        kernel_of: returns the kernel of a record as it is now.

    Raises:
        SystemExit: unless the compiler is the report's.
    """
    told, found = report["versions"]["compiler"], toolchain.compiler_version()[1]
    if told != found:
        raise SystemExit(f"error: the kernels were compiled with {told}, and this is {found}")
    for record in records:
        try:
            named = kernel_of(record)
        except CodegenError:  # it is gone, or its spec has a field that specs no longer have
            continue
        source = source_sha256(render(named))
        if source != record["source_sha256"] and code_sha256(named) == record.get("code_sha256"):
            record["source_sha256"] = source
            print(f"{record['name']}: the source is another, its code the same")
