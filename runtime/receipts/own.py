"""Receipts in the user's own folder, with the layout of generated/, for custom and for shipped kernels."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import platformdirs

from codegen.errors import MOST_OF_MESSAGE, CodegenError
from codegen.files import MOST_BYTES, errors_of
from codegen.library import NamedSpec
from codegen.parse import parse_spec
from codegen.plain import json_model
from codegen.provenance import Vouched
from codegen.receipts import Receipt, ReceiptError, ReceiptState, ReceiptStatus, judged, receipt_path
from codegen.render import render, spec_json_of
from codegen.wording import in_shell, one_line, shown
from runtime.compile.cache_environment import TRUST_OTHERS, trusts_others
from runtime.compile.cache_folder import Folder
from runtime.compile.cache_trust import TrustError, check, open_inner, open_way

VARIABLE = "CODEGEN_RECEIPTS"


def folder() -> Path:
    """Get the user's folder of receipts: CODEGEN_RECEIPTS, else one in the user's data folder.

    Raises:
        ReceiptError: if it lies in the home folder and that is unknown.
    """
    found = _place()
    if found is None:
        raise ReceiptError(f"there is no home folder for receipts: set {VARIABLE} to a folder of your own, or HOME")
    return found


def _place() -> Path | None:
    """The folder; None if it belongs in the home folder and there is none."""
    given = os.environ.get(VARIABLE)
    try:
        path = Path(given).expanduser() if given else platformdirs.user_data_path("sparse-kernel-codegen") / "receipts"
    except RuntimeError:
        path = None
    if path is not None and not str(path).startswith("~"):  # older platformdirs do not expand ~
        return path.absolute()
    if given:
        raise ReceiptError(f"{VARIABLE} is {shown(given)}, and there is no such home folder: name a folder of your own")
    return None


def find(named: NamedSpec) -> Vouched | None:
    """The receipt of a kernel in the user's folder; None if there is none.

    A receipt that other users could write proves nothing: it is reported as unreadable.

    Raises:
        ReceiptError: if CODEGEN_RECEIPTS does not name a folder.
        CacheError: if CODEGEN_CACHE_TRUST_OTHERS is neither 0 nor 1.
    """
    top = _place()
    if top is None:
        return None
    path = receipt_path(named, top)
    place, trusts = one_line(str(path)), trusts_others()
    try:
        text = _read(top, named.subfolder / path.name, trusts=trusts)
        receipt = json_model(Receipt, text).of(named)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except TrustError as error:
        return Vouched(place, ReceiptState(ReceiptStatus.UNREADABLE, one_line(_untrusted(error), MOST_OF_MESSAGE)))
    except (CodegenError, OSError, UnicodeDecodeError) as error:
        return Vouched(place, ReceiptState(ReceiptStatus.UNREADABLE, one_line(str(error))))
    return None if receipt is None else Vouched(place, judged(named, receipt, render(named)), receipt)


def make(place: Path) -> None:
    """Create a private folder of receipts. A folder outside the user's folder of receipts is left alone.

    Raises:
        ReceiptError: if other users could write to it, so that its receipts would be ignored.
        FileError: if it cannot be created.
    """
    top = _place()
    if top is None or not place.absolute().is_relative_to(top):
        return
    try:
        with errors_of(place):
            open_way(place.absolute(), make=True, trusts_others=trusts_others()).close()
    except TrustError as error:
        raise ReceiptError(_untrusted(error)) from None


def protect(path: Path) -> None:
    """Remove other users' write access to a receipt in the user's folder and to its source, whatever the umask."""
    top = _place()
    if top is None or not path.absolute().is_relative_to(top):
        return
    for each in (path, path.with_suffix(".cu")):
        with errors_of(each):
            each.chmod(each.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))


def _untrusted(error: TrustError) -> str:
    """Reason why a receipt is ignored."""
    remedy = f"run: {error.remedy}; or " if error.remedy else ""
    return f"{error.reason}, so others could write receipts there; {remedy}set {TRUST_OTHERS}=1 if you trust them"


def kernels() -> tuple[NamedSpec, ...]:
    """Custom kernels in the user's folder. Unreadable ones are skipped.

    Raises:
        ReceiptError: for a CODEGEN_RECEIPTS that names no folder.
        CacheError: for settings of trust that are neither yes nor no.
    """
    top = _place()
    if top is None:
        return ()
    trusts = trusts_others()
    try:
        with closing(open_way(top, make=False, trusts_others=trusts)) as opened:
            stems = [name.removesuffix(".json") for name in opened.names() if name.endswith(".json")]
    except (TrustError, OSError):
        return ()
    found: list[NamedSpec] = []
    for stem in stems:
        with suppress(CodegenError, OSError, UnicodeDecodeError):
            found += _kernels_of(top, stem, trusts=trusts)
    return tuple(found)


def _kernels_of(top: Path, stem: str, *, trusts: bool) -> Iterator[NamedSpec]:
    """Yield the kernels whose source and receipt are in a folder."""
    receipt = json_model(Receipt, _read(top, Path(f"{stem}.json"), trusts=trusts))
    fields = spec_json_of(_read(top, Path(f"{stem}.cu"), trusts=trusts))
    if fields is None:
        return
    spec = parse_spec(json.loads(fields))
    first = NamedSpec(stem, spec, receipt.spec.file, has_twin=bool(receipt.twins))
    yield first
    for dtype in receipt.twins:
        twin = parse_spec({**json.loads(fields), "dtype": dtype})
        yield replace(first, stem=f"{stem}_{dtype}", spec=twin, has_twin=False, twin_of=first)


def _read(top: Path, inside: Path, *, trusts: bool) -> str:
    """Read a text file that no other user could have written.

    Raises:
        TrustError: if another user could have written it.
        OSError: if it is missing, unreadable, or not a regular file.
        ReceiptError: if it is too large.
    """
    here = open_way(top, make=False, trusts_others=trusts)
    try:
        for part in inside.parts[:-1]:
            inner = open_inner(here, part, make=False, trusts_others=trusts)
            here.close()
            here = inner
        return _text(here, inside.name, trusts=trusts)
    finally:
        here.close()


def _text(here: Folder, name: str, *, trusts: bool) -> str:
    """Read a text file of an open folder."""
    descriptor = here.open(name, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ReceiptError(f"{one_line(name)}: is not a regular file")
        if not trusts:
            _check(here.name(name), status, descriptor)
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ReceiptError(f"{one_line(name)}: is too large: at most {MOST_BYTES >> 20} MiB are read")
    return data.decode("utf-8")


def _check(path: str, status: os.stat_result, descriptor: int) -> None:
    """Check an open file as the cache does. A chmod is enough to fix it."""
    try:
        check(path, status, descriptor)
    except TrustError as error:
        mine = status.st_uid == os.geteuid()
        raise TrustError(error.reason, f"chmod go-w {in_shell(path)}" if mine else error.remedy) from None
