"""Folders that a command writes completely or not at all."""

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
"""Function from a folder to the names of its files that are unchanged since the command wrote them."""


def check_folder(folder: Path, mark: str, owned: Owned, what: str = "export") -> None:
    """Reject a path at which a folder must not be written.

    Args:
        folder: the path.
        mark: name of the file that identifies the command that wrote a folder.
        owned: the files that may be replaced.
        what: name of the command in messages.

    Raises:
        FileError: if the path is not a folder, or the folder has other files or changed files.
    """
    with errors_of(folder):
        if not (os.path.lexists(folder)):
            return
        if folder.is_symlink() or not folder.is_dir():
            raise FileError(folder, "exists and is not a folder: name another one")
        held = sorted(each.name for each in folder.iterdir())
        names = owned(folder) if held else ()
    foreign = [name for name in held if name not in names or not is_file(folder / name)]
    if held and (foreign or mark not in held):
        holds = (foreign or held)[0]
        reason = f"holds {holds}, which no {what} wrote in this form: nothing was replaced; name another folder"
        raise FileError(folder, reason)


def write_folder(folder: Path, files: Mapping[str, bytes], mark: str, owned: Owned, what: str = "export") -> bool:
    """Write a folder with exactly these files; return whether anything was written.

    The files are written to a temporary folder, which then replaces the old one. The folder is briefly absent during
    the replacement, but never incomplete.

    Args:
        folder: the folder to write.
        files: contents by file name.
        mark: see ``check_folder``.
        owned: see ``check_folder``.
        what: see ``check_folder``.

    Raises:
        FileError: like ``check_folder``, or if the folder cannot be written; the old folder is then unchanged.
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
        shutil.rmtree(old, ignore_errors=True)  # not after an error: files that could not be restored stay there
    return True


def has_hash(path: Path, sha256: str, most: int = MOST_BYTES) -> bool:
    """Whether a path is a regular file, not a link, with this SHA-256.

    Raises:
        FileError: for a file that cannot be read, or has more than ``most`` bytes.
    """
    return is_file(path) and not path.is_symlink() and hashlib.sha256(read_bytes(path, most)).hexdigest() == sha256


def _swap(fresh: Path, folder: Path, old: Path, check: Callable[[], None]) -> None:
    """Move ``folder`` to ``old`` and ``fresh`` to ``folder``; on failure, move ``old`` back.

    ``check`` verifies ``old`` before it is removed, as another process may have added files.
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
    """Whether a folder has exactly these files."""
    if folder.is_dir() and len(list(folder.iterdir())) != len(files):
        return False
    return all(_is_file_of(folder / name, data) for name, data in files.items())


def _is_file_of(path: Path, data: bytes) -> bool:
    return is_file(path) and path.stat().st_size == len(data) and read_bytes(path, len(data)) == data
