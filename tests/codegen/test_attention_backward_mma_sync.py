"""Plans of the gradients of attention by mma.sync: what they take up, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.arch import ARCHS, KIB
from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.plan import Plan
from codegen.plans import plan_for

TOPK = {"kind": "topk", "block": {"q": 64, "kv": 64}}
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


@pytest.mark.parametrize(
    ("gradients", "fields", "message"),
    [
        ("dq", {"tile": {"m": 32, "n": 32}}, "tile.m: is 32; allowed: 64, 128 (warps of 16 rows)"),
        ("dkdv", {"tile": {"m": 32, "n": 96}}, "tile.n: is 96; allowed: 64, 128 (warps of 16 rows)"),
        ("dq", {"tile": {"m": 64, "n": 24}}, "tile.n: is 24; allowed: 16 to 128, multiples of 16"),
        ("dkdv", {"tile": {"m": 144, "n": 64}}, "tile.m: is 144; allowed: 16 to 128, multiples of 16"),
        ("dq", {"tile": {"m": 128, "n": 48}}, "tile.n: is 48; 8 warps copy 32 rows at a time: a multiple"),
        (
            "dkdv",
            {"tile": {"m": 16, "n": 128}},
            "tile.m: is 16; 8 warps copy 32 rows at a time: a multiple is expected",
        ),
        ("dq", {"stages": 1}, "stages: is 1; allowed: 2 to 8 (one stage fills while another is read)"),
        ("dq", {"tile": {"m": 128, "n": 64}}, "tile: 128 x 64 needs about 258 registers a thread (208 of them"),
        ("dkdv", {"stages": 3}, "stages: 3 stages of tile 32 x 128 need 113 KB of shared memory, sm_89 has 99 KB"),
        ("dq", {"pattern": {**TOPK, "block": {"q": 64, "kv": 32}}}, "pattern.block.kv: is 32; allowed in a gradient: "),
        ("dq", {"pattern": TOPK, "tile": {"m": 64, "n": 48}}, "tile.n: is 48; a step is a key block, or an equal part"),
        (
            "dkdv",
            {"pattern": TOPK, "tile": {"m": 32, "n": 128}},
            "tile.n: is 128; a tile is a key block, or an equal part",
        ),
        (
            "dq",
            {"pattern": {**TOPK, "kind": "block_lists", "mask": "bits"}},
            "pattern.mask: is bits, of which sm_89 has no gradient; allowed: ",
        ),
        ("dq", {"softcap": 9.0}, "softcap: is 9.0, of which sm_89 has no gradient"),
        ("dkdv", {"kv_lengths": True}, "kv_lengths: is true, of which sm_89 has no gradient"),
        ("dq_dkdv", {}, "gradients: is dq_dkdv; allowed on sm_89: dq, dkdv"),
        ("dq", {"head_dim": 96}, "head_dim: is 96; allowed in a gradient on sm_89: 64, 128"),
    ],
)
def test_what_is_refused(gradients: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(gradients, **fields)
    assert str(caught.value).startswith(message), str(caught.value)
