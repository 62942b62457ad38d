"""Specs of another architecture that compute the same."""

from __future__ import annotations

import json

from codegen.arch import ARCHS
from codegen.errors import SpecError
from codegen.library import find_spec, shipped_specs
from codegen.operators import operator_of
from codegen.planning import plan_for
from codegen.select.choice import choose
from codegen.select.problem import has_problem, is_chosen, parse_problem, said_by
from codegen.spec import Spec


def suggest(spec: Spec, arch: str) -> str:
    """Advice for a device of another architecture, ``arch``, than a spec's.

    Names the shipped specs that compute the same there, the one that codegen.select chooses first; without one, the
    spec that would, or why none can.
    """
    serving = [
        named.stem
        for named in shipped_specs()
        if named.spec.arch == arch and problem_of(named.spec) == problem_of(spec)
    ]
    if serving:
        if is_chosen(spec):
            first = choose(parse_problem({**problem_of(spec), "arch": arch})).named.stem
            serving.sort(key=lambda stem: stem != first)
        return f"choose {' or '.join(serving)}, which compute{'s' if len(serving) == 1 else ''} the same on {arch}"
    fields = {"arch": arch, **problem_of(spec)}
    try:
        plan_for(find_spec(fields))
    except SpecError as error:
        return f"{arch} has no kernel that computes the same: {error}"
    return f"no shipped spec computes the same on {arch}, but this one does: {json.dumps(fields)}"


def suggest_for(spec: Spec, compute_capability: tuple[int, int]) -> str:
    """Return :func:`advice` for a device by its compute capability."""
    for arch in ARCHS.values():
        if arch.compute_capability == compute_capability:
            return suggest(spec, arch.name)
    return f"there are kernels for {', '.join(ARCHS)}"


def problem_of(spec: Spec) -> dict[str, object]:
    """Return the fields that say what a spec computes; options that are off are left out."""
    computes = operator_of(spec).computes
    if computes:
        used = {name for name in spec.options if getattr(spec, name) != type(spec).model_fields[name].default}
        return spec.model_dump(include={"op", "dtype", *computes} | used)
    if not has_problem(spec):
        return {"op": spec.op, "dtype": spec.dtype}
    return {name: value for name, value in said_by(spec).items() if name != "arch"}
