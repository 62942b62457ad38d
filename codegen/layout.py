"""Layout of template insertions in a source: they keep the indentation of their line, and empty ones have no line."""

from __future__ import annotations

import re

_BEGIN, _END, _NOTHING = "\x01", "\x02", "\x03"
_INNERMOST = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}")
_EMPTY_LINE = re.compile(rf"(?m)^[ {_NOTHING}]*{_NOTHING}[ {_NOTHING}]*\n")


def mark(value: object) -> object:
    """Mark the text of an insertion for ``lay_out``; the ``finalize`` function of the template environment."""
    return f"{_BEGIN}{value}{_END}" if isinstance(value, str) and (not value or "\n" in value) else value


def lay_out(text: str) -> str:
    """Rendered text without marks.

    Each line of an insertion gets the indentation of the line that the insertion is on. A line with nothing but empty
    insertions is dropped. Directives (``#``) stay at the beginning of their line.
    """
    found = 1
    while found:
        text, found = _INNERMOST.subn(_indented, text)
    text = _EMPTY_LINE.sub("", text).replace(_NOTHING, "")
    return re.sub(r"(?m)^[ ]+#", "#", text)


def _indented(match: re.Match[str]) -> str:
    inserted = match.group(1)
    if not inserted:
        return _NOTHING
    before = re.split(f"[\n{_BEGIN}]", match.string[max(0, match.start() - 200) : match.start()])[-1]
    indentation = re.match(" *", before)
    assert indentation is not None
    return re.sub(r"\n(?=[^\n#])", "\n" + indentation.group(), inserted)
