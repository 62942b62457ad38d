"""Messages of pydantic's errors in specs and problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from codegen.patterns import PATTERNS
from codegen.wording import alternatives, shown

Place = tuple[int | str, ...]


def first_error(error: ValidationError, models: Mapping[str, type[BaseModel]], what: str) -> tuple[str, str]:
    """Return the field that an error names first, dotted, as a file has it; and what to tell of it.

    Args:
        error: of a union of models that ``op`` tells apart.
        models: the models by ``op``.
        what: what they are, in a word.
    """
    errors = error.errors(include_url=False)
    # A misspelt field is one too many, and often one that is missing.
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    parts = _parts(first["loc"], models)
    kind, context, given = first["type"], first.get("ctx", {}), f"is {shown(first['input'])}"
    if kind == "extra_forbidden":
        reason = f"is not a field of {what}; {alternatives(parts[-1], _fields_of(first['loc'], models))}"
    elif kind == "missing":
        reason = "is missing"
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = f"is {shown(context['tag'])}" if "tag" in context else "is missing"
        reason = f"{tag}; allowed: {', '.join(map(repr, PATTERNS if parts else models))}"
        parts.append(str(context.get("discriminator", "")).strip("'"))
    elif kind == "literal_error":
        reason = f"{given}; allowed: {context['expected']}"
    elif kind in ("model_type", "model_attributes_type"):
        reason = f"{given}; a mapping of fields is expected"
    else:
        message = first["msg"].removeprefix("Value error, ")
        reason = f"{given}; {message[0].lower()}{message[1:]}"
    return ".".join(parts), reason


def _parts(place: Place, models: Mapping[str, type[BaseModel]]) -> list[str]:
    """Return the fields of a place, into which pydantic puts the values that tell models apart too."""
    parts = [str(part) or repr(part) for i, part in enumerate(place) if not (i == 0 and part in models)]
    return [parts[0], *parts[2:]] if len(parts) > 1 and parts[0] == "pattern" else parts


def _fields_of(place: Place, models: Mapping[str, type[BaseModel]]) -> list[str]:
    """Return the fields that there are beside the last one of a place, as a file has them."""
    model: Any = models[str(place[0])]
    for part in place[1:-1]:
        if part in PATTERNS:  # the pattern's kind, which pydantic puts behind its field
            model = PATTERNS[str(part)]
        elif part in model.model_fields:
            annotation = model.model_fields[str(part)].annotation
            found = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
            model = next((kind for kind in found if issubclass(kind, BaseModel)), model)
    return [field.alias or name for name, field in model.model_fields.items()]
