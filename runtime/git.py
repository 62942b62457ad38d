"""Files of commits, and changes since the last commit, from git."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection
from pathlib import Path

from codegen.errors import MOST_OF_PLACE, CodegenError
from codegen.files import MOST_BYTES, resolved
from codegen.wording import one_line, shown
from runtime.errors import ToolchainError

INSTALL = "apt-get install git"
ELSEWHERE = frozenset(
    f"GIT_{name}"
    for name in (
        *("DIR", "WORK_TREE", "IMPLICIT_WORK_TREE", "COMMON_DIR", "INDEX_FILE", "PREFIX", "INTERNAL_SUPER_PREFIX"),
        *("OBJECT_DIRECTORY", "ALTERNATE_OBJECT_DIRECTORIES", "SHALLOW_FILE", "GRAFT_FILE", "NAMESPACE"),
        *("REPLACE_REF_BASE", "NO_REPLACE_OBJECTS"),
    )
)
"""Environment variables, set for example in git hooks, that select another repository, work tree, index or object store
than the folder's own."""


def commit_of(revision: str, folder: Path) -> str:
    """Resolve a revision to the hash of its commit.

    Raises:
        CodegenError: if the revision is not a commit, or the folder is not in a repository.
        ToolchainError: if git is not installed.
    """
    try:
        return git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except GitError as error:
        if error.told:
            raise
        raise CodegenError(f"{shown(revision)} is not a commit of {one_line(str(folder), MOST_OF_PLACE)}") from None


def file_of(commit: str, path: str, folder: Path) -> str:
    """Read a file of a commit.

    Args:
        commit: hash of the commit.
        path: path of the file from the root of the repository.
        folder: a folder in the repository.

    Raises:
        CodegenError: if the file does not exist or is too large.
    """
    name = f"{commit}:{path}"
    if int(git(folder, "cat-file", "-s", name)) > MOST_BYTES:
        raise CodegenError(f"{one_line(path)} of {commit[:12]} is too large: at most {MOST_BYTES >> 20} MiB is read")
    return git(folder, "cat-file", "blob", name)


def files_of(commit: str, below: str, folder: Path) -> list[str]:
    """List the files of a commit in a folder of the repository, as paths from its root."""
    return git(folder, "ls-tree", "-r", "-z", "--name-only", "--full-tree", commit, f"{below}/").split("\0")[:-1]


def texts_of(commit: str, below: str, suffixes: tuple[str, ...], folder: Path) -> dict[str, str]:
    """Read the files of a commit in a folder of the repository: content by path from its root.

    Args:
        commit: hash of the commit.
        below: the folder to read. A folder that the commit does not have gives no files.
        suffixes: suffixes of the files to read. Links are skipped.
        folder: a folder in the repository.

    Raises:
        CodegenError: if a file is too large or missing from the repository.
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
        told_of = data[at:end].split()  # hash, type, size; or "missing"
        if len(told_of) != 3:
            raise CodegenError(f"{one_line(path)} of {commit[:12]} cannot be read: the repository lacks the object")
        at = end + 1 + int(told_of[2]) + 1
        texts[path] = data[end + 1 : at - 1].decode(errors="replace")
    return texts


def changed_files(folder: Path, written: Collection[Path] = ()) -> list[str]:
    """List the files of a repository that differ from its last commit, including untracked files.

    Args:
        folder: a folder in the repository.
        written: exact paths of files to ignore, because the calling command writes them.
    """
    top = resolved(Path(git(folder, "rev-parse", "--show-toplevel").removesuffix("\n")))
    own = {resolved(path.parent) / path.name for path in written}
    told = git(folder, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all")
    return [line[3:] for line in told.split("\0") if line and top / line[3:] not in own]


class GitError(CodegenError):
    """An error of git.

    Attributes:
        told: its message, on one line.
    """

    def __init__(self, told: str) -> None:
        self.told = one_line(told.strip())
        super().__init__(f"git: {self.told}")


def git(folder: Path, *arguments: str) -> str:
    """Run git on the repository that a folder is in, and return its output.

    Raises:
        GitError: if it fails.
        ToolchainError: if it is not installed.
    """
    return _run(folder, arguments).decode(errors="surrogateescape")


def _run(folder: Path, arguments: tuple[str, ...], given: bytes = b"") -> bytes:
    environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    command = ["git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, input=given, capture_output=True, check=False, env=environment)
    except OSError as error:
        raise ToolchainError(f"git cannot be started ({error.strerror}): {INSTALL}") from None
    if result.returncode != 0:
        raise GitError(result.stderr.decode(errors="replace"))
    return result.stdout
