"""Copying B by rows, where it is stored by columns and a block of A would read too little of each.

Blocks of 16 and 32 columns meet 32 and 64 bytes of a column of B, and the L2 is slow with such segments. So a kernel of
its own, launched before, copies B by rows, at the speed of device memory, and the product reads the copy.
"""

from __future__ import annotations

from codegen.dtypes import DTYPES
from codegen.plan import Constant, Param, Prologue, TensorMap, i32, tensor_map
from codegen.plans.bsr.parts import SWIZZLE, copies_b, group_columns
from codegen.spec import BsrSpmmSpec

WARP_COLUMNS = 16  # of B, that a warp turns round
COPY_COLUMNS = 128  # of a tile: 33 KB of shared memory with its copy, so that an SM has six on their way
COPY_THREADS = COPY_COLUMNS // WARP_COLUMNS * 32


def copy_prologue(spec: BsrSpmmSpec, stem: str) -> Prologue | None:
    """Return the kernel that copies B, if there is one."""
    if not copies_b(spec):
        return None
    return Prologue(f"{stem}_copy_b", COPY_THREADS)


def copy_tiles(spec: BsrSpmmSpec, rows: int, columns: int) -> tuple[int, int]:
    """Tiles of the copy of a B of this shape: (down, across)."""
    return (-(-rows // group_columns(spec)), -(-columns // COPY_COLUMNS)) if copies_b(spec) else (0, 0)


def copy_stride(spec: BsrSpmmSpec, columns: int) -> int:
    """Return the elements from one row of the copy to the next: whole lines of the L2, so that none holds two rows."""
    return -(-columns // group_columns(spec)) * group_columns(spec)


def copy_constants(spec: BsrSpmmSpec) -> tuple[Constant, ...]:
    """Return the constants of the copy."""
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
    """Return the parameters of the copy."""
    if not copies_b(spec):
        return ()
    return (tensor_map("b_columns_map", "B, by columns", ("K", "N")), i32("copy_rows", "K / kCopyDepth, rounded up"))


def copy_maps(spec: BsrSpmmSpec) -> dict[str, TensorMap]:
    """Tensor map by which the copy reads B. The copy is written through the map of the product."""
    return {"b_columns_map": TensorMap((group_columns(spec), COPY_COLUMNS), SWIZZLE)} if copies_b(spec) else {}


def copy_summary(spec: BsrSpmmSpec) -> tuple[tuple[str, str], ...]:
    """Return the line for ``explain``."""
    return (("before", "a prologue copies B by rows, into device memory of B's size"),) if copies_b(spec) else ()
