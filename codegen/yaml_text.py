"""Strict and bounded reading of YAML as plain data with the line of each field, and replacement of values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from codegen.errors import SpecError
from codegen.plain import PlainCopy, joined
from codegen.yaml_nodes import MappingNode, Node, ScalarNode, SequenceNode, compose

_PLAIN_WORD = re.compile(r"[a-z][a-z0-9_]*")
_WORDS_OF_YAML = ("true", "false", "null", "yes", "no", "on", "off")
_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")
_REST_OF_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)?")


@dataclass(frozen=True)
class Document:
    """A parsed YAML text.

    Attributes:
        text: the text.
        root: root node, with offsets in the text.
        fields: the document as plain data.
        lines: line of each field, by dotted name.
    """

    text: str
    root: Node
    fields: Any
    lines: Mapping[str, int]


def read_yaml(text: str, origin: str) -> Document:
    """Read one YAML document.

    Args:
        text: YAML.
        origin: name of the file in messages.

    Raises:
        SpecError: for a text that is not YAML, repeats a key or exceeds the bounds of a spec; with file and line.
    """
    copy = _Copy()
    try:
        root = compose(text, origin)
        return Document(text, root, copy.of(root), copy.lines)
    except SpecError as error:
        raise (error if error.location else error.at(location_of(origin, copy.lines, error.field))) from None
    except yaml.MarkedYAMLError as error:
        line = f"{origin}:{error.problem_mark.line + 1}" if error.problem_mark else origin
        raise SpecError("", _problem(error, text), line) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # invalid characters and escapes
        reason = str(error).strip().partition("\n")[0]
        raise SpecError("", f"is not YAML: {reason or type(error).__name__}", origin) from None


def _problem(error: yaml.MarkedYAMLError, text: str) -> str:
    """The parser's message in one line, with the offending character."""
    problem = str(error.problem or "is not YAML").partition("\n")[0]
    if problem == "found character that cannot start any token" and error.problem_mark:
        character = text.removeprefix("\ufeff")[error.problem_mark.index]
        return f"found character {character!r} that cannot start any token"
    return f"{error.context} {problem}" if problem.startswith("but ") else problem


def location_of(origin: str, lines: Mapping[str, int], field: str) -> str:
    """``file:line`` of a field, or of the nearest enclosing field in the file."""
    while field and field not in lines:
        field = field.rpartition(".")[0]
    return f"{origin}:{lines[field]}" if field else origin


class _Copy(PlainCopy):
    """Copies nodes.

    Attributes:
        lines: line of each field, by dotted name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}

    def of(self, node: Any, name: str = "", level: int = 0) -> Any:
        if isinstance(node, ScalarNode):
            return super().of(node.value, name, level)
        if isinstance(node, SequenceNode):
            return super().of(node.items, name, level)
        if not isinstance(node, MappingNode):
            return super().of(node, name, level)
        fields: dict[Any, Node] = {}
        for entry in node.entries:
            if not isinstance(entry.key, ScalarNode):
                spelt = joined(name, self.of(entry.key, name, level + 1))
                self.lines[spelt] = entry.line
                raise SpecError(spelt, "is a mapping or a list; names of fields are words")
            fields[entry.key.value] = entry.value
            self.lines[joined(name, entry.key.value)] = entry.line
        return super().of(fields, name, level)


def with_values(document: Document, values: Mapping[str, Any]) -> str:
    """Text with replaced values of some fields, and otherwise unchanged.

    Args:
        document: a mapping.
        values: scalars, and mappings of one level, which keep other entries. Missing fields are added after the last
            one.
    """
    assert isinstance(document.root, MappingNode)
    edits = list(_edits(document.text, document.root, values))
    text = document.text
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _edits(text: str, mapping: MappingNode, values: Mapping[str, Any]) -> list[tuple[int, int, str]]:
    """Edits that set fields of a mapping: start, end, and the replacement for the text in between."""
    edits: list[tuple[int, int, str]] = []
    added: dict[str, Any] = {}
    for name, value in values.items():
        entry = mapping.entry(name)
        if entry is None:
            added[name] = value
            continue
        is_alias = text[entry.start : entry.start + 1] == "*"
        if isinstance(value, dict) and isinstance(entry.value, MappingNode) and not is_alias:
            edits += _edits(text, entry.value, value)
            continue
        match = _PROPERTIES.match(text, entry.start)
        start = match.end() if match else entry.start
        edits.append((start, entry.end, f"{'' if start < entry.end else ' '}{flow_text(value)}"))
    if added:
        edits.append(_addition(text, mapping, added))
    return edits


def _addition(text: str, mapping: MappingNode, values: Mapping[str, Any]) -> tuple[int, int, str]:
    """Edit that adds fields after the last one of a mapping."""
    parts = [f"{name}: {flow_text(value)}" for name, value in values.items()]
    if mapping.is_flow:
        end = mapping.entries[-1].end if mapping.entries else mapping.start + 1
        return end, end, (", " if mapping.entries else "") + ", ".join(parts)
    last = mapping.entries[-1]
    place = last.key_start
    indent = text[max(text.rfind("\n", 0, place), text.rfind("\r", 0, place)) + 1 : place]
    end = last.end
    if text[end - 1] not in "\r\n":  # a block scalar ends with its line
        rest = _REST_OF_LINE.match(text, end)
        assert rest is not None
        end = rest.end()
    break_ = "\r\n" if "\r\n" in text else "\n"
    before = "" if text[end - 1] in "\r\n" else break_
    return end, end, before + "".join(f"{indent}{part}{break_}" for part in parts)


def flow_text(value: Any) -> str:
    """A value as YAML has it on one line."""
    if isinstance(value, dict):
        inner = dict(sorted(value.items(), key=lambda item: item[0] != "kind"))
        return "{" + ", ".join(f"{name}: {flow_text(each)}" for name, each in inner.items()) + "}"
    if isinstance(value, str) and _PLAIN_WORD.fullmatch(value) and value not in _WORDS_OF_YAML:
        return value
    return json.dumps(value)
