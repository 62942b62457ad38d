"""Element types: one row per type."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """Spellings of one element type in the languages of the generated sources."""

    name: str
    bytes: int
    ptx: str  # type suffix of mma / wgmma / cvt
    packed_ptx: str  # two elements in 32 bits, for cvt
    cuda: str  # type of the CUDA headers (WMMA sources only; the others use raw bits)
    header: str

    @property
    def is_fp8(self) -> bool:
        """Whether an element has 8 bits."""
        return self.bytes == 1

    @property
    def bits(self) -> str:
        """C++ type that holds the bits of an element."""
        return "unsigned char" if self.is_fp8 else "unsigned short"

    @property
    def chunk_elements(self) -> int:
        """Elements per 16-byte chunk."""
        return 16 // self.bytes


DTYPES = {
    "fp16": DType("fp16", 2, "f16", "f16x2", "__half", "cuda_fp16.h"),
    "bf16": DType("bf16", 2, "bf16", "bf16x2", "__nv_bfloat16", "cuda_bf16.h"),
    "e4m3": DType("e4m3", 1, "e4m3", "e4m3x2", "__nv_fp8_e4m3", "cuda_fp8.h"),
    "e5m2": DType("e5m2", 1, "e5m2", "e5m2x2", "__nv_fp8_e5m2", "cuda_fp8.h"),
}
FP8 = ("e4m3", "e5m2")
TWINS = ("fp16", "bf16")
"""Types of a spec that lists several. A source of the second type is that of the first with words replaced."""
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
"""Largest finite number of each FP8 type."""
