"""Sources as HTML: five kinds of tokens colored, and an anchor at each function."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from markupsafe import Markup, escape
from pygments.lexer import Lexer
from pygments.lexers import CudaLexer, YamlLexer
from pygments.token import Token, _TokenType

from codegen.tools.outline import Function, functions

_CLASSES: tuple[tuple[_TokenType, str], ...] = (
    (Token.Comment.Preproc, "kw"),
    (Token.Comment.PreprocFile, "st"),
    (Token.Comment, "co"),
    (Token.Keyword, "kw"),
    (Token.Literal.Number, "nu"),
    (Token.Literal.String, "st"),
    (Token.Name.Tag, "kw"),
)


def yaml_html(text: str) -> Markup:
    """YAML, highlighted."""
    return Markup("").join(_colored(text, _lexer("yaml")))


def cuda_html(source: str) -> Markup:
    """A generated source, highlighted, with an anchor before each function."""
    anchors = {each.first: anchor_of(each) for each in functions(source)}
    parts, line, start, lines = [], 1, 0, source.splitlines(keepends=True)
    for number in [*sorted(anchors), len(lines) + 1]:
        if number > line:
            parts.append(_paragraphs("".join(lines[start : number - 1])))
            line, start = number, number - 1
        if number in anchors:
            parts.append(Markup('<a id="{}"></a>').format(anchors[number]))
    return Markup("").join(parts)


def anchor_of(function: Function) -> str:
    """The anchor of a function: its first line, because two functions may share a name."""
    return f"line-{function.first}"


def _paragraphs(text: str) -> Markup:
    """Part of a source, highlighted. Kernels share many paragraphs, and each is highlighted once."""
    return Markup("").join(_paragraph(part) for part in re.split(r"(?<=\n\n)", text))


@cache
def _paragraph(text: str) -> Markup:
    return Markup("").join(_colored(text, _lexer("cuda")))


@cache
def _lexer(language: str) -> Lexer:
    options = {"stripnl": False, "ensurenl": False}
    return CudaLexer(**options) if language == "cuda" else YamlLexer(**options)


def _colored(text: str, lexer: Lexer) -> Iterator[Markup]:
    """Spans of tokens; neighbors of the same kind are merged."""
    kind, run = "", ""
    for token, value in lexer.get_tokens(text):
        found = next((name for among, name in _CLASSES if token in among), "")
        if found != kind and value.strip():
            yield _span(kind, run)
            kind, run = found, ""
        run += value
    yield _span(kind, run)


def _span(kind: str, text: str) -> Markup:
    return Markup('<span class="{}">{}</span>').format(kind, text) if kind else escape(text)
