"""A launch of a problem of known shape: grid, numbers, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields

from codegen.errors import SpecError
from codegen.operators import operator_of
from codegen.plan import Plan
from codegen.problem import BlockSize, LaunchArgs, Shape
from codegen.wording import alternatives, shown

MOST = 2**30  # largest size: kernels count in 32 bits


@dataclass(frozen=True)
class SizedLaunch:
    """A launch.

    Attributes:
        plan: plan of the kernel.
        shape: shape of the problem.
        sm_count: multiprocessors of the device.
        args: arguments that depend on the shape.
        grid: thread blocks.
        block: threads and bytes of dynamic shared memory per thread block.
    """

    plan: Plan
    shape: Shape
    sm_count: int
    args: LaunchArgs
    grid: int
    block: BlockSize


def sized_launch(plan: Plan, sizes: Mapping[str, int], sm_count: int) -> SizedLaunch:
    """Launch of a problem.

    Args:
        plan: plan of the kernel.
        sizes: fields of the operator's shape (``codegen.problem``).
        sm_count: multiprocessors of the device.

    Raises:
        SpecError: for sizes that are not a problem of this kernel.
    """
    shape = _shape(plan, sizes)
    slots = sm_count * plan.ctas_per_sm
    args = plan.problem(shape, slots)
    size = args.block or BlockSize(plan.threads, plan.shared_bytes)
    if size.shared_bytes > plan.shared_bytes:
        most = f"which needs {size.shared_bytes} bytes of shared memory, but has {plan.shared_bytes}"
        raise SpecError("shape.block_kv", f"gives {args.numbers['key_blocks']} key blocks, {most}")
    return SizedLaunch(plan, shape, sm_count, args, plan.thread_blocks(args.tiles, slots), size)


def _shape(plan: Plan, sizes: Mapping[str, int]) -> Shape:
    """Shape with these sizes."""
    operator = operator_of(plan.spec)
    kind = operator.shape
    known = {field.name: field for field in fields(kind)}
    for name, size in sizes.items():
        if name not in known:
            raise SpecError(f"shape.{name}", f"is not a size of {plan.spec.op}; {alternatives(name, known)}")
        if isinstance(size, bool) or not isinstance(size, int) or not (_least(known[name]) <= size <= MOST):
            raise SpecError(f"shape.{name}", f"is {shown(size)}, expected {_least(known[name])} to 2^30")
    for name, field in known.items():
        if field.default is MISSING and name not in sizes:
            raise SpecError(f"shape.{name}", f"is missing; a shape of {plan.spec.op} has {', '.join(known)}")
    for name, unit, what in operator.units(plan.spec, sizes):
        if sizes[name] % unit:
            raise SpecError(f"shape.{name}", f"is {sizes[name]}, expected a multiple of {unit}, {what}")
    for name in operator.counts(plan, plan.spec):
        if sizes.get(name, 0) < 1:
            raise SpecError(f"shape.{name}", f"is {sizes.get(name, 0)}, {plan.stem} needs 1 or more")
    return kind(**sizes)


def _least(field: object) -> int:
    return 1 if getattr(field, "default", MISSING) is MISSING else 0


def smallest_shape(plan: Plan) -> Shape:
    """Shape of the smallest problem of a kernel: one tile, one block, one query."""
    operator = operator_of(plan.spec)
    sizes = {field.name: 1 for field in fields(operator.shape) if field.default is MISSING}
    sizes |= {name: unit for name, unit, _ in operator.units(plan.spec, sizes)}
    return operator.shape(**sizes, **operator.smallest(plan, plan.spec))
