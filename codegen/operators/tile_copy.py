"""The record of tile copies."""

from __future__ import annotations

from codegen.operators.record import Operator
from codegen.plans.bsr import tile_copy
from codegen.problem import CopyShape
from codegen.select.default_tables import TILE_COPY
from codegen.spec import TileCopySpec

_CASES = "plain one_tile one_chunk odd_rows odd_columns odd_both many_tiles tall wide strided"

TILE_COPY_OPERATOR = Operator(
    model=TileCopySpec,
    shape=CopyShape,
    kernel=lambda spec: tile_copy,
    rows=TILE_COPY,
    stem=lambda spec: [f"{spec.tile.m}x{spec.tile.n}"],
    title=lambda spec: spec.op,
    computes=lambda spec: ("dtype",),
    units=lambda spec, sizes: [("columns", 8, "the elements of a load")],
    cases=lambda plan, spec: _CASES.split(),
    tolerance=0.0,  # bit for bit
)
