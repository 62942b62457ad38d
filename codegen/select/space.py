"""Explicit spaces of candidates: the tuning of a spec, with lists of values for some fields."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from codegen.errors import MOST_OF_MESSAGE, CodegenError, SpecError
from codegen.library import NamedSpec, shipped_specs, unnamed_stem
from codegen.parse import BY_OP, PARTIAL_ADAPTER, parse_spec
from codegen.plain import PlainCopy, json_value
from codegen.planning import plan_of
from codegen.select.candidates import is_allowed
from codegen.select.problem import TUNING_FIELDS, Fields, Problem, tuning_of
from codegen.spec import Spec
from codegen.validation import first_error
from codegen.wording import alternatives, one_line, shown

OPTION = "--over"
MOST_POINTS = 100_000
"""Most combinations of a space; each is planned."""
MOST_TOLD = 5
"""Most fields in a message about ruled-out candidates."""
_SIZE = re.compile(r"[0-9]{1,9}")
Axes = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Ruled:
    """Combinations that one field rules out.

    Attributes:
        field: dotted name of the offending field.
        count: number of combinations.
        example: one of them, and the reason.
    """

    field: str
    count: int
    example: str


@dataclass(frozen=True)
class Space:
    """A space of candidates.

    Attributes:
        current: base spec; always the first candidate.
        axes: values of each field, by dotted name.
        members: legal combinations by their values on the command line, in the order of the axes.
        ruled_out: reasons for the others, most frequent first.
        points: total number of combinations.
    """

    current: NamedSpec
    axes: Axes
    members: Mapping[tuple[str, ...], NamedSpec]
    ruled_out: tuple[Ruled, ...]
    points: int

    @property
    def candidates(self) -> list[NamedSpec]:
        """Kernels to try: the current one, then the others of the space."""
        others = {named.spec.hash: named for named in self.members.values()}
        others.pop(self.current.spec.hash, None)
        return [self.current, *others.values()]

    def told(self) -> str:
        """Number of legal combinations, and reasons against the others, in words."""
        text = f"{len(self.members)} of {self.points} combinations are legal"
        return f"{text}; {told_ruled_out(self.ruled_out)}" if self.ruled_out else text


def told_ruled_out(ruled_out: Sequence[Ruled]) -> str:
    """Reasons against ruled-out candidates, in words."""
    parts = [f"{each.field} rules out {each.count} ({each.example})" for each in ruled_out[:MOST_TOLD]]
    rest = sum(each.count for each in ruled_out[MOST_TOLD:])
    return "; ".join(parts) + (f"; {rest} others" if rest else "")


def parse_axes(texts: Sequence[str], spec: Spec) -> dict[str, tuple[Any, ...]]:
    """Axes from FIELD=VALUE,VALUE,... of a command line: ``tile.m=64,128``, ``tile=128x128,192x80``, ``stages=2,3``.

    Args:
        texts: the options; one may have several fields: ``tile.m=64,128,stages=2,3``.
        spec: spec of the kernels, whose model has the fields.

    Raises:
        SpecError: for a field that is not a tuning field or is repeated, and for a value that is not allowed or is
            repeated.
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        name = ""
        for part in text.replace(" ", "").split(","):
            given, equals, value = part.partition("=")
            if equals:
                name = _field(given, spec)
                if name in axes:
                    raise _error(name, "is given twice")
                axes[name] = []
            else:
                value = part
            if not name or not value:
                raise _error("", f"has {shown(part)} of {shown(text)}; expected FIELD=VALUE,VALUE,...")
            checked = _value(name, value, spec)
            if checked in axes[name]:
                raise _error(name, f"has {shown(value)} twice")
            axes[name].append(checked)
    if "tile" in axes and any(name.startswith("tile.") for name in axes):
        raise _error("tile", "is given both as a whole and by parts: use one of them")
    return {name: tuple(values) for name, values in axes.items()}


def _error(field: str, reason: str) -> SpecError:
    return SpecError(f"{OPTION} {field}".rstrip(), reason)


def _field(name: str, spec: Spec) -> str:
    """Dotted name of a tuning field; raises SpecError for other fields."""
    model = type(spec)
    fields = [field.alias or each for each, field in model.model_fields.items()]
    parts = [f"tile.{each}" for each in type(spec.tile).model_fields]
    known = [each for each in fields if each in TUNING_FIELDS] + parts
    if name in known:
        return name
    if name.partition(".")[0] in fields and not name.startswith("tile"):
        raise _error(one_line(name), "defines what a kernel computes: put it into the problem")
    raise _error(one_line(name), f"is not a tuning field of this spec; {alternatives(name, known)}")


def _value(name: str, text: str, spec: Spec) -> Any:
    """Value of a field as plain data, if the spec's model accepts it."""
    plain = _plain(name, text, spec)
    try:
        PARTIAL_ADAPTER.validate_python(PlainCopy().of(with_tuning(json.loads(spec.canonical_json()), {name: plain})))
    except ValidationError as error:
        raise _error(*first_error(error, BY_OP, "this spec")) from None
    return plain


def _plain(name: str, text: str, spec: Spec) -> Any:
    if name == "tile":
        sizes, parts = text.split("x"), list(type(spec.tile).model_fields)
        if len(sizes) != len(parts) or not all(map(_SIZE.fullmatch, sizes)):
            raise _error(
                name, f"has {shown(text)}; expected {'x'.join(part.upper() for part in parts)}, such as 128x64"
            )
        return {part: int(size) for part, size in zip(parts, sizes, strict=True)}
    try:
        return json_value(text)
    except CodegenError:
        return text


def with_tuning(fields: Fields, tuning: Mapping[str, Any]) -> Fields:
    """Fields of a spec with some replaced; fields of the tile have dotted names."""
    changed = dict(fields)
    for name, value in tuning.items():
        outer, dot, inner = name.partition(".")
        changed[outer] = {**changed[outer], inner: value} if dot else value
    return changed


def base_fields(current: Spec, problem: Problem) -> Fields:
    """Base fields of a space's specs: those of the problem, else those of the current spec.

    A problem with FP8 operands does not define the granularity of scales; kernels with another granularity are not
    candidates.
    """
    fields: Fields = json.loads(current.canonical_json())
    unsaid = {name: value for name, value in fields.items() if name not in {*problem.said, *TUNING_FIELDS}}
    return {**unsaid, **problem.fields(), **tuning_of(current)}


def space(current: NamedSpec, problem: Problem, axes: Axes) -> Space:
    """Space of the combinations of values.

    Args:
        current: spec with the other fields.
        problem: problem of the kernels.
        axes: values by dotted name of the field, from ``parse_axes``.

    Raises:
        CodegenError: if no combination is legal, with the reasons; or if there are too many.
    """
    points = math.prod(map(len, axes.values()))
    if points > MOST_POINTS:
        raise _error("", f"has {points} combinations; at most {MOST_POINTS} are allowed: give fewer values")
    base = base_fields(current.spec, problem)
    known = {each.spec.hash: each for each in [*shipped_specs(), current]}
    members: dict[tuple[str, ...], NamedSpec] = {}
    errors: dict[str, list[str]] = {}
    for values in itertools.product(*axes.values()):
        tuning = dict(zip(axes, values, strict=True))
        try:
            spec = parse_spec(with_tuning(base, tuning))
            plan_of(spec, "candidate")
            if not is_allowed(spec, problem):
                raise SpecError("prepared", "a kernel that requires a prepared A, unlike the problem")
        except SpecError as error:
            text = ", ".join(f"{name} {spelt(value)}" for name, value in tuning.items())
            errors.setdefault(error.field, []).append(f"{text}: {one_line(error.reason)}")
            continue
        members[tuple(map(spelt, values))] = known.get(spec.hash) or NamedSpec(unnamed_stem(spec), spec)
    counted = sorted(errors.items(), key=lambda item: -len(item[1]))
    ruled_out = tuple(Ruled(field or "the spec", len(found), found[0]) for field, found in counted)
    if not members:
        raise CodegenError(
            f"{OPTION}: none of {points} combinations is legal: " + one_line(told_ruled_out(ruled_out), MOST_OF_MESSAGE)
        )
    return Space(current, axes, members, ruled_out, points)


def spelt(value: Any) -> str:
    """Value in the syntax of the command line."""
    if isinstance(value, dict):
        return "x".join(map(str, value.values()))
    return value if isinstance(value, str) else json.dumps(value)


def differences(spec: Spec, current: Spec) -> dict[str, Any]:
    """Tuning fields in which two specs differ, by dotted name; an option that is off is None."""
    one, other = _flat(tuning_of(spec)), _flat(tuning_of(current))
    return {name: one.get(name) for name in {**one, **other} if one.get(name) != other.get(name)}


def _flat(tuning: Fields) -> Fields:
    found: Fields = {}
    for name, value in tuning.items():
        found |= {f"{name}.{part}": size for part, size in value.items()} if isinstance(value, dict) else {name: value}
    return found
