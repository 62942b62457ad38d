"""Specs of another architecture that compute the same result."""

from __future__ import annotations

import json

from codegen.arch import ARCHS
from codegen.errors import SpecError
from codegen.library import find_spec, shipped_specs
from codegen.operators import operator_of
from codegen.planning import plan_for
from codegen.select.choice import choose
from codegen.select.problem import is_chosen, parse_problem, said_by
from codegen.spec import Spec

FP8_PROBLEM = ("output", "scale_rows", "scales")
"""Fields of FP8 specs that define what a kernel computes; a selection problem does not have them."""


def suggest(spec: Spec, arch: str) -> str:
    """Advice for a user whose device has the architecture ``arch``, not that of the spec.

    The advice names the shipped specs for ``arch`` that compute the same result, starting with the one that
    codegen.select chooses. If none is shipped, it gives a spec that would, or the reason why there is none.
    """
    problem = problem_of(spec)
    near = (named for named in shipped_specs() if (named.spec.arch, named.spec.op) == (arch, spec.op))
    serving = [named.stem for named in near if problem_of(named.spec) == problem]
    if serving:
        if is_chosen(spec):
            first = choose(parse_problem({**said_by(spec), "arch": arch})).named.stem
            serving.sort(key=lambda stem: stem != first)
        return f"choose {' or '.join(serving)}, which compute{'s' if len(serving) == 1 else ''} the same on {arch}"
    fields = {"arch": arch, **problem}
    try:
        plan_for(find_spec(fields))
    except SpecError as error:
        return f"{arch} has no kernel that computes the same: {error}"
    return f"no shipped spec computes the same on {arch}; this spec does: {json.dumps(fields)}"


def suggest_for(spec: Spec, compute_capability: tuple[int, int]) -> str:
    """Advice of :func:`suggest` for a compute capability."""
    for arch in ARCHS.values():
        if arch.compute_capability == compute_capability:
            return suggest(spec, arch.name)
    return f"supported architectures: {', '.join(ARCHS)}"


def problem_of(spec: Spec) -> dict[str, object]:
    """Fields of a spec that define what its kernel computes, as plain data, without options that are off."""
    computes = operator_of(spec).computes
    defaults = {name: field.default for name, field in type(spec).model_fields.items()}
    if computes is None:
        said = said_by(spec)
        scaled = {name for name in FP8_PROBLEM if spec.is_fp8 and name in defaults and name not in said}
        used = {name for name in scaled if getattr(spec, name) != defaults[name]}
        return {name: value for name, value in said.items() if name != "arch"} | spec.model_dump(
            mode="json", include=used
        )
    used = {name for name in spec.options if getattr(spec, name) != defaults[name]}
    return spec.model_dump(mode="json", include={"op", *computes(spec)} | used, exclude_none=True)
