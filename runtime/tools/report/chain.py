"""The hashes of a kernel, from its spec to its receipt, each with a command that checks it without this package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from codegen.files import read_bytes
from codegen.receipts import ReceiptStatus
from codegen.render import SEAL
from codegen.wording import in_shell
from runtime.tools.report.kernels import Kernel

SAME, OTHER = "the receipt names the same", "the receipt names another one"


@dataclass(frozen=True)
class Link:
    """One hash.

    Attributes:
        what: the hashed artifact.
        sha256: the hash; "" if there is none.
        over: description of the hashed bytes.
        check: a command that prints or compares the hash; "" if ``over`` is sufficient.
        told: comparison with the receipt, in words.
        fits: whether it matches the receipt; None if it is not compared.
    """

    what: str
    sha256: str
    over: str
    check: str
    told: str
    fits: bool | None


def links(kernel: Kernel) -> list[Link]:
    """The hashes of a kernel, tied together by its receipt."""
    return [_spec(kernel), _source(kernel), _seal(kernel), _launch(kernel), *_code(kernel), _receipt(kernel)]


def _compared(ours: str, theirs: str | None) -> tuple[str, bool | None]:
    if theirs is None:
        return "there is no receipt", None
    return (SAME, True) if ours == theirs else (OTHER, False)


def _spec(kernel: Kernel) -> Link:
    spec, receipt = kernel.named.spec, kernel.receipt
    told, fits = _compared(spec.hash, receipt.spec.hash if receipt else None)
    return Link(
        "spec",
        spec.hash,
        "the canonical JSON of the spec: all fields but unused options, sorted, without spaces",
        f"printf %s {in_shell(spec.canonical_json())} | sha256sum",
        told,
        fits,
    )


def _source(kernel: Kernel) -> Link:
    told, fits = _compared(kernel.source_sha256, kernel.receipt.source.sha256 if kernel.receipt else None)
    over = f"the bytes of the source below, {_file(kernel, '.cu')}"
    check = f"sha256sum {in_shell(_file(kernel, '.cu'))}"
    if kernel.named.twin_of is not None:
        over, check = f"{over} with words replaced", f"{_twin(kernel)} | sha256sum"
    return Link("source", kernel.source_sha256, over, check, told, fits)


def _twin(kernel: Kernel) -> str:
    """The command that prints the source of a twin, which is not a file."""
    return f"codegen render {kernel.named.argument} --out -"


def _file(kernel: Kernel, suffix: str) -> str:
    """Path of a kernel's file: in the tree if it is shipped, else the output path of ``codegen render``."""
    name = f"{kernel.named.main.stem}{suffix}"
    return f"generated/{(kernel.named.subfolder / name).as_posix()}" if kernel.named.is_shipped else name


def _seal(kernel: Kernel) -> Link:
    line = next(line for line in kernel.source.splitlines() if line.startswith(SEAL))
    return Link(
        "seal",
        line.removeprefix(SEAL),
        "all lines of the source except the seal itself; a file edited by hand has another hash",
        f"{_without_seal(kernel)} | sha256sum",
        "recorded in the source",
        None,
    )


def _without_seal(kernel: Kernel) -> str:
    """The command that prints the source without its seal line."""
    filtered = f"grep -v '^{SEAL}'"
    if kernel.named.twin_of is not None:
        return f"{_twin(kernel)} | {filtered}"
    return f"{filtered} {in_shell(_file(kernel, '.cu'))}"


def _launch(kernel: Kernel) -> Link:
    told, fits = _compared(kernel.plan.launch_sha256, kernel.receipt.cubin.launch_sha256 if kernel.receipt else None)
    return Link(
        "launch",
        kernel.plan.launch_sha256,
        "the launch as JSON: types and offsets of parameters, boxes of tensor maps, threads, shared memory",
        f"codegen compile {kernel.named.argument} --check",
        told,
        fits,
    )


def _code(kernel: Kernel) -> list[Link]:
    """Hashes of the compiler's outputs, which the receipt records."""
    receipt = kernel.receipt
    if receipt is None:
        return [Link("cubin", "", "what the compiler makes of the source", "", "there is no receipt", None)]
    cubin, check = receipt.cubin, f"codegen compile {kernel.named.argument} --check"
    how = f"by {cubin.compiler_package}, {' '.join(cubin.options)}"
    told = "recorded in the receipt" if kernel.is_of_receipt else "recorded in a receipt of another source"
    found = [Link("cubin", cubin.sha256, f"the machine code compiled from the source {how}", check, told, None)]
    if cubin.ptx_sha256:
        over = "the PTX of the same source, for newer GPUs"
        found.append(Link("PTX", cubin.ptx_sha256, over, check, told, None))
    return found


def _receipt(kernel: Kernel) -> Link:
    file = _file(kernel, ".json")
    if kernel.receipt is None:
        return Link("receipt", "", file, "", kernel.standing.explanation, None)
    digest = hashlib.sha256(read_bytes(kernel.receipt_path)).hexdigest()
    over = "the bytes of the receipt, which records all of the above and the test results on a GPU"
    fits = kernel.standing.standing is ReceiptStatus.OK
    return Link("receipt", digest, over, f"sha256sum {in_shell(file)}", kernel.standing.explanation, fits)
