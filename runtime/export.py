"""``codegen export``: kernels in folders, which load without a compiler."""

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
    """An exported kernel.

    Attributes:
        folder: its folder.
        changed: whether the export wrote files.
        compiled: the kernel.
        receipt: its receipt.
    """

    folder: Path
    changed: bool
    compiled: Compiled
    receipt: Receipt

    @property
    def is_verified(self) -> bool:
        """Whether this cubin (not PTX of the same source) passed all cases on a GPU."""
        found = self.receipt.verification
        return found is not None and not found.failed and found.target.endswith(" cubin")

    @property
    def standing(self) -> str:
        """Description of the kernel's test results on a GPU."""
        found = self.receipt.verification
        if found is None:
            return "no receipt of a GPU run of this cubin"
        verdict = f"{len(found.failed)} of {len(found.cases)} cases FAILED" if found.failed else "all cases passed"
        return one_line(f"{verdict} on {found.device} ({found.target})")


def parse_sizes(text: str) -> dict[str, int]:
    """Parse the sizes of ``--shape``.

    Raises:
        SpecError: if the text is not FIELD=NUMBER,...
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
    """Check before any compilation that the kernels can be written.

    Raises:
        FileError: if a folder holds other files, or an exported file was changed.
        SpecError: if a kernel's name cannot be exported, or two kernels have the same name.
    """
    for i, named in enumerate(named_specs):
        check_exportable(named)
        if named.stem in (other.stem for other in named_specs[:i]):
            raise SpecError("", f"two specs have the name {named.stem}, and hence the same folder")
        check_folder(out / named.stem, RECORD, partial(exported_names, symbol=named.stem))


def launches_of(
    named_specs: Sequence[NamedSpec], sizes: Mapping[str, int] | None, sm_count: int | None
) -> list[SizedLaunch | None]:
    """Launch of each kernel for a named shape.

    Raises:
        SpecError: if the sizes are not a problem of a kernel, or only one of ``--shape`` and ``--sm-count`` is given.
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
        named: the kernel's spec.
        out: parent folder.
        sized: launch for a problem of known shape, to be exported too.

    Raises:
        FileError: if the folder holds other files or cannot be written.
        ToolchainError, CompileError, CacheError, NoJitError: if there is no cubin.
        SpillError: if a shipped kernel's code spills registers and its receipt's code does not.
    """
    compiled = compile_spec(named)
    check_spills(compiled)
    told = receipt_of(compiled)
    folder = out / named.stem
    files = files_of(compiled.generated, compiled.code, compiled.log, told, sized)
    changed = write_folder(folder, files, RECORD, partial(exported_names, symbol=named.stem))
    return Exported(folder, changed, compiled, told)


def receipt_of(compiled: Compiled) -> Receipt:
    """Receipt for an export: the kernel's receipt if it matches this source and cubin, else one without GPU results.

    The latter has no hash of PTX either, because no PTX is exported.

    Raises:
        ReceiptError: if the receipt cannot be read.
    """
    named = compiled.named
    own = unverified(compiled, cubin_record(compiled, with_ptx=False))
    try:
        known = read_receipt(named, place_of(named, ".json"))
    except MissingReceipt:
        return own
    cubin = known.cubin.model_copy(update={"ptx_sha256": None})
    return known if (known.spec, known.source, cubin) == (own.spec, own.source, own.cubin) else own
