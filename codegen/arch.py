"""Architectures: limits and legal combinations, one row each.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
WARP = 32  # threads
PARTITIONS = 4  # of an SM
FIRST_FP8 = (8, 9)  # compute capability that has it first
REGISTER_UNIT = 8  # a thread's registers are allocated in multiples of this


@dataclass(frozen=True)
class Combination:
    """One way of building a kernel that a template set exists for."""

    op: str
    mma: str
    copy: str
    schedule: str


@dataclass(frozen=True)
class Arch:
    """What one architecture offers to a thread block, and which kernels are written for it."""

    name: str
    compute_capability: tuple[int, int]
    since_cuda: tuple[int, int]  # whose compiler knows it first
    shared_memory_per_block: int  # bytes, opt-in maximum
    shared_memory_per_sm: int  # bytes
    registers_per_sm: int
    registers_per_thread: int
    warps_per_sm: int
    combinations: tuple[Combination, ...]

    def registers_for(self, threads: int, blocks: int) -> int:
        """Return the most registers of a thread if ``blocks`` thread blocks of ``threads`` are to share an SM.

        An SM has four partitions, each with a quarter of the registers, between which warps are dealt out.
        """
        warps = -(-threads * blocks // (WARP * PARTITIONS))  # of the partition that has most
        each = self.registers_per_sm // PARTITIONS // (WARP * warps)
        return min(self.registers_per_thread, each // REGISTER_UNIT * REGISTER_UNIT)

    def blocks_for(self, threads: int, registers: int) -> int:
        """Return how many thread blocks of ``threads`` with ``registers`` a thread fit the registers of an SM."""
        each = -(-min(registers, self.registers_per_thread) // REGISTER_UNIT) * REGISTER_UNIT
        warps = PARTITIONS * (self.registers_per_sm // PARTITIONS // (WARP * each))
        return warps * WARP // threads

    @property
    def virtual(self) -> str:
        """Name of the PTX target, e.g. ``compute_89``."""
        return self.name.replace("sm_", "compute_")

    @property
    def forward_compatible(self) -> bool:
        """Whether newer devices run its PTX: that of an ``a`` architecture is for this one alone."""
        return not self.name.endswith("a")

    def of(self, op: str) -> tuple[Combination, ...]:
        """Return the legal combinations of one operator."""
        return tuple(c for c in self.combinations if c.op == op)


MMA_SYNC = (
    Combination("attention", "mma", "cp_async", "multistage"),
    Combination("attention", "wmma", "cp_async", "multistage"),
    Combination("attention_backward", "mma", "cp_async", "multistage"),
    Combination("block_mask", "none", "ld_global", "multistage"),
    Combination("bsr_spmm", "mma", "cp_async", "multistage"),
    Combination("bsr_spmm", "wmma", "cp_async", "multistage"),
    Combination("bsr_spmm", "wmma", "ld_global", "multistage"),
    Combination("bsr_sddmm", "mma", "cp_async", "multistage"),
    Combination("bsr_sddmm", "wmma", "cp_async", "multistage"),
    Combination("bsr_spgemm", "mma", "cp_async", "multistage"),
    Combination("bsr_spgemm", "wmma", "cp_async", "multistage"),
    Combination("select_topk", "none", "ld_global", "multistage"),
    Combination("tile_copy", "none", "cp_async", "multistage"),
    Combination("tile_copy", "none", "ld_global", "multistage"),
)
"""Kernels of sm_89, which compile unchanged for every architecture from sm_80 on. There they have never run."""
MMA_SYNC_FP8 = (*MMA_SYNC, Combination("quantise", "none", "ld_global", "multistage"))
"""And those that want FP8, which sm_89 has first."""


def _mma_sync(
    major: int, minor: int, since_cuda: tuple[int, int], shared_memory_per_sm: int, warps_per_sm: int
) -> Arch:
    """Return an architecture that MMA_SYNC is for."""
    return Arch(
        name=f"sm_{major}{minor}",
        compute_capability=(major, minor),
        since_cuda=since_cuda,
        shared_memory_per_block=shared_memory_per_sm - 1 * KIB,
        shared_memory_per_sm=shared_memory_per_sm,
        registers_per_sm=65536,
        registers_per_thread=255,
        warps_per_sm=warps_per_sm,
        combinations=MMA_SYNC if (major, minor) < FIRST_FP8 else MMA_SYNC_FP8,
    )


ARCHS = {
    arch.name: arch
    for arch in (
        _mma_sync(8, 0, (11, 0), 164 * KIB, 64),
        _mma_sync(8, 6, (11, 1), 100 * KIB, 48),
        _mma_sync(8, 9, (11, 8), 100 * KIB, 48),
        Arch(
            name="sm_90a",
            compute_capability=(9, 0),
            since_cuda=(12, 0),
            shared_memory_per_block=227 * KIB,
            shared_memory_per_sm=228 * KIB,
            registers_per_sm=65536,
            registers_per_thread=255,
            warps_per_sm=64,
            combinations=(
                Combination("attention", "wgmma", "tma", "ping_pong"),
                Combination("attention", "wgmma", "tma", "cooperative"),
                Combination("attention_backward", "wgmma", "tma", "cooperative"),
                Combination("attention_backward", "mma", "cp_async", "multistage"),  # gradients: daux alone
                Combination("block_mask", "none", "ld_global", "multistage"),
                Combination("bsr_spmm", "wgmma", "tma", "cooperative"),
                Combination("bsr_spmm", "mma", "cp_async", "multistage"),
                Combination("bsr_spmm", "mma", "tma", "cooperative"),
                Combination("bsr_spmm", "mma", "ld_global", "multistage"),
                Combination("bsr_spmm", "wmma", "tma", "multistage"),
                Combination("bsr_spmm", "wmma", "cp_async", "multistage"),
                Combination("bsr_spmm", "wmma", "ld_global", "multistage"),
                Combination("bsr_sddmm", "wgmma", "tma", "cooperative"),
                Combination("bsr_sddmm", "mma", "cp_async", "multistage"),
                Combination("bsr_spgemm", "wgmma", "tma", "cooperative"),
                Combination("bsr_spgemm", "mma", "cp_async", "multistage"),
                Combination("quantise", "none", "ld_global", "multistage"),
                Combination("select_topk", "none", "ld_global", "multistage"),
                Combination("tile_copy", "none", "tma", "multistage"),
            ),
        ),
        _mma_sync(12, 0, (12, 8), 100 * KIB, 48),
    )
}
