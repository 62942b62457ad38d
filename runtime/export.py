"""``codegen export``: kernels in folders that are loaded without a compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from codegen.errors import SpecError
from codegen.folders import check_folder, write_folder
from codegen.library import NamedSpec
from codegen.places import place_of
from codegen.receipts import MissingReceipt, Receipt, read_receipt
from codegen.render import generate
from codegen.tools.exports import RECORD, check_exportable, exported_names, files_of
from codegen.tools.sized_launch import SizedLaunch, sized_launch
from codegen.wording import one_line, shown
from runtime.compile.compiler import Compiled, compile_spec
from runtime.compile.compilers import check_spills
from runtime.verify.receipts import cubin_record, unverified

MOST_SMS = 4096


@dataclass(frozen=True)
class Exported:
    """A kernel that was exported.

    Attributes:
        folder: where.
        changed: whether it had to be written.
        compiled: the kernel.
        receipt: what its receipt says.
    """

    folder: Path
    changed: bool
    compiled: Compiled
    receipt: Receipt

    @property
    def is_verified(self) -> bool:
        """Whether this cubin, not PTX of the same source, passed all cases on a GPU."""
        found = self.receipt.verification
        return found is not None and not found.failed and found.target.endswith(" cubin")

    @property
    def standing(self) -> str:
        """What a GPU made of the kernel, in words."""
        found = self.receipt.verification
        if found is None:
            return "no receipt says that a GPU ran this cubin"
        verdict = f"{len(found.failed)} of {len(found.cases)} cases FAILED" if found.failed else "all cases passed"
        return one_line(f"{verdict} on {found.device} ({found.target})")


def parse_sizes(text: str) -> dict[str, int]:
    """Return the sizes that ``--shape`` names.

    Raises:
        SpecError: for a text that is not FIELD=NUMBER,...
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if not name or not (number.isascii() and number.isdecimal()) or len(number) > 18:
            raise SpecError("shape", f"has {shown(part)}, expected FIELD=NUMBER, separated by commas")
        if name in sizes:
            raise SpecError(f"shape.{name}", "is given twice")
        sizes[name] = int(number)
    return sizes


def check_places(named_specs: Sequence[NamedSpec], out: Path) -> None:
    """Refuse what cannot be written, before anything is compiled.

    Raises:
        FileError: for a folder that holds something else, or an exported file that was changed.
        SpecError: for a kernel's name that cannot be.
    """
    for i, named in enumerate(named_specs):
        check_exportable(named)
        if named.stem in (other.stem for other in named_specs[:i]):
            raise SpecError("", f"two of the specs are called {named.stem}: they would have the same folder")
        check_folder(out / named.stem, RECORD, partial(exported_names, symbol=named.stem))


def launches_of(
    named_specs: Sequence[NamedSpec], sizes: Mapping[str, int] | None, sm_count: int | None
) -> list[SizedLaunch | None]:
    """Return the launch of the named shape of each kernel.

    Raises:
        SpecError: for sizes that are no problem of a kernel's, or one of the two without the other.
    """
    if (sizes is None) != (sm_count is None):
        raise SpecError("shape" if sizes is None else "sm_count", "is missing: --shape and --sm-count belong together")
    if sizes is None or sm_count is None:
        return [None] * len(named_specs)
    if not 1 <= sm_count <= MOST_SMS:
        raise SpecError("sm_count", f"is {sm_count}, expected 1 to {MOST_SMS}")
    return [sized_launch(generate(named).plan, sizes, sm_count) for named in named_specs]


def export(named: NamedSpec, out: Path, sized: SizedLaunch | None = None) -> Exported:
    """Compile a kernel, or take it from the cache, and write its folder ``out / stem``.

    Args:
        named: its spec.
        out: folder of the folders.
        sized: the launch of a problem of known shape, to be told too.

    Raises:
        FileError: when the folder holds something else, or cannot be written.
        ToolchainError, CompileError, CacheError, NoJitError: when there is no cubin.
        SpillError: when that of a shipped kernel spills registers, and that of its receipt does not.
    """
    compiled = compile_spec(named)
    check_spills(compiled)
    told = receipt_of(compiled)
    folder = out / named.stem
    files = files_of(compiled.generated, compiled.code, compiled.log, told, sized)
    changed = write_folder(folder, files, RECORD, partial(exported_names, symbol=named.stem))
    return Exported(folder, changed, compiled, told)


def receipt_of(compiled: Compiled) -> Receipt:
    """Return the kernel's receipt if it is of this source and this cubin; else one that says nothing of a GPU.

    That one has no hash of PTX either, of which none is exported.

    Raises:
        ReceiptError: for a receipt that cannot be read.
    """
    named = compiled.named
    own = unverified(compiled, cubin_record(compiled, with_ptx=False))
    try:
        known = read_receipt(named, place_of(named, ".json"))
    except MissingReceipt:
        return own
    cubin = known.cubin.model_copy(update={"ptx_sha256": None})
    return known if (known.spec, known.source, cubin) == (own.spec, own.source, own.cubin) else own
