"""The record of quantization to FP8."""

from __future__ import annotations

from codegen.operators.record import Operator, Sizes, Unit
from codegen.plans import quantize
from codegen.problem import QuantizeShape
from codegen.select.default_tables import QUANTIZE
from codegen.spec import QuantizeSpec

_CASES = (
    "plain many_heads long one_row odd_length short_of_a_block outliers offset small zeros strange given into "
    "given_into"
)


def _computes(spec: QuantizeSpec) -> tuple[str, ...]:
    fields = ("dtype", "codes", "head_dim", "scales")
    return (*fields, "tile") if spec.scales == "row_block" else fields  # rows of a tile share a scale


def _units(spec: QuantizeSpec, sizes: Sizes) -> list[Unit]:
    del spec
    return [("heads", sizes.get("kv_heads") or 1, "the heads of the mean")]  # without a mean, any number


QUANTIZE_OPERATOR = Operator(
    model=QuantizeSpec,
    shape=QuantizeShape,
    kernel=lambda spec: quantize,
    rows=QUANTIZE,
    stem=lambda spec: [spec.codes, f"d{spec.head_dim}", spec.scales],
    title=lambda spec: spec.op,
    computes=_computes,
    units=_units,
    counts=lambda plan, spec: ("kv_heads",) if spec.mean == "product" else (),
    smallest=lambda plan, spec: {"kv_heads": int(spec.mean == "product")},
    cases=lambda plan, spec: _CASES.split(),
    tolerance=0.0,  # bit for bit
)
