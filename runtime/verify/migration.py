"""Migration of receipts to renamed specs and sources. Needs no GPU.

The machine code and the launch were verified and measured. If both are unchanged, byte for byte, only names or comments
have changed and the results still hold. After a change of names, a compilation confirms that.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from codegen.files import is_file, read_bytes
from codegen.library import NamedSpec, shipped_names
from codegen.migrations import migrated
from codegen.plain import json_value
from codegen.prune import same_code
from codegen.receipts import (
    CubinRecord,
    MissingReceipt,
    Receipt,
    ReceiptError,
    SourceRecord,
    SpecRecord,
    read_receipt,
    receipt_path,
    source_sha256,
)
from codegen.render import generate, render, spec_json_of
from codegen.spec import canonical
from codegen.twins import twin_source
from runtime.compile.compiler import compile_spec
from runtime.verify import version1
from runtime.verify.receipts import cubin_record, differences


def place_of(named: NamedSpec, folder: Path) -> Path:
    """Path of a spec's receipt in ``folder``, or the path where it belongs if there is none.

    An earlier version may have had the spec in another folder of specs/, and a twin's receipt in its own file.

    Raises:
        ReceiptError: if the only receipt is for a kernel with another name.
    """
    path = receipt_path(named, folder)
    if _has(named, path):
        return path
    own = path.with_name(f"{named.stem}.json")
    if not named.is_shipped:
        return own if _has(named, own) else path
    known = set(shipped_names())
    for found in sorted(folder.rglob("*.json")):
        if found.stem in (named.stem, named.main.stem) and _has(named, found):
            return found
        if found.stem not in known and _spec_hash(found) == named.spec.hash:
            raise _renamed(named, found.stem)
    return path


def _has(named: NamedSpec, path: Path) -> bool:
    """Whether a file has, or may have if it is unreadable, the receipt of a kernel."""
    if path.stem != named.main.stem:
        return is_file(path)  # as for twins in earlier versions
    try:
        read_receipt(named, path)
    except MissingReceipt:
        return False
    except ReceiptError:
        return True
    return True


def earlier_receipt(named: NamedSpec, path: Path) -> Receipt:
    """Receipt of a kernel at a path from ``place_of``.

    Raises:
        MissingReceipt, ReceiptError: as ``read_receipt`` does.
    """
    return read_receipt(named, path) if path.stem == named.main.stem else Receipt.read(path)


def earlier_source(named: NamedSpec, path: Path) -> str | None:
    """Source of a kernel beside its receipt; a twin's source by replacing words."""
    source = path.with_suffix(".cu")
    if not is_file(source):
        return None
    text = read_bytes(source).decode("utf-8", "replace")
    return twin_source(text, path.stem) if named.twin_of is not None and path.stem == named.main.stem else text


def _spec_hash(path: Path) -> str:
    try:
        return Receipt.read(path).spec.hash
    except ReceiptError:
        return ""


def _renamed(named: NamedSpec, old: str) -> ReceiptError:
    return ReceiptError(
        f"{named.stem}: its receipt describes a kernel named {old}, and the name is part of the machine code"
    )


def carried_over(earlier: Receipt, named: NamedSpec, old_source: str | None) -> Receipt:
    """Migrate a receipt to the current spec and source.

    Args:
        earlier: the earlier receipt.
        named: the current spec.
        old_source: the source beside the earlier receipt, if it exists.

    Raises:
        ReceiptError: unless the spec differs only in renamed fields, and machine code and launch are unchanged.
    """
    old_stem = Path(earlier.source.file).stem
    if old_stem not in (named.stem, named.main.stem):
        raise _renamed(named, old_stem)
    if earlier.spec.hash != named.spec.hash:
        _check_spec(earlier, named, old_source)
    source = render(named)
    cubin = _cubin_of_today(earlier, named)
    same = _same_code(earlier, old_source, source)
    if not same and (changed := differences(cubin, cubin_record(compile_spec(named)))):
        raise ReceiptError(f"{named.stem}: {'; '.join(changed)}")
    return Receipt(
        spec=SpecRecord(file=named.origin, hash=named.spec.hash),
        source=SourceRecord(file=named.source_file, sha256=source_sha256(source)),
        cubin=cubin,
        verification=earlier.verification,
        measurement=earlier.measurement,
    )


def _same_code(earlier: Receipt, old_source: str | None, source: str) -> bool:
    """Whether a source differs from the receipt's source, if that exists, only in comments, which no compiler reads."""
    if earlier.source.sha256 == source_sha256(source):
        return True
    if old_source is None or source_sha256(old_source) != earlier.source.sha256:
        return False
    return same_code(old_source, source)


def _check_spec(earlier: Receipt, named: NamedSpec, old_source: str | None) -> None:
    """Refuse a spec that differs from the receipt's spec with current names."""
    old = spec_json_of(old_source or "")
    if old is None or hashlib.sha256(old.encode()).hexdigest() != earlier.spec.hash:
        raise ReceiptError(
            f"{named.stem}: its spec has changed, and {earlier.source.file} is not the receipt's source, "
            f"which would show the change: restore that source first (git checkout), then migrate"
        )
    fields, _ = migrated(json_value(old))  # trusted, because its hash is the receipt's
    today = json.loads(named.spec.canonical_json())
    if canonical(fields) != named.spec.canonical_json():
        changed = sorted(name for name in fields.keys() | today.keys() if fields.get(name) != today.get(name))
        raise ReceiptError(f"{named.stem}: its spec has changed by more than names: {', '.join(changed)}")


def _cubin_of_today(earlier: Receipt, named: NamedSpec) -> CubinRecord:
    """Cubin record of a receipt with the current hash of the launch.

    Version 1 did not record the L2 fetch granularity: the current plan provides it.
    """
    plan = generate(named).plan
    if earlier.schema_version == 1:
        found, told = version1.launch_sha256(plan), earlier.cubin.launch_sha256
        if found != told:
            raise ReceiptError(
                f"{named.stem}: launch_sha256 is {found} by version 1, the receipt says {told}: the launch "
                "or the names of its parameters have changed"
            )
        return earlier.cubin.model_copy(update={"launch_sha256": plan.launch_sha256})
    if earlier.cubin.launch_sha256 != plan.launch_sha256:
        raise ReceiptError(
            f"{named.stem}: launch_sha256 is {plan.launch_sha256}, the receipt says {earlier.cubin.launch_sha256}"
        )
    return earlier.cubin
