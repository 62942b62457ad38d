"""Strict and bounded composition of a YAML text into nodes with offsets.

PyYAML scans and parses. Scalars are resolved here by YAML 1.2, as PyYAML follows YAML 1.1, where ``on`` is a boolean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from codegen.errors import SpecError
from codegen.plain import MOST_CHARACTERS, MOST_LEVELS, MOST_VALUES

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml, or PyYAML's slower Python parser if PyYAML was built without it."""
_WORDS: Final = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL_OR_HEXADECIMAL = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


@dataclass(frozen=True, eq=False)
class ScalarNode:
    """A scalar.

    Attributes:
        value: plain data.
    """

    value: bool | int | float | str | None


@dataclass(frozen=True, eq=False)
class SequenceNode:
    """A sequence of nodes."""

    items: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """A key of a mapping and its value.

    Attributes:
        key: node of the key.
        value: node of the value, also if an alias gives it.
        line: line of the key, counted from 1.
        key_start: offset of the key in the text.
        start: offset of the value.
        end: offset of the end of the value.
    """

    key: Node
    value: Node
    line: int
    key_start: int
    start: int
    end: int


@dataclass(eq=False)
class MappingNode:
    """A mapping.

    Attributes:
        is_flow: whether it is in braces.
        start: offset of its opening brace, if it has one.
        entries: keys with their values, in order.
    """

    is_flow: bool
    start: int
    entries: list[Entry] = field(default_factory=list)

    def entry(self, name: str) -> Entry | None:
        """Entry of a key, or None."""
        return next(
            (each for each in self.entries if isinstance(each.key, ScalarNode) and each.key.value == name), None
        )


Node = ScalarNode | SequenceNode | MappingNode


def compose(text: str, origin: str) -> Node:
    """Nodes of a text with one document; an empty text is the scalar null.

    Args:
        text: YAML 1.2, without tags and merge keys.
        origin: name of the file in messages.

    Raises:
        SpecError: for a text beyond the bounds of a spec, a repeated key, a tag or a merge key.
        yaml.YAMLError: for a text that is not YAML.
    """
    mark = text.startswith("\ufeff")
    return _Composer(text[mark:], origin, offset=int(mark)).document()


class _Composer:
    """Composes nodes from the events of PyYAML's parser, and stops at the first one beyond the bounds.

    Args:
        text: YAML without a byte order mark.
        origin: name of the file in messages.
        offset: number of characters before the text.
    """

    def __init__(self, text: str, origin: str, *, offset: int) -> None:
        self._events: Iterator[Any] = yaml.parse(text, Loader=LOADER)
        self._origin, self._offset = origin, offset
        self._anchors: dict[str, Node] = {}
        self._values = self._end = self._level = 0

    def document(self) -> Node:
        """Root node of the only document of the text."""
        next(self._events)  # start of the stream
        start = next(self._events)
        if isinstance(start, yaml.StreamEndEvent):
            return ScalarNode(None)
        if start.version is not None and tuple(start.version) != (1, 2):
            version = ".".join(map(str, start.version))
            raise self._refusal(start, f"declares YAML {version}; expected YAML 1.2")
        root = self._node(next(self._events))
        next(self._events)  # end of the document
        if not isinstance(more := next(self._events), yaml.StreamEndEvent):
            raise self._refusal(more, "expected a single document in the stream but found another document")
        return root

    def _refusal(self, event: Any, reason: str) -> SpecError:
        return SpecError("", reason, f"{self._origin}:{event.start_mark.line + 1}")

    def _node(self, event: Any) -> Node:
        """Node that begins with an event."""
        self._values += 1
        if self._values > MOST_VALUES:
            raise self._refusal(event, f"has more than {MOST_VALUES} values")
        if self._level > MOST_LEVELS:
            raise self._refusal(event, f"is nested too deeply: at most {MOST_LEVELS} levels")
        self._end = event.end_mark.index + self._offset
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise self._refusal(event, f"found undefined alias {event.anchor!r}")
            return self._anchors[event.anchor]
        if event.tag not in (None, "!"):
            raise self._refusal(event, f"has the tag {event.tag!r}; tags are not allowed")
        if isinstance(event, yaml.ScalarEvent):
            return self._anchored(event, self._scalar(event))
        self._level += 1
        node = self._mapping(event) if isinstance(event, yaml.MappingStartEvent) else self._sequence(event)
        self._level -= 1
        return node

    def _anchored(self, event: Any, node: Node) -> Node:
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _scalar(self, event: Any) -> ScalarNode:
        if len(event.value) > MOST_CHARACTERS:
            reason = f"has a value of {len(event.value)} characters; at most {MOST_CHARACTERS} are allowed"
            raise self._refusal(event, reason)
        return ScalarNode(event.value if event.style or event.tag else _resolved(event.value))

    def _sequence(self, start: Any) -> SequenceNode:
        sequence = SequenceNode()
        self._anchored(start, sequence)
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            sequence.items.append(self._node(event))
        self._end_of_collection(start, event)
        return sequence

    def _mapping(self, start: Any) -> MappingNode:
        mapping = MappingNode(bool(start.flow_style), start.end_mark.index - 1 + self._offset)
        self._anchored(start, mapping)
        keys: set[object] = set()
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._node(event)
            if isinstance(key, ScalarNode):
                identity = (type(key.value), key.value)
                if identity in keys:
                    raise self._refusal(event, f'found duplicate key "{key.value}"')
                if key.value == "<<":
                    raise self._refusal(event, "has the merge key <<, which is not supported; write the fields out")
                keys.add(identity)
            value_event = next(self._events)
            value = self._node(value_event)
            places = [each.start_mark.index + self._offset for each in (event, value_event)]
            mapping.entries.append(Entry(key, value, event.start_mark.line + 1, places[0], places[1], self._end))
        self._end_of_collection(start, event)
        return mapping

    def _end_of_collection(self, start: Any, end: Any) -> None:
        if start.flow_style:  # without brackets, the end is the start of the next token
            self._end = end.end_mark.index + self._offset


def _resolved(text: str) -> bool | int | float | str | None:
    """Plain data of an unquoted scalar, by the core schema of YAML 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        if _INTEGER.fullmatch(text):
            return int(text)
    except ValueError:  # more digits than Python parses
        return text
    if _OCTAL_OR_HEXADECIMAL.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text.replace(".", "") if text[-1] in "fFnN" else text)
    return text
