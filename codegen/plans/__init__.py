"""One module per kernel template: from a spec to its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from codegen.dtypes import FP8
from codegen.errors import SpecError
from codegen.plan import Plan, require
from codegen.plans import (
    attention_backward,
    attention_backward_daux,
    attention_backward_dq_dkdv,
    attention_backward_mma_sync,
    attention_mma_sync,
    attention_sm90a,
    attention_wmma,
    block_mask,
    bsr_sddmm_multistage,
    bsr_sddmm_sm90a,
    bsr_sddmm_sm90a_fp8,
    bsr_sddmm_sm90a_swap_ab,
    bsr_spgemm_multistage,
    bsr_spgemm_sm90a,
    bsr_spmm_few_columns,
    bsr_spmm_mma,
    bsr_spmm_sm90a,
    bsr_spmm_sm90a_fp8,
    bsr_spmm_sm90a_gathered,
    bsr_spmm_sm90a_gathered_mma,
    bsr_spmm_sm90a_pairs,
    bsr_spmm_sm90a_swap_ab,
    bsr_spmm_sm90a_transposed,
    bsr_spmm_wmma,
    gathered,
    quantise,
    select_topk,
    tile_copy,
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
    Spec,
    UnchosenSpec,
)
from codegen.tile_rules import Rule, Tile, tiles, with_tile

if TYPE_CHECKING:
    from codegen.library import NamedSpec


class Kernel(Protocol):
    """A module of a kernel."""

    __name__: str
    TILE: tuple[Rule[Any], ...]

    def plan(self, spec: Any, stem: str) -> Plan:
        """Plan of a spec."""


HEIGHTS_OF_ROWS = (bsr_spmm_sm90a_pairs.ROWS, gathered.ROWS)
"""Heights of tiles of several block rows, by which BSR x dense has kernels of their own."""


def plan_for(named: NamedSpec) -> Plan:
    """Work out the plan of a spec.

    Raises:
        SpecError: when the spec cannot work on its architecture, with the field, the numbers and the place in the file.
    """
    try:
        return plan_of(named.spec, named.stem)
    except SpecError as error:
        raise named.located(error) from None


def plan_of(spec: Spec, stem: str) -> Plan:
    """Work out the plan of a spec that has no place in a file.

    Raises:
        SpecError: as :func:`plan_for` does, without the place.
    """
    return kernel_of(spec).plan(spec, stem)


def kernel_of(spec: Spec) -> Kernel:
    """The kernel of a spec.

    Raises:
        SpecError: for an option that no kernel of its operator has.
    """
    if isinstance(spec, AttentionSpec):
        if spec.mma == "wgmma":
            return attention_sm90a
        return attention_wmma if spec.mma == "wmma" else attention_mma_sync
    if isinstance(spec, BsrSddmmSpec):
        return _sddmm(spec)
    if isinstance(spec, BsrSpgemmSpec):
        return bsr_spgemm_sm90a if spec.mma == "wgmma" else bsr_spgemm_multistage
    if isinstance(spec, BsrSpmmSpec):
        return bsr_spmm_sm90a_fp8 if spec.dtype in FP8 and spec.mma == "wgmma" else _spmm(spec)
    return _unchosen(spec)


def tiles_of(spec: Spec) -> list[Tile]:
    """Tiles that the rules of the kernels allow that compute what a spec says, whatever its own tile is.

    Registers and shared memory may not have room for all of them: a plan tells.
    """
    heights = (spec.tile.m, *HEIGHTS_OF_ROWS) if isinstance(spec, BsrSpmmSpec) else (None,)
    kernels: dict[str, Kernel] = {}
    for height in heights:
        try:
            kernel = kernel_of(spec if height is None else with_tile(spec, {"m": height}))
        except SpecError:
            continue
        kernels[kernel.__name__] = kernel
    return [tile for kernel in kernels.values() for tile in tiles(spec, kernel.TILE)]


def _unchosen(spec: UnchosenSpec) -> Kernel:
    if isinstance(spec, AttentionBackwardSpec):
        if spec.gradients == "daux":
            return attention_backward_daux
        if spec.mma == "mma":
            return attention_backward_mma_sync
        if spec.gradients == "dq_dkdv":
            return attention_backward_dq_dkdv
        return attention_backward
    if isinstance(spec, BlockMaskSpec | QuantiseSpec):
        return quantise if isinstance(spec, QuantiseSpec) else block_mask
    return select_topk if isinstance(spec, SelectTopkSpec) else tile_copy


def _spmm(spec: BsrSpmmSpec) -> Kernel:
    if gathered.gathers_rows(spec):
        if spec.mma == "mma":
            return bsr_spmm_sm90a_gathered_mma
        return bsr_spmm_sm90a_gathered
    if spec.mma == "wgmma" and not spec.transpose_a and spec.block.rows in bsr_spmm_sm90a_swap_ab.SIZES:
        return bsr_spmm_sm90a_swap_ab
    require(
        spec.ctas_per_sm == 1,
        "ctas_per_sm",
        f"is {spec.ctas_per_sm}; more than 1 is written for wgmma with blocks of 16 and 32 rows, not transposed",
    )
    if spec.mma != "wgmma":
        by_mma: dict[str, Kernel] = {"cp_async": bsr_spmm_mma, "ld_global": bsr_spmm_few_columns}
        return by_mma[spec.copy_] if spec.mma == "mma" else bsr_spmm_wmma
    if spec.transpose_a:
        return bsr_spmm_sm90a_transposed
    pairs = (spec.block.rows, spec.tile.m) == (64, bsr_spmm_sm90a_pairs.ROWS)
    return bsr_spmm_sm90a_pairs if pairs else bsr_spmm_sm90a


def _sddmm(spec: BsrSddmmSpec) -> Kernel:
    if spec.dtype in FP8 and spec.mma == "wgmma":
        return bsr_sddmm_sm90a_fp8
    if spec.mma == "wgmma" and spec.block.rows in bsr_sddmm_sm90a_swap_ab.SIZES:
        return bsr_sddmm_sm90a_swap_ab
    require(
        spec.ctas_per_sm == 1,
        "ctas_per_sm",
        f"is {spec.ctas_per_sm}; more than 1 is written for wgmma with blocks of 16 and 32 rows",
    )
    return bsr_sddmm_sm90a if spec.mma == "wgmma" else bsr_sddmm_multistage
