"""Receipts (verification records) of generated sources: binary hash, test results on a GPU, measurements.

``generated/<stem>.json``, next to ``generated/<stem>.cu``, binds spec, source, cubin, verification and measurement by
hash; it includes the receipt of a twin. Only ``codegen verify``, ``measure`` and ``migrate`` write it; it is never
edited by hand.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from codegen.cases import case_names, most_allowed
from codegen.dtypes import TWINS
from codegen.errors import CodegenError, FileError, MissingFileError
from codegen.files import locked, read_text, write_all, write_if_changed
from codegen.json_rows import json_rows
from codegen.library import GENERATED, NamedSpec
from codegen.patterns.base import SpecModel
from codegen.plain import json_model, json_value
from codegen.plan import Plan
from codegen.render import generate
from codegen.wording import one_line

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]
# Not strict: JSON has no number for a non-finite error, which is the string "NaN" or "Infinity".
Error = Annotated[float, Field(strict=False)]
Milliseconds = Annotated[float, Field(gt=1e-6, lt=1e9, allow_inf_nan=False)]
Tflops = Annotated[float, Field(ge=0, lt=1e6, allow_inf_nan=False)]
LocalBytes = Annotated[int, Field(ge=0, le=512 << 10, description="limit of local memory per thread")]
FEW = 3
"""Most cases that a line lists."""


class _Record(SpecModel):
    model_config = ConfigDict(ser_json_inf_nan="strings")


class SpecRecord(_Record):
    """The spec."""

    file: str = Field(description="relative to the project")
    hash: Sha256 = Field(description="SHA-256 of the canonical JSON")


class SourceRecord(_Record):
    """The generated source."""

    file: str = Field(description="relative to the project")
    sha256: Sha256 = Field(description="SHA-256 of the text; for a twin, of the text with words replaced")


class CubinRecord(_Record):
    """The compiled binary."""

    sha256: Sha256
    ptx_sha256: Sha256 | None = Field(default=None, description="SHA-256 of the PTX for newer GPUs; sm_90a has none")
    launch_sha256: Sha256 | None = Field(
        default=None,
        description="SHA-256 of the launch: types and offsets of parameters, boxes and swizzles of tensor maps, "
        "threads; in version 1 also of names",
    )
    arch: str
    compiler: str = Field(description='name and version of the compiler: "NVRTC 13.0"')
    compiler_package: str = Field(description='the wheel it came from: "nvidia-cuda-nvrtc 13.0.88"')
    options: tuple[str, ...]
    registers: Count = Field(description="registers per thread at launch", le=255)
    spill_bytes: LocalBytes
    stack_bytes: LocalBytes
    static_shared_bytes: int = Field(ge=0, le=48 << 10, description="a kernel has no more that the compiler knows")
    dynamic_shared_bytes: Count
    instructions: dict[str, Count] = Field(description="instruction counts by kind, from the disassembly")

    @field_validator("instructions")
    @classmethod
    def _sorted(cls, value: dict[str, int]) -> dict[str, int]:
        return dict(sorted(value.items()))


class CaseRecord(_Record):
    """One verified case."""

    name: str
    description: str
    max_error: Error = Field(description="largest absolute difference from the oracle")
    torch_error: Error | None = Field(description="the same error of torch in the kernel's type")
    tolerance: Error = Field(description="tolerance of max_error")
    passed: bool = Field(description="also false for other failures, which the description explains")

    @property
    def holds(self) -> bool:
        """Whether the case passed and its figures agree; the flag alone does not count."""
        figures = [figure for figure in (self.max_error, self.torch_error, self.tolerance) if figure is not None]
        plain = all(math.isfinite(figure) and figure >= 0 for figure in figures)
        return self.passed and plain and self.max_error <= self.tolerance


class VerificationRecord(_Record):
    """Test results of this source on a GPU."""

    device: str
    driver: str
    target: str = Field(description='what ran: "sm_90a cubin" or "compute_89 PTX"')
    oracle: str
    torch: str = Field(description="version")
    worst_error: Error
    cases: Annotated[tuple[CaseRecord, ...], Field(min_length=1)]

    @property
    def failed(self) -> list[str]:
        """Names of the cases that failed, or whose figures show a failure."""
        return [case.name for case in self.cases if not case.holds]


class MeasurementRecord(_Record):
    """Times of one shape, with those of a peer in the same run."""

    shape: str
    milliseconds: Milliseconds
    tflops: Tflops
    peer: str
    peer_milliseconds: Milliseconds
    peer_tflops: Tflops


class Receipt(_Record):
    """The receipt of one generated source."""

    schema_version: Literal[1, 2] = 2
    spec: SpecRecord
    source: SourceRecord
    cubin: CubinRecord
    verification: VerificationRecord | None = None
    measurement: tuple[MeasurementRecord, ...] = ()
    twins: dict[Literal["bf16"], Receipt] = Field(default={}, description="receipts of the other types of the spec")

    @field_validator("twins")
    @classmethod
    def _has_no_further_ones(cls, value: dict[str, Receipt]) -> dict[str, Receipt]:
        if any(twin.twins for twin in value.values()):
            raise ValueError("a twin cannot have twins")
        return value

    @classmethod
    def read(cls, path: Path) -> Receipt:
        """Read a receipt.

        Raises:
            MissingReceipt: if the file does not exist.
            ReceiptError: if it cannot be read, or is not a receipt of this version.
        """
        try:
            return json_model(cls, read_text(path))
        except MissingFileError:
            raise MissingReceipt(f"{one_line(path.name)}: does not exist") from None
        except FileError as error:
            raise ReceiptError(f"{one_line(path.name)}: {error.reason}") from None
        except CodegenError as error:
            raise ReceiptError(f"{one_line(path.name)}: {error}") from None

    def with_measurement_of(self, earlier: Receipt) -> Receipt:
        """This receipt with the measurement of an earlier one, or unchanged.

        The measurement is kept if source, cubin, device and driver are the same.
        """
        same = (earlier.source, earlier.cubin.sha256) == (self.source, self.cubin.sha256)
        devices = [(r.verification.device, r.verification.driver) if r.verification else None for r in (earlier, self)]
        return self.model_copy(update={"measurement": earlier.measurement}) if same and len(set(devices)) == 1 else self

    def of(self, named: NamedSpec) -> Receipt | None:
        """Receipt of one kernel of the spec, without those of others; None if there is none."""
        if named.twin_of is None:
            return self.model_copy(update={"twins": {}})
        return next((twin for dtype, twin in self.twins.items() if dtype == named.spec.dtype), None)

    def including(self, named: NamedSpec, receipt: Receipt) -> Receipt:
        """This receipt with that of one kernel of the spec replaced; those of others are kept."""
        if named.twin_of is not None:
            return self.model_copy(update={"twins": {**self.twins, named.spec.dtype: receipt}})
        return receipt.model_copy(update={"twins": self.twins if named.has_twin else {}})

    @property
    def text(self) -> str:
        """Text of its file, deterministic for the same facts."""
        return json_rows(_without_twins_of_none(json.loads(self.model_dump_json())), ("twins",))  # NaN as text

    def write(self, path: Path) -> bool:
        """Write this receipt to a file; return whether the file changed. ``write_receipt`` keeps those of twins."""
        return write_if_changed(path, self.text)


class ReceiptError(CodegenError):
    """A receipt cannot be read."""


class MissingReceipt(ReceiptError):
    """A receipt does not exist."""


def _without_twins_of_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a receipt, without empty twins."""
    twins = {dtype: _without_twins_of_none(twin) for dtype, twin in fields.pop("twins").items()}
    return fields | ({"twins": twins} if twins else {})


def source_sha256(text: str) -> str:
    """Hash of a source, as in its receipt."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def twin_receipt(text: str) -> str | None:
    """Text of a twin's receipt, from the text of its file of any version; None if there is none."""
    try:
        found = json_value(text)
    except CodegenError:
        return None
    twins = found.get("twins") if isinstance(found, dict) else None
    twin = twins.get(TWINS[1]) if isinstance(twins, dict) else None
    return json_rows(twin) if isinstance(twin, dict) else None


def receipt_path(named: NamedSpec, folder: Path = GENERATED) -> Path:
    """Path of the receipt of a kernel and its twin, in a folder with the layout of specs/."""
    return folder / named.subfolder / f"{named.main.stem}.json"


def read_receipt(named: NamedSpec, path: Path) -> Receipt:
    """Read the receipt of one kernel from its file.

    Raises:
        MissingReceipt: if the file does not exist.
        ReceiptError: if the file cannot be read, or is not a receipt of this version.
    """
    found = Receipt.read(path).of(named)
    if found is None:
        raise MissingReceipt(f"{one_line(path.name)}: has no receipt of {named.stem}")
    return found


def write_receipt(
    named: NamedSpec,
    receipt: Receipt,
    path: Path,
    first: Callable[[], Receipt] | None = None,
    source: str | None = None,
) -> bool:
    """Write the receipt of one kernel to its file, and keep the receipt of the other type.

    Concurrent writes of receipts of the same spec do not lose any of them.

    Args:
        named: the kernel.
        receipt: its receipt.
        path: the file.
        first: creates the receipt of the first type, if the file of a twin's receipt has none.
        source: text of the source next to the file, written together with it or not at all.

    Returns:
        Whether a file changed.

    Raises:
        ReceiptError: for the receipt of a twin without a receipt of the first type.
        FileError: if the file cannot be written.
    """
    other = None if named.twin_of is None or first is None or _readable(path) else first()  # slow
    with locked(path.parent):
        found = _readable(path) or other
        if found is None and named.twin_of is not None:
            raise MissingReceipt(f"{one_line(path.name)}: there is no receipt of {named.main.stem}, the first type")
        texts = {path: (found.including(named, receipt) if found else receipt).text}
        return any(write_all(texts if source is None else {path.with_suffix(".cu"): source, **texts}).values())


def _readable(path: Path) -> Receipt | None:
    try:
        return Receipt.read(path)
    except ReceiptError:
        return None


class ReceiptStatus(StrEnum):
    """State of a receipt for its source."""

    MISSING = "missing"
    UNREADABLE = "unreadable"
    STALE = "stale"
    UNVERIFIED = "unverified"
    FAILED = "failed"
    OK = "ok"


@dataclass(frozen=True)
class ReceiptState:
    """A state, with an explanation in one line."""

    standing: ReceiptStatus
    explanation: str


def state(named: NamedSpec, source_text: str, folder: Path = GENERATED) -> ReceiptState:
    """State of the receipt of a spec, in ``folder`` with the layout of specs/, for the source of the spec."""
    try:
        receipt = read_receipt(named, receipt_path(named, folder))
    except MissingReceipt:
        return ReceiptState(ReceiptStatus.MISSING, "there is no receipt: this source was never verified")
    except ReceiptError as error:
        return ReceiptState(ReceiptStatus.UNREADABLE, str(error))
    return judged(named, receipt, source_text)


def judged(named: NamedSpec, receipt: Receipt, source_text: str) -> ReceiptState:
    """State of a receipt for the source of a spec."""
    version1 = "it has version 1, whose launch hash includes names" if receipt.schema_version == 1 else ""
    changed = ""
    if receipt.spec.hash != named.spec.hash:
        changed = "the spec changed after the receipt was written"
    elif receipt.source.sha256 != source_sha256(source_text):
        changed = "the source changed after the receipt was written"
    elif not version1 and receipt.cubin.launch_sha256 not in (None, generate(named).plan.launch_sha256):
        changed = "its launch differs from that of the source"
    if changed or version1:
        return ReceiptState(ReceiptStatus.STALE, "; ".join(filter(None, (changed, version1))))
    return _verified(receipt, generate(named).plan)


def _verified(receipt: Receipt, plan: Plan) -> ReceiptState:
    verification = receipt.verification
    if verification is None:
        return ReceiptState(ReceiptStatus.UNVERIFIED, "compiled, but never run on a GPU")
    cases = len(verification.cases)
    if verification.failed:
        return ReceiptState(
            ReceiptStatus.FAILED,
            f"{len(verification.failed)} of {cases} cases failed: {one_line(', '.join(verification.failed))}",
        )
    for told in _contradictions(receipt.cubin, verification, plan):
        return ReceiptState(ReceiptStatus.FAILED, f"the receipt contradicts itself: {told}")
    ran = {case.name for case in verification.cases}
    if missing := [name for name in case_names(plan) if name not in ran]:
        told = f"{len(missing)} cases of its spec never ran: {_few(missing)}"
        return ReceiptState(ReceiptStatus.UNVERIFIED, told)
    where = one_line(verification.device)
    return ReceiptState(ReceiptStatus.OK, f"{cases} cases on {where}, worst error {verification.worst_error:.2g}")


def _contradictions(cubin: CubinRecord, verification: VerificationRecord, plan: Plan) -> Iterator[str]:
    """Contradiction of a receipt with its own figures or the plan of its spec; "" if there is none."""
    arch = plan.arch
    if cubin.arch != arch.name or f"--gpu-architecture={arch.name}" not in cubin.options:
        yield f"its cubin is for {one_line(cubin.arch)}, its spec for {arch.name}"
    if cubin.dynamic_shared_bytes != plan.shared_bytes:
        yield f"{cubin.dynamic_shared_bytes} bytes of shared memory at launch; the plan has {plan.shared_bytes}"
    targets = [f"{arch.name} cubin", *([f"{arch.virtual} PTX"] if arch.forward_compatible else [])]
    if verification.target not in targets:
        yield f"{one_line(verification.target)} ran, expected {' or '.join(targets)}"
    counts = Counter(case.name for case in verification.cases)
    if doubled := [name for name, count in counts.items() if count > 1]:
        yield f"it has repeated cases: {_few(doubled)}"
    known = set(case_names(plan))
    if strange := [name for name in counts if name not in known]:
        yield f"its spec has no such cases: {_few(strange)}"
    most = most_allowed(plan)
    if loose := [case.name for case in verification.cases if case.tolerance > most]:
        yield f"tolerances exceed {most:g}: {_few(loose)}"
    worst = max(case.max_error for case in verification.cases)
    if verification.worst_error != worst:
        yield f"its worst error is {verification.worst_error:g}, not {worst:g}"


def _few(names: list[str]) -> str:
    return one_line(", ".join(names[:FEW]) + (", ..." if len(names) > FEW else ""))
