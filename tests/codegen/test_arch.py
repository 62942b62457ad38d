"""How many thread blocks the registers of an SM hold, and what each thread then has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.arch import ARCHS
from codegen.library import shipped_specs
from codegen.planning import plan_for

SM90 = ARCHS["sm_90a"]


@pytest.mark.parametrize(
    ("threads", "blocks", "registers"),
    [
        (128, 1, 255),  # a warp on each partition: more than a thread can address
        (256, 1, 255),
        (512, 1, 128),
        (288, 2, 96),  # 18 warps: five on some partition, where 65536 / 576 would be 112
        (320, 2, 96),
        (64, 9, 96),
        (64, 8, 128),
    ],
)
def test_a_threads_registers_are_those_of_the_partition_with_most_warps(
    threads: int, blocks: int, registers: int
) -> None:
    assert SM90.registers_for(threads, blocks) == registers


@given(warps=st.integers(1, 32), registers=st.integers(1, 400))
def test_as_many_thread_blocks_fit_as_leave_each_thread_what_it_needs(warps: int, registers: int) -> None:
    threads, needed = 32 * warps, min(registers, SM90.registers_per_thread)
    blocks = SM90.blocks_for(threads, registers)
    assert blocks == 0 or SM90.registers_for(threads, blocks) >= needed
    assert SM90.registers_for(threads, blocks + 1) < needed


def test_no_shipped_plan_reckons_with_more_than_a_thread_has() -> None:
    for named in shipped_specs():
        plan = plan_for(named)
        if plan.spec.schedule == "multistage":
            most = plan.arch.registers_for(plan.threads, plan.ctas_per_sm)
            assert plan.registers.needed <= plan.registers.limit <= most, named.stem


def test_kernels_need_what_their_architecture_has() -> None:
    for arch in ARCHS.values():
        for each in arch.combinations:
            assert each.mma != "wgmma" or arch.has_wgmma, f"{arch.name}: {each}"
            assert each.copy != "tma" or arch.has_tma, f"{arch.name}: {each}"
            assert each.op != "quantize" or arch.has_fp8, f"{arch.name}: {each}"
        assert not arch.has_fp8_wgmma or arch.has_wgmma, arch.name
