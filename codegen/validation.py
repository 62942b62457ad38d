"""Messages for pydantic's errors in specs and problems."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from codegen.devices import DATA_CENTER_BLACKWELL, arch_of, is_data_center_blackwell
from codegen.errors import SpecError
from codegen.patterns import PATTERNS
from codegen.wording import alternatives, nearest, shown

Place = tuple[int | str, ...]

OTHER_NAMES = {
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "fp8": "e4m3",
    "fp8_e4m3": "e4m3",
    "float8_e5m2": "e5m2",
    "fp8_e5m2": "e5m2",
    "flash_attention": "attention",
    "flash_attn": "attention",
    "flex_attention": "attention",
    "sdpa": "attention",
    "spmm": "bsr_spmm",
    "gemm": "bsr_spmm",
    "matmul": "bsr_spmm",
    "sddmm": "bsr_sddmm",
    "spgemm": "bsr_spgemm",
    "full": "dense",
    "window": "sliding_window",
    "local": "sliding_window",
}
"""Values by the names that other libraries give them."""


def first_error(error: ValidationError, models: Mapping[str, type[BaseModel]], what: str) -> tuple[str, str]:
    """The most telling error: the dotted field, as a file has it, and a message.

    Args:
        error: of a union of models, which ``op`` distinguishes.
        models: the models by ``op``.
        what: what the models describe, such as "this spec".
    """
    return every_error(error, models, what)[0]


def every_error(error: ValidationError, models: Mapping[str, type[BaseModel]], what: str) -> list[tuple[str, str]]:
    """Every error, as ``first_error`` returns one: unknown fields first.

    A misspelt field is one too many and often one that is missing: the second of these errors is left out.
    """
    errors = error.errors(include_url=False)
    ordered = sorted(errors, key=lambda each: each["type"] != "extra_forbidden")
    meant = {name for each in errors if each["type"] == "extra_forbidden" for name in _meant(each["loc"], models)}
    kept = [each for each in ordered if each["type"] != "missing" or _dotted(each["loc"], models) not in meant]
    return list(dict.fromkeys(_told(each, models, what) for each in kept))


def _told(error: Any, models: Mapping[str, type[BaseModel]], what: str) -> tuple[str, str]:
    """The dotted field of one error, and its message."""
    parts = _parts(error["loc"], models)
    kind, context, given = error["type"], error.get("ctx", {}), f"is {shown(error['input'])}"
    if kind == "extra_forbidden":
        reason = f"is not a field of {what}; {_instead(parts[-1], error['input'], _fields_of(error['loc'], models))}"
    elif kind == "missing":
        reason = "is missing"
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        allowed = [*(PATTERNS if parts else models)]
        tag = f"is {shown(context['tag'])}" if "tag" in context else "is missing"
        reason = f"{tag}; allowed: {', '.join(map(repr, allowed))}{_meaning(context.get('tag'), allowed)}"
        parts.append(str(context.get("discriminator", "")).strip("'"))
    elif kind == "literal_error":
        reason = f"{given}; allowed: {context['expected']}{_hint(parts[-1], error['input'], context['expected'])}"
    elif kind == "bool_type":
        reason = f"{given}; allowed: true, false"
    elif kind in ("model_type", "model_attributes_type"):
        reason = f"{given}; a mapping of fields is expected"
    else:
        message = error["msg"].removeprefix("Value error, ")
        reason = f"{given}; {message[0].lower()}{message[1:]}"
    return ".".join(parts), reason


def _instead(name: str, value: Any, known: Sequence[str]) -> str:
    """The end of a message on an unknown field: the same in this package's fields, or the nearest names."""
    if name == "window_size" and "left" in known:
        return _window(value)
    if name == "window_size":
        return f"for a window, write pattern: {{kind: sliding_window, ...}} and in it {_window(value)}"
    if name in ("causal", "is_causal") and "pattern" in known:
        return "write pattern: {kind: causal}"
    if name in ("softmax_scale", "sm_scale", "scale"):
        return "the scale is an argument of the call: leave it out"
    return alternatives(name, known)


def _window(value: Any) -> str:
    """Fields of a sliding window, as FlashAttention's pair (left, right) or as a number of keys gives them."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return f"write left: {value - 1}, right: 0"
    if isinstance(value, list) and len(value) == 2 and all(isinstance(each, int) and each >= 0 for each in value):
        return f"write left: {value[0]}, right: {value[1]}"
    return "write left and right: keys before and after the query's own position"


def _meaning(value: Any, allowed: Sequence[str]) -> str:
    """The end of a message on an unknown word: the allowed one that is meant, if there is one."""
    found = _meant_by(value, allowed) if isinstance(value, str) else ""
    return f"; did you mean {found}?" if found else ""


def _meant_by(value: str, allowed: Sequence[str]) -> str:
    """The allowed word that a value means by another name or spelling; "" if none is near."""
    word = re.sub(r"[\s-]+", "_", value.strip().lower()).removeprefix("torch.")
    for each in (word, OTHER_NAMES.get(word, "")):
        if each in allowed:
            return each
    by_letters = {name.replace("_", ""): name for name in allowed}
    return by_letters.get(word.replace("_", "")) or nearest(word, allowed)


def _hint(field: str, value: Any, expected: str) -> str:
    """The end of a message on a value that is not allowed: the one that is meant, or how to get along without it.

    Args:
        field: name of the field.
        value: its value.
        expected: the allowed values, as pydantic lists them: ``'fp16', 'bf16' or 'e4m3'``, ``64, 96 or 128``.
    """
    words, numbers = re.findall(r"'([^']*)'", expected), [int(each) for each in re.findall(r"\b\d+\b", expected)]
    if words:
        if field == "arch" and isinstance(value, str):
            return _arch_meant(value, words)
        return _meaning(value, words)
    if isinstance(value, str):
        return f"; write {value} without quotes" if value in map(str, numbers) else ""
    if field != "head_dim" or isinstance(value, bool) or not isinstance(value, int):
        return ""
    larger = [each for each in numbers if each > value]
    return f"; calls with smaller heads use the next size, {min(larger)}" if larger and value > 0 else ""


def _arch_meant(value: str, allowed: Sequence[str]) -> str:
    """The end of a message on an unknown architecture: the one of a GPU of that name, or the nearest name."""
    if is_data_center_blackwell(value):
        return f"; {DATA_CENTER_BLACKWELL}"
    try:
        found = arch_of(value)
    except SpecError:
        return _meaning(value, allowed)
    return f"; did you mean {found}?"


def _parts(place: Place, models: Mapping[str, type[BaseModel]]) -> list[str]:
    """Fields of a place, without the values that pydantic adds to tell models apart."""
    parts = [str(part) or repr(part) for i, part in enumerate(place) if not (i == 0 and part in models)]
    return [parts[0], *parts[2:]] if len(parts) > 1 and parts[0] == "pattern" else parts


def _dotted(place: Place, models: Mapping[str, type[BaseModel]]) -> str:
    return ".".join(_parts(place, models))


def _meant(place: Place, models: Mapping[str, type[BaseModel]]) -> list[str]:
    """Dotted names of the fields that an unknown one may be."""
    *outer, name = _parts(place, models)
    found = nearest(name, _fields_of(place, models))
    return [".".join([*outer, found])] if found else []


def _fields_of(place: Place, models: Mapping[str, type[BaseModel]]) -> list[str]:
    """Fields beside the last one of a place, as a file has them."""
    model: Any = models[str(place[0])]
    for part in place[1:-1]:
        if part in PATTERNS:  # the pattern's kind, which pydantic puts behind its field
            model = PATTERNS[str(part)]
        elif part in model.model_fields:
            annotation = model.model_fields[str(part)].annotation
            found = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
            model = next((kind for kind in found if issubclass(kind, BaseModel)), model)
    return [field.alias or name for name, field in model.model_fields.items()]
