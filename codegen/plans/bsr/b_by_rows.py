"""Prologue that copies a B stored by columns to rows, for small blocks of A.

Blocks of 16 and 32 columns read segments of 32 and 64 bytes from a column of B, which are slow in the L2. The prologue
copies B by rows at the speed of device memory, and the product reads the copy.
"""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.plan import Constant, Param, Prologue, TensorMap, i32, tensor_map
from codegen.plans.bsr.parts import SWIZZLE, copies_b, group_columns
from codegen.spec import BsrSpmmSpec

WARP_COLUMNS = 16  # of B that a warp transposes
COPY_COLUMNS = 128  # per tile: 33 KB of shared memory with its copy, so that an SM has six tiles in flight
COPY_THREADS = COPY_COLUMNS // WARP_COLUMNS * 32


def copy_prologue(spec: BsrSpmmSpec, stem: str) -> Prologue | None:
    """Prologue that copies B, or None."""
    if not copies_b(spec):
        return None
    return Prologue(f"{stem}_copy_b", COPY_THREADS)


def copy_tiles(spec: BsrSpmmSpec, rows: int, columns: int) -> tuple[int, int]:
    """Tiles of the copy of a B of this shape: (down, across)."""
    return (-(-rows // group_columns(spec)), -(-columns // COPY_COLUMNS)) if copies_b(spec) else (0, 0)


def copy_stride(spec: BsrSpmmSpec, columns: int) -> int:
    """Row stride of the copy, in elements: whole L2 lines, so that no line has two rows."""
    return -(-columns // group_columns(spec)) * group_columns(spec)


def copy_constants(spec: BsrSpmmSpec) -> tuple[Constant, ...]:
    """Constants of the copy."""
    if not copies_b(spec):
        return ()
    depth = group_columns(spec)
    return (
        Constant("kCopyThreads", COPY_THREADS, "threads per block of the prologue that copies B by rows"),
        Constant("kCopyDepth", depth, "rows of B per block of the prologue"),
        Constant("kCopyColumns", COPY_COLUMNS, "columns of B per block of the prologue"),
        Constant("kCopyBytes", COPY_COLUMNS * depth * DTYPES[spec.dtype].bytes, "bytes per block of the prologue"),
    )


def copy_params(spec: BsrSpmmSpec) -> tuple[Param, ...]:
    """Parameters of the copy."""
    if not copies_b(spec):
        return ()
    return (tensor_map("b_columns_map", "B, by columns", ("K", "N")), i32("copy_rows", "K / kCopyDepth, rounded up"))


def copy_maps(spec: BsrSpmmSpec) -> dict[str, TensorMap]:
    """Tensor map through which the copy reads B; the map of the product writes the copy."""
    return {"b_columns_map": TensorMap((group_columns(spec), COPY_COLUMNS), SWIZZLE)} if copies_b(spec) else {}


def copy_summary(spec: BsrSpmmSpec) -> tuple[tuple[str, str], ...]:
    """Line for ``explain``."""
    return (("before", "a prologue copies B by rows, into device memory of B's size"),) if copies_b(spec) else ()
