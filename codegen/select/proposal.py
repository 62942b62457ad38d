"""Proposals of another tuning for a spec file, as text diffs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from codegen.errors import CodegenError
from codegen.files import resolved, write_if_changed
from codegen.library import IN_SOURCE_TREE, NamedSpec, read_specs, shown_place, spec_text
from codegen.select.problem import tuning_of
from codegen.spec import Spec
from codegen.tools.new import yaml_of
from codegen.yaml_text import read_yaml, with_values


@dataclass(frozen=True)
class Proposal:
    """A proposed text and the current one.

    Attributes:
        place: name of the file in messages; a stem if there is no file.
        old: current text.
        new: proposed text.
    """

    place: str
    old: str
    new: str

    def diff(self) -> str:
        """Unified diff; "" if nothing differs."""
        lines = difflib.unified_diff(
            self.old.splitlines(), self.new.splitlines(), f"a/{self.place}", f"b/{self.place}", lineterm=""
        )
        return "\n".join(lines)


def check_writable(current: NamedSpec) -> None:
    """Reject a spec whose file cannot be changed, before anything is measured.

    Raises:
        CodegenError: for a spec without a file, or from an installed package.
    """
    if current.path is None:
        raise CodegenError("--write: the current spec has no file; name one with --spec FILE")
    if current.is_shipped and not IN_SOURCE_TREE:
        raise CodegenError(
            f"--write: {current.stem} belongs to the installed package; copy its spec to your own file, "
            "and name it with --spec FILE"
        )


def propose(current: NamedSpec, best: Spec) -> Proposal:
    """Proposal: the file of a spec with the tuning of another one, with the same comments and layout.

    Raises:
        CodegenError: if the file has changed since it was read, or cannot be edited.
    """
    if current.path is None:
        return Proposal(current.stem, yaml_of(current.spec), yaml_of(best))
    tuning = _written_tuning(current.spec, best)
    place = shown_place(current.path)
    old = spec_text(current.path)
    if _read(current, old) != current.spec:
        raise CodegenError(f"{place}: has changed since it was read; run again")
    new = with_values(read_yaml(old, place), tuning)
    if _read(current, new) != best:
        raise CodegenError(f"{place}: cannot be edited in place; change by hand: {tuning}")
    return Proposal(place, old, new)


def _read(current: NamedSpec, text: str) -> Spec | None:
    """Spec of a kernel in the text of its file; None if the text has no kernel of that name."""
    assert current.path is not None
    return next((named.spec for named in read_specs(current.path, text) if named.stem == current.stem), None)


def write_proposal(current: NamedSpec, proposal: Proposal) -> bool:
    """Write a proposal to the spec's file; return whether the file changed."""
    check_writable(current)
    assert current.path is not None
    return write_if_changed(resolved(current.path), proposal.new)


def _written_tuning(current: Spec, best: Spec) -> Mapping[str, Any]:
    """Differing tuning fields; an option that is now off has its off value."""
    one, other = tuning_of(best), tuning_of(current)
    dumped = best.model_dump(mode="json", by_alias=True)
    return {name: dumped[name] for name in {**other, **one} if one.get(name) != other.get(name)}
