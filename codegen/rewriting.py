"""Spec files with current names: the minimal text edits of ``codegen migrate``."""

from __future__ import annotations

import re
from typing import Any

from codegen import migrations
from codegen.errors import SpecError
from codegen.migrations import LEFT_OUT, Change, applied, spelt
from codegen.yaml_nodes import Entry, MappingNode, Node
from codegen.yaml_text import location_of, read_yaml

_SCALAR = re.compile(r"""(?P<quote>["'])(?:(?!(?P=quote)).)*(?P=quote)|[^\s,#\[\]{}"']+""")


def rewritten(text: str, origin: str) -> tuple[str, list[Change]]:
    """Text of a spec file with the current names, and the changes.

    Comments and layout are kept: only names and values are replaced, or fields removed.

    Args:
        text: YAML.
        origin: name of the file in messages.

    Raises:
        SpecError: for a text that is not YAML, or in which a name cannot be replaced; with file and line.
    """
    changes, document = [], read_yaml(text, origin)
    for renamed in migrations.TABLE:
        try:
            change = renamed.change(document.fields)
            if change is not None:
                text = _edited(text, document.root, change)
                if not _reads_as(text, applied(change, document.fields)):
                    raise _by_hand(change)
                changes.append(change)
                document = read_yaml(text, origin)  # offsets have changed
        except SpecError as error:
            raise error.at(location_of(origin, document.lines, error.field)) from None
    return text, changes


def _reads_as(text: str, fields: Any) -> bool:
    try:
        return bool(read_yaml(text, "").fields == fields)
    except SpecError:
        return False


def _by_hand(change: Change) -> SpecError:
    return SpecError(change.field, f"{change.reason}; it cannot be rewritten in place: change it by hand")


def _edited(text: str, node: Node, change: Change) -> str:
    """Text with one change, at the offsets of its nodes."""
    *outer, field = change.field.split(".")
    for part in outer:
        node = _entry(node, part, change).value
    entry = _entry(node, field, change)
    key, value = entry.key_start, entry.start
    key_end = _end_of(re.compile(rf"""(["']?){re.escape(field)}\1(?=\s*:)"""), text, key, change)
    if change.new is change.old:
        return text[:key] + text[key:key_end].replace(field, change.name) + text[key_end:]
    value_end = _end_of(_SCALAR, text, value, change)
    if change.new is LEFT_OUT:
        return _without(text, key, value_end, flow=isinstance(node, MappingNode) and node.is_flow)
    quote = text[value] if text[value] in "\"'" else ""
    name = text[key:key_end].replace(field, change.name)
    return f"{text[:key]}{name}{text[key_end:value]}{quote}{spelt(change.new)}{quote}{text[value_end:]}"


def _entry(node: Node, name: str, change: Change) -> Entry:
    entry = node.entry(name) if isinstance(node, MappingNode) else None
    if entry is None:  # a mapping given by an alias
        raise _by_hand(change)
    return entry


def _end_of(pattern: re.Pattern[str], text: str, start: int, change: Change) -> int:
    match = pattern.match(text, start)
    if match is None:
        raise _by_hand(change)
    return match.end()


def _without(text: str, start: int, end: int, *, flow: bool) -> str:
    """Text without a field, and without its comma in braces or its line elsewhere."""
    before, after = text[:start], text[end:]
    if flow:
        if (comma := re.match(r"\s*,[ \t]*", after)) is not None:
            return before + after[comma.end() :]
        return re.sub(r",\s*$", "", before) + after
    rest = re.match(r"[^\r\n]*(\r\n|\r|\n)?", after)
    assert rest is not None
    return re.sub(r"[ \t]*$", "", before) + after[rest.end() :]
