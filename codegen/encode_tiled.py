"""Arguments of cuTensorMapEncodeTiled that a plan fixes; address, sizes and strides come from a call."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.dtypes import DTYPES
from codegen.plan import TensorMap

STRIDE_BYTES = 16
"""Alignment of ``globalAddress`` and of each of ``globalStrides`` that the driver API requires, in bytes."""
_DATA_TYPES = {"fp16": "FLOAT16", "bf16": "BFLOAT16", "fp32": "FLOAT32", "e4m3": "UINT8", "e5m2": "UINT8"}

ELEMENT_BYTES = {"fp32": 4, **{name: dtype.bytes for name, dtype in DTYPES.items()}}


@dataclass(frozen=True)
class EncodeTiled:
    """Arguments of cuTensorMapEncodeTiled, in order, with the driver API's names for their values.

    Attributes:
        data_type: ``tensorDataType``.
        rank: ``tensorRank``.
        box_dim: ``boxDim``, elements of one copy, innermost dimension first.
        element_strides: ``elementStrides``.
        interleave: ``interleave``.
        swizzle: ``swizzle``.
        l2_promotion: ``l2Promotion``.
        oob_fill: ``oobFill``.
    """

    data_type: str
    rank: int
    box_dim: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: str
    swizzle: str
    l2_promotion: str
    oob_fill: str


def encode_tiled(how: TensorMap, dtype: str) -> EncodeTiled:
    """Arguments for a tensor map of a tensor of ``dtype``, unless the map sets its own type."""
    rank = len(how.box)
    return EncodeTiled(
        data_type=f"CU_TENSOR_MAP_DATA_TYPE_{_DATA_TYPES[how.dtype or dtype]}",
        rank=rank,
        box_dim=how.box,
        element_strides=(1,) * rank,
        interleave="CU_TENSOR_MAP_INTERLEAVE_NONE",
        swizzle=f"CU_TENSOR_MAP_SWIZZLE_{f'{how.swizzle}B' if how.swizzle else 'NONE'}",
        l2_promotion=f"CU_TENSOR_MAP_L2_PROMOTION_L2_{how.promotion}B",
        oob_fill="CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    )
