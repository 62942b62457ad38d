"""Plans of attention over pages: tiles, workspaces, shared memory, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.arch import ARCHS, KIB
from codegen.errors import SpecError
from codegen.library import NamedSpec, find_spec, shipped_specs
from codegen.paged_cases import CASES, SPOILED_CASES, cases_of
from codegen.planning import plan_for
from codegen.plans.paged_attention import TILE_COST, tiles_of
from codegen.problem import PagedShape
from codegen.spec import PagedAttentionSpec

SHIPPED = [named for named in shipped_specs() if named.spec.op == "paged_attention"]


def spec_of(**fields: Any) -> PagedAttentionSpec:
    spec = find_spec({"op": "paged_attention", "arch": "sm_90a", "head_dim": 128, **fields}).spec
    assert isinstance(spec, PagedAttentionSpec)
    return spec


def test_every_cache_and_head_size_has_a_kernel_on_the_device_that_has_one() -> None:
    found = {(named.spec.arch, named.spec.dtype, named.spec.cache, named.spec.head_dim) for named in SHIPPED}  # type: ignore[union-attr]
    for arch in ("sm_90a", "sm_89"):
        for dtype in ("fp16", "bf16"):
            heads = {(cache, d) for of, kind, cache, d in found if (of, kind) == (arch, dtype)}
            assert heads >= {("same", d) for d in (64, 128, 256)} | {("e4m3", d) for d in (64, 128, 256)}


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if not ARCHS[arch].has_fp8])
def test_architectures_without_fp8_have_no_e4m3_caches(arch: str) -> None:
    with pytest.raises(SpecError, match=rf"^cache: is e4m3; {arch} lacks FP8: use sm_89, sm_90a, sm_120"):
        plan_for(find_spec({"op": "paged_attention", "arch": arch, "head_dim": 64, "cache": "e4m3"}))
    assert plan_for(find_spec({"op": "paged_attention", "arch": arch, "head_dim": 64})).threads


@pytest.mark.parametrize("arch", ARCHS)
def test_what_no_kernel_has_is_refused_by_name(arch: str) -> None:
    def refused(says: str, **fields: Any) -> None:
        with pytest.raises(SpecError, match=says):
            plan_for(find_spec({"op": "paged_attention", "arch": arch, "head_dim": 64, **fields}))

    if ARCHS[arch].has_fp8:
        refused(r"^head_dim: is 192; e4m3 caches have heads of 64, 128 or 256", head_dim=192, cache="e4m3")
        refused(r"^tile.n: is 16; allowed: 32, 64, 128, 256", cache="e4m3", tile={"m": 16, "n": 16})
    refused(r"^head_dim: is 80; allowed: 64, 128, 192 or 256", head_dim=80)
    refused(r"^tile.m: is 64; allowed: 16, 32", tile={"m": 64, "n": 64})
    refused(r"^tile.n: is 48; allowed: 16, 32, 64, 128", tile={"m": 16, "n": 48})
    refused(r"^stages: is 1: 4096 bytes, fewer than the 4608 of a warp's sums", tile={"m": 16, "n": 16}, stages=1)
    refused(r"^stages: .*shared memory", head_dim=256, tile={"m": 16, "n": 128}, stages=8)
    refused(r"^dtype", dtype="e4m3")


@pytest.mark.parametrize("named", SHIPPED, ids=lambda named: named.stem)
def test_shared_memory_and_threads_fit(named: NamedSpec) -> None:
    plan, arch = plan_for(named), ARCHS[named.spec.arch]
    spec: Any = named.spec
    regions = {region.name: region for region in plan.shared}
    ends = sorted((region.offset, region.offset + region.bytes) for region in plan.shared)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert (
        ends[-1][1] <= plan.shared_bytes and plan.ctas_per_sm * (plan.shared_bytes + KIB) <= arch.shared_memory_per_sm
    )
    warps, element = plan.threads // 32, 1 if spec.cache == "e4m3" else 2
    assert regions["Ring"].bytes == spec.stages * 2 * spec.tile.n * spec.head_dim * element
    assert regions["Ring"].bytes // warps >= spec.tile.m * (spec.head_dim + 8) * 4, "sums of a warp are in its ring"
    assert plan.threads % spec.tile.m == 0 and spec.head_dim % (4 * plan.threads // spec.tile.m) == 0
    assert plan.ctas_per_sm * plan.threads <= 32 * arch.warps_per_sm


@given(
    lengths=st.lists(st.integers(0, 99), min_size=1, max_size=40),
    group=st.sampled_from([1, 3, 4, 16, 24]),
    kv_heads=st.integers(1, 4),
    m=st.sampled_from([16, 32]),
)
def test_tiles_are_at_least_those_of_any_lengths(lengths: list[int], group: int, kv_heads: int, m: int) -> None:
    spec = spec_of(head_dim=64, tile={"m": m, "n": 16})
    tokens = max(1, sum(lengths))
    shape = PagedShape(len(lengths), tokens, group * kv_heads, kv_heads)
    assert tiles_of(spec, shape) >= sum(-(-length * group // m) for length in lengths) * kv_heads
    listed = PagedShape(len(lengths), tokens, group * kv_heads, kv_heads, list_length=5)
    assert tiles_of(spec, listed) == tokens * -(-group // m) * kv_heads


@pytest.mark.parametrize("named", SHIPPED, ids=lambda named: named.stem)
def test_workspaces_depend_on_the_device_or_on_tiles(named: NamedSpec) -> None:
    plan = plan_for(named)
    spec: Any = named.spec
    part = spec.tile.m * (spec.head_dim + 2) * 4
    for tokens, batch in ((1, 1), (64, 64), (5000, 3)):
        shape = PagedShape(batch, tokens, 32, 8, 1 << 17)
        args = plan.problem(shape, 264)
        assert args.tiles == 264 and args.counters == {"counters": 264} and args.scratch == {"partials": 528 * part}
        invariant = PagedShape(batch, tokens, 32, 8, 1 << 17, most_parts=16)
        tiles, args = tiles_of(spec, invariant), plan.problem(invariant, 264)
        assert args.tiles == 264 and args.counters == {"counters": tiles}
        assert args.scratch == {"partials": 16 * tiles * part}
        assert args.units == tiles * (TILE_COST + -(-(1 << 17) // spec.tile.n))


def test_units_beyond_32_bits_are_told() -> None:
    plan = plan_for(find_spec("h100_paged_d128"))
    assert plan.problem(PagedShape(1, 1 << 16, 64, 8, 1 << 20), 264).units >= 2**31
    assert plan.problem(PagedShape(1, 1, 64, 8, 1 << 30), 264).units < 2**31
    listed = plan.problem(PagedShape(1, 1 << 16, 64, 8, 1 << 30, 2048, 1), 264)
    assert listed.units == (1 << 16) * 8 * (TILE_COST + 2048 // 64) and listed.numbers["list_steps"] == 32


def test_cases_have_names_of_their_own_and_all_that_a_call_has() -> None:
    for named in SHIPPED:
        assert isinstance(named.spec, PagedAttentionSpec)
        names = [case.name for case in cases_of(named.spec)]
        assert len({*names}) == len(names) and any("token_scales" in name for name in names) is (
            named.spec.cache == "e4m3"
        )
    sizes, layouts = {case.page_size for case in CASES}, {case.layout for case in CASES}
    assert sizes >= {0, 1, 16, 32, 64, 128, 256} and layouts == {"NHD", "HND", "rows"}
    flags = "shared", "before", "sink_keys", "entries", "counted", "repeated", "softcap", "sinks", "batch_invariant"
    for name in flags:
        assert any(getattr(case, name) for case in CASES), name
    assert not all(case.head_lists for case in CASES) and {case.entry_keys for case in CASES} >= {1, 4, 8, 16, 64, 128}
    assert {(bool(case.sink_keys), max(case.q_lens) > 1) for case in SPOILED_CASES if case.window[0]} == {
        (sinks, drafts) for sinks in (False, True) for drafts in (False, True)
    }
    assert all(case.spoiled for case in SPOILED_CASES)
    assert any(0 in case.kv_lens for case in CASES) and any(0 in case.q_lens for case in CASES)
