"""Tensor maps: how the TMA unit addresses a tensor, 128 bytes that the driver encodes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from codegen.plan import TensorMap
from runtime.driver.api import call, driver

_MAPS_KEPT = 256  # tensor maps remembered for one signature: the caching allocator hands out few addresses


@dataclass
class MapEncoder:
    """Encodes the tensor map of one tensor shape for any address, and remembers the last ones."""

    dtype: str
    dims: tuple[int, ...]  # innermost first
    strides: tuple[int, ...]  # elements, innermost (1) left out
    how: TensorMap
    known: dict[int, bytes] = field(default_factory=dict)

    def at(self, address: int) -> bytes:
        """Return the 128 bytes of the tensor map of a tensor at ``address``."""
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= _MAPS_KEPT:
                self.known.clear()
            found = self.known[address] = self._encode(address)
        return found

    def _encode(self, address: int) -> bytes:
        cuda = driver()
        rank = len(self.dims)
        element = 2
        # The stride of a dimension of size 1 is never used, but it is checked.
        row = -(-self.dims[0] * element // 16) * 16
        strides = [
            row if size == 1 else stride * element for size, stride in zip(self.dims[1:], self.strides, strict=True)
        ]
        swizzle = {
            0: cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            32: cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
            64: cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
            128: cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        }[self.how.swizzle]
        types = cuda.CUtensorMapDataType
        tensor_map = call(
            cuda.cuTensorMapEncodeTiled,
            {"fp16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, "bf16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16}[self.dtype],
            rank,
            address,
            [cuda.cuuint64_t(size) for size in self.dims],
            [cuda.cuuint64_t(stride) for stride in strides],
            [cuda.cuuint32_t(size) for size in self.how.box],
            [cuda.cuuint32_t(1)] * rank,
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            {
                128: cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                256: cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            }[self.how.promotion],
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return ctypes.string_at(int(tensor_map.getPtr()), 128)
