"""The plan of a spec, whatever its operator."""

from __future__ import annotations

from codegen.errors import SpecError
from codegen.library import NamedSpec
from codegen.operators import operator_of
from codegen.operators.record import Kernel
from codegen.plan import Plan
from codegen.spec import Spec
from codegen.tile_rules import Tile, tiles, with_tile


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


def tiles_of(spec: Spec) -> list[Tile]:
    """Tiles that the rules of the kernels allow that compute what a spec says, whatever its own tile is.

    Registers and shared memory may not have room for all of them: a plan tells.
    """
    operator = operator_of(spec)
    specs = [spec, *(with_tile(spec, {"m": height}) for height in operator.heights)]
    kernels: dict[str, Kernel] = {}
    for each in specs:
        try:
            kernel = operator.kernel(each)
        except SpecError:
            continue
        kernels[kernel.__name__] = kernel
    return [tile for kernel in kernels.values() for tile in tiles(spec, kernel.TILE)]
