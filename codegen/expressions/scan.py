"""Tokens of an expression's text, before Python's parser sees it.

Only words, numbers and operators of expressions pass: no strings, comments or further statements, and no names that
Python normalizes to others (as it does outside ASCII). Errors give the location.
"""

from __future__ import annotations

import keyword
import re

from codegen.expressions.nodes import ExpressionError
from codegen.wording import one_line, shown

MOST_TEXT = 4000
"""Most characters of an expression."""
_MOST_PIECE = 60
_NUMBER = (
    r"(?:0[xX][0-9a-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+|(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][+-]?[0-9_]+)?)"
)
_TOKEN = re.compile(
    rf" +|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|{_NUMBER}(?![A-Za-z0-9_.])|(?P<number>\.?[0-9][A-Za-z0-9_.]*)"
    r"|<<|>>|[<>=!]=|//|(?P<refused>\*\*|:=|&&|\|\||[=!\"'#;{}@\\?$`])|[-+*/%<>&|^~()\[\],.:]"
)
_WORDS = frozenset({"and", "or", "not", "if", "else", "True", "False"})
_SPACES = str.maketrans("\t\n\r\f\v", "     ")
_REFUSED = {
    "**": "a power is not allowed",
    ":=": "an assignment is not allowed",
    "=": "an assignment is not allowed; == compares",
    "&&": "&& is not allowed, write and",
    "||": "|| is not allowed, write or",
    "!": "! is not allowed, write not",
    "?": "? is not allowed, write: x if condition else y",
    '"': "a string is not allowed",
    "'": "a string is not allowed",
    "#": "a comment is not allowed",
    ";": "a second statement is not allowed",
    "{": "a brace is not allowed",
    "}": "a brace is not allowed",
    "lambda": "a lambda is not allowed",
    "is": "is is not allowed; == compares",
}


def at(text: str, start: int, end: int, reason: str) -> ExpressionError:
    """Error in a piece of a text.

    Args:
        text: the whole text.
        start: index of the first character of the piece.
        end: index after its last character.
        reason: the error.
    """
    piece = text[start:end].strip()
    which = f'"{one_line(piece, _MOST_PIECE)}"' if piece else "the end" if start >= len(text.rstrip()) else "a space"
    return ExpressionError(f"column {start + 1} ({which}): {reason}")


def spaced(text: str) -> str:
    """Text on one line, of the same length: any white space becomes a space.

    Raises:
        ExpressionError: for a token that expressions cannot have, with its location.
    """
    if not isinstance(text, str):
        raise ExpressionError(f"an expression is text, but this is {shown(text)}")
    if len(text) > MOST_TEXT:
        raise ExpressionError(f"has {len(text)} characters, at most {MOST_TEXT} are allowed")
    line = text.translate(_SPACES)
    if not line.strip(" "):
        raise ExpressionError("an expression is empty")
    start = 0
    while start < len(line):
        start = _end_of_token(line, start)
    return line


def _end_of_token(line: str, start: int) -> int:
    """End of the token that begins here."""
    token = _TOKEN.match(line, start)
    if token is None:
        raise at(line, start, start + 1, "expressions cannot have this character")
    word = token.group()
    if token["refused"] or (keyword.iskeyword(word) and word not in _WORDS):
        raise at(line, start, token.end(), _REFUSED.get(word, f"{one_line(word)} is not valid in an expression"))
    if token["number"]:
        raise at(line, start, token.end(), "neither an integer nor a floating-point number")
    return token.end()
