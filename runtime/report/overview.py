"""What the head of a generated source says of its pipeline: the paragraphs on roles, barriers and the pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TITLES = ("Who does what", "Which barrier guards what", "Pipeline")
_NAMES = r"\w+(?:\[[\w +]*\])*"
_LISTED = re.compile(rf"^  (?P<names>{_NAMES}(?:, {_NAMES})*)  +(?P<text>\S.*)$")
_MBARRIER = re.compile("full|empty|semaphore|rows|packet")


@dataclass(frozen=True)
class Barrier:
    """Barriers that guard the same.

    Attributes:
        names: as the source writes them: ``k_full[i]`` and ``k_empty[i]``.
        text: what they guard.
    """

    names: tuple[str, ...]
    text: str


def paragraphs(source: str) -> list[str]:
    """Return those of the head that are about the pipeline, as they stand there, without the marks of comments."""
    head = source.partition("\n\n")[2].partition("\n\n")[0]
    lines = [line.removeprefix("//").removeprefix(" ") for line in head.splitlines() if line.startswith("//")]
    found = re.split(r"\n(?=\n)\n", "\n".join(lines))
    return [part.strip("\n") for part in found if part.strip("\n").startswith(_TITLES)]


def barriers(source: str) -> list[Barrier]:
    """Return the mbarriers that the head lists, in its order."""
    return [barrier for part in paragraphs(source) if part.startswith(_TITLES[1]) for barrier in _listed(part)]


def _listed(paragraph: str) -> Iterator[Barrier]:
    names: tuple[str, ...] = ()
    text = ""
    for line in paragraph.splitlines():
        told = _LISTED.match(line)
        if told and _MBARRIER.search(told["names"]):
            if names:
                yield Barrier(names, text)
            names, text = tuple(told["names"].split(", ")), told["text"]
        elif names and line.startswith("   "):
            text += f" {line.strip()}"
        elif names:
            yield Barrier(names, text)
            names = ()
    if names:
        yield Barrier(names, text)
