"""Folders that a command writes: whole, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from codegen.errors import FileError
from codegen.files import MOST_BYTES, errors_of, is_file, read_bytes

Owned = Callable[[Path], Collection[str]]
"""The names of the files in a folder that are as the command wrote them, by their hashes."""


def check_folder(folder: Path, mark: str, owned: Owned, what: str = "export") -> None:
    """Refuse to write a folder in a place that has something else.

    Args:
        folder: the place.
        mark: the file that says what wrote a folder.
        owned: the files that may be replaced.
        what: the command, as messages call it.

    Raises:
        FileError: for a place that is no folder, or a folder that holds anything else, or a file that was changed.
    """
    with errors_of(folder):
        if not (os.path.lexists(folder)):
            return
        if folder.is_symlink() or not folder.is_dir():
            raise FileError(folder, "is there, and no folder: name another one")
        held = sorted(each.name for each in folder.iterdir())
        names = owned(folder) if held else ()
    foreign = [name for name in held if name not in names or not is_file(folder / name)]
    if held and (foreign or mark not in held):
        holds = (foreign or held)[0]
        reason = f"holds {holds}, which no {what} wrote as it is: nothing was replaced; name another folder"
        raise FileError(folder, reason)


def write_folder(folder: Path, files: Mapping[str, bytes], mark: str, owned: Owned, what: str = "export") -> bool:
    """Make a folder hold these files and nothing else; return whether it had to be written.

    The files are written beside it, and take its place when all are there. Where an older one is replaced there is a
    moment without any: never one with a part of the files.

    Args:
        folder: what to write.
        files: what it holds.
        mark: as ``check_folder`` has it, and
        owned, what: likewise.

    Raises:
        FileError: as ``check_folder`` does, or when it cannot be written; it is then as it was.
    """
    check_folder(folder, mark, owned, what)
    if _holds(folder, files):
        return False
    with errors_of(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
        fresh, old = beside.with_suffix(".tmp"), beside.with_suffix(".old")
        try:
            fresh.mkdir()
            for name, data in files.items():
                with (fresh / name).open("xb") as file:
                    file.write(data)
            _swap(fresh, folder, old, lambda: check_folder(old, mark, owned, what))
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)  # not after an error: what could not be put back stays there
    return True


def has_hash(path: Path, sha256: str, most: int = MOST_BYTES) -> bool:
    """Whether a path is a file, not a link, of this SHA-256.

    Raises:
        FileError: for one that cannot be read, or of more than ``most`` bytes.
    """
    return is_file(path) and not path.is_symlink() and hashlib.sha256(read_bytes(path, most)).hexdigest() == sha256


def _swap(fresh: Path, folder: Path, old: Path, check: Callable[[], None]) -> None:
    """Put ``fresh`` in the place of ``folder``, which goes to ``old``, and comes back if that fails.

    ``check`` refuses ``old``, which will be removed: somebody may have put something into it meanwhile.
    """
    if not folder.exists():
        fresh.rename(folder)
        return
    folder.rename(old)
    try:
        check()
        fresh.rename(folder)
    except (OSError, FileError) as error:
        with contextlib.suppress(OSError):
            old.rename(folder)
        if isinstance(error, FileError):
            raise FileError(folder, error.reason) from None
        raise


def _holds(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Whether a folder has all of these files, and no others."""
    if folder.is_dir() and len(list(folder.iterdir())) != len(files):
        return False
    return all(_is_file_of(folder / name, data) for name, data in files.items())


def _is_file_of(path: Path, data: bytes) -> bool:
    return is_file(path) and path.stat().st_size == len(data) and read_bytes(path, len(data)) == data
