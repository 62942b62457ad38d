"""The plan of a spec of any operator."""

from __future__ import annotations

from codegen.errors import SpecError
from codegen.library import NamedSpec
from codegen.operators import operator_of
from codegen.operators.record import Kernel
from codegen.plan import Plan
from codegen.spec import Spec
from codegen.tile_rules import Tile, tiles, with_tile


def plan_for(named: NamedSpec) -> Plan:
    """Plan of a named spec.

    Raises:
        SpecError: if the spec cannot work on its architecture; gives field, numbers and location in the file.
    """
    try:
        return plan_of(named.spec, named.stem)
    except SpecError as error:
        raise named.located(error) from None


def plan_of(spec: Spec, stem: str) -> Plan:
    """Plan of a spec without a file.

    Raises:
        SpecError: like :func:`plan_for`, without a location.
    """
    return operator_of(spec).plan(spec, stem)


def tiles_of(spec: Spec) -> list[Tile]:
    """Tiles that the rules of a spec's kernels allow, for any tile of the spec itself.

    Some may exceed registers or shared memory; planning them raises SpecError.
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
