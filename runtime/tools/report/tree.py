"""The tree of a report: its commit, and the files that differ from it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from codegen import __version__
from codegen.library import IN_SOURCE_TREE, ROOT
from codegen.wording import one_line
from runtime import git


@dataclass(frozen=True)
class Tree:
    """A tree of the project.

    Attributes:
        commit: hash of the commit; "" for an installed package, or a tree outside a repository.
        changed: files that differ from the commit, including new ones.
        version: version of the package.
    """

    commit: str = ""
    changed: tuple[str, ...] = ()
    version: str = __version__


def in_repository(root: Path = ROOT) -> bool:
    """Whether the package is a source tree in a repository."""
    return IN_SOURCE_TREE and any((folder / ".git").exists() for folder in (root, *root.parents))


def tree_of(report: Collection[Path], root: Path = ROOT) -> Tree:
    """The package's tree. Files of an earlier ``report`` do not count as changes.

    Raises:
        CodegenError: if git refuses.
        ToolchainError: without git, in a repository.
    """
    if not in_repository(root):
        return Tree()
    return Tree(git.commit_of("HEAD", root), tuple(map(one_line, git.changed_files(root, report))))
