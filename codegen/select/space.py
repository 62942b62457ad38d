"""Spaces of candidates that are given by hand: the tuning of a spec, with some fields replaced by values in turn."""

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
"""Combinations of a space: a plan of each is tried."""
MOST_TOLD = 5
"""Of the fields that rule candidates out, in a message."""
_SIZE = re.compile(r"[0-9]{1,9}")
Axes = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Ruled:
    """Combinations that one field rules out.

    Attributes:
        field: the field that is at fault, dotted.
        count: how many.
        example: one of them, and why.
    """

    field: str
    count: int
    example: str


@dataclass(frozen=True)
class Space:
    """A space of candidates.

    Attributes:
        current: the spec that the others differ from; the first candidate, whether the axes have it or not.
        axes: values of each field, by its dotted name.
        members: the legal combinations by their values as a command line has them, in the order of the axes.
        ruled_out: what became of the others, the most frequent first.
        points: combinations in all.
    """

    current: NamedSpec
    axes: Axes
    members: Mapping[tuple[str, ...], NamedSpec]
    ruled_out: tuple[Ruled, ...]
    points: int

    @property
    def candidates(self) -> list[NamedSpec]:
        """The kernels to try: the current one, then the others of the space."""
        others = {named.spec.hash: named for named in self.members.values()}
        others.pop(self.current.spec.hash, None)
        return [self.current, *others.values()]

    def told(self) -> str:
        """The number of legal combinations, and the reasons that ruled out the others, in words."""
        text = f"{len(self.members)} of {self.points} combinations are legal"
        return f"{text}; {told_ruled_out(self.ruled_out)}" if self.ruled_out else text


def told_ruled_out(ruled_out: Sequence[Ruled]) -> str:
    """The reasons that ruled candidates out, in words."""
    parts = [f"{each.field} rules out {each.count} ({each.example})" for each in ruled_out[:MOST_TOLD]]
    rest = sum(each.count for each in ruled_out[MOST_TOLD:])
    return "; ".join(parts) + (f"; {rest} others" if rest else "")


def parse_axes(texts: Sequence[str], spec: Spec) -> dict[str, tuple[Any, ...]]:
    """Read FIELD=VALUE,VALUE,... of a command line: ``tile.m=64,128``, ``tile=128x128,192x80``, ``stages=2,3``.

    Args:
        texts: of each option; one may have several fields: ``tile.m=64,128,stages=2,3``.
        spec: of the kernels, whose model has the fields.

    Raises:
        SpecError: for a field that is none of those that say how such a kernel computes, or is given twice; for a value
            that is not allowed, or is given twice.
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
                raise _error("", f"has {shown(part)} of {shown(text)}; FIELD=VALUE,VALUE,... is expected")
            checked = _value(name, value, spec)
            if checked in axes[name]:
                raise _error(name, f"has {shown(value)} twice")
            axes[name].append(checked)
    if "tile" in axes and any(name.startswith("tile.") for name in axes):
        raise _error("tile", "is given whole, and by its parts: say one of them")
    return {name: tuple(values) for name, values in axes.items()}


def _error(field: str, reason: str) -> SpecError:
    return SpecError(f"{OPTION} {field}".rstrip(), reason)


def _field(name: str, spec: Spec) -> str:
    """Dotted name of a tuning field; SpecError for another field."""
    model = type(spec)
    fields = [field.alias or each for each, field in model.model_fields.items()]
    parts = [f"tile.{each}" for each in type(spec.tile).model_fields]
    known = [each for each in fields if each in TUNING_FIELDS] + parts
    if name in known:
        return name
    if name.partition(".")[0] in fields and not name.startswith("tile"):
        raise _error(one_line(name), "says what a kernel computes, not how: it belongs into the problem")
    raise _error(one_line(name), f"is not a field of this spec that says how it computes; {alternatives(name, known)}")


def _value(name: str, text: str, spec: Spec) -> Any:
    """Value of a field as plain data, if the spec's model takes it by itself."""
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
            raise _error(name, f"has {shown(text)}; {'x'.join(part.upper() for part in parts)} is expected, as 128x64")
        return {part: int(size) for part, size in zip(parts, sizes, strict=True)}
    try:
        return json_value(text)
    except CodegenError:
        return text


def with_tuning(fields: Fields, tuning: Mapping[str, Any]) -> Fields:
    """Fields of a spec with some replaced, those of its tile by dotted names."""
    changed = dict(fields)
    for name, value in tuning.items():
        outer, dot, inner = name.partition(".")
        changed[outer] = {**changed[outer], inner: value} if dot else value
    return changed


def base_fields(current: Spec, problem: Problem) -> Fields:
    """Fields of a space's specs before the axes: those of the problem, and the current spec's where it has none.

    A problem of FP8 operands does not say the granularity of their scales; kernels of another one are no candidates.
    """
    fields: Fields = json.loads(current.canonical_json())
    unsaid = {name: value for name, value in fields.items() if name not in {*problem.said, *TUNING_FIELDS}}
    return {**unsaid, **problem.fields(), **tuning_of(current)}


def space(current: NamedSpec, problem: Problem, axes: Axes) -> Space:
    """Space of the combinations of values.

    Args:
        current: the spec that has the other fields.
        problem: what the kernels compute.
        axes: values by the dotted names of fields, as ``parse_axes`` returns them.

    Raises:
        CodegenError: if no combination is legal, with what ruled them out; if there are more than are looked at.
    """
    points = math.prod(map(len, axes.values()))
    if points > MOST_POINTS:
        raise _error("", f"has {points} combinations; at most {MOST_POINTS} are looked at: give fewer values")
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
                raise SpecError("prepared", "a kernel that wants A prepared, and the problem says otherwise")
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
    """Value as a command line has it."""
    if isinstance(value, dict):
        return "x".join(map(str, value.values()))
    return value if isinstance(value, str) else json.dumps(value)


def differences(spec: Spec, current: Spec) -> dict[str, Any]:
    """Tuning fields in which a spec differs from another, by dotted names; an option that is off is None."""
    one, other = _flat(tuning_of(spec)), _flat(tuning_of(current))
    return {name: one.get(name) for name in {**one, **other} if one.get(name) != other.get(name)}


def _flat(tuning: Fields) -> Fields:
    found: Fields = {}
    for name, value in tuning.items():
        found |= {f"{name}.{part}": size for part, size in value.items()} if isinstance(value, dict) else {name: value}
    return found
