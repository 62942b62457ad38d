"""Architectures: limits, capabilities and legal combinations, one row each.

Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Kernels
test the capabilities below, never the name of an architecture.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
WARP = 32  # threads
PARTITIONS = 4  # per SM
REGISTER_UNIT = 8  # a thread's registers are allocated in multiples of this


@dataclass(frozen=True)
class Combination:
    """A legal combination of instruction, copy and schedule: one set of templates."""

    op: str
    mma: str
    copy: str
    schedule: str


@dataclass(frozen=True)
class Machine:
    """A GPU in the performance model of plans.

    Attributes:
        sms: number of SMs.
        flops: floating-point operations per SM and microsecond.
        bytes: bytes from the L2 per SM and microsecond.
    """

    sms: int
    flops: float
    bytes: float


@dataclass(frozen=True)
class Arch:
    """Limits and capabilities of an architecture, and the kernels that support it.

    Attributes:
        name: compiler target, such as ``sm_90a``.
        compute_capability: compute capability of its devices.
        since_cuda: first CUDA version whose compiler supports it.
        shared_memory_per_block: bytes, opt-in maximum.
        shared_memory_per_sm: bytes.
        warps_per_sm: maximum of resident warps.
        machine: a typical device.
        devices: names of its devices in NVIDIA's list of CUDA GPUs.
        combinations: legal combinations of its kernels.
        registers_per_sm: number of 32-bit registers.
        registers_per_thread: maximum of 32-bit registers.
        has_tma: whether a copy engine moves boxes of tensors and completes mbarriers (TMA).
        has_wgmma: whether warpgroups multiply 64 rows at a time from shared memory (WGMMA).
        has_fp8_mma_sync: whether mma.sync multiplies FP8. If not, the compiler converts operands to fp16 in
            registers, provided that the architecture supports FP8.
        has_fp8_wgmma: whether WGMMA multiplies FP8.
        tensor_flops: floating-point operations per SM and clock, for 16-bit products with fp32 sums; None if devices
            differ.
    """

    name: str
    compute_capability: tuple[int, int]
    since_cuda: tuple[int, int]
    shared_memory_per_block: int
    shared_memory_per_sm: int
    warps_per_sm: int
    machine: Machine
    devices: tuple[str, ...]
    combinations: tuple[Combination, ...]
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    has_tma: bool = False
    has_wgmma: bool = False
    has_fp8_mma_sync: bool = False
    has_fp8_wgmma: bool = False
    tensor_flops: int | None = None

    def registers_for(self, threads: int, blocks: int) -> int:
        """Most registers per thread such that ``blocks`` thread blocks of ``threads`` threads fit an SM.

        An SM has four partitions with a quarter of the registers each; warps are distributed over them.
        """
        warps = -(-threads * blocks // (WARP * PARTITIONS))  # in the partition with the most warps
        each = self.registers_per_sm // PARTITIONS // (WARP * warps)
        return min(self.registers_per_thread, each // REGISTER_UNIT * REGISTER_UNIT)

    def blocks_for(self, threads: int, registers: int) -> int:
        """Number of thread blocks that fit the registers of an SM, with ``registers`` registers per thread."""
        each = -(-min(registers, self.registers_per_thread) // REGISTER_UNIT) * REGISTER_UNIT
        warps = PARTITIONS * (self.registers_per_sm // PARTITIONS // (WARP * each))
        return warps * WARP // threads

    @property
    def virtual(self) -> str:
        """Name of the PTX target, e.g. ``compute_89``."""
        return self.name.replace("sm_", "compute_")

    @property
    def forward_compatible(self) -> bool:
        """Whether newer devices run its PTX; PTX of an ``a`` architecture runs on that architecture only."""
        return not self.name.endswith("a")

    @property
    def has_fp8(self) -> bool:
        """Whether the architecture supports FP8."""
        return self.has_fp8_mma_sync or self.has_fp8_wgmma

    def of(self, op: str) -> tuple[Combination, ...]:
        """Legal combinations of one operator."""
        return tuple(c for c in self.combinations if c.op == op)

    def has_kernel(self, op: str, mma: str, copy: str, schedule: str) -> bool:
        """Whether a combination is legal."""
        return Combination(op, mma, copy, schedule) in self.combinations


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
    Combination("paged_attention", "mma", "cp_async", "multistage"),
    Combination("select_topk", "none", "ld_global", "multistage"),
    Combination("tile_copy", "none", "cp_async", "multistage"),
    Combination("tile_copy", "none", "ld_global", "multistage"),
)
"""Kernels of sm_89. They compile unchanged for every architecture from sm_80 on, but have only run on sm_89."""
MMA_SYNC_FP8 = (*MMA_SYNC, Combination("quantize", "none", "ld_global", "multistage"))
"""Kernels that need FP8; sm_89 is the first architecture that supports it."""


ARCHS = {
    arch.name: arch
    for arch in (
        # Machines: data sheets. Each L2 serves an SM at most about 64 bytes per clock, and sustains half of that.
        # Tensor FLOPs: data sheets of A100, L4 and H100 (peak over SMs and boost clock).
        Arch(
            name="sm_80",
            compute_capability=(8, 0),
            since_cuda=(11, 0),
            shared_memory_per_block=163 * KIB,
            shared_memory_per_sm=164 * KIB,
            warps_per_sm=64,
            machine=Machine(108, 2.9e6, 45e3),  # A100
            devices=("A100", "A30"),
            combinations=MMA_SYNC,
            tensor_flops=2048,
        ),
        Arch(
            name="sm_86",
            compute_capability=(8, 6),
            since_cuda=(11, 1),
            shared_memory_per_block=99 * KIB,
            shared_memory_per_sm=100 * KIB,
            warps_per_sm=48,
            machine=Machine(84, 1.5e6, 50e3),  # A40, RTX 3090
            devices=("A10", "A40", "A6000", "RTX 3080", "RTX 3090"),
            combinations=MMA_SYNC,
        ),
        Arch(
            name="sm_89",
            compute_capability=(8, 9),
            since_cuda=(11, 8),
            shared_memory_per_block=99 * KIB,
            shared_memory_per_sm=100 * KIB,
            warps_per_sm=48,
            machine=Machine(58, 2.1e6, 60e3),  # L4
            devices=("L4", "L40", "L40S", "RTX 4080", "RTX 4090", "RTX 6000 Ada"),
            combinations=MMA_SYNC_FP8,
            has_fp8_mma_sync=True,
            tensor_flops=1024,
        ),
        Arch(
            name="sm_90a",
            compute_capability=(9, 0),
            since_cuda=(12, 0),
            shared_memory_per_block=227 * KIB,
            shared_memory_per_sm=228 * KIB,
            warps_per_sm=64,
            machine=Machine(132, 6.0e6, 45e3),  # H100, H200
            devices=("H100", "H200", "H800", "H20", "GH200"),
            has_tma=True,
            has_wgmma=True,
            has_fp8_wgmma=True,
            tensor_flops=4096,
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
                Combination("key_lists_backward", "wgmma", "tma", "cooperative"),
                Combination("key_lists_forward", "wgmma", "tma", "cooperative"),
                Combination("paged_attention", "mma", "cp_async", "multistage"),
                Combination("quantize", "none", "ld_global", "multistage"),
                Combination("select_topk", "none", "ld_global", "multistage"),
                Combination("tile_copy", "none", "tma", "multistage"),
            ),
        ),
        Arch(
            name="sm_120",
            compute_capability=(12, 0),
            since_cuda=(12, 8),
            shared_memory_per_block=99 * KIB,
            shared_memory_per_sm=100 * KIB,
            warps_per_sm=48,
            machine=Machine(188, 2.1e6, 60e3),  # RTX PRO 6000
            devices=("RTX 5080", "RTX 5090", "RTX PRO 6000"),
            combinations=MMA_SYNC_FP8,
            has_tma=True,
            has_fp8_mma_sync=True,
        ),
    )
}
