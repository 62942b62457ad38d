"""What git has of a commit: files as they were, and whether the tree is that of a commit."""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from pathlib import Path

from codegen.errors import MOST_OF_PLACE, CodegenError
from codegen.files import MOST_BYTES, resolved
from codegen.wording import one_line, shown
from runtime.errors import ToolchainError

INSTALL = "apt-get install git"


def commit_of(revision: str, folder: Path) -> str:
    """Return the hash of a commit, by any name that git knows.

    Raises:
        CodegenError: if it is none, or the folder is in no repository.
        ToolchainError: without git.
    """
    try:
        return git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except GitError as error:
        if error.told:
            raise
        raise CodegenError(f"{shown(revision)} is no commit of {one_line(str(folder), MOST_OF_PLACE)}") from None


def file_of(commit: str, path: str, folder: Path) -> str:
    """Return what a file of a commit holds.

    Args:
        commit: its hash.
        path: the file, from the root of the repository.
        folder: a folder in it.

    Raises:
        CodegenError: if there is none, or it is too large.
    """
    name = f"{commit}:{path}"
    if int(git(folder, "cat-file", "-s", name)) > MOST_BYTES:
        raise CodegenError(f"{one_line(path)} of {commit[:12]} is too large: at most {MOST_BYTES >> 20} MiB is read")
    return git(folder, "cat-file", "blob", name)


def files_of(commit: str, below: str, folder: Path) -> list[str]:
    """Return the files of a commit in a folder of the repository, from its root."""
    return git(folder, "ls-tree", "-r", "-z", "--name-only", "--full-tree", commit, f"{below}/").split("\0")[:-1]


def texts_of(commit: str, below: str, suffixes: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Return what the files of a commit in a folder of the repository hold, by their places from its root.

    Args:
        commit: its hash.
        below: the folder; what a commit does not have holds nothing.
        suffixes: endings of the files that are read; no links are.
        folder: a folder in the repository.

    Raises:
        CodegenError: if one of them is too large.
    """
    told = git(folder, "ls-tree", "-r", "-l", "-z", "--full-tree", commit, f"{below}/")
    blobs: dict[str, str] = {}
    for line in told.split("\0")[:-1]:
        about, _, path = line.partition("\t")
        mode, _, blob, size = about.split()
        if not (mode.startswith("100") and path.endswith(suffixes)):
            continue
        if int(size) > MOST_BYTES:
            raise CodegenError(
                f"{one_line(path)} of {commit[:12]} is too large: at most {MOST_BYTES >> 20} MiB is read"
            )
        blobs[path] = blob
    data = _run(folder, ("cat-file", "--batch"), "".join(f"{blob}\n" for blob in blobs.values()).encode())
    texts, at = {}, 0
    for path in blobs:
        end = data.index(b"\n", at)
        told_of = data[at:end].split()  # hash, type, size; or that it is missing
        if len(told_of) != 3:
            raise CodegenError(f"{one_line(path)} of {commit[:12]} cannot be read: the repository does not have it")
        at = end + 1 + int(told_of[2]) + 1
        texts[path] = data[end + 1 : at - 1].decode(errors="replace")
    return texts


def changed_files(folder: Path, written: Collection[Path] = ()) -> list[str]:
    """Return the files of a repository that are not as its last commit has them, new ones too.

    Args:
        folder: a folder of the repository.
        written: files that are left out, each by its own path: what a command writes is no change. Nothing else in
            their folders is left out.
    """
    top = resolved(Path(git(folder, "rev-parse", "--show-toplevel").removesuffix("\n")))
    own = {resolved(path.parent) / path.name for path in written}
    told = git(folder, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all")
    return [line[3:] for line in told.split("\0") if line and top / line[3:] not in own]


class GitError(CodegenError):
    """Git refuses.

    Attributes:
        told: what it says, in one line.
    """

    def __init__(self, told: str) -> None:
        self.told = one_line(told.strip())
        super().__init__(f"git: {self.told}")


def git(folder: Path, *arguments: str) -> str:
    """Return what git prints.

    Raises:
        GitError: if it fails.
        ToolchainError: if it is not there.
    """
    return _run(folder, arguments).decode(errors="surrogateescape")


def _run(folder: Path, arguments: tuple[str, ...], given: bytes = b"") -> bytes:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], input=given, capture_output=True, check=False)
    except OSError as error:
        raise ToolchainError(f"git cannot be started ({error.strerror}): {INSTALL}") from None
    if result.returncode != 0:
        raise GitError(result.stderr.decode(errors="replace"))
    return result.stdout
