"""A launch of a problem whose shape is known beforehand: its grid, its numbers, its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace

from codegen.errors import SpecError
from codegen.plan import Plan
from codegen.problem import (
    AttentionShape,
    BlockMaskShape,
    BlockSize,
    CopyShape,
    LaunchArgs,
    QuantiseShape,
    SddmmShape,
    SelectShape,
    Shape,
    SpgemmShape,
    SpmmShape,
)
from codegen.spec import (
    AttentionBackwardSpec,
    AttentionSpec,
    BlockMaskSpec,
    BsrSddmmSpec,
    BsrSpgemmSpec,
    BsrSpmmSpec,
    QuantiseSpec,
    SelectTopkSpec,
)
from codegen.wording import alternatives, shown

SHAPES: dict[str, type[Shape]] = {
    "attention": AttentionShape,
    "attention_backward": AttentionShape,
    "block_mask": BlockMaskShape,
    "bsr_spmm": SpmmShape,
    "bsr_sddmm": SddmmShape,
    "bsr_spgemm": SpgemmShape,
    "quantise": QuantiseShape,
    "select_topk": SelectShape,
    "tile_copy": CopyShape,
}
"""The shape of each operator's problem."""
MOST = 2**30  # of a size: kernels count in 32 bits


@dataclass(frozen=True)
class SizedLaunch:
    """A launch.

    Attributes:
        plan: of the kernel.
        shape: of the problem.
        sm_count: multiprocessors of the device.
        args: what follows from the shape.
        grid: thread blocks.
        block: threads of each, and bytes of its dynamic shared memory.
    """

    plan: Plan
    shape: Shape
    sm_count: int
    args: LaunchArgs
    grid: int
    block: BlockSize


def sized_launch(plan: Plan, sizes: Mapping[str, int], sm_count: int) -> SizedLaunch:
    """Work out the launch of a problem.

    Args:
        plan: of the kernel.
        sizes: fields of the operator's shape (``codegen.problem``).
        sm_count: multiprocessors of the device.

    Raises:
        SpecError: for sizes that are no problem of this kernel's.
    """
    shape = _shape(plan, sizes)
    slots = sm_count * plan.ctas_per_sm
    args = plan.problem(shape, slots)
    size = args.block or BlockSize(plan.threads, plan.shared_bytes)
    if size.shared_bytes > plan.shared_bytes:
        most = f"which takes {size.shared_bytes} bytes of shared memory, {plan.shared_bytes} are there"
        raise SpecError("shape.block_kv", f"makes {args.numbers['key_blocks']} key blocks, {most}")
    return SizedLaunch(plan, shape, sm_count, args, plan.thread_blocks(args.tiles, slots), size)


def _shape(plan: Plan, sizes: Mapping[str, int]) -> Shape:
    """Return the shape that sizes are of."""
    kind = SHAPES[plan.spec.op]
    known = {field.name: field for field in fields(kind)}
    for name, size in sizes.items():
        if name not in known:
            raise SpecError(f"shape.{name}", f"is no size of {plan.spec.op}; {alternatives(name, known)}")
        if isinstance(size, bool) or not isinstance(size, int) or not (_least(known[name]) <= size <= MOST):
            raise SpecError(f"shape.{name}", f"is {shown(size)}, expected {_least(known[name])} to 2^30")
    for name, field in known.items():
        if field.default is MISSING and name not in sizes:
            raise SpecError(f"shape.{name}", f"is missing; a shape of {plan.spec.op} has {', '.join(known)}")
    for name, unit, what in _units(plan, sizes):
        if sizes[name] % unit:
            raise SpecError(f"shape.{name}", f"is {sizes[name]}, expected a multiple of {unit}, {what}")
    _check_lists(plan, sizes)
    return kind(**sizes)


def _least(field: object) -> int:
    return 1 if getattr(field, "default", MISSING) is MISSING else 0


def _units(plan: Plan, sizes: Mapping[str, int]) -> list[tuple[str, int, str]]:
    """Return of what each size is a multiple."""
    spec = plan.spec
    if isinstance(spec, AttentionSpec):
        return [("heads", sizes["kv_heads"] * spec.pack_gqa, "the heads of K times those that are packed")]
    if isinstance(spec, AttentionBackwardSpec | SelectTopkSpec):
        columns = [("head_dim", 8, "the elements of a load")] if isinstance(spec, SelectTopkSpec) else []
        return [("heads", sizes["kv_heads"], "the heads of K"), *columns]
    if isinstance(spec, BsrSddmmSpec | BsrSpgemmSpec):
        wide = "its columns" if isinstance(spec, BsrSddmmSpec) else "the columns of a block"
        depth = [("depth", spec.block.cols, wide)] if isinstance(spec, BsrSpgemmSpec) else []
        return [("rows", spec.block.rows, "the rows of a block"), *depth, ("columns", spec.block.cols, wide)]
    if isinstance(spec, BsrSpmmSpec):
        down, across = spec.block.rows, spec.block.cols
        if spec.transpose_a:
            down, across = across, down
        return [("rows", down, "the side of a block"), ("depth", across, "the side of a block")]
    if isinstance(spec, BlockMaskSpec | QuantiseSpec):
        heads = sizes.get("kv_heads") or 1  # without a mean, of none
        return [("heads", heads, "the heads of the mean")] if isinstance(spec, QuantiseSpec) else []
    return [("columns", 8, "the elements of a load")]


def _check_lists(plan: Plan, sizes: Mapping[str, int]) -> None:
    """Refuse a shape without the sizes that its kernel divides work by."""
    spec = plan.spec
    wanted: tuple[str, ...] = ()
    if isinstance(spec, AttentionSpec) and spec.pattern.fixed_block is not None:
        wanted = ("list_batches", "list_heads")
    if isinstance(spec, AttentionBackwardSpec) and not spec.by_queries and spec.pattern.fixed_block is not None:
        wanted = ("list_batches", "list_heads", "list_length")  # it transposes the lists
    if isinstance(spec, BsrSpmmSpec):
        wanted = (*(("chunk_blocks",) if plan.row_cutting else ()), *(("groups", "rounds") if plan.gathered else ()))
    if isinstance(spec, QuantiseSpec) and spec.mean == "product":
        wanted = ("kv_heads",)
    if isinstance(spec, BsrSpgemmSpec) and spec.output == "bsr":
        wanted = ("blocks",)
    for name in wanted:
        if sizes.get(name, 0) < 1:
            raise SpecError(f"shape.{name}", f"is {sizes.get(name, 0)}, {plan.stem} needs 1 or more")


def smallest_shape(plan: Plan) -> Shape:
    """Return the shape of the smallest problem of a kernel: one tile, one block, one query."""
    kind, spec = SHAPES[plan.spec.op], plan.spec
    sizes = {field.name: 1 for field in fields(kind) if field.default is MISSING}
    sizes |= {name: unit for name, unit, _ in _units(plan, sizes)}
    shape = kind(**sizes)
    if isinstance(shape, AttentionShape):
        return replace(shape, list_batches=1, list_heads=1, list_length=1)
    if isinstance(shape, QuantiseShape):
        return replace(shape, kv_heads=int(isinstance(spec, QuantiseSpec) and spec.mean == "product"))
    if isinstance(shape, SpgemmShape):
        return replace(shape, blocks=1)
    if isinstance(shape, SpmmShape):
        assert isinstance(spec, BsrSpmmSpec)
        chunk = None if plan.row_cutting is None else plan.row_cutting.step
        return replace(shape, chunk_blocks=chunk, groups=1 if plan.gathered else None, rounds=1)
    return shape
