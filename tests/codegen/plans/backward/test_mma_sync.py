"""Plans of the gradients of attention by mma.sync: what they take up, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest

from codegen.arch import ARCHS, KIB
from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.problem import AttentionShape
from codegen.render import render_plan

TOPK = {"kind": "topk", "block": {"q": 64, "kv": 64}}
BITS = {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "bits"}
MUCH_ASKED = {**BITS, "mask": "t[q_idx - kv_idx] > t[kv_idx] and t[q_idx] > t[head]", "aux": {"t": "fp32[999]"}}
WIDE = [192, 256]
EACH_PATTERN: tuple[dict[str, Any], ...] = (
    {"kind": "dense"},
    {"kind": "causal"},
    {"kind": "sliding_window", "left": 100, "right": 70},
    {"kind": "sink_window", "sink": 4, "left": 500, "right": 30},
    {"kind": "strided", "stride": 3, "local": 1, "block": 64},
    {"kind": "prefix_lm"},
    *({"kind": "topk", "block": {"q": q, "kv": kv}} for q in (64, 128) for kv in (64, 128)),
    *(
        {**BITS, "block": {"q": q, "kv": kv}, "mask": m}
        for q in (64, 128)
        for kv in (64, 128)
        for m in ("causal", "bits")
    ),
    MUCH_ASKED,
)
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_120")


def plan_of(gradients: str, pattern: dict[str, Any] | None = None, **fields: Any) -> Plan:
    common = {"op": "attention_backward", "arch": "sm_89", "head_dim": 128, "gradients": gradients}
    return plan_for(find_spec({**common, "pattern": pattern or {"kind": "dense"}, **fields}))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("gradients", ["dq", "dkdv"])
def test_two_thread_blocks_of_small_blocks_share_an_sm(gradients: str, head_dim: int) -> None:
    causal = {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "causal"}
    for pattern in (TOPK, causal):
        plan = plan_of(gradients, pattern, head_dim=head_dim)
        assert plan.ctas_per_sm == 2
        assert 2 * (plan.shared_bytes + KIB) <= ARCHS["sm_89"].shared_memory_per_sm
        assert 2 * plan.threads * plan.registers.needed <= ARCHS["sm_89"].registers_per_sm


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("gradients", ["dq", "dkdv"])
def test_every_architecture_of_mma_sync_has_them(gradients: str, arch: str) -> None:
    plan = plan_of(gradients, arch=arch)
    assert (plan.spec.mma, plan.spec.copy_, plan.spec.schedule) == ("mma", "cp_async", "multistage")
    assert not plan.tensor_maps and plan.prologue is not None


def test_what_a_step_multiplies_and_loads() -> None:
    dq, dkdv = plan_of("dq"), plan_of("dkdv")
    assert (dq.flops, dq.bytes) == (3 * 2 * 128 * 32 * 128, 2 * 32 * 128 * 2)
    assert (dkdv.flops, dkdv.bytes) == (4 * 2 * 128 * 32 * 128, 2 * 32 * 128 * 2)


def test_q_and_dout_arrive_where_the_ring_is() -> None:
    for plan in (plan_of("dq", TOPK), plan_of("dq", tile={"m": 128, "n": 32}, stages=2)):
        regions = {region.name: region for region in plan.shared}
        assert regions["Q"].aliases == regions["Dout"].aliases == "Ring"
        assert regions["Q"].bytes + regions["Dout"].bytes <= regions["Ring"].bytes
        assert not regions["Q"].overlaps(regions["Dout"])


@pytest.mark.parametrize("head_dim", [64, 128, *WIDE])
@pytest.mark.parametrize("gradients", ["dq", "dkdv"])
def test_every_pattern_has_a_tile_by_default_with_all_options(gradients: str, head_dim: int) -> None:
    for pattern in EACH_PATTERN:
        for options in ({}, {"softcap": 9.0, "kv_lengths": True}):
            plan = plan_of(gradients, pattern, head_dim=head_dim, **options)
            assert plan.shared_bytes <= ARCHS["sm_89"].shared_memory_per_block
            assert plan.registers.needed <= plan.registers.limit


@pytest.mark.parametrize("head_dim", WIDE)
def test_dk_and_dv_of_wide_heads_are_summed_up_by_two_thread_blocks(head_dim: int) -> None:
    shape = AttentionShape(3, 4, 2, 500, 1000)
    for gradients, size, tiles in (("dkdv", 128, 2 * 8), ("dkdv", head_dim, 2 * 2 * 16), ("dq", head_dim, 4 * 8)):
        assert plan_of(gradients, head_dim=size).problem(shape).tiles == 3 * tiles, (gradients, size)
    plan = plan_of("dkdv", head_dim=head_dim)
    step = plan.spec.tile.model_dump()["m"]
    assert (plan.flops, plan.bytes) == (5 * 2 * step * 64 * head_dim, 2 * 2 * step * head_dim * 2)
    source = render_plan(plan)
    assert "index = blockIdx.x / 2" in source and "of_dk = blockIdx.x % 2 == 1;" in source
    assert source.count("\n    add_gradient(") == 1, "either dV or dK"


@pytest.mark.parametrize("head_dim", WIDE)
def test_q_and_dout_of_wide_heads_have_places_of_their_own(head_dim: int) -> None:
    regions = {region.name: region for region in plan_of("dq", head_dim=head_dim).shared}
    assert not any(one.overlaps(other) for one in regions.values() for other in regions.values() if one is not other)
    assert regions["Q"].bytes == regions["Dout"].bytes == 64 * head_dim * 2


@pytest.mark.parametrize("gradients", ["dq", "dkdv"])
def test_options_are_in_the_source_where_they_are_asked_for(gradients: str) -> None:
    plain = render_plan(plan_of(gradients))
    for word, options in (("cap_slope", {"softcap": 9.0}), ("p.kv_lengths", {"kv_lengths": True})):
        assert word not in plain and word in render_plan(plan_of(gradients, **options)), word
    with_bits = render_plan(plan_of(gradients, BITS))
    assert "load_word" in with_bits and "visible(" not in with_bits


def test_steps_that_share_a_word_of_bits_begin_in_it_where_they_are() -> None:
    """Of 16 keys: two steps have one word."""
    source = render_plan(plan_of("dq", BITS, tile={"m": 64, "n": 16}))
    assert "(bits) + i % kBlockSteps * kTileN / 32;" in source and "kStepWords = 1;" in source
    wide = render_plan(plan_of("dq", {**BITS, "block": {"q": 64, "kv": 128}}, head_dim=64))
    assert "(bits) + i % kBlockSteps * (kTileN / 32);" in wide and "kStepWords = 2;" in wide


@pytest.mark.parametrize("gradients", ["dq", "dkdv"])
def test_what_is_copied_ends_with_the_keys_of_the_batch(gradients: str) -> None:
    """So that K and V behind it are zeros, whatever is there."""
    source = render_plan(plan_of(gradients, kv_lengths=True))
    copied = re.findall(r"copy_rows<kTileN>\([^;]*?([\w.]+) - (?:first_)?row, p\.head_chunks\);", source)
    assert copied == ["kv_end"] * 2


@pytest.mark.parametrize(
    ("gradients", "fields", "message"),
    [
        ("dq", {"tile": {"m": 32, "n": 32}}, "tile.m: is 32; allowed: 64, 128 (warps of 16 rows)"),
        ("dkdv", {"tile": {"m": 32, "n": 96}}, "tile.n: is 96; allowed: 64, 128 (warps of 16 rows)"),
        ("dq", {"tile": {"m": 64, "n": 24}}, "tile.n: is 24; allowed: 16 to 128, multiples of 16"),
        ("dkdv", {"tile": {"m": 144, "n": 64}}, "tile.m: is 144; allowed: 16 to 128, multiples of 16"),
        ("dq", {"tile": {"m": 128, "n": 48}}, "tile.n: is 48; expected a multiple of the 32 rows that 8 warps"),
        (
            "dkdv",
            {"tile": {"m": 16, "n": 128}},
            "tile.m: is 16; expected a multiple of the 32 rows that 8 warps copy at a time",
        ),
        ("dq", {"stages": 1}, "stages: is 1; allowed: 2 to 8 (one stage fills while another is read)"),
        ("dq", {"tile": {"m": 128, "n": 64}}, "tile: 128 x 64 needs about 258 registers per thread (208 of them"),
        ("dkdv", {"stages": 3}, "stages: 3 stages of tile 32 x 128 need 113 KB of shared memory, sm_89 has 99 KB"),
        ("dq", {"pattern": {**TOPK, "block": {"q": 64, "kv": 32}}}, "pattern.block.kv: is 32; allowed in a gradient: "),
        (
            "dq",
            {"pattern": TOPK, "tile": {"m": 64, "n": 48}},
            "tile.n: is 48; a step is a key block or an equal part of one",
        ),
        (
            "dkdv",
            {"pattern": TOPK, "tile": {"m": 32, "n": 128}},
            "tile.n: is 128; a tile is a key block or an equal part of one",
        ),
        ("dq_dkdv", {}, "gradients: is dq_dkdv; allowed on sm_89: dq, dkdv"),
        ("dq", {"head_dim": 96}, "head_dim: is 96; allowed in a gradient on sm_89: 64, 128, 192, 256"),
        (
            "dq",
            {"head_dim": 256, "tile": {"m": 64, "n": 32}},
            "stages: 2 stages of tile 64 x 32 need 129 KB of shared memory, sm_89 has 99 KB",
        ),
        ("dkdv", {"head_dim": 192, "stages": 3}, "stages: 3 stages of tile 32 x 64 need 121 KB of shared memory"),
        ("dkdv", {"pattern": MUCH_ASKED, "tile": {"m": 64, "n": 64}}, "tile: 64 x 64 needs about 2"),
    ],
)
def test_what_is_refused(gradients: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(gradients, **fields)
    assert str(caught.value).startswith(message), str(caught.value)
