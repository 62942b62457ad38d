"""Tensor maps: 128-byte descriptors of tensors for TMA, encoded by the driver."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from codegen.encode_tiled import ELEMENT_BYTES, STRIDE_BYTES, encode_tiled
from codegen.plan import TensorMap
from runtime.driver.api import call, driver

_MAPS_KEPT = 256  # tensor maps cached per signature: the caching allocator reuses a few addresses


@dataclass
class MapEncoder:
    """Encoder of tensor maps for one tensor shape at any address, with a cache of the last ones."""

    dtype: str
    dims: tuple[int, ...]  # innermost first
    strides: tuple[int, ...]  # elements, innermost (1) left out
    how: TensorMap
    known: dict[int, bytes] = field(default_factory=dict)

    def at(self, address: int) -> bytes:
        """The 128 bytes of the tensor map for a tensor at ``address``."""
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= _MAPS_KEPT:
                self.known.clear()
            found = self.known[address] = self._encode(address)
        return found

    def _encode(self, address: int) -> bytes:
        cuda = driver()
        element = ELEMENT_BYTES[self.how.dtype or self.dtype]
        # The driver checks the stride of a dimension of size 1, although nothing uses it.
        row = -(-self.dims[0] * element // STRIDE_BYTES) * STRIDE_BYTES
        strides = [
            row if size == 1 else stride * element for size, stride in zip(self.dims[1:], self.strides, strict=True)
        ]
        told = encode_tiled(self.how, self.dtype)
        tensor_map = call(
            cuda.cuTensorMapEncodeTiled,
            getattr(cuda.CUtensorMapDataType, told.data_type),
            told.rank,
            address,
            [cuda.cuuint64_t(size) for size in self.dims],
            [cuda.cuuint64_t(stride) for stride in strides],
            [cuda.cuuint32_t(size) for size in told.box_dim],
            [cuda.cuuint32_t(stride) for stride in told.element_strides],
            getattr(cuda.CUtensorMapInterleave, told.interleave),
            getattr(cuda.CUtensorMapSwizzle, told.swizzle),
            getattr(cuda.CUtensorMapL2promotion, told.l2_promotion),
            getattr(cuda.CUtensorMapFloatOOBfill, told.oob_fill),
        )
        return ctypes.string_at(int(tensor_map.getPtr()), 128)
