"""Kernels that may run under ``verified_only``: the ones with a receipt of their current source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from codegen.errors import SpecError
from codegen.library import IN_SOURCE_TREE, NamedSpec
from codegen.provenance import Provenance, Vouched, nearest_shipped, provenance_of, vouched
from codegen.receipts import ReceiptStatus, judged
from codegen.select.choice import Choice
from codegen.select.shipped import Verified
from codegen.tools.exports import read_export
from codegen.wording import in_shell
from runtime.compile import compilers, toolchain
from runtime.errors import ToolchainError, UnverifiedError
from runtime.receipts import own


def provenance(named: NamedSpec) -> Provenance:
    """Provenance of a kernel by the package's and the user's receipts, with caveats of the installed compiler."""
    found = provenance_of(named, own.find)
    return replace(found, caveat=_caveat(found.vouched)) if found.is_verified else found


def _caveat(found: Vouched | None) -> str:
    """Caveat of a receipt about the installed compiler's code; "" without a caveat or a compiler."""
    if found is None or found.receipt is None:
        return ""
    try:
        installed = toolchain.compiler_version()[1]
    except ToolchainError:
        return ""
    if found.receipt.cubin.compiler_package == installed:
        return ""
    return compilers.caveat(installed) or compilers.difference(installed)


def is_verified(named: NamedSpec) -> bool:
    """Whether a kernel has a receipt, in the package or in the user's folder."""
    found = vouched(named, own.find)
    return found is not None and found.holds


def check(named: NamedSpec) -> None:
    """Refuse a kernel without a receipt.

    Raises:
        UnverifiedError: if it has none, with the nearest shipped kernel and the command that makes a receipt.
    """
    if not is_verified(named):
        raise refusal(named)


def refusal(named: NamedSpec) -> UnverifiedError:
    """Build the error for a kernel without a receipt."""
    found, sibling = vouched(named, own.find), nearest_shipped(named)
    reason = "no receipt" if found is None else f"no receipt of this source ({found})"
    near = "" if sibling is None else str(sibling)
    return UnverifiedError(named.stem, named.spec.hash, reason, near, verify_command(named))


def verify_command(named: NamedSpec) -> str:
    """Command that makes the receipt of a kernel where the runtime finds it."""
    line = f"codegen verify {named.argument}"
    finds = named.path is None or (named.is_shipped and IN_SOURCE_TREE)
    return line if finds else f"{line} --out {in_shell(str(own.folder()))}"


def chosen(choose: Callable[[Verified | None], Choice]) -> Choice:
    """Choose a kernel with a receipt: the unrestricted choice, or else the best kernel that computes the same result.

    Args:
        choose: chooses among all kernels, or among kernels with receipts.

    Raises:
        UnverifiedError: if no kernel with a receipt computes the same result.
        SpecError: if ``choose`` raises it for all kernels.
    """
    first = choose(None)
    if is_verified(first.named):
        return first
    try:
        other = choose(Verified(is_verified, own.kernels()))
    except SpecError:
        raise refusal(first.named) from None
    check(other.named)  # a complete spec is not replaced
    return replace(other, reason=f"{other.reason}; {first.named.stem} was skipped because it has no receipt")


def check_exported(folder: Path) -> None:
    """Refuse an exported kernel unless its receipt says that a GPU passed all cases.

    Raises:
        UnverifiedError: if the receipt does not say so.
        ExportError, FileError: if the folder is not an exported kernel.
    """
    found = read_export(folder)
    named = found.generated.named
    standing = judged(named, found.receipt, found.generated.source)
    if standing.standing is not ReceiptStatus.OK:
        again = f"codegen verify {named.argument}, and export it again"
        raise UnverifiedError(named.stem, named.spec.hash, f"its receipt says: {standing.explanation}", "", again)
