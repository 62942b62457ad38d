"""The plan of a spec, whatever its operator."""

from __future__ import annotations

from codegen.errors import SpecError
from codegen.library import NamedSpec
from codegen.operators import operator_of
from codegen.plan import Plan
from codegen.spec import Spec


def plan_for(named: NamedSpec) -> Plan:
    """Work out the plan of a spec.

    Raises:
        SpecError: when the spec cannot work on its architecture, with the field, the numbers and the place in the file.
    """
    try:
        return plan_of(named.spec, named.stem)
    except SpecError as error:
        raise named.located(error) from None


def plan_of(spec: Spec, stem: str) -> Plan:
    """Work out the plan of a spec that has no place in a file.

    Raises:
        SpecError: as :func:`plan_for` does, without the place.
    """
    return operator_of(spec).plan(spec, stem)
