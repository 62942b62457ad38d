"""Bounded conversion of input from callers and parsers to plain data, the only input of pydantic."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from codegen.errors import CodegenError, SpecError
from codegen.wording import one_line, shown

MOST_VALUES = 2000
"""Most values of a spec; real specs have some dozens."""
MOST_LEVELS = 20
"""Most nesting levels of a spec; real specs have four."""
MOST_JSON_LEVELS = 100
MOST_CHARACTERS = 10_000
"""Most characters of one text, which is a word: parsing a number of a million digits takes minutes."""
INTEGER_BITS = 63
_NOT_ITS_VALUE = frozenset({"missing", "extra_forbidden"})
"""Kinds of errors about a field's name; messages omit its value."""

Model = TypeVar("Model", bound=BaseModel)


class PlainCopy:
    """Copies mappings, lists, models and scalars of any classes as plain Python."""

    def __init__(self) -> None:
        self._values = 0

    def of(self, node: Any, name: str = "", level: int = 0) -> Any:
        """Copy of the value of field ``name``.

        Raises:
            SpecError: for too many values or levels (YAML aliases are copied repeatedly, so a few lines can expand to
                gigabytes), an oversized number, an invalid name, or a value that is not plain data.
        """
        self._values += 1
        if self._values > MOST_VALUES:
            raise SpecError("", f"has more than {MOST_VALUES} values; those of an alias count at each use")
        if level > MOST_LEVELS:
            raise SpecError("", f"is nested too deeply: at most {MOST_LEVELS} levels are allowed")
        if isinstance(node, BaseModel):
            node = _dumped(node, name)
        if isinstance(node, Mapping):
            return dict(self._item(key, node, name, level) for key in node)
        if isinstance(node, list | tuple):
            return [self.of(value, joined(name, i), level + 1) for i, value in enumerate(node)]
        return self.scalar(node, name)

    def _item(self, key: Any, node: Mapping[Any, Any], name: str, level: int) -> tuple[str, Any]:
        plain = self.key(key, name)
        return plain, self.of(node[key], joined(name, plain), level + 1)

    def key(self, key: Any, name: str) -> str:
        """Copy of a key in the mapping of field ``name``."""
        plain = self.scalar(key, name)
        if not isinstance(plain, str):
            raise SpecError(joined(name, plain), f"is of type {type(plain).__name__}; names of fields are words")
        return plain

    def scalar(self, node: Any, name: str) -> bool | int | float | str | None:
        """Copy of a scalar value."""
        if node is None or isinstance(node, bool):
            return node
        if isinstance(node, int):
            return _bounded(int.__int__(node), name)
        if isinstance(node, float):
            return float.__float__(node)
        if isinstance(node, str):
            return _text(str.__str__(node), name)
        raise SpecError(name, f"is {shown(node)}; expected a mapping, a list, a word, a number, true, false or null")


def _dumped(model: BaseModel, name: str) -> Any:
    """Model as plain data, to be validated again: ``model_copy`` does not check changed fields."""
    try:
        return model.model_dump(mode="json", by_alias=True)
    except Exception as error:  # unchecked fields may raise anything
        raise SpecError(name, f"is not a valid {type(model).__name__}: {error}") from None


def _bounded(number: int, name: str) -> int:
    if number.bit_length() > INTEGER_BITS:
        raise SpecError(name, f"is an integer of {number.bit_length()} bits; at most {INTEGER_BITS} are allowed")
    return number


def _text(text: str, name: str) -> str:
    if len(text) > MOST_CHARACTERS:
        raise SpecError(name, f"has {len(text)} characters; at most {MOST_CHARACTERS} are allowed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise SpecError(name, f"is {shown(text)}; half of a surrogate pair is not a character") from None
    return text


def joined(name: str, part: object) -> str:
    """Dotted name of a part of a field."""
    spelt = part if isinstance(part, str) and part else shown(part)  # an empty name gets quotes
    return f"{name}.{spelt}" if name else spelt


def json_value(text: str | bytes) -> Any:
    """Parse a JSON text strictly.

    Raises:
        CodegenError: for a text that is not JSON (bytes must be UTF-8), is nested too deeply, repeats a name in an
            object, or has a number that Python cannot read or that is not finite (``NaN`` is not JSON).
    """
    try:
        given = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(given, object_pairs_hook=_object, parse_constant=_not_finite, parse_float=_finite)
    except RecursionError:
        raise _too_deep() from None
    except CodegenError:
        raise
    except Exception as error:
        raise CodegenError(f"is not JSON: {one_line(str(error))}") from None
    level = [value]
    for _ in range(MOST_JSON_LEVELS):
        level = [part for each in level for part in _parts(each)]
        if not level:
            return value
    raise _too_deep()


def json_model(model: type[Model], text: str | bytes) -> Model:
    """Parse a JSON text as a model.

    Raises:
        CodegenError: like ``json_value``; also for a missing, unknown or mistyped field, with its name.
    """
    json_value(text)  # pydantic's own parser accepts repeated names and NaN
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise CodegenError(first_reason(error)) from None


def first_reason(error: ValidationError, *outer: str) -> str:
    """First field of an error (dotted, below ``outer``), its value, and the allowed values."""
    first = error.errors(include_url=False)[0]
    field = one_line(".".join(map(str, (*outer, *first["loc"]))))
    shows = first["type"] not in _NOT_ITS_VALUE and not isinstance(first["input"], dict)
    given = f"is {shown(first['input'])}; " if shows else ""
    reason = one_line(first["msg"].removeprefix("Value error, "))
    return f"{field + ': ' if field else ''}{given}{reason}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CodegenError(f"has the name {shown(twice)} twice in one object")
    return value


def _not_finite(token: str) -> float:
    raise CodegenError(f"has the number {token}; JSON only has finite numbers")


def _finite(token: str) -> float:
    number = float(token)
    return number if math.isfinite(number) else _not_finite(one_line(token))


def _parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def _too_deep() -> CodegenError:
    return CodegenError(f"is nested too deeply: at most {MOST_JSON_LEVELS} levels are allowed")
