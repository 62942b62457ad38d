"""Display of text from outside: one line of bounded length in messages, printable ASCII in sources."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable

MOST_SHOWN = 200
"""Characters of a value, a name or a field in a message."""
FEW = 8
"""Names that a message lists in full."""
_GAP = " ... "
_NEAREST = 3


def one_line(text: str, most: int = MOST_SHOWN) -> str:
    """Text for a message: unprintable characters are escaped, and the middle of a long text is cut out."""
    cut = _cut(text, most)
    if cut.isprintable():
        return cut
    return _cut("".join(each if each.isprintable() else ascii(each)[1:-1] for each in cut), most)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    tail = (most - len(_GAP)) // 3
    return text[: most - len(_GAP) - tail] + _GAP + text[-tail:]


def shown(value: object) -> str:
    """The ``repr`` of a value, as ``one_line`` shows it."""
    try:
        return one_line(repr(value))
    except Exception:  # of a foreign type, or an integer of more digits than Python prints
        return one_line(f"a value of type {type(value).__name__} that cannot be printed")


def plural(count: int, noun: str) -> str:
    """A number of things: 1 entry, 2 entries."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith("y") else f"{count} {noun}s"


def alternatives(name: str, known: Iterable[str], listed: str = "") -> str:
    """The end of a message on an unknown name: the nearest names, or all if they are few.

    Args:
        name: the unknown name.
        known: the known names.
        listed: the command that lists all of them, in a message.
    """
    names, given = list(known), one_line(name)
    if near := difflib.get_close_matches(given, names, n=_NEAREST, cutoff=0.6):
        return f"did you mean {' or '.join(near)}?"
    if len(names) <= FEW:
        return f"there are {', '.join(names)}"
    nearest = difflib.get_close_matches(given, names, n=_NEAREST, cutoff=0.0)
    return f"there are {len(names)}, among them {', '.join(nearest)}{f'; {listed}' if listed else ''}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The most similar of some names; "" if none is similar."""
    found = difflib.get_close_matches(one_line(name), list(known), n=1, cutoff=0.6)
    return found[0] if found else ""


def in_shell(text: str) -> str:
    """A word of a command line, quoted for a shell, with unprintable characters escaped byte by byte."""
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(each if _stands(each) else _in_bytes(each) for each in text) + "'"


def _stands(character: str) -> bool:
    return character.isprintable() and character not in "\\'"


def _in_bytes(character: str) -> str:
    return "".join(rf"\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))


def in_comment(text: str) -> str:
    """Text for a comment or a string of a source: printable ASCII that cannot continue on the next line.

    A backslash at the end of a line, or its trigraph, would join the next line to it.
    """
    return "".join(_escaped(each) for each in text).replace("??", r"?\x3f")


def _escaped(character: str) -> str:
    if " " <= character <= "~":
        return r"\x5c" if character == "\\" else character
    return ascii(character)[1:-1]
