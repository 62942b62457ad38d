"""Plans: regions of shared memory do not overlap, and what does not fit is refused with the numbers."""

from __future__ import annotations

import json
import math
import pickle
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from each import every_source, looped

from codegen.arch import KIB
from codegen.errors import SpecError
from codegen.flags import Flags
from codegen.library import TEMPLATES, NamedSpec, find_spec, shipped_specs
from codegen.parse import parse_spec
from codegen.patterns import PatternBase
from codegen.plan import Plan, Registers, SharedLayout, TensorMap, check_budget
from codegen.planning import plan_for
from codegen.preparation import round_columns
from codegen.problem import (
    AttentionShape,
    BlockMaskShape,
    CopyShape,
    KeyListsShape,
    PagedShape,
    QuantizeShape,
    SddmmShape,
    SelectShape,
    SpgemmShape,
    SpmmShape,
)
from codegen.receipts import MissingReceipt, read_receipt, receipt_path
from codegen.render import generate, render_plan
from codegen.spec import AttentionSpec
from codegen.tools.explain import (
    blocks_by_registers,
    blocks_by_shared_memory,
    blocks_by_threads,
    explained,
    launch_registers,
    occupancy,
)

C_TYPES = {"i32": {"int"}, "i64": {"int64"}, "f32": {"float"}, "tensor_map": {"TensorMap"}}


@every_source
def test_shared_memory_map(named: NamedSpec) -> None:
    plan = plan_for(named)
    regions = {region.name: region for region in plan.shared}
    for number, region in enumerate(plan.shared):
        assert region.bytes > 0
        below = [other for other in plan.shared[:number] if other.overlaps(region)]
        if region.aliases is None:
            assert not below, f"{region.name} overlaps {below[0].name}"
        else:
            assert below and below[0] is regions[region.aliases] and below[0].aliases is None
    last = max(region.offset + region.bytes for region in plan.shared)
    assert last == plan.shared_bytes <= plan.arch.shared_memory_per_block
    assert len(regions) == len(plan.shared)


@every_source
def test_what_a_launch_is_given_are_parameters(named: NamedSpec) -> None:
    plan = plan_for(named)
    pointers = {param.name for param in plan.params if param.type == "pointer"}
    assert plan.dynamic_scheduler == ("scheduler" in pointers)
    pattern = getattr(named.spec, "pattern", None)
    numbers = dict.fromkeys(pattern.number_params, 40) if isinstance(pattern, PatternBase) else {}
    shape = {
        "attention": AttentionShape(2, 64, 1, 1000, 1000, 1, 1, **numbers),
        "attention_backward": AttentionShape(2, 64, 1, 1000, 1000, 1, 1, 8, **numbers),
        "block_mask": BlockMaskShape(2, 64, 1000, 1000),
        "bsr_spmm": SpmmShape(4096, 4096, 1000, 900, 1000, chunk_blocks=plan.row_cutting and 120),
        "bsr_sddmm": SddmmShape(1024, 1024, 1000, 10),
        "bsr_spgemm": SpgemmShape(1024, 1024, 1024, 10),
        "key_lists_backward": KeyListsShape(3, 1000, 1000, 4, 16),
        "key_lists_forward": KeyListsShape(3, 1000, 1000, 4, 16),
        "paged_attention": PagedShape(3, 100, 64, 8, 4096),
        "quantize": QuantizeShape(2, 64, 1000, 8),
        "select_topk": SelectShape(2, 64, 1, 1000, 1000, 72, 128, 64),
        "tile_copy": CopyShape(1000, 1000),
    }[named.spec.op]
    args = plan.problem(shape, 132)
    assert args.tiles > 0 and {*args.counters, *args.scratch} <= pointers
    assert {*args.numbers} <= {param.name for param in plan.params if param.type in ("i32", "i64")}


@every_source
def test_a_plan_can_be_sent_to_another_process(named: NamedSpec) -> None:
    plan = plan_for(named)
    assert pickle.loads(pickle.dumps(plan)) == plan == plan_for(named)


@cache
def words_of_tags(path: str) -> set[str]:
    """Words in the tags of a template."""
    tags = re.findall(r"\{[{%].*?[}%]\}", (TEMPLATES / path).read_text(encoding="utf-8"), re.DOTALL)
    return {word for tag in tags for word in re.findall(r"\w+", tag)}


def test_templates_ask_every_flag() -> None:
    asked: dict[type[Flags], set[str]] = {}
    given: dict[type[Flags], set[str]] = {}
    files = (Path(__file__).parents[2] / f"unshipped_{name}.json" for name in ("attention", "bsr"))
    unshipped = (fields for file in files for fields in json.loads(file.read_text(encoding="utf-8")))
    for named in (*shipped_specs(), *map(find_spec, unshipped)):
        generated = generate(named)
        kind = type(generated.plan.flags)
        asked.setdefault(kind, set()).update(*map(words_of_tags, generated.templates))
        given[kind] = {*generated.plan.flags.named()}
    given = {kind: names - EXPRESSIONS for kind, names in given.items()}
    assert not {kind.__name__: names - asked[kind] for kind, names in given.items() if names - asked[kind]}


EXPRESSIONS = {"aux", "expression_helpers", "mask_lines", "shares_row_parts", "shares_column_parts"}
EXPRESSIONS |= {"score_expression", "score_lines", "slope_expression", "slope_lines"}
EXPRESSIONS |= {"pair_expression", "pair_lines"}
"""Of masks and scores that are expressions: all kernels are asked for them, and not all have some."""


@every_source
def test_alignment(named: NamedSpec) -> None:
    plan = plan_for(named)
    # What TMA and WGMMA swizzle by 128 bytes repeats every 1024; mbarriers are 8 bytes; vector loads are 16.
    swizzled = any(box.swizzle == 128 for box in plan.tensor_maps.values())
    for region in plan.shared:
        if region.name == "Barriers":
            assert region.offset % 8 == 0
        elif region.bytes >= KIB and region.name not in ("Loads", "Steps", "Norms"):  # words of threads
            assert region.offset % (1024 if swizzled else 16) == 0, region.name


@every_source
def test_blocks_fit_an_sm(named: NamedSpec) -> None:
    plan = plan_for(named)
    assert plan.threads % 32 == 0
    assert plan.threads <= 1024
    assert plan.ctas_per_sm <= min(blocks_by_shared_memory(plan), blocks_by_threads(plan), blocks_by_registers(plan))
    assert plan.registers.needed <= plan.registers.limit <= plan.arch.registers_per_thread
    if named.spec.schedule == "multistage":  # no registers change hands: every thread has what it started with
        assert plan.registers.needed <= launch_registers(plan)


@every_source
def test_registers_handed_over_add_up(named: NamedSpec) -> None:
    plan = plan_for(named)
    constants = {constant.name: constant.value for constant in plan.constants}
    if "kProducerRegisters" not in constants:
        pytest.skip("one kind of warp")
    warpgroups = plan.threads // 128
    total = 128 * (constants["kProducerRegisters"] + (warpgroups - 1) * constants["kConsumerRegisters"])
    assert total <= plan.threads * launch_registers(plan)
    assert constants["kConsumerRegisters"] == plan.registers.limit


@every_source
def test_names_and_comments(named: NamedSpec) -> None:
    plan = plan_for(named)
    for names in ([c.name for c in plan.constants], [p.name for p in plan.params]):
        assert len(set(names)) == len(names)
    assert all(c.comment and c.name.startswith("k") for c in plan.constants)
    assert all(p.doc for p in plan.params)
    for param in plan.params:
        assert param.ctype in C_TYPES[param.type] if param.type in C_TYPES else param.ctype.endswith("*")
    assert set(plan.tensor_maps) == {p.name for p in plan.params if p.type == "tensor_map"}
    assert (plan.flops > 0) == (named.spec.op not in ("block_mask", "quantize", "tile_copy"))
    assert plan.bytes > 0
    assert plan.summary


@every_source
def test_tma_boxes_are_encodable(named: NamedSpec) -> None:
    plan = plan_for(named)
    for name, tensor in plan.tensor_maps.items():
        assert all(1 <= extent <= 256 for extent in tensor.box), name
        assert tensor.swizzle in (0, 32, 64, 128)
        if tensor.swizzle:
            assert tensor.box[0] * plan.dtype.bytes <= tensor.swizzle


@every_source
def test_pattern_tensors_reach_the_kernel(named: NamedSpec) -> None:
    spec = named.spec
    if not isinstance(spec, AttentionSpec):
        pytest.skip("not attention")
    params = {param.name for param in plan_for(named).params}
    for tensor in spec.index_tensors:
        axes: tuple[str, ...] = ("batch",) if tensor.per_batch else ("batch", "head", "row")
        axes += ("entry",) if tensor.of_entries else ()
        axes = () if tensor.dims == ("bounds",) else axes
        wanted = {tensor.name, *(f"{tensor.name}_{axis}_stride" for axis in axes)}
        assert wanted == {name for name in params if name.startswith(tensor.name)} - {f"{tensor.name}_length"}
    assert ("lse" in params) == spec.lse


def test_layout_aligns_and_counts() -> None:
    layout = SharedLayout()
    assert layout.add("A", 100, "").offset == 0
    assert layout.add("B", 8, "").offset == 1024
    assert layout.add("C", 8, "", align=8).offset == 1032
    assert layout.size == 1040


def plan_of(data: dict[str, Any]) -> Plan:
    return plan_for(find_spec(data))


def test_too_much_shared_memory_is_refused_with_numbers(attention: dict[str, Any]) -> None:
    spec = parse_spec(attention)
    enough = Registers(accumulators=100, overhead=40, limit=240)
    check_budget(spec, 227 * KIB, enough)
    with pytest.raises(SpecError) as caught:
        check_budget(spec, 227 * KIB + 1, enough)
    assert caught.value.field == "stages"
    assert "need 228 KB of shared memory, sm_90a has 227 KB" in caught.value.reason


def test_a_heavy_expression_is_not_refused_for_its_registers(attention: dict[str, Any]) -> None:
    spec = parse_spec(attention)
    check_budget(spec, 0, Registers(accumulators=200, overhead=28 + 100, limit=240, expression=100))
    with pytest.raises(SpecError, match="241 registers"):
        check_budget(spec, 0, Registers(accumulators=200, overhead=29 + 100, limit=240, expression=100))
    with pytest.raises(SpecError, match="241 registers"):  # a light one has those it needs
        check_budget(spec, 0, Registers(accumulators=200, overhead=33 + 8, limit=240, expression=8))
    tables = {f"t{number}": "bool[q_len, kv_len]" for number in range(8)}
    mask = " and ".join(f"{name}[q_idx, kv_idx]" for name in tables)
    pattern = {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": mask, "aux": tables}
    plan = plan_of({"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": pattern})
    assert plan.registers.needed > plan.registers.limit >= plan.registers.least
    told = [json.dumps(explained(each)) for each in (plan, plan_of(attention))]
    assert ["its expression needs about" in each for each in told] == [True, False]


def test_too_many_registers_are_refused_with_numbers(attention: dict[str, Any]) -> None:
    spec = parse_spec(attention)
    check_budget(spec, 0, Registers(accumulators=200, overhead=40, limit=240))
    with pytest.raises(SpecError) as caught:
        check_budget(spec, 0, Registers(accumulators=201, overhead=40, limit=240))
    assert caught.value.field == "tile"
    assert "241 registers" in caught.value.reason
    assert "240 are available" in caught.value.reason


@looped
@pytest.mark.parametrize("stages", range(1, 9))
def test_stages_fit_or_are_refused(attention: dict[str, Any], stages: int) -> None:
    attention["stages"] = stages
    if stages <= 3:
        plan = plan_of(attention)
        assert plan.shared_bytes <= 227 * KIB
        # The third stage takes the place of the next tile's Q, and of the staging of O.
        assert constants_of(plan)["kTileStages"] == (2 if stages < 3 else 1)
        assert [region.name for region in plan.shared if region.name == "O"] == (["O"] if stages < 3 else [])
        return
    with pytest.raises(
        SpecError, match=r"^stages: \d stages of tile 128 x 128 need \d+ KB of shared memory, sm_90a has"
    ):
        plan_of(attention)


@pytest.mark.parametrize(
    ("head_dim", "n", "blocks"), [(64, 64, 2), (64, 128, 2), (128, 64, 2), (128, 128, 1), (256, 64, 1)]
)
def test_one_warpgroup_shares_an_sm_where_it_can(attention: dict[str, Any], head_dim: int, n: int, blocks: int) -> None:
    plan = plan_of(
        attention
        | {"head_dim": head_dim, "pattern": {"kind": "dense"}, "schedule": "cooperative", "stages": 2}
        | {"tile": {"m": 64, "n": n}}
    )
    assert (plan.threads, plan.ctas_per_sm) == (256, blocks)
    assert min(blocks_by_shared_memory(plan), 2) == blocks
    # Registers change hands only where two thread blocks have to make do with what an SM has.
    assert ("kProducerRegisters" in constants_of(plan)) == (blocks == 2) == plan.flags.uses_setmaxnreg
    assert plan.registers.limit == (216 if blocks == 2 else 255)


@looped
@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("schedule", {"schedule": "ping_pong", "tile": {"m": 64, "n": 128}}),
        ("tile.m", {"tile": {"m": 96, "n": 128}}),
        ("tile.m", {"tile": {"m": 320, "n": 128}}),
        ("tile.m", {"tile": {"m": 192, "n": 128}}),
        # 256 rows of a query block in tiles of 192: the second would lie in two blocks.
        (
            "tile.m",
            {
                "pack_gqa": 4,
                "pattern": {"kind": "topk", "k": 8, "block": {"q": 64, "kv": 128}},
                "tile": {"m": 192, "n": 128},
            },
        ),
        ("tile.n", {"tile": {"m": 128, "n": 32}}),
        ("tile.n", {"tile": {"m": 128, "n": 272}}),
        ("tile.n", {"pattern": {"kind": "dense"}, "tile": {"m": 128, "n": 88}}),
        ("tile.n", {"tile": {"m": 128, "n": 80}}),
        ("tile.n", {"pattern": {"kind": "topk", "k": 8, "block": {"q": 128, "kv": 64}}, "tile": {"m": 128, "n": 192}}),
        ("pattern.block.q", {"pattern": {"kind": "topk", "k": 8, "block": {"q": 8, "kv": 128}}}),
        ("pattern.block.kv", {"pattern": {"kind": "topk", "k": 8, "block": {"q": 128, "kv": 32}}}),
    ],
)
def test_tile_the_kernel_is_not_written_for(attention: dict[str, Any], field: str, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(attention | change)
    assert caught.value.field == field
    assert "is " in caught.value.reason


def constants_of(plan: Plan) -> dict[str, int | float]:
    return {constant.name: constant.value for constant in plan.constants}


@pytest.mark.parametrize(
    ("head_dim", "groups", "q_stages", "own_staging"),
    [(64, 1, 2, True), (96, 2, 2, True), (128, 2, 2, True), (192, 3, 1, True), (256, 4, 1, False)],
)
def test_head_sizes(head_dim: int, groups: int, q_stages: int, own_staging: bool) -> None:
    plan = plan_of({"op": "attention", "arch": "sm_90a", "head_dim": head_dim, "pattern": {"kind": "dense"}})
    values = constants_of(plan)
    assert (values["kGroups"], values["kTileStages"]) == (groups, q_stages)
    assert values["kQBytes"] == groups * values["kQGroupBytes"] == groups * 128 * 128
    regions = {region.name: region.bytes for region in plan.shared}
    assert regions["Q"] == q_stages * values["kQBytes"]
    assert ("O" in regions) == own_staging
    # O that takes Q's place keeps to its warpgroup's rows of it.
    assert values["kOGroupBytes"] == (64 * 128 if own_staging else values["kQGroupBytes"])


def test_large_tiles_take_registers_from_the_producer(attention: dict[str, Any]) -> None:
    attention |= {"pattern": {"kind": "dense"}, "stages": 2}
    for keys, split in ((160, (56, 224)), (176, (40, 232))):
        attention["tile"] = {"m": 128, "n": keys}
        values = constants_of(plan_of(attention))
        assert (values["kProducerRegisters"], values["kConsumerRegisters"]) == split
    attention |= {"head_dim": 256, "tile": {"m": 128, "n": 128}, "stages": 1}
    with pytest.raises(SpecError, match=r"^tile: 128 x 128 needs about 256 registers .*, 232 are available"):
        plan_of(attention)


def q_operand(plan: Plan) -> str:
    """Where the products of an sm_90a attention kernel read Q."""
    flags = plan.flags.named()
    return "registers" if flags["q_in_registers"] else "slices" if flags["q_slices"] else "shared"


@looped
@pytest.mark.parametrize(
    ("head_dim", "keys", "rows", "slices"),
    [
        (128, 128, 128, None),
        (128, 144, 128, 5),
        (128, 176, 128, 1),
        (128, 80, 192, 2),
        (128, 64, 192, 5),
        (64, 128, 192, 1),
        (64, 64, 256, 1),  # of two for which there is room
        (256, 64, 128, 4),
        (192, 64, 128, None),
    ],
)
def test_as_much_of_q_is_in_registers_as_there_is_room_for(
    head_dim: int, keys: int, rows: int, slices: int | None
) -> None:
    """Slices of 16 columns, None for all of Q."""
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": head_dim, "tile": {"m": rows, "n": keys}}
    plan = plan_of({**fields, "pattern": {"kind": "dense"}, "stages": 1 if keys > 144 else 2})
    assert q_operand(plan) == ("registers" if slices is None else "slices" if slices else "shared")
    in_registers = head_dim // 16 if slices is None else slices
    assert constants_of(plan).get("kQSlices") == (slices or None)  # where it is neither none nor all of Q
    # Scores, their exponentials in 16 bits, O, and Q in 16 bits.
    assert plan.registers.accumulators == keys // 2 + keys // 4 + head_dim // 2 + 4 * in_registers
    source = render_plan(plan)
    operands = "q" if slices is None else "q, q_descriptor" if slices else "q_descriptor"
    assert f"issue_qk_gemm(s, {operands}, k_descriptors" in source


def test_short_tiles_of_parts_keep_q_in_shared_memory() -> None:
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": {"kind": "dense"}, "kv_splits": 2}
    plan = plan_of({**fields, "tile": {"m": 128, "n": 64}, "schedule": "cooperative"})
    assert q_operand(plan) == "shared"


def test_q_stays_in_shared_memory_where_that_leaves_room_for_another_stage(attention: dict[str, Any]) -> None:
    attention["stages"] = 3
    plan = plan_of(attention)
    assert q_operand(plan) != "registers" and plan.flags.o_aliases_q


@pytest.mark.parametrize(("keys", "steps"), [(128, 1), (64, 2)])
def test_a_listed_block_is_one_step_or_several(attention: dict[str, Any], keys: int, steps: int) -> None:
    attention["tile"]["n"] = keys
    plan = plan_of(attention)
    assert constants_of(plan).get("kBlockSteps", 1) == steps


@pytest.mark.parametrize("pattern", [{"kind": "topk", "k": 9}, {"kind": "block_lists", "mask": "causal"}])
def test_a_step_may_hold_a_pair_of_listed_blocks(pattern: dict[str, Any]) -> None:
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": 128, "tile": {"m": 128, "n": 128}}
    one = plan_of(fields | {"pattern": {**pattern, "block": {"q": 128, "kv": 128}}})
    pair = plan_of(fields | {"pattern": {**pattern, "block": {"q": 128, "kv": 64}}})
    for plan, loads, keys in ((one, 1, 128), (pair, 2, 64)):
        values = constants_of(plan)
        assert (values.get("kStepBlocks", 1), values.get("kLoadKeys", values["kTileN"]), values["kBlockKeys"]) == (
            loads,
            keys,
            keys,
        )
        assert "kBlockSteps" not in values
        assert plan.tensor_maps["k_map"].box == plan.tensor_maps["v_map"].box == (64, keys, 1, 1)
        assert {region.name: region.bytes for region in plan.shared}["BlockMeta"] == 4 * 2 * loads
        # The loads of a step fill a stage of the ring.
        assert loads * keys * 128 == values["kKvGroupBytes"]
    assert pair.bytes == one.bytes and pair.flops == one.flops


def test_pairs_need_registers_as_any_step_does() -> None:
    pattern = {"kind": "topk", "k": 8, "block": {"q": 128, "kv": 128}}
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": pattern, "tile": {"m": 128, "n": 256}}
    with pytest.raises(SpecError, match=r"^tile: 128 x 256 needs about 256 registers .*, 232 are available"):
        plan_of(fields)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [64, 128])
def test_steps_that_do_not_fit_the_stripes_are_refused(block: int, causal: bool) -> None:
    pattern = {"kind": "strided", "stride": 2, "local": 0, "block": block, "causal": causal}
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": pattern}
    for keys in range(64, 208, 16):
        data = fields | {"tile": {"m": 128, "n": keys}}
        if keys in (block // 2, block, 2 * block):
            assert constants_of(plan_of(data))["kTileN"] == keys
            continue
        message = rf"^tile.n: is {keys}; a step is a block of the pattern, {block} keys, an equal part of one, or two$"
        with pytest.raises(SpecError, match=message):
            plan_of(data)


@pytest.mark.parametrize(
    ("m", "head_dim", "keys", "registers"),
    [(128, 64, 192, (56, 224)), (192, 128, 80, (32, 160)), (192, 64, 128, (32, 160)), (256, 64, 64, (32, 112))],
)
def test_tiles_of_two_to_four_warpgroups(m: int, head_dim: int, keys: int, registers: tuple[int, int]) -> None:
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": head_dim, "pattern": {"kind": "dense"}}
    plan = plan_of(fields | {"tile": {"m": m, "n": keys}})
    values, warpgroups = constants_of(plan), m // 64
    assert (values["kProducerRegisters"], values["kConsumerRegisters"]) == registers
    assert values["kConsumerWarpgroups"] == warpgroups and plan.threads == values["kThreads"] == 128 * (warpgroups + 1)
    assert values["kProducerRegisters"] + warpgroups * values["kConsumerRegisters"] <= 512  # 65536 / 128
    assert plan.tensor_maps["q_map"].box[1] == m == plan.tile_queries
    assert plan.tensor_maps["o_map"].box[1] == 64
    assert plan.tensor_maps["k_map"].box[1] == keys
    # Barriers, entries and what tells the last part are there for each warpgroup.
    regions = {region.name: region.bytes for region in plan.shared}
    assert regions["IsLast"] == 4 * warpgroups
    assert plan.stream_k is not None and plan.stream_k.counters == warpgroups


@looped
@pytest.mark.parametrize(
    ("m", "head_dim", "keys", "needed", "available"),
    [
        (128, 64, 224, 232, 232),
        (128, 64, 240, 244, 232),
        (128, 128, 176, 232, 232),  # 4 of them for a part of Q
        (128, 128, 192, 240, 232),
        (192, 96, 112, 160, 160),
        (192, 128, 96, 164, 160),
        (192, 64, 144, 168, 160),
        (256, 64, 80, 120, 112),
    ],
)
def test_what_the_registers_of_large_tiles_hold(m: int, head_dim: int, keys: int, needed: int, available: int) -> None:
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": head_dim, "pattern": {"kind": "dense"}, "stages": 1}
    fields["tile"] = {"m": m, "n": keys}
    if needed <= available:
        assert plan_of(fields).registers.needed == needed
        return
    message = rf"^tile: {m} x {keys} needs about {needed} registers .*, {available} are available"
    with pytest.raises(SpecError, match=message):
        plan_of(fields)


@pytest.mark.parametrize(
    ("m", "block_q", "sub_tiles"),
    [(192, 64, 3), (256, 64, 4), (256, 128, 2), (128, 128, 1), (256, 32, 4), (192, 16, 3)],
)
def test_sub_tiles_of_large_tiles(m: int, block_q: int, sub_tiles: int) -> None:
    pattern = {"kind": "topk", "k": 8, "block": {"q": block_q, "kv": 64}}
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": pattern, "tile": {"m": m, "n": 64}}
    plan = plan_of(fields)
    values = constants_of(plan)
    assert values.get("kSubTiles", 1) == sub_tiles
    warpgroups = m // 64
    assert values.get("kSubTileWarpgroups", warpgroups) * sub_tiles == values["kConsumerWarpgroups"] == warpgroups
    assert plan.tile_queries == sub_tiles * block_q == sub_tiles * values["kSubTileRows"]
    regions = {region.name: region.bytes for region in plan.shared}
    assert regions["K"] == regions["V"] == sub_tiles * plan.spec.stages * values["kKvBytes"]
    assert regions["BlockMeta"] == 4 * sub_tiles * plan.spec.stages


def test_softcap(attention: dict[str, Any]) -> None:
    attention["softcap"] = 30
    plan = plan_of(attention)
    values = constants_of(plan)
    assert values["kCapArgument"] == pytest.approx(2 / 30)
    assert values["kCap"] == pytest.approx(30 / math.log(2))
    assert "take_step_max(step_max, s, kCappedScale);" in render_plan(plan)
    literals = {constant.name: (constant.ctype, constant.literal) for constant in plan.constants}
    assert literals["kCappedScale"] == ("float", "1.0f")
    assert literals["kTileM"] == ("int", "128")


def test_sink(attention: dict[str, Any]) -> None:
    params = {param.name: param for param in plan_of(attention | {"sink": True}).params}
    assert params["sink"].ctype == "const float*"
    # Beside a sink, as where it is capped, the row's largest logit is known in units of log2(e) only.
    assert "scale" not in params and "scale_log2" in params
    assert "sink" not in {param.name for param in plan_of(attention).params}


@pytest.mark.parametrize("mma", ["mma", "wmma"])
def test_padded_heads(mma: str) -> None:
    spec = {"op": "attention", "arch": "sm_89", "head_dim": 128, "mma": mma, "pattern": DENSE}
    plain, padded = plan_of(spec), plan_of(spec | {"pad_heads": True})
    assert [p.name for p in padded.params if p not in plain.params] == ["head_chunks"]
    assert (padded.registers, padded.shared, padded.constants) == (plain.registers, plain.shared, plain.constants)
    assert "pad_heads" not in plain.spec.canonical_json() and '"pad_heads":true' in padded.spec.canonical_json()


def test_heads_that_tma_pads_anyway(attention: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"^pad_heads: is true; kernels for sm_90a always support smaller heads"):
        plan_of(attention | {"pad_heads": True})


@looped
@pytest.mark.parametrize(
    ("block_q", "heads", "sub_tiles", "sub_tile_queries", "tile_queries", "q_boxes", "q_box", "o_box"),
    [
        (None, 8, 1, 16, 16, 1, (8, 16, 1, 1), (8, 8, 1, 1)),
        (None, 64, 1, 2, 2, 1, (64, 2, 1, 1), (64, 1, 1, 1)),
        (64, 8, 1, 16, 16, 1, (8, 16, 1, 1), (8, 8, 1, 1)),  # a block is four tiles
        (16, 8, 1, 16, 16, 1, (8, 16, 1, 1), (8, 8, 1, 1)),  # a block is a tile
        (8, 8, 2, 8, 16, 1, (8, 16, 1, 1), (8, 8, 1, 1)),  # a block is a warpgroup's rows
        (1, 64, 2, 1, 2, 1, (64, 2, 1, 1), (64, 1, 1, 1)),
        (4, 8, 2, 4, 8, 2, (8, 4, 1, 1), (8, 4, 1, 1)),  # a block is half of them
        (1, 16, 2, 1, 2, 2, (16, 1, 1, 1), (16, 1, 1, 1)),
        (16, 1, 2, 16, 32, 2, (1, 16, 1, 1), (1, 16, 1, 1)),  # padding without packing
    ],
)
def test_rows_of_packed_heads(
    attention: dict[str, Any],
    block_q: int | None,
    heads: int,
    sub_tiles: int,
    sub_tile_queries: int,
    tile_queries: int,
    q_boxes: int,
    q_box: tuple[int, ...],
    o_box: tuple[int, ...],
) -> None:
    if block_q is None:
        attention |= {"pattern": {"kind": "causal"}, "stream_k_tail": False}
    else:
        attention["pattern"]["block"] = {"q": block_q, "kv": 64}
    attention |= {"pack_gqa": heads, "tile": {"m": 128, "n": 64}}
    plan = plan_of(attention)
    values = constants_of(plan)
    assert (values.get("kSubTiles", 1), values["kSubTileRows"], plan.tile_queries) == (
        sub_tiles,
        sub_tile_queries,
        tile_queries,
    )
    assert values["kTileQueries"] == tile_queries and "kTileM" not in values
    assert values["kPackGqa"] == heads and values["kQBoxes"] == q_boxes
    assert values.get("kBlockQueries") == block_q
    assert plan.tensor_maps["q_map"].box == (64, *q_box)
    assert plan.tensor_maps["o_map"].box == (64, *o_box)
    # All bytes of the copies of Q are waited for, and they stay within their warpgroup's rows.
    assert values["kQLoadBytes"] == 2 * q_boxes * 128 * heads * q_box[1] <= values["kQBytes"]
    assert heads * q_box[1] * q_boxes <= 128
    assert values["kWarpgroupQueries"] * heads <= 64
    assert values["kWarpgroupQueries"] * (128 // 64) == tile_queries


@pytest.mark.parametrize(("block_q", "heads", "least"), [(8, 1, 16), (1, 8, 2), (2, 4, 4)])
def test_query_blocks_that_fill_too_few_rows(attention: dict[str, Any], block_q: int, heads: int, least: int) -> None:
    attention["pattern"]["block"]["q"] = block_q
    attention["pack_gqa"] = heads
    message = rf"^pattern.block.q: is {block_q}; allowed on sm_90a with pack_gqa {heads}: {least}, "
    with pytest.raises(SpecError, match=message):
        plan_of(attention)


@looped
@pytest.mark.parametrize(
    "change", [{"pack_gqa": 8}, {"pattern": {"kind": "topk", "k": 8, "block": {"q": 16, "kv": 64}}}]
)
@pytest.mark.parametrize("asks", [{"lse": True}, {"sink": True}, {"pattern": {"kind": "causal"}}, {}])
def test_packed_heads_have_a_name_where_the_kernel_asks_for_them(
    attention: dict[str, Any], change: dict[str, Any], asks: dict[str, Any]
) -> None:
    del attention["tile"], attention["stream_k_tail"]
    plan = plan_of(attention | {"lse": False} | change | asks | {"pack_gqa": change.get("pack_gqa", 1)})
    source = render_plan(plan)
    code = re.sub(r"//.*", "", source)
    for constant in plan.constants:
        assert len(re.findall(rf"\b{constant.name}\b", code)) > 1, constant.name
    assert ("kPackGqa" in source) == ("kPackGqa" in code)


@pytest.mark.parametrize(("n", "stages", "resident"), [(240, 1, 1), (240, 2, 1), (224, 1, 1), (208, 1, 2), (128, 1, 2)])
def test_thread_blocks_of_one_warpgroup_share_an_sm_where_registers_suffice(n: int, stages: int, resident: int) -> None:
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": {"kind": "dense"}}
    plan = plan_of({**fields, "tile": {"m": 64, "n": n}, "stages": stages})
    assert plan.ctas_per_sm == resident


def test_one_head_a_row_keeps_its_maps(attention: dict[str, Any]) -> None:
    plan = plan_of(attention | {"pack_gqa": 1})
    assert plan.tensor_maps["q_map"].box == (64, 128, 1, 1)
    assert plan.tile_queries == constants_of(plan)["kTileM"] == 128


@looped
@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("block.rows", {"block": {"rows": 48, "cols": 64}}),
        ("block.cols", {"block": {"rows": 128, "cols": 32}}),
        ("block.cols", {"block": {"rows": 32, "cols": 64}, "tile": {"m": 32, "n": 256, "k": 64}}),
        ("tile.m", {"block": {"rows": 32, "cols": 32}, "tile": {"m": 64, "n": 256, "k": 32}}),
        ("tile.n", {"block": {"rows": 32, "cols": 32}, "tile": {"m": 32, "n": 64, "k": 32}}),
        ("tile.k", {"block": {"rows": 32, "cols": 16}, "tile": {"m": 32, "n": 256, "k": 48}}),
        ("tile.k", {"block": {"rows": 16, "cols": 32}, "tile": {"m": 16, "n": 256, "k": 16}}),
        ("tile.k", {"block": {"rows": 16, "cols": 16}, "tile": {"m": 16, "n": 128, "k": 128}}),
        ("stages", {"block": {"rows": 16, "cols": 16}, "tile": {"m": 16, "n": 256, "k": 16}, "stages": 1}),
        ("ctas_per_sm", {"ctas_per_sm": 2}),
        (
            "ctas_per_sm",
            {
                "arch": "sm_89",
                "mma": "mma",
                "copy": "cp_async",
                "schedule": "multistage",
                "block": {"rows": 32, "cols": 32},
                "ctas_per_sm": 2,
            },
        ),
        (
            "ctas_per_sm",
            {"block": {"rows": 16, "cols": 16}, "tile": {"m": 16, "n": 512, "k": 16}, "stages": 7, "ctas_per_sm": 2},
        ),
    ],
)
def test_blocks_the_spmm_kernels_are_not_written_for(spmm: dict[str, Any], field: str, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(spmm | change)
    assert caught.value.field == field
    assert "is " in caught.value.reason


@pytest.mark.parametrize(
    ("op", "field", "change"),
    [
        ("sddmm", "block.rows", {"block": {"rows": 48, "cols": 64}}),
        ("sddmm", "block.cols", {"block": {"rows": 64, "cols": 32}}),
        ("sddmm", "block.cols", {"block": {"rows": 32, "cols": 64}}),
        ("sddmm", "tile.m", {"tile": {"m": 64, "n": 256, "k": 64}}),
        ("sddmm", "tile.n", {"tile": {"m": 128, "n": 64, "k": 64}}),
        ("sddmm", "tile.k", {"tile": {"m": 128, "n": 256, "k": 32}}),
        ("sddmm", "stages", {"stages": 1}),
        ("sddmm", "stages", {"stages": 5}),
        ("sddmm", "ctas_per_sm", {"ctas_per_sm": 2}),
        ("sddmm", "tile.m", {"block": {"rows": 32, "cols": 32}}),
        ("sddmm", "tile.n", {"block": {"rows": 16, "cols": 16}, "tile": {"m": 16, "n": 1024, "k": 64}}),
        ("sddmm", "tile.k", {"block": {"rows": 16, "cols": 32}, "tile": {"m": 16, "n": 256, "k": 128}}),
        ("sddmm", "stages", {"block": {"rows": 16, "cols": 16}, "tile": {"m": 16, "n": 256, "k": 64}, "stages": 1}),
        ("sddmm", "stages", {"block": {"rows": 32, "cols": 32}, "tile": {"m": 32, "n": 512, "k": 64}}),
        (
            "sddmm",
            "ctas_per_sm",
            {"block": {"rows": 32, "cols": 32}, "tile": {"m": 32, "n": 256, "k": 64}, "ctas_per_sm": 2},
        ),
        (
            "sddmm",
            "tile",
            {"block": {"rows": 32, "cols": 32}, "tile": {"m": 32, "n": 512, "k": 64}, "stages": 2, "ctas_per_sm": 3},
        ),
        ("spgemm", "block.rows", {"block": {"rows": 32, "cols": 32}}),
        ("spgemm", "block.cols", {"block": {"rows": 128, "cols": 64}}),
        ("spgemm", "tile.m", {"tile": {"m": 64, "n": 128, "k": 64}}),
        ("spgemm", "tile.n", {"tile": {"m": 128, "n": 256, "k": 64}}),
        ("spgemm", "tile.k", {"tile": {"m": 128, "n": 128, "k": 128}}),
        ("spgemm", "stages", {"stages": 1}),
        ("spgemm", "stages", {"stages": 7}),
    ],
)
def test_what_the_other_bsr_kernels_are_not_written_for(
    op: str, field: str, change: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(request.getfixturevalue(op) | change)
    assert caught.value.field == field
    assert any(character.isdigit() for character in caught.value.reason)


@pytest.mark.parametrize("size", [128, 64, 32, 16])
def test_an_epilogue_adds_what_it_needs_and_nothing_else(size: int) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": size, "cols": size}}
    plain = plan_of(fields)
    source = render_plan(plan_of(fields | {"epilogue": {"bias": True, "activation": "silu"}}))
    assert "The stored result is silu(A B + bias)" in source
    assert "const unsigned short* bias;" in source and "load_bias(p, " in source and "activate(acc" in source
    banner, _, source = render_plan(plan_of(fields | {"epilogue": {"activation": "relu"}})).partition("\n\n")
    assert '"bias":false' in banner
    assert "bias" not in source and "activate(acc" in source
    assert "activate" not in render_plan(plain) and "bias" not in render_plan(plain)


def test_an_epilogue_is_refused_where_there_is_none() -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_89", "block": {"rows": 128, "cols": 128}, "epilogue": {"bias": True}}
    with pytest.raises(SpecError, match=r"^epilogue: is not supported on sm_89"):
        plan_of(fields)


@pytest.mark.parametrize("size", [128, 64, 32, 16])
def test_what_is_added_comes_to_a_staging_of_its_own(size: int) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": size, "cols": size}}
    plain, plan = plan_of(fields), plan_of(fields | {"accumulate": True})
    values = {constant.name: constant.value for constant in plan.constants}
    assert values["kStagingGroups"] == values["kWarpgroupGroups"]
    assert values["kCInBytes"] == values["kWarpgroupGroups"] * values["kCGroupBytes"]
    assert 2 * values["kCInBytes"] == plan.spec.tile.m * plan.spec.tile.n * plan.dtype.bytes
    assert plan.tensor_maps["c_in_map"] == plan.tensor_maps["c_map"]
    assert [param.name for param in plan.params if param not in plain.params] == ["c_in_map", "beta"]
    source = render_plan(plan_of(fields | {"accumulate": True, "epilogue": {"activation": "relu"}}))
    assert "The stored result is relu(A B + beta c)" in source
    assert "beta" not in render_plan(plain) and plain.spec.hash != plan.spec.hash


PAIRS = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 64, "cols": 64}, "tile": {"m": 128, "n": 256, "k": 64}}


@pytest.mark.parametrize("columns", [128, 256])
def test_two_block_rows_share_a_tile_of_b(columns: int) -> None:
    plan = plan_of(PAIRS | {"tile": {"m": 128, "n": columns, "k": 64}})
    assert plan.template == "bsr_spmm/sm90a_pairs.cu.j2"
    values = {constant.name: constant.value for constant in plan.constants}
    assert values["kAccumulators"] == 64 * columns // 128
    regions = {region.name: region for region in plan.shared}
    assert regions["A"].bytes == plan.spec.stages * values["kConsumers"] * values["kABytes"]
    assert regions["Rows"].bytes == 4 * plan.spec.stages and regions["Rows"].offset % 4 == 0
    for box in (plan.tensor_maps["a_map"].box, plan.tensor_maps["c_map"].box):
        assert box[:2] == (64, 64)


@looped
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"accumulate": True}, "accumulate"),
        ({"scheduler": "dynamic"}, "scheduler"),
        ({"stages": 5}, "stages"),
        ({"stages": 1}, "stages"),
        ({"block": {"rows": 64, "cols": 32}}, "block.cols"),
        ({"tile": {"m": 128, "n": 512, "k": 64}}, "tile.n"),
        ({"tile": {"m": 128, "n": 256, "k": 32}}, "tile.k"),
        ({"tile": {"m": 256, "n": 256, "k": 64}}, "tile.m"),
        ({"block": {"rows": 128, "cols": 64}, "tile": {"m": 256, "n": 256, "k": 64}}, "tile.m"),
    ],
)
def test_what_tiles_of_two_block_rows_are_not_written_for(change: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(PAIRS | change)
    assert caught.value.field == field


GATHERED = {
    "op": "bsr_spmm",
    "arch": "sm_90a",
    "block": {"rows": 16, "cols": 16},
    "tile": {"m": 384, "n": 128, "k": 16},
    "mma": "mma",
    "copy": "tma",
    "stages": 4,
}
GATHERED_32 = GATHERED | {
    "block": {"rows": 32, "cols": 32},
    "tile": {"m": 384, "n": 128, "k": 32},
    "mma": "wgmma",
    "stages": 3,
}


@pytest.mark.parametrize(("rows", "cols", "stages"), [(16, 16, 4), (16, 32, 3), (32, 16, 4), (32, 32, 3)])
def test_a_tile_of_gathered_rows_fills_registers_and_shared_memory(rows: int, cols: int, stages: int) -> None:
    tile = {"m": 384, "n": 128, "k": cols}
    fields = GATHERED if rows == 16 else GATHERED_32
    plan = plan_of(fields | {"block": {"rows": rows, "cols": cols}, "tile": tile, "stages": stages})
    assert plan.prologue is not None and plan.cluster == 2
    values = {constant.name: constant.value for constant in plan.constants}
    assert values["kTileSlots"] * rows == 384 and plan.registers.accumulators == 128
    # What setmaxnreg gives to three warpgroups is what it takes from the other.
    assert (values["kProducerRegisters"] + 3 * values["kConsumerRegisters"]) * 128 == 65536
    regions = {region.name: region for region in plan.shared}
    assert regions["B"].bytes == values["kRingColumns"] * values["kBColumnBytes"]
    assert values["kRingColumns"] >= min(values["kRoundColumns"], values["kTileSlots"])
    # One more column would not fit.
    assert plan.shared_bytes <= 232448 < plan.shared_bytes + values["kBColumnBytes"]
    # Each thread block of the cluster loads a part of a packet, in pieces of 16 bytes.
    assert values["kPacketBytes"] % (2 * 16) == 0
    assert values["kTileSlots"] * (rows * cols * 2 + 4) <= values["kPacketBytes"] <= values["kStageBytes"]
    assert values["kStageBytes"] % (8 * cols * 2) == 0  # the swizzle repeats there
    # The warps that load rows of B have turns for all columns of a round, and there is one for packets.
    assert values["kColumnWarps"] * values["kWarpColumns"] >= round_columns(values["kRingColumns"])
    assert values["kColumnWarps"] + 1 == values["kProducerWarps"]
    if rows == 16:
        assert plan.template == "bsr_spmm/sm90a_gathered_mma.cu.j2"
        assert values["kConsumerWarps"] * values["kWarpSlots"] == values["kTileSlots"]
        # A packet of any number of blocks is two parts in pieces of 16 bytes; a full one has room.
        words = plan.flags.words_bytes
        assert isinstance(words, int) and words == 2 * 4 * values["kConsumerWarps"]
        assert words % (2 * 16) == values["kABlockBytes"] % (2 * 16) == 0
        assert words + values["kTileSlots"] * values["kABlockBytes"] <= values["kPacketBytes"]
        assert values["kSteps"] * values["kStepBytes"] == values["kABlockBytes"] == rows * cols * 2
        assert regions["C"].bytes == values["kConsumerWarps"] * values["kCGroupBytes"]
    else:
        assert plan.template == "bsr_spmm/sm90a_gathered.cu.j2"
        assert values["kConsumers"] * values["kSlots"] == values["kTileSlots"]
        assert values["kSlots"] * values["kTileGroups"] * values["kAccumulators"] == 128
        assert values["kSlots"] % values["kStagingSlots"] == 0
        staged = values["kConsumers"] * values["kStagingSlots"] * values["kTileGroups"] * values["kCGroupBytes"]
        assert regions["C"].bytes == staged


@pytest.mark.parametrize(("size", "stages", "mma"), [(16, 4, "mma"), (32, 3, "wgmma")])
def test_rows_are_gathered_as_shipped_if_nothing_is_said(size: int, stages: int, mma: str) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": size, "cols": size}}
    spec = plan_of(fields | {"tile": {"m": 384, "n": 128, "k": size}}).spec
    assert spec == find_spec(f"h100_bsr_spmm_b{size}_gathered").spec
    for said in ({"copy": "tma"}, {"schedule": "cooperative"}, {"mma": mma}):
        assert plan_of(fields | {"tile": {"m": 384, "n": 128, "k": size}} | said).spec == spec
    assert (spec.stages, spec.mma) == (stages, mma)
    assert plan_of(fields).spec.tile.m == size  # one block row


@pytest.mark.parametrize(("cols", "stages"), [(16, 4), (32, 3)])
def test_mma_sync_gathers_rows_if_tma_copies(cols: int, stages: int) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 16, "cols": cols}, "mma": "mma"}
    spec = plan_of(fields | {"copy": "tma"}).spec
    assert (spec.tile.m, spec.tile.n, spec.tile.k) == (384, 128, cols)
    assert (spec.stages, spec.schedule) == (stages, "cooperative")
    assert plan_of(fields).spec.copy_ == "cp_async"


@looped
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"accumulate": True}, "accumulate"),
        ({"scheduler": "dynamic"}, "scheduler"),
        ({"epilogue": {"bias": True}}, "epilogue"),
        ({"b_layout": "column_major"}, "b_layout"),
        ({"ctas_per_sm": 2}, "ctas_per_sm"),
        ({"transpose_a": True}, "transpose_a"),
        ({"stages": 1}, "stages"),
        ({"block": {"rows": 16, "cols": 64}}, "block.cols"),
        ({"block": {"rows": 32, "cols": 16}}, "block.rows"),
        ({"block": {"rows": 64, "cols": 64}}, "block.rows"),
        ({"tile": {"m": 16, "n": 128, "k": 16}}, "tile.m"),
        ({"tile": {"m": 256, "n": 128, "k": 16}}, "tile.m"),
        ({"tile": {"m": 384, "n": 256, "k": 16}}, "tile.n"),
        ({"tile": {"m": 384, "n": 128, "k": 32}}, "tile.k"),
        (GATHERED_32 | {"stages": 5}, "stages"),
        (GATHERED_32 | {"block": {"rows": 16, "cols": 32}}, "tile.m"),
        (GATHERED_32 | {"block": {"rows": 32, "cols": 64}}, "block.cols"),
        (GATHERED_32 | {"tile": {"m": 256, "n": 128, "k": 32}}, "tile.m"),
    ],
)
def test_what_tiles_of_gathered_rows_are_not_written_for(change: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(GATHERED | change)
    assert caught.value.field == field


@pytest.mark.parametrize("change", [{"tile": {"m": 32, "n": 512, "k": 16}}, {"tile": GATHERED["tile"], "mma": "wgmma"}])
def test_what_is_wrong_with_a_tile_tells_how_rows_are_gathered(change: dict[str, Any]) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 16, "cols": 16}}
    with pytest.raises(SpecError, match="16: 16, or 384, rows gathered, with mma: mma and copy: tma"):
        plan_of(fields | change)


@pytest.mark.parametrize(("rows", "cols"), [(128, 128), (128, 64), (64, 128), (64, 64)])
def test_a_transposed_block_is_read_in_column_groups(rows: int, cols: int) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": rows, "cols": cols}, "transpose_a": True}
    plan = plan_of(fields)
    assert plan.template == "bsr_spmm/sm90a_transposed.cu.j2" and plan.spec.tile.m == cols
    values = {constant.name: constant.value for constant in plan.constants}
    assert plan.tensor_maps["a_map"].box == (64, 64, 1)
    assert values["kAGroups"] * values["kAGroupBytes"] == values["kABytes"] == cols * 64 * 2
    assert values.get("kWarpgroupRows") == (64 if cols == 128 else None)  # a column group of A, or parts side by side
    source = render_plan(plan_of(fields | {"epilogue": {"activation": "relu"}}))
    assert "The stored result is relu(A^T B)" in source
    assert "A in shared memory, M-major, B MN-major." in source and ", p, 1, 1, 1, 1;" in source


@looped
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"arch": "sm_89"}, "transpose_a"),
        ({"block": {"rows": 32, "cols": 64}}, "block.rows"),
        ({"block": {"rows": 64, "cols": 32}}, "block.cols"),
        ({"tile": {"m": 64, "n": 256, "k": 64}}, "tile.m"),
        ({"tile": {"m": 128, "n": 512, "k": 64}}, "tile.n"),
        ({"tile": {"m": 128, "n": 256, "k": 32}}, "tile.k"),
        ({"stages": 1}, "stages"),
        ({"stages": 5}, "stages"),
        ({"accumulate": True}, "accumulate"),
        ({"scheduler": "dynamic"}, "scheduler"),
    ],
)
def test_what_is_not_written_for_transposed_matrices(change: dict[str, Any], field: str) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 128, "cols": 128}, "transpose_a": True}
    with pytest.raises(SpecError) as caught:
        plan_of(fields | change)
    assert caught.value.field == field


@pytest.mark.parametrize("size", [128, 64])
def test_a_step_of_32_columns_has_narrow_rows_of_a(size: int) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": size, "cols": size}}
    wide = plan_of(fields | {"tile": {"m": size, "n": 256, "k": 64}})
    plan = plan_of(fields | {"tile": {"m": size, "n": 256, "k": 32}})
    assert (plan.tensor_maps["a_map"].box, plan.tensor_maps["a_map"].swizzle) == ((32, size, 1), 64)
    assert plan.tensor_maps["b_map"].box == (64, 32) and 2 * plan.bytes == wide.bytes
    source = render_plan(plan)
    assert ("first_row * kARowBytes" in source) == (size == 128) and '"n"(kNarrowDescriptorUpperHalf)' in source
    assert "arrow" not in render_plan(wide).replace("arrows", "")


def test_blocks_of_64_have_wide_tiles_unless_something_needs_the_room() -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 64, "cols": 64}}
    for change in ({}, {"epilogue": {"bias": True}}, {"scheduler": "dynamic"}):
        spec = plan_of(fields | change).spec
        assert (spec.tile.n, spec.tile.k, spec.stages) == (512, 32, 5)
    for change in ({"accumulate": True}, {"transpose_a": True}):
        assert plan_of(fields | change).spec.tile.n == 256


@pytest.mark.parametrize(
    ("change", "clips"),
    [
        ({}, True),
        ({"tile": {"m": 64, "n": 256, "k": 64}}, True),
        ({"accumulate": True}, True),
        ({"scheduler": "dynamic"}, False),
        ({"block": {"rows": 128, "cols": 64}}, False),
    ],
)
def test_what_a_tile_has_beyond_b_is_neither_loaded_nor_multiplied(change: dict[str, Any], clips: bool) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 64, "cols": 64}}
    source = render_plan(plan_of(fields | change))
    for text in ("if (c_column >= p.n) {", "kABytes + b_tile_bytes(p, b_column)", "if (first < p.n) tma_load_2d("):
        assert (text in source) == clips
    assert source.count("const int c_column = ") == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tile": {"m": 64, "n": 384, "k": 32}}, "tile.n"),
        ({"tile": {"m": 64, "n": 512, "k": 16}}, "tile.k"),
        ({"block": {"rows": 128, "cols": 64}, "tile": {"m": 128, "n": 512, "k": 32}}, "tile.n"),
        ({"stages": 6}, "stages"),
    ],
)
def test_what_a_wide_tile_cannot_be(change: dict[str, Any], field: str) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 64, "cols": 64}}
    with pytest.raises(SpecError) as caught:
        plan_of(fields | change)
    assert caught.value.field == field


@looped
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("size", [128, 64, 32, 16])
def test_handing_tiles_out_needs_a_queue_and_an_order(size: int, accumulate: bool) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": size, "cols": size}, "accumulate": accumulate}
    plain, plan = plan_of(fields), plan_of(fields | {"scheduler": "dynamic"})
    names, of_plain = {param.name for param in plan.params}, {param.name for param in plain.params}
    cut = size < 64
    if cut:  # how many units there are is on the device
        added = {"chunks", "chunk_count", "chunk_blocks", "chunks_done", "parts"}
        assert of_plain - names == {"block_rows", "tiles"}
        assert names - of_plain == added | {"column_tiles", "group_tiles", "scheduler"}
    else:
        bands = set() if size == 128 else {"column_tiles", "group_tiles"}  # a static scheduler has high tiles in bands
        assert of_plain <= names and names - of_plain == {"row_order", "scheduler"} | bands
    regions = {region.name: region for region in plan.shared}
    barriers, queue = regions["Barriers"], regions["Queue"]
    assert queue.offset >= barriers.offset + barriers.bytes and queue.offset % 16 == 0
    assert queue.bytes == 2 * 4 * (32 + (6 if cut else 4))  # the kernel compares it with what it makes of it
    assert ("IsLast" in regions) == cut
    assert barriers.bytes == 8 * (2 * plan.spec.stages + 2 * accumulate)
    assert regions["QueueBarriers"].offset == barriers.offset + barriers.bytes
    assert regions["QueueBarriers"].bytes == 8 * 5
    assert plan.threads == plain.threads + 32 * cut  # else a warp of the producing warpgroup schedules
    source = render_plan(plan)
    wanted = (
        ("const Unit unit(p, number)", "Unit take_next(") if cut else ("const Tile tile(p, number)", "Tile take_next(")
    )
    assert all(text in source for text in wanted) and ("combine_partials" in source) == cut
    assert "schedule(" not in render_plan(plain)


@pytest.mark.parametrize(("rows", "cols", "more"), [(128, 128, {}), (64, 64, {}), (64, 128, {"scheduler": "dynamic"})])
def test_columns_of_b_are_copied_as_a_whole(rows: int, cols: int, more: dict[str, Any]) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": rows, "cols": cols}, **more}
    plan = plan_of(fields | {"b_layout": "column_major"})
    plain = plan_of(fields | {"tile": {"m": rows, "n": 256, "k": 64}})
    assert plan.spec.tile == plain.spec.tile and plan.shared_bytes == plain.shared_bytes
    assert plan.tensor_maps["b_map"].box == (64, 256) and "b_groups_map" not in plan.tensor_maps
    assert {param.name for param in plain.params} - {param.name for param in plan.params} == {"b_groups_map", "n"}
    source = render_plan(plan)
    assert "k16_shared_k_major(" in source and "b_groups_map" not in source and "kBGroupBytes" not in source
    assert "b_layout" not in plain.spec.canonical_json()


@pytest.mark.parametrize(
    ("fields", "multiply", "b", "only_by_rows"),
    [
        (
            {"block": {"rows": 128, "cols": 64}, "transpose_a": True},
            "m_major_k_major",
            "(M, N)",
            {"kTileGroups", "kBGroupBytes"},
        ),
        (
            {"block": {"rows": 64, "cols": 128}, "tile": {"m": 128, "n": 128, "k": 64}},
            "k_major",
            "(K, N)",
            {"kBGroupBytes"},
        ),
    ],
    ids=["transposed", "two block rows"],
)
def test_columns_of_b_in_other_kernels_for_wgmma(
    fields: dict[str, Any], multiply: str, b: str, only_by_rows: set[str]
) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", **fields}
    plain, plan = plan_of(fields), plan_of(fields | {"b_layout": "column_major"})
    assert (plan.spec.tile, plan.shared_bytes, plan.template) == (plain.spec.tile, plain.shared_bytes, plain.template)
    assert plan.tensor_maps["b_map"].box == (64, plan.spec.tile.n) and "b_groups_map" not in plan.tensor_maps
    assert {param.name for param in plain.params} - {param.name for param in plan.params} == {"b_groups_map", "n"}
    names = ({constant.name for constant in each.constants} for each in (plain, plan))
    assert set.difference(*names) == only_by_rows
    source = render_plan(plan)
    assert f"k16_shared_{multiply}(" in source and f"// B, by columns {b}" in source
    assert "b_groups_map" not in source


@pytest.mark.parametrize(
    ("rows", "cols", "tile_k"),
    [(32, 32, 32), (16, 16, 32), (16, 32, 32), (32, 16, 64)],
)
def test_columns_of_b_are_copied_for_small_blocks(rows: int, cols: int, tile_k: int) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": rows, "cols": cols}, "stages": 3}
    fields |= {"tile": {"m": rows, "n": 512, "k": tile_k}}
    plain, plan = plan_of(fields), plan_of(fields | {"b_layout": "column_major"})
    assert plain.prologue is None and plan.prologue is not None and plan.prologue.threads == 256
    assert plan.shared == plain.shared and plan.tensor_maps.items() - plain.tensor_maps.items() == {
        ("b_columns_map", TensorMap((64, 128), 128))
    }
    added = {param.name for param in plan.params} - {param.name for param in plain.params}
    assert added == {"b_columns_map", "copy_rows"}
    values = {constant.name: constant.value for constant in plan.constants}
    assert values["kCopyBytes"] == 2 * values["kCopyDepth"] * values["kCopyColumns"] == 16 << 10
    assert values["kCopyDepth"] % cols == 0  # whole boxes of the map by which the copy is written
    own, copied = render_plan(plain), render_plan(plan)
    assert f"{plan.prologue.symbol}(const" in copied and "copy_b" not in own and "row += kBlockCols)" in copied
    assert copied.partition(f"{plan.stem}(const")[2] == own.partition(f"{plain.stem}(const")[2] != ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block": {"rows": 64, "cols": 64}, "tile": {"m": 64, "n": 512, "k": 32}}, "tile.n is 512 and tile.k 32"),
        ({"tile": {"m": 128, "n": 256, "k": 32}}, "where tile.n is 256 and tile.k 32: row_major"),
    ],
)
def test_where_b_is_stored_by_rows_only(change: dict[str, Any], reason: str) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 128, "cols": 128}, "b_layout": "column_major"}
    with pytest.raises(SpecError, match=reason) as caught:
        plan_of(fields | change)
    assert caught.value.field == "b_layout"


@pytest.mark.parametrize("size", [16, 32])
def test_small_blocks_of_two_sparse_matrices_are_multiplied_by_mma_sync(size: int) -> None:
    fields = {"op": "bsr_spgemm", "arch": "sm_90a", "block": {"rows": size, "cols": size}}
    plan = plan_of(fields)
    assert (plan.spec.mma, plan.spec.copy_, plan.spec.schedule) == ("mma", "cp_async", "multistage")
    assert plan_of(fields | {"arch": "sm_89"}).spec.tile == plan.spec.tile
    with pytest.raises(SpecError, match=rf"^block.rows: is {size}; allowed on sm_90a with wgmma: 64, 128"):
        plan_of(fields | {"mma": "wgmma"})
    large = plan_of({"op": "bsr_spgemm", "arch": "sm_90a", "block": {"rows": 64, "cols": 64}})
    assert large.spec.mma == "wgmma"


@pytest.mark.parametrize("size", [16, 32])
def test_sampled_small_blocks_by_mma_sync_if_asked(size: int) -> None:
    fields = {"op": "bsr_sddmm", "arch": "sm_90a", "block": {"rows": size, "cols": size}, "mma": "mma"}
    plan = plan_of(fields)
    assert (plan.spec.copy_, plan.spec.schedule, plan.spec.stages) == ("cp_async", "multistage", 3)
    assert plan_of(fields | {"arch": "sm_89"}).spec.tile == plan.spec.tile
    with pytest.raises(SpecError, match=r"^ctas_per_sm: is 2; more than 1 requires wgmma with blocks of"):
        plan_of(fields | {"ctas_per_sm": 2})


@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (16, 32), (32, 16), (32, 32)])
def test_sampled_small_blocks_are_computed_transposed(rows: int, cols: int) -> None:
    fields = {"op": "bsr_sddmm", "arch": "sm_90a", "block": {"rows": rows, "cols": cols}}
    plan = plan_of(fields)
    spec, values = plan.spec, {constant.name: constant.value for constant in plan.constants}
    assert (spec.copy_, spec.schedule, plan.template) == ("tma", "cooperative", "bsr_sddmm/sm90a_swap_ab.cu.j2")
    width = 512 if cols == 32 else 256
    assert spec.tile.model_dump() == {"m": rows, "n": width, "k": 64}
    assert plan.bytes == 2 * (rows + width) * 64 and spec.stages * plan.ctas_per_sm * plan.bytes >= 192 * KIB
    assert plan.ctas_per_sm == (2 if cols == 16 else 1)
    assert plan_of(fields | {"stages": 2}).ctas_per_sm == 1
    # A wgmma's 64 rows are whole blocks, one behind the other; each begins where the swizzle's pattern does.
    assert values["kBGroupBytes"] == 64 // cols * values["kBBlockBytes"] and values["kBBlockBytes"] % 1024 == 0
    assert values["kABytes"] % 1024 == 0 and values["kWarpgroupGroups"] * 2 * 64 == width
    assert values["kTileBlocks"] == width // cols <= 32  # lanes of the warp that finds their columns
    assert plan.tensor_maps["c_map"] == TensorMap((16, 16, 1), 32)
    source = render_plan(plan)
    assert f"wgmma_m64n{rows}k16_shared_k_major(accumulators[group]" in source
    body = source.partition("\n\n")[2]
    assert max(map(len, body.splitlines())) <= 120 and "\n\n\n" not in body
    assert all(len(re.findall(rf"\b{name}\b", body)) > 1 for name in [*values, *(param.name for param in plan.params)])


@pytest.mark.parametrize(("stages", "resident", "pieces"), [(3, 1, 2), (6, 1, 2), (3, 2, 1), (2, 2, 2), (2, 3, 0)])
def test_sampled_small_blocks_store_through_what_the_ring_leaves(stages: int, resident: int, pieces: int) -> None:
    fields = {"op": "bsr_sddmm", "arch": "sm_90a", "block": {"rows": 32, "cols": 32}, "stages": stages}
    fields |= {"tile": {"m": 32, "n": 256, "k": 64}}
    if pieces == 0:
        with pytest.raises(SpecError, match="ctas_per_sm: is 3; thread blocks of 77 KB and 1 KB each do not fit"):
            plan_of(fields | {"ctas_per_sm": resident})
        return
    plan = plan_of(fields | {"ctas_per_sm": resident})
    values = {constant.name: constant.value for constant in plan.constants}
    assert values["kStagingPieces"] == pieces and plan.ctas_per_sm == resident
    assert next(region.bytes for region in plan.shared if region.name == "C") == 8 * pieces * 512
    assert resident <= min(blocks_by_shared_memory(plan), blocks_by_threads(plan))
    assert plan.registers.needed <= plan.registers.limit <= launch_registers(plan)
    assert f"__launch_bounds__(kThreads, {resident})" in render_plan(plan)
    assert (plan.spec.hash == plan_of(fields).spec.hash) == (resident == 1)


def test_tiles_are_not_handed_out_on_sm_89() -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_89", "block": {"rows": 128, "cols": 128}, "scheduler": "dynamic"}
    with pytest.raises(SpecError, match=r"^scheduler: is not supported on sm_89"):
        plan_of(fields)


def test_nothing_is_added_where_there_is_no_kernel_for_it() -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_89", "block": {"rows": 128, "cols": 128}, "accumulate": True}
    with pytest.raises(SpecError, match=r"^accumulate: is not supported on sm_89"):
        plan_of(fields)


@pytest.mark.parametrize(("block", "stages", "wanted"), [(128, 3, 2), (128, 4, 1), (64, 4, 3), (64, 2, 5), (64, 8, 1)])
def test_thread_blocks_of_spgemm_share_an_sm(block: int, stages: int, wanted: int) -> None:
    fields = {"op": "bsr_spgemm", "arch": "sm_90a", "block": {"rows": block, "cols": block}, "stages": stages}
    plan = plan_of(fields)
    assert plan.ctas_per_sm == wanted
    assert wanted <= min(blocks_by_shared_memory(plan), blocks_by_threads(plan))
    assert plan.registers.needed <= launch_registers(plan)


def test_tiles_of_a_product_are_handed_out_one_by_one() -> None:
    fields = {"op": "bsr_spgemm", "arch": "sm_90a", "block": {"rows": 128, "cols": 128}}
    plain, plan = plan_of(fields), plan_of(fields | {"scheduler": "dynamic"})
    assert plan.spec.hash != plain.spec.hash and plan.threads == plain.threads + 32
    assert plan.registers.needed <= launch_registers(plan) and plan.ctas_per_sm == plain.ctas_per_sm == 2
    assert [param.name for param in plan.params if param not in plain.params] == ["tiles", "scheduler"]
    regions = {region.name: region for region in plan.shared}
    assert {region.name for region in plain.shared} == set(regions) - {"List", "ListBarriers"}
    assert all(regions[name].offset % 8 == 0 for name in ("Barriers", "List", "ListBarriers"))
    source = render_plan(plan)
    assert "take_ticket(p)" in source and "release_scheduler(p)" in source and "kRunTiles" not in source
    assert "schedule(" not in render_plan(plain) and "kTileShift" not in render_plan(plain)
    with pytest.raises(SpecError, match=r"^scheduler: is dynamic; allowed with output bsr"):
        plan_of(fields | {"scheduler": "dynamic", "output": "bsr"})


@pytest.mark.parametrize("block", [64, 128])
def test_a_product_on_a_pattern_differs_in_what_its_tiles_are(block: int) -> None:
    fields = {"op": "bsr_spgemm", "arch": "sm_90a", "block": {"rows": block, "cols": block}}
    plain, plan = plan_of(fields), plan_of(fields | {"output": "bsr"})
    assert plan_of(fields | {"output": "dense"}).spec.hash == plain.spec.hash != plan.spec.hash
    assert '"output"' not in plain.spec.canonical_json() and '"output":"bsr"' in plan.spec.canonical_json()
    assert (plan.shared, plan.threads, plan.ctas_per_sm) == (plain.shared, plain.threads, plain.ctas_per_sm)
    assert plan.tensor_maps == plain.tensor_maps | {"c_map": TensorMap((64, 64, 1), 128)}
    names = {param.name for param in plan.params}
    assert names - {param.name for param in plain.params} == {
        *("c_crow_indices", "c_col_indices", "c_index_words", "block_rows", "blocks")
    }
    source = render_plan(plan)
    assert "kRunTiles" not in source and "tma_store_3d(&p.c_map, staging, group * kGroupColumns" in source
    assert "find_row" not in render_plan(plain)


@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (16, 32), (32, 16), (32, 32)])
def test_small_blocks_get_a_wide_tile_and_a_deep_ring(rows: int, cols: int) -> None:
    plan = plan_of({"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": rows, "cols": cols}})
    assert plan.template == "bsr_spmm/sm90a_swap_ab.cu.j2"
    assert plan.spec.tile.model_dump() == {"m": rows, "n": 512, "k": cols}
    assert plan.tensor_maps["a_map"].swizzle == 2 * cols
    assert plan.spec.stages * plan.bytes >= 96 * KIB  # on their way: what the L2 takes to be busy


@pytest.mark.parametrize(
    ("field", "k", "stages", "resident"), [("stages", 128, 2, 1), ("stages", 64, 4, 1), ("tile", 32, 2, 3)]
)
def test_what_small_blocks_have_no_room_for(field: str, k: int, stages: int, resident: int) -> None:
    block, tile = {"rows": 32, "cols": 32}, {"m": 32, "n": 512, "k": k}
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": block, "tile": tile, "stages": stages}
    with pytest.raises(SpecError, match="need.* 227 KB" if field == "stages" else "72 are available") as caught:
        plan_of(fields | {"ctas_per_sm": resident})
    assert caught.value.field == field


@looped
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (16, 32), (32, 16), (32, 32)])
def test_a_step_of_several_small_blocks(rows: int, cols: int, count: int) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": rows, "cols": cols}, "stages": 2}
    one = plan_of(fields | {"tile": {"m": rows, "n": 256, "k": cols}})
    plan = plan_of(fields | {"tile": {"m": rows, "n": 256, "k": count * cols}})
    values = {constant.name: constant.value for constant in plan.constants}
    assert values["kStepBlocks"] == count and 32 % count == 0  # a step's columns are among the 32 that a warp holds
    assert (plan.flops, plan.bytes) == (count * one.flops, count * one.bytes)
    # One copy brings the blocks of A; B comes block by block, each tile where a swizzle's pattern begins.
    assert plan.tensor_maps["a_map"].box == (cols, rows, count)
    assert all(plan.tensor_maps[name] == one.tensor_maps[name] for name in ("b_map", "b_groups_map", "c_map"))
    assert count * values["kABlockBytes"] == values["kABytes"] and count * values["kBBlockBytes"] == values["kBBytes"]
    assert values["kBBlockBytes"] == 4 * values["kBGroupBytes"] and values["kBBlockBytes"] % 1024 == 0
    assert values["kABlockBytes"] % (8 * 2 * cols) == 0
    source = render_plan(plan)
    assert "issue_blocks<kStepBlocks>" in source and "issue_blocks<1>" in source and "kTileK" not in source
    body = source.partition("\n\n")[2]
    assert max(map(len, body.splitlines())) <= 120 and "\n\n\n" not in body
    assert all(len(re.findall(rf"\b{name}\b", body)) > 1 for name in values)
    assert "kStepBlocks" not in render_plan(one)


@pytest.mark.parametrize(("stages", "resident"), [(6, 1), (6, 2), (3, 3)])
def test_thread_blocks_of_small_blocks_share_an_sm_as_asked(stages: int, resident: int) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 16, "cols": 16}, "stages": stages}
    plan = plan_of(fields | {"ctas_per_sm": resident})
    assert plan.ctas_per_sm == resident
    assert resident <= min(blocks_by_shared_memory(plan), blocks_by_threads(plan))
    assert plan.registers.needed <= plan.registers.limit <= launch_registers(plan)
    assert f"__launch_bounds__(kThreads, {resident})" in render_plan(plan)
    assert (plan.spec.hash == plan_of(fields).spec.hash) == (resident == 1)


@looped
@pytest.mark.parametrize("more", [{}, {"accumulate": True}, {"scheduler": "dynamic"}, {"b_layout": "column_major"}])
@pytest.mark.parametrize("resident", [2, 3])
@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (16, 32), (32, 16), (32, 32)])
def test_left_out_tiles_and_stages_leave_room_for_other_thread_blocks(
    rows: int, cols: int, resident: int, more: dict[str, Any]
) -> None:
    fields = {"arch": "sm_90a", "block": {"rows": rows, "cols": cols}, "ctas_per_sm": resident}
    for op, options in (("bsr_spmm", more), ("bsr_sddmm", {})):
        plan = plan_of({"op": op, **fields, **options})
        assert plan.ctas_per_sm == resident <= min(blocks_by_shared_memory(plan), blocks_by_registers(plan))
        assert plan.spec.stages >= 2
        plan_of({"op": op, **fields, **options, "tile": {"n": 128}})


@pytest.mark.parametrize(("tile", "stages"), [({"k": 64}, 3), ({"n": 1024}, 6), ({"n": 256, "k": 64}, 6)])
def test_left_out_stages_follow_the_tile_of_small_blocks(tile: dict[str, int], stages: int) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 16, "cols": 16}}
    assert plan_of(fields | {"tile": tile}).spec.stages == stages


@pytest.mark.parametrize(
    ("rows", "cols", "field", "reason"),
    [
        (256, 64, "block.rows", "is 256; allowed on sm_90a with wgmma: 16, 32, 64, 128"),
        (64, 16, "block.cols", "is 16; allowed with wgmma where block.rows is 64: 64, 128"),
        (32, 64, "block.cols", "is 64; allowed with wgmma where block.rows is 32: 16, 32"),
    ],
)
def test_blocks_that_other_instructions_have_kernels_for(rows: int, cols: int, field: str, reason: str) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": rows, "cols": cols}}
    with pytest.raises(SpecError) as caught:
        plan_of(fields)
    assert (caught.value.field, caught.value.reason) == (field, reason)
    plan_of(fields | {"mma": "wmma"})


@looped
@pytest.mark.parametrize("rows", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("cols", [16, 32, 64, 112, 128])
@pytest.mark.parametrize("n", [64, 128])
def test_steps_of_products_by_wmma_are_those_of_the_document(rows: int, cols: int, n: int) -> None:
    fields = {"op": "bsr_spmm", "arch": "sm_90a", "mma": "wmma", "block": {"rows": rows, "cols": cols}, "stages": 2}
    few = rows >= 64 and n == 64
    steps = [k for k in ((32, 64) if few else (16, 32, 64, 112)) if cols % k == 0]
    assert bool(steps) != (few and cols in (16, 112))
    for k in (16, 32, 64, 112):
        spec = fields | {"tile": {"m": rows, "n": n, "k": k}}
        if k in steps:
            plan_of(spec)
        else:
            reason = rf"tile\.k: is {k}; allowed with" if steps else r"tile\.n: is 64; allowed with .*: 128$"
            with pytest.raises(SpecError, match=reason):
                plan_of(spec)


def ada(head_dim: int, pattern: dict[str, Any], m: int, n: int, warp_rows: int = 16, **options: Any) -> dict[str, Any]:
    """A spec of attention on sm_89."""
    fields = {"op": "attention", "arch": "sm_89", "head_dim": head_dim, "pattern": pattern, "tile": {"m": m, "n": n}}
    return {**fields, "warp_rows": warp_rows, **options}


def listed(q: int, kv: int) -> dict[str, Any]:
    return {"kind": "topk", "k": 8, "block": {"q": q, "kv": kv}}


DENSE = {"kind": "dense"}


@looped
@pytest.mark.parametrize("kv", [16, 32, 64, 128])
@pytest.mark.parametrize("q", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_sm_89_has_a_kernel_for_all_blocks_and_heads(head_dim: int, q: int, kv: int) -> None:
    plan = plan_of({"op": "attention", "arch": "sm_89", "head_dim": head_dim, "pattern": listed(q, kv)})
    values = constants_of(plan)
    assert values["kStepBlocks"] * values["kLoadKeys"] == values["kTileN"]
    assert values["kLoadKeys"] * values.get("kBlockSteps", 1) == kv
    assert values["kTileM"] % values["kPassRows"] == 0 and values["kLoadKeys"] % values["kPassRows"] == 0
    # A row is whole lines of chunks, and the rows that share a swizzle share the banks.
    assert values["kRowLines"] * values["kLineChunks"] * 16 == values["kRowBytes"] == 2 * head_dim
    assert values["kLineChunks"] * values["kSwizzleRows"] == 8
    assert values.get("kBlockQueries", q) == q
    assert plan.ctas_per_sm >= (1 if head_dim > 128 else 2)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_swizzled_rows_meet_no_bank_twice(head_dim: int) -> None:
    """The 8 rows that one matrix of ldmatrix reads, one chunk of each, lie in 8 different groups of banks."""
    values = constants_of(plan_of(ada(head_dim, DENSE, 64, 32)))
    lines, swizzle = values["kLineChunks"], values["kSwizzleRows"]

    def place(row: int, chunk: int) -> int:
        return int(row * values["kRowBytes"] + (chunk ^ int(row // swizzle % lines)) * 16)

    for chunk in range(head_dim // 8):
        for first in (0, 8):
            assert len({place(row, chunk) // 16 % 8 for row in range(first, first + 8)}) == 8
    assert len({place(row, chunk) for row in range(16) for chunk in range(head_dim // 8)}) == 16 * head_dim // 8


@pytest.mark.parametrize(
    ("head_dim", "n", "warp_rows", "kept"),
    [(64, 64, 32, True), (128, 64, 16, True), (128, 64, 32, False), (128, 32, 32, False), (256, 32, 16, False)],
)
def test_q_stays_in_registers_if_they_last(head_dim: int, n: int, warp_rows: int, kept: bool) -> None:
    plan = plan_of(ada(head_dim, DENSE, 64, n, warp_rows))
    assert plan.flags.named()["q_in_registers"] is kept
    regions = {region.name: region for region in plan.shared}
    # In shared memory it has a place of its own; else it passes through the ring.
    assert (regions["Ring"].offset == regions["Q"].bytes) != kept
    assert regions["O"].offset == 0


@looped
@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("tile.m", ada(64, DENSE, 48, 64)),
        ("tile.m", ada(64, listed(32, 64), 64, 64)),
        ("tile.m", ada(64, listed(128, 16), 128, 64)),  # eight warps copy more rows at a time than a block has
        ("tile.n", ada(64, DENSE, 64, 24)),
        ("tile.n", ada(64, DENSE, 64, 256)),
        ("tile.n", ada(64, listed(64, 64), 64, 48)),
        ("warp_rows", ada(64, DENSE, 16, 64, 32)),
        ("warp_rows", ada(192, DENSE, 64, 32, 32)),  # no tile has the registers
        ("warp_rows", ada(256, DENSE, 32, 32, 32)),
        ("tile", ada(128, DENSE, 64, 128, 32)),
        ("stages", ada(64, DENSE, 64, 64, stages=1)),
        ("stages", ada(256, DENSE, 64, 64, stages=3)),
        ("pattern.block.q", ada(64, listed(8, 64), 64, 64)),
        ("tile.m", ada(64, DENSE, 16, 64, pack_gqa=32)),  # less than a query's heads
        ("tile.m", ada(64, listed(2, 64), 64, 64, pack_gqa=16)),
        ("pattern.block.q", ada(64, listed(1, 64), 16, 64, pack_gqa=8)),
    ],
)
def test_tiles_that_sm_89_has_no_kernel_for(field: str, spec: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(spec)
    assert caught.value.field == field
    assert "is " in caught.value.reason or "need" in caught.value.reason


def plain_ada(head_dim: int, pattern: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A spec of attention on sm_89 that leaves the tile out."""
    return {"op": "attention", "arch": "sm_89", "head_dim": head_dim, "pattern": pattern, **fields}


@pytest.mark.parametrize(
    ("spec", "field", "reason"),
    [
        (plain_ada(64, listed(8, 64)), "pattern.block.q", "is 8; allowed on sm_89: 16, 32, 64, 128"),
        (
            plain_ada(64, listed(1, 64), pack_gqa=8),
            "pattern.block.q",
            "is 1; allowed on sm_89 with pack_gqa 8: 2, 4, 8, 16, 32, 64, 128",
        ),
        (
            plain_ada(256, DENSE, warp_rows=32),
            "warp_rows",
            "is 32; O does not fit a thread's registers with head_dim 256; allowed: 16",
        ),
        (
            plain_ada(96, listed(1, 16), pack_gqa=64, warp_rows=16),
            "warp_rows",
            "is 16; 4 warps copy 32 rows of 96 elements at a time, which the 16 keys of a step or a listed block are "
            "no multiple of; use warp_rows 32",
        ),
    ],
)
def test_a_field_that_was_given_is_to_blame_on_sm_89(spec: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(spec)
    assert (caught.value.field, caught.value.reason) == (field, reason)


@pytest.mark.parametrize(
    ("spec", "instead"),
    [
        (ada(192, DENSE, 256, 112), "tile.m 16, 32, 64"),
        (ada(64, listed(128, 16), 128, 64), "tile.m 16, 32, 64 or warp_rows 32"),
        (ada(64, DENSE, 256, 32), "tile.m 16, 32, 64, 128 or warp_rows 32"),
        (ada(96, DENSE, 128, 48), "tile.m 16, 32"),
        (ada(96, DENSE, 128, 48, 32), "tile.m 32, 64"),
        (ada(96, DENSE, 128, 48, 32, pack_gqa=64), "tile.m 64"),
        (ada(96, DENSE, 128, 48, pack_gqa=64), "another tile.n"),
    ],
)
def test_what_to_use_instead_helps(spec: dict[str, Any], instead: str) -> None:
    with pytest.raises(SpecError, match=r"^tile\.m: is \d+; \d+ warps copy .* rows of .* elements at a time") as caught:
        plan_of(spec)
    assert caught.value.reason.endswith(f"; use {instead}")
    for sizes in re.findall(r"tile\.m ([\d, ]*\d)", instead):
        for m in map(int, sizes.split(", ")):
            plan_of(spec | {"tile": spec["tile"] | {"m": m}})
    if "warp_rows" in instead:
        plan_of(spec | {"warp_rows": 32})


@pytest.mark.parametrize("q", [1, 2, 16, 128])
def test_a_left_out_tile_has_all_heads_of_a_query(q: int) -> None:
    plan = plan_of(plain_ada(96, listed(q, 16), pack_gqa=64))
    assert isinstance(plan.spec, AttentionSpec)
    assert (plan.spec.tile.m, plan.spec.warp_rows, plan.tile_queries) == (64, 32, 1)


@looped
@pytest.mark.parametrize("kv", [16, 32, 64, 128])
@pytest.mark.parametrize("q", [32, 128])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("warp_rows", [16, 32])
def test_a_left_out_tile_follows_the_rows_of_a_warp(head_dim: int, q: int, kv: int, warp_rows: int) -> None:
    masked = {"kind": "block_lists", "block": {"q": q, "kv": kv}, "mask": "causal"}
    for pattern in (listed(q, kv), masked, DENSE, {"kind": "causal"}):
        plan_of(plain_ada(head_dim, pattern, warp_rows=warp_rows))
    plan_of(plain_ada(head_dim, {"kind": "causal"}, warp_rows=warp_rows, tile={"m": 32}))


def wmma(head_dim: int, pattern: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A spec of attention on sm_89 by WMMA."""
    return {"op": "attention", "arch": "sm_89", "mma": "wmma", "head_dim": head_dim, "pattern": pattern, **fields}


@looped
@pytest.mark.parametrize("kv", [16, 32, 64, 128])
@pytest.mark.parametrize("q", [16, 32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_wmma_has_a_kernel_for_all_blocks(head_dim: int, q: int, kv: int) -> None:
    plan = plan_of(wmma(head_dim, listed(q, kv)))
    values = constants_of(plan)
    assert plan.template == "attention/wmma.cu.j2" and plan.tile_queries == min(q, 64)
    assert values["kStepBlocks"] * values["kLoadKeys"] == values["kTileN"]
    assert values["kLoadKeys"] * values.get("kBlockSteps", 1) == kv
    assert values["kTileM"] % values["kPassRows"] == 0 and values["kLoadKeys"] % values["kPassRows"] == 0
    assert values.get("kBlockQueries", q) == q
    assert plan.ctas_per_sm >= 2


@pytest.mark.parametrize("n", [32, 64, 128])
def test_strips_of_wmma_hold_what_passes_through_them(n: int) -> None:
    """Scores, P and the factors behind it, O; at addresses that WMMA takes, in banks that do not collide."""
    plan = plan_of(wmma(64, DENSE, tile={"m": 64, "n": n}, stages=2))
    values = constants_of(plan)
    strip, factor, bytes_ = values["kStripStride"], values["kFactorStride"], values["kStripBytes"]
    assert n <= strip and 16 * strip * 4 == bytes_
    assert 16 * strip * 2 <= values["kFactorsOffset"] and values["kFactorsOffset"] + 16 * factor * 4 <= bytes_
    assert values["kOutColumns"] <= n and values["kHeadDim"] % values["kOutColumns"] == 0
    assert bytes_ % 32 == values["kFactorsOffset"] % 32 == 0 and factor % 4 == strip % 8 == 0
    assert values["kRowStride"] % 8 == 0
    # Four rows of floats begin in banks 0, 8, 16 and 24; rows of 16-bit elements are an odd number of chunks long.
    assert {row * strip % 32 for row in range(4)} == {0, 8, 16, 24}
    assert strip * 2 // 16 % 2 == values["kRowStride"] * 2 // 16 % 2 == 1
    regions = {region.name: region for region in plan.shared}
    assert regions["Strips"].bytes == 4 * bytes_ and regions["Strips"].offset % 32 == 0
    assert regions["Q"].bytes == 64 * values["kRowStride"] * 2
    assert regions["Q"].offset == (plan.spec.stages - 1) * values["kSlot"] * 2


@looped
@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("head_dim", wmma(256, DENSE)),
        ("tile.m", wmma(64, DENSE, tile={"m": 256, "n": 64})),
        ("tile.m", wmma(64, listed(32, 64), tile={"m": 64, "n": 64})),
        ("tile.m", wmma(64, listed(128, 16), tile={"m": 128, "n": 64})),  # copies more rows at a time than a block has
        ("tile.n", wmma(64, DENSE, tile={"m": 64, "n": 48})),
        ("tile", wmma(128, DENSE, tile={"m": 16, "n": 128}, stages=2)),
        ("stages", wmma(64, DENSE, stages=1)),
        ("stages", wmma(128, DENSE, tile={"m": 128, "n": 64}, stages=4)),
        ("warp_rows", wmma(64, DENSE, warp_rows=32)),
        ("pattern.block.q", wmma(64, listed(8, 64), tile={"m": 64, "n": 64})),
        ("softcap", wmma(64, DENSE, softcap=30.0)),
        ("sink", wmma(64, DENSE, sink=True)),
        ("pack_gqa", wmma(64, DENSE, pack_gqa=8)),
    ],
)
def test_what_wmma_has_no_kernel_for(field: str, spec: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(spec)
    assert caught.value.field == field
    assert "wmma" in caught.value.reason or re.search(r"\d", caught.value.reason)


@pytest.mark.parametrize(
    ("pattern", "heads", "m", "queries"),
    [
        (listed(64, 64), 8, 128, 16),
        (listed(1, 64), 16, 16, 1),
        (listed(4, 64), 4, 16, 4),
        (listed(16, 16), 2, 32, 16),
        (DENSE, 64, 128, 2),
    ],
)
def test_packed_heads_share_a_tile_on_sm_89(pattern: dict[str, Any], heads: int, m: int, queries: int) -> None:
    """Left-out tiles hold whole queries, of one block: blocks of as few queries as their heads fill 16 rows with."""
    plan = plan_of({"op": "attention", "arch": "sm_89", "head_dim": 64, "pattern": pattern, "pack_gqa": heads})
    values = constants_of(plan)
    assert isinstance(plan.spec, AttentionSpec)
    assert (plan.spec.tile.m, values["kTileM"], values["kPackGqa"]) == (m, m, heads)
    assert plan.tile_queries == values["kTileQueries"] == values["kSubTileRows"] == queries
    block = plan.spec.pattern.fixed_block
    assert values.get("kBlockQueries") == (block.q if block is not None and block.q > queries else None)
    assert plan.flops == 4 * m * plan.spec.tile.n * 64


def test_warp_rows_are_a_matter_of_mma_sync(attention: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"^warp_rows: is 32; sm_90a multiplies 64 rows at a time"):
        plan_of(attention | {"warp_rows": 32})


def test_left_out_warp_rows_follow_the_tile() -> None:
    fields = {"op": "attention", "arch": "sm_89", "pattern": DENSE}
    for head_dim, m, rows in ((64, 128, 32), (128, 128, 32), (128, 64, 16), (256, 64, 16), (192, 128, 16)):
        spec = parse_spec({**fields, "head_dim": head_dim, "tile": {"m": m, "n": 32}})
        assert isinstance(spec, AttentionSpec) and spec.warp_rows == rows


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (ada(128, DENSE, 64, 64, stages=3), "8 of 48 warps (17%), limited by shared memory and registers"),
        (ada(64, DENSE, 64, 64), "12 of 48 warps (25%), limited by registers"),
        (ada(128, DENSE, 128, 32, 32), "8 of 48 warps (17%), limited by shared memory and registers"),
        (ada(128, DENSE, 128, 32, 32) | {"arch": "sm_80"}, "8 of 64 warps (12%), limited by registers"),
    ],
)
def test_occupancy(spec: dict[str, Any], said: str) -> None:
    assert occupancy(plan_of(spec)) == said


def by_wmma(**fields: Any) -> dict[str, Any]:
    """A spec of the simplest product kernel that differs in some fields."""
    return {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 128, "cols": 128}, "mma": "wmma", **fields}


@looped
@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("epilogue", {"epilogue": {"bias": True}}),
        ("accumulate", {"accumulate": True}),
        ("scheduler", {"scheduler": "dynamic"}),
        ("transpose_a", {"transpose_a": True}),
        ("ctas_per_sm", {"ctas_per_sm": 2}),
        ("block.rows", {"block": {"rows": 48, "cols": 128}}),
        ("block.cols", {"block": {"rows": 128, "cols": 96}, "tile": {"k": 32}}),
        ("tile.m", {"tile": {"m": 64}}),
        ("tile.n", {"tile": {"n": 192}}),
        ("tile.n", {"tile": {"n": 256}}),
        ("tile.k", {"tile": {"k": 48}}),
        ("stages", {"copy": "cp_async", "stages": 1}),
        ("stages", {"copy": "tma", "stages": 1}),
        ("stages", {"copy": "ld_global", "stages": 2}),
        ("stages", {"copy": "cp_async", "stages": 8, "block": {"rows": 256, "cols": 128}}),  # too much shared memory
    ],
)
def test_what_products_by_wmma_are_not_written_for(field: str, change: dict[str, Any]) -> None:
    plan_of(by_wmma())
    with pytest.raises(SpecError) as caught:
        plan_of(by_wmma(**change))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        # With mma.sync on sm_90a, which multiplies small blocks.
        ("output", {"op": "bsr_spgemm", "arch": "sm_90a", "block": {"rows": 16, "cols": 16}, "output": "bsr"}),
        (
            "scheduler",
            {"op": "bsr_spgemm", "arch": "sm_90a", "block": {"rows": 32, "cols": 32}, "scheduler": "dynamic"},
        ),
        ("stages", {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 128, "cols": 128}, "stages": 1}),
        (
            "tile.m",
            {
                "op": "bsr_spmm",
                "arch": "sm_90a",
                "block": {"rows": 16, "cols": 16},
                "tile": {"m": 8, "n": 512, "k": 16},
                "mma": "wgmma",
                "ctas_per_sm": 2,
            },
        ),
        (
            "tile.m",  # a multiple of 16, but no whole warpgroups
            {"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": {"kind": "causal"}, "tile": {"m": 80}},
        ),
        (
            "tile.m",
            {"op": "attention", "arch": "sm_89", "head_dim": 128, "pattern": {"kind": "causal"}, "tile": {"m": 24}},
        ),
    ],
)
def test_what_else_there_is_no_kernel_for(field: str, spec: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_of(spec)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "spec",
    [
        {"op": "bsr_sddmm", "block": {"rows": 64, "cols": 64}},
        {"op": "bsr_spmm", "block": {"rows": 64, "cols": 64}, "tile": {"m": 128, "n": 256, "k": 64}},
    ],
)
def test_two_stages_are_enough(spec: dict[str, Any]) -> None:
    assert plan_of({"arch": "sm_90a", "stages": 2, **spec}).spec.stages == 2
    with pytest.raises(SpecError, match=r"^stages: is 1; a warpgroup reads one stage"):
        plan_of({"arch": "sm_90a", "stages": 1, **spec})


@looped
@pytest.mark.parametrize("kind", ["topk", "block_lists"])
@pytest.mark.parametrize("queries", [16, 32, 64, 128])
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_lists_have_a_kernel_without_a_tile(kind: str, queries: int, keys: int, head_dim: int) -> None:
    more = {"k": 8} if kind == "topk" else {}
    pattern = {"kind": kind, "block": {"q": queries, "kv": keys}, **more}
    plan = plan_of({"op": "attention", "arch": "sm_90a", "head_dim": head_dim, "pattern": pattern})
    crowded = queries < 128 and ((keys == 128 and head_dim in (96, 128)) or head_dim > 128)
    assert plan.spec.stages == (1 if crowded else 2)


@looped
@pytest.mark.parametrize("kind", ["topk", "block_lists"])
@pytest.mark.parametrize("queries", [16, 32, 64])
@pytest.mark.parametrize(
    ("rows", "keys", "head_dim", "stages"),
    [
        (128, 64, 64, 2),
        (128, 64, 128, 2),
        (128, 128, 64, 2),
        (128, 128, 96, 1),
        (128, 128, 128, 1),
        (192, 64, 64, 2),
        (192, 64, 96, 1),
        (192, 64, 128, 1),
        (192, 128, 64, 2),
        (256, 64, 64, 2),
    ],
)
def test_lists_have_one_stage_only_where_two_do_not_fit(
    kind: str, queries: int, rows: int, keys: int, head_dim: int, stages: int
) -> None:
    more = {"k": 33} if kind == "topk" else {}
    pattern = {"kind": kind, "block": {"q": queries, "kv": 64}, **more}
    tile = {"m": rows, "n": keys}
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": head_dim, "pattern": pattern, "tile": tile}
    assert parse_spec(fields).stages == stages
    if stages == 1:
        with pytest.raises(SpecError, match=r"2 stages of tile .* KB of shared memory"):
            plan_of({**fields, "stages": 2})


def splits_of(plan: Plan) -> tuple[int, int]:
    constants = {constant.name: constant.value for constant in plan.constants}
    return constants["kProducerRegisters"], constants["kConsumerRegisters"]


@pytest.mark.parametrize(
    ("pattern", "keys", "split"),
    [
        ({"kind": "dense"}, 64, (32, 160)),
        ({"kind": "topk", "k": 8, "block": {"q": 64, "kv": 64}}, 64, (32, 160)),
        ({"kind": "block_lists", "block": {"q": 64, "kv": 64}}, 64, (56, 152)),
    ],
)
def test_a_producer_of_several_lists_has_more_registers(
    pattern: dict[str, Any], keys: int, split: tuple[int, int]
) -> None:
    plan = plan_of(
        {"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": pattern, "tile": {"m": 192, "n": keys}}
    )
    assert splits_of(plan) == split and plan.registers.needed <= split[1] == plan.registers.limit


@pytest.mark.parametrize(
    ("kind", "m", "keys", "reason"),
    [
        ({"kind": "topk", "k": 33}, 192, 128, "192 x 128 needs about 156 registers per thread .*, 152 are available"),
        ({"kind": "block_lists"}, 256, 64, "256 x 64 needs about 108 registers per thread .*, 104 are available"),
    ],
)
def test_a_tile_is_refused_whose_consumers_the_producer_leaves_too_few_registers(
    kind: dict[str, Any], m: int, keys: int, reason: str
) -> None:
    pattern = {**kind, "block": {"q": 64, "kv": 64}}
    fields = {"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": pattern, "tile": {"m": m, "n": keys}}
    with pytest.raises(SpecError, match=reason) as refused:
        plan_of(fields)
    assert refused.value.field == "tile"


@pytest.mark.parametrize(
    ("name", "keys", "rereads"),
    [("l4_dense", 64, True), ("l4_topk32", 64, True), ("l4_causal", 48, False), ("l4_dense", 32, False)],
)
def test_a_threads_number_is_read_anew_where_hardly_a_register_is_left(name: str, keys: int, rereads: bool) -> None:
    shipped = find_spec(name).spec.model_dump(mode="json", by_alias=True)
    plan = plan_for(find_spec({**shipped, "tile": {**shipped["tile"], "n": keys}}))
    assert ("%%tid.x" in render_plan(plan)) is rereads


def test_what_explain_says_of_registers_holds_for_the_compilers_figures() -> None:
    for named in shipped_specs():
        try:
            receipt = read_receipt(named, receipt_path(named))
        except MissingReceipt:
            continue
        if receipt.spec.hash == named.spec.hash:
            plan, registers = plan_for(named), receipt.cubin.registers
            assert registers <= launch_registers(plan), named.stem
            if plan.spec.schedule == "multistage":
                assert plan.registers.accumulators <= registers, named.stem
