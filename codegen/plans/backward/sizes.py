"""Registers and shared memory of attention gradients, by head size."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.arch import ARCHS
from codegen.dtypes import DTYPES
from codegen.plan import Registers, Ring, SharedLayout
from codegen.plans.attention.expressions import expression_registers
from codegen.plans.attention.rows import SWIZZLE, WARPGROUP_ROWS
from codegen.plans.backward.parts import STATS_BYTES, arrived_barrier, step_meta, step_places, tile_segment
from codegen.spec import AttentionBackwardSpec

# By consumer warpgroups: registers per producer and per consumer thread; the first split that fits is used. The splits
# for one consumer are for two thread blocks per SM.
REGISTER_SPLITS = {1: ((40, 216), (24, 232)), 2: ((40, 232), (24, 240))}
# Addresses, loop state, statistics: an allowance that avoids spills and serialization of wgmmas by ptxas. dQ holds S of
# a step and dS of the previous step at the same time, which the sum of its accumulators does not count.
OVERHEAD_REGISTERS = {"dq": 40, "dkdv": 12}
RUNS_REGISTERS = 8  # more, in dQ, for masks of patterns with several ranges of keys: they compare with more bounds
LARGEST_SUMMED = 128  # largest head_dim for which one warpgroup has registers for dK and dV of 64 keys


@dataclass(frozen=True)
class Sizes:
    """Sizes derived from a spec.

    Attributes:
        columns: columns per column group.
        groups: column groups per head.
        consumers: warpgroups that compute.
        divides_products: whether the consumers split the products of the same 64 keys: one accumulates dV, the other
            dK. Otherwise each has its own 64 rows, with all of their products.
        v_stages: stages of the ring of V (dQ): one fewer than that of K, whose stages are in use for longer, if both
            do not fit.
        q_bytes: bytes of Q, or of dO, of a tile or step.
        kv_bytes: bytes of K, or of V, of a step or tile.
        shared: shared memory layout.
        producer: registers per producer thread.
        registers: register budget per consumer thread.
    """

    columns: int
    groups: int
    consumers: int
    divides_products: bool
    v_stages: int
    q_bytes: int
    kv_bytes: int
    shared: SharedLayout
    producer: int
    registers: Registers

    @classmethod
    def of(cls, spec: AttentionBackwardSpec) -> Sizes:
        """Sizes of a spec, without a check that they fit."""
        columns = SWIZZLE // DTYPES[spec.dtype].bytes
        groups, m, n = -(-spec.head_dim // columns), spec.tile.m, spec.tile.n
        is_dq = spec.gradients == "dq"
        divided = divides_products(spec)
        resident, step = (m, n) if is_dq else (n, m)
        consumers = 2 if divided else resident // WARPGROUP_ROWS
        q_bytes, kv_bytes = m * groups * SWIZZLE, n * groups * SWIZZLE
        v_stages, shared = spec.stages, _shared(spec, q_bytes, kv_bytes, spec.stages)
        if is_dq and spec.stages > 1 and shared.size > ARCHS[spec.arch].shared_memory_per_block:
            v_stages, shared = spec.stages - 1, _shared(spec, q_bytes, kv_bytes, spec.stages - 1)
        # Per thread and column of 64 rows: half a register for a product, a quarter for a 16-bit operand.
        sums = spec.head_dim // 2 * (1 if is_dq or divided else 2)
        operand = 0 if is_dq else step // 4  # P^T in addition to S^T and dP^T; dS replaces them
        accumulators = sums + 2 * (step // 2) + operand
        splits, overhead = REGISTER_SPLITS[consumers], OVERHEAD_REGISTERS[spec.gradients]
        runs = spec.pattern.masks_pairs and not spec.pattern.banded and spec.pattern.fixed_block is None
        overhead += RUNS_REGISTERS if is_dq and runs else 0
        expression = expression_registers(spec.forward, gradients=True)
        overhead += expression
        producer, consumer = next((s for s in splits if accumulators + overhead <= s[1]), splits[-1])
        registers = Registers(accumulators, overhead, consumer, expression)
        return cls(columns, groups, consumers, divided, v_stages, q_bytes, kv_bytes, shared, producer, registers)


def divides_products(spec: AttentionBackwardSpec) -> bool:
    """Whether dK and dV of 64 keys exceed the registers of one warpgroup."""
    return spec.gradients == "dkdv" and spec.head_dim > LARGEST_SUMMED


def _shared(spec: AttentionBackwardSpec, q_bytes: int, kv_bytes: int, v_stages: int) -> SharedLayout:
    """Shared memory layout: operands of the tile, and the ring of its steps."""
    stages, rows = spec.stages, spec.tile.m
    shared = SharedLayout()
    barriers = 2 * stages + 1
    if spec.gradients == "dq":
        shared.add("Q", q_bytes, "Q of the tile in column groups; then staging of dQ", stores=True)
        shared.add("Dout", q_bytes, "dO of the tile")
        own_barriers = v_stages < stages
        of_v = "v" if own_barriers else "kv"
        shared.add("K", stages * kv_bytes, "K ring", ring=Ring(stages, "kv_full[i]", "kv_empty[i]"))
        shared.add("V", v_stages * kv_bytes, "V ring", ring=Ring(v_stages, f"{of_v}_full[i]", f"{of_v}_empty[i]"))
        barriers += 2 * v_stages if own_barriers else 0
    else:
        first, second = ("dV", "dK") if divides_products(spec) else ("dK", "dV")
        shared.add("K", kv_bytes, f"K of the tile in column groups; then staging of {first}", stores=True)
        shared.add("V", kv_bytes, f"V of the tile; then staging of {second}", stores=True)
        ring = Ring(stages, "q_full[i]", "q_empty[i]")
        shared.add("Q", stages * q_bytes, "Q ring", ring=ring)
        shared.add("Dout", stages * q_bytes, "dO ring", ring=ring)
        if divides_products(spec):
            shared.add(
                "Weights", WARPGROUP_ROWS * rows * 4, "P^T of a step in fp32, which one consumer passes to the other"
            )
        shared.add("Stats", stages * rows * STATS_BYTES, "statistics of the queries in the ring", align=16)
    shared.add("Barriers", 8 * barriers, "mbarriers", align=8)
    if spec.gradients == "dkdv" and spec.score is not None:
        step_places(shared, spec)
    step_meta(shared, spec)
    tile_segment(shared, spec)
    arrived_barrier(shared, spec)
    return shared
