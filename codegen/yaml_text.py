"""Reading of YAML, strictly and within bounds: what a parser makes of a text, and as plain data with its lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSet, TaggedScalar
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import Node
from ruamel.yaml.scalarbool import ScalarBoolean

from codegen.errors import SpecError
from codegen.plain import MOST_CHARACTERS, MOST_LEVELS, MOST_VALUES, PlainCopy


@dataclass(frozen=True)
class Document:
    """A YAML text that was read.

    Attributes:
        tree: what the parser made of it, with places and layout.
        fields: the same as plain data.
        lines: line of each field, by dotted name.
    """

    tree: Any
    fields: Any
    lines: Mapping[str, int]


def read_yaml(text: str, origin: str) -> Document:
    """Read one YAML document; the boundary to the parser.

    Args:
        text: YAML.
        origin: the file as messages name it.

    Raises:
        SpecError: for a text that is not YAML, repeats a key or has more than a spec has; with file and line.
    """
    copy = _Copy()
    try:
        tree = _parser().load(text)
        return Document(tree, copy.of(tree), copy.lines)
    except SpecError as error:
        raise error.at(location_of(origin, copy.lines, error.field)) from None
    except MarkedYAMLError as error:
        line = f"{origin}:{error.problem_mark.line + 1}" if error.problem_mark else origin
        problem = str(error.problem or "is not YAML")
        reason = f"{error.context} {problem}" if problem.startswith("but ") else problem
        raise SpecError("", reason.partition("\n")[0], line) from None
    except Exception as error:  # the parser lets through what its constructors of values raise
        raise SpecError("", _reason_of(error), origin) from None


def with_values(document: Document, values: Mapping[str, Any]) -> str:
    """Return the text of a document with other values of some fields; comments and layout stay.

    Args:
        document: what was read; its tree is changed.
        values: scalars, and mappings of one level, of which parts that are not named stay. What the document has not
            comes behind the rest.
    """
    for name, value in values.items():
        if not isinstance(value, dict):
            document.tree[name] = value
            continue
        if not isinstance(document.tree.get(name), CommentedMap):
            document.tree[name] = CommentedMap()
            document.tree[name].fa.set_flow_style()
        document.tree[name].update(value)
    writer, stream = YAML(typ="rt", pure=True), StringIO()
    writer.width = MOST_CHARACTERS
    writer.dump(document.tree, stream)
    return stream.getvalue()


def _reason_of(error: Exception) -> str:
    """Return what a parser's own error says, in one line."""
    if isinstance(error, TypeError) and "unhashable" in str(error):
        return "has a mapping or a list in the name of a field, which is a word"
    said = str(error).strip().partition("\n")[0]
    if isinstance(error, YAMLError | ValueError) and said:
        return f"is not YAML: {said}"
    return f"has a value that cannot be read by its tag or its escapes ({type(error).__name__}: {said})"


def location_of(origin: str, lines: Mapping[str, int], field: str) -> str:
    """Return file:line of a field, or of the nearest enclosing field that is in the file."""
    while field and field not in lines:
        field = field.rpartition(".")[0]
    return f"{origin}:{lines[field]}" if field else origin


def _parser() -> YAML:
    parser = YAML(typ="rt", pure=True)
    parser.Composer = _BoundedComposer
    parser.preserve_quotes = True
    return parser


class _BoundedComposer(Composer):
    """Stops at the first value that a spec has no use for, before anything is made of a text."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader)
        self.warn_double_anchors = False
        self._values = self._level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        self._values += 1
        if self._values > MOST_VALUES:
            raise ComposerError(None, None, f"has more than {MOST_VALUES} values", event.start_mark)
        if self._level > MOST_LEVELS:
            raise ComposerError(None, None, f"is nested too deeply: at most {MOST_LEVELS} levels", event.start_mark)
        if len(getattr(event, "value", None) or "") > MOST_CHARACTERS:
            reason = f"has a value of {len(event.value)} characters; at most {MOST_CHARACTERS} are allowed"
            raise ComposerError(None, None, reason, event.start_mark)
        self._level += 1
        node: Node = super().compose_node(parent, index)
        self._level -= 1
        return node


class _Copy(PlainCopy):
    """Copies a YAML tree.

    Attributes:
        lines: line of each field, by dotted name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}

    def of(self, node: Any, name: str = "", level: int = 0) -> Any:
        if isinstance(node, CommentedMap):
            for key in node:
                if key in (node.lc.data or {}):  # a merged key has no place of its own
                    self.lines[f"{name}.{_word(key)}" if name else str(_word(key))] = node.lc.key(key)[0] + 1
        return super().of(list(node) if isinstance(node, CommentedSet) else node, name, level)

    def key(self, key: Any, name: str) -> str:
        word = _word(key)
        if isinstance(word, list | dict):
            spelt = f"{name}.{word}" if name else str(word)
            raise SpecError(spelt, "is a mapping or a list; the name of a field is a word")
        return super().key(key, name)

    def scalar(self, node: Any, name: str) -> bool | int | float | str | None:
        return super().scalar(_word(node), name)


def _word(node: Any) -> Any:
    """Return a scalar of the parser, or a name that is none, as it would be without its layout."""
    if isinstance(node, TaggedScalar):
        return node.value  # !!str 128; tags of other types were read as those
    if isinstance(node, ScalarBoolean):  # a boolean with an anchor
        return bool(node)
    if isinstance(node, tuple):
        return [_plain_part(part) for part in node]
    if isinstance(node, Mapping):
        return {_plain_part(key): _plain_part(value) for key, value in node.items()}
    return node


def _plain_part(node: Any) -> Any:
    word = _word(node)
    return next((kind(word) for kind in (bool, int, float, str) if isinstance(word, kind)), word)
