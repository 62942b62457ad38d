"""Composition of a YAML text into nodes that know their places, strictly and within bounds.

PyYAML scans and parses; the scalars of YAML 1.2 are resolved here, since PyYAML resolves those of 1.1, where ``on`` is
a boolean.
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
"""libyaml; where PyYAML was built without it, PyYAML's parser in Python.

The latter is slower, and refuses one text more: a word in brackets or braces that has a question mark in it.
"""

_STANDARD: Final = "tag:yaml.org,2002:"
_MERGE: Final = "<<"
_UNPRINTABLE = re.compile(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_OTHER_BREAKS = re.compile(r"[\x85\u2028\u2029]")
_WORDS: Final = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
}
_INTEGER = re.compile(r"[-+]?(?:0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)
_DATE = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt]|[ \t]+)[0-9]{1,2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]*)?"
    r"(?:[ \t]*(?:Z|[-+][0-9]{1,2}(?::[0-9]{2})?))?"
)
_BREAK = re.compile(r"\r\n|\r|\n")
_COMMENT_OR_TAB = re.compile(r"(?:^|(?<=[ \t]))#[^\r\n]*|(?P<tab>\t)", re.MULTILINE)


@dataclass(frozen=True)
class Unread:
    """A scalar that is not plain data: a date, or a text that its tag does not allow.

    Attributes:
        text: the scalar.
        kind: why it was not read.
    """

    text: str
    kind: str

    def __repr__(self) -> str:
        """Return the text and the reason, for the message that refuses it."""
        return f"{self.text}, {self.kind}"


@dataclass(frozen=True, eq=False)
class ScalarNode:
    """A scalar.

    Attributes:
        value: plain data, or ``Unread``.
        merges: whether it is the key that merges other mappings into its own.
    """

    value: bool | int | float | str | Unread | None
    merges: bool = False


@dataclass(frozen=True, eq=False)
class SequenceNode:
    """A sequence of nodes."""

    items: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """A key of a mapping and its value.

    Attributes:
        key: node of the key.
        value: node of the value, where an alias stands for it too.
        line: line of the key, from 1.
        key_start: offset of the key in the text.
        start: offset of the value.
        end: offset behind the value.
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
        is_flow: whether it stands in braces.
        start: offset of its opening brace, if it has one.
        entries: keys that stand in it, in their order.
        merged: keys that ``<<`` brings in, without those that stand in it.
    """

    is_flow: bool
    start: int
    entries: list[Entry] = field(default_factory=list)
    merged: list[Entry] = field(default_factory=list)

    def entry(self, name: str) -> Entry | None:
        """The entry of a key that stands in the mapping; None for one that is merged into it, or absent."""
        return next(
            (each for each in self.entries if isinstance(each.key, ScalarNode) and each.key.value == name), None
        )


Node = ScalarNode | SequenceNode | MappingNode


def compose(text: str, origin: str) -> Node:
    """Compose the nodes of a text with one document; an empty text is the scalar null.

    Args:
        text: YAML 1.2.
        origin: the file as messages name it.

    Raises:
        SpecError: for a text beyond the bounds of a spec, a repeated key, or a merge that is not one of mappings.
        yaml.YAMLError: for a text that is not YAML.
    """
    if (match := _UNPRINTABLE.search(text)) is not None:
        reason = f"is not YAML: unacceptable character #x{ord(match[0]):04x}: special characters are not allowed"
        raise SpecError("", reason, origin)
    if (match := _OTHER_BREAKS.search(text)) is not None:
        line = len(_BREAK.findall(text, 0, match.start())) + 1
        raise SpecError("", f"has the line break U+{ord(match[0]):04X}; lines end in LF or CR LF", f"{origin}:{line}")
    mark = text.startswith("\ufeff")
    composer = _Composer(text[mark:], origin, offset=int(mark))
    root = composer.document()
    composer.check_tabs()
    return root


class _Composer:
    """Makes nodes of the events of PyYAML's parser, and stops at the first one beyond the bounds.

    Args:
        text: YAML without a byte order mark.
        origin: the file as messages name it.
        offset: characters that stand before the text.
    """

    def __init__(self, text: str, origin: str, *, offset: int) -> None:
        self._events: Iterator[Any] = yaml.parse(text, Loader=LOADER)
        self._text, self._origin, self._offset = text, origin, offset
        self._anchors: dict[str, Node] = {}
        self._open: list[Node] = []
        self._quoted: list[tuple[int, int]] = []
        self._values = self._end = 0

    def document(self) -> Node:
        """Compose the only document of the text."""
        next(self._events)  # start of the stream
        start = next(self._events)
        if isinstance(start, yaml.StreamEndEvent):
            return ScalarNode(None)
        if start.version is not None and tuple(start.version) != (1, 2):
            version = ".".join(map(str, start.version))
            raise self._refusal(start, f"is YAML {version} by its directive; YAML 1.2 is expected")
        root = self._node(next(self._events))
        next(self._events)  # end of the document
        if not isinstance(more := next(self._events), yaml.StreamEndEvent):
            raise self._refusal(more, "expected a single document in the stream but found another document")
        return root

    def check_tabs(self) -> None:
        """Refuse tabs between the tokens of the text: libyaml takes some of them for blanks.

        Raises:
            SpecError: for a tab that is neither in quotes, nor in a block scalar, nor in a comment.
        """
        if "\t" not in self._text:
            return
        unquoted = list(self._text)
        for start, end in self._quoted:
            unquoted[start:end] = "x" * (end - start)
        for match in _COMMENT_OR_TAB.finditer("".join(unquoted)):
            if match["tab"]:
                line = len(_BREAK.findall(self._text, 0, match.start())) + 1
                raise SpecError("", r"found character '\t' that cannot start any token", f"{self._origin}:{line}")

    def _refusal(self, event: Any, reason: str) -> SpecError:
        return SpecError("", reason, f"{self._origin}:{event.start_mark.line + 1}")

    def _node(self, event: Any) -> Node:
        """Compose the node that begins with an event."""
        self._values += 1
        if self._values > MOST_VALUES:
            raise self._refusal(event, f"has more than {MOST_VALUES} values")
        if len(self._open) > MOST_LEVELS:
            raise self._refusal(event, f"is nested too deeply: at most {MOST_LEVELS} levels")
        self._end = event.end_mark.index + self._offset
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise self._refusal(event, f"found undefined alias {event.anchor!r}")
            return self._anchors[event.anchor]
        if isinstance(event, yaml.ScalarEvent):
            return self._anchored(event, self._scalar(event))
        kind = (event.tag or "").removeprefix(_STANDARD)
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        if kind != event.tag and kind not in ("", *(("map", "set") if is_mapping else ("seq",))):
            raise self._refusal(event, f"has the tag !!{kind} on a {'mapping' if is_mapping else 'list'}")
        if not is_mapping:
            return self._sequence(event)
        mapping = self._mapping(event)
        return SequenceNode([each.key for each in mapping.entries]) if kind == "set" else mapping

    def _anchored(self, event: Any, node: Node) -> Node:
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _scalar(self, event: Any) -> ScalarNode:
        if len(event.value) > MOST_CHARACTERS:
            reason = f"has a value of {len(event.value)} characters; at most {MOST_CHARACTERS} are allowed"
            raise self._refusal(event, reason)
        if event.style:
            self._quoted.append((event.start_mark.index, event.end_mark.index))
        is_plain = event.tag is None and not event.style
        return ScalarNode(_value(event.value, event.tag, is_plain=is_plain), merges=is_plain and event.value == _MERGE)

    def _sequence(self, start: Any) -> SequenceNode:
        sequence = SequenceNode()
        self._anchored(start, sequence)
        self._open.append(sequence)
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            sequence.items.append(self._node(event))
        self._open.pop()
        self._end_of_collection(start, event)
        return sequence

    def _mapping(self, start: Any) -> MappingNode:
        mapping = MappingNode(bool(start.flow_style), start.end_mark.index - 1 + self._offset)
        self._anchored(start, mapping)
        self._open.append(mapping)
        keys: set[object] = set()
        sources: list[MappingNode] = []
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._node(event)
            identity = _identity(key)
            if identity in keys:
                assert isinstance(key, ScalarNode)
                raise self._refusal(event, f'found duplicate key "{key.value}"')
            keys.add(identity)
            value_event = next(self._events)
            value = self._node(value_event)
            if isinstance(key, ScalarNode) and key.merges:
                sources += self._sources(value_event, value)
                continue
            places = [each.start_mark.index + self._offset for each in (event, value_event)]
            mapping.entries.append(Entry(key, value, event.start_mark.line + 1, places[0], places[1], self._end))
        self._open.pop()
        for entry in (each for source in sources for each in (*source.entries, *source.merged)):
            if (identity := _identity(entry.key)) not in keys:
                keys.add(identity)
                mapping.merged.append(entry)
        self._end_of_collection(start, event)
        return mapping

    def _end_of_collection(self, start: Any, end: Any) -> None:
        if start.flow_style:  # the end of one without brackets is where the next token begins
            self._end = end.end_mark.index + self._offset

    def _sources(self, event: Any, node: Node) -> list[MappingNode]:
        """The mappings that a merge names, the first of which counts where several have a key."""
        sources = node.items if isinstance(node, SequenceNode) else [node]
        mappings = [each for each in sources if isinstance(each, MappingNode)]
        if len(mappings) < len(sources):
            raise self._refusal(event, "expected a mapping or list of mappings for merging")
        if any(each is outer for each in (node, *mappings) for outer in self._open):
            raise self._refusal(event, "found a mapping that is merged into itself")
        return mappings


def _identity(key: Node) -> object:
    """What two equal keys have in common; keys that are mappings or lists are refused later."""
    return (type(key.value), key.value) if isinstance(key, ScalarNode) else key


def _value(text: str, tag: str | None, *, is_plain: bool) -> bool | int | float | str | Unread | None:
    """Plain data of a scalar."""
    if is_plain:
        return _resolved(text)
    kind = (tag or "").removeprefix(_STANDARD)
    if kind == tag or kind in ("", "str"):  # a tag of one's own means nothing here
        return text
    value = _resolved(text)
    if kind == "float" and type(value) is int:
        value = float(value)
    kinds = {"int": int, "float": float, "bool": bool, "null": type(None)}
    return value if type(value) is kinds.get(kind) else Unread(text, f"with the tag !!{kind}")


def _resolved(text: str) -> bool | int | float | str | Unread | None:
    """Plain data of a scalar without quotes and tag, as YAML 1.2 has it; digits may be grouped by underscores."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "+-.0123456789":
        return text
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        lower = text.replace("_", "").lower()
        return float(lower.replace(".", "") if lower[-1] in "fn" else lower)
    return Unread(text, "a date") if _DATE.fullmatch(text) else text


def _integer(text: str) -> int | Unread:
    digits = text.replace("_", "").lstrip("+-")
    base = {"0b": 2, "0o": 8, "0x": 16}.get(digits[:2], 10)
    try:
        number = int(digits[2:] if base != 10 else digits, base)
    except ValueError:  # no digit behind the base, or more digits than Python reads
        return Unread(text, f"an integer of {len(digits)} digits" if base == 10 else "an integer without digits")
    return -number if text[0] == "-" else number
