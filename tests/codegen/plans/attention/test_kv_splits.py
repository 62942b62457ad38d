"""``kv_splits``: what is filled in, what the plan of such a kernel has, how keys are divided, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_values import declarations, problems, seqlen_info

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.parse import parse_spec
from codegen.planning import plan_for
from codegen.render import render
from codegen.spec import AttentionSpec

FIELDS: dict[str, Any] = {"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": {"kind": "dense"}}
PARTS = {**FIELDS, "kv_splits": 2}
LISTS = {"kind": "topk", "k": 8, "block": {"q": 128, "kv": 128}}


@pytest.mark.parametrize(
    ("change", "m", "n", "stages"),
    [
        ({}, 64, 64, 2),
        ({"head_dim": 64}, 128, 64, 4),
        ({"head_dim": 64, "tile": {"n": 128}}, 64, 128, 2),
        ({"head_dim": 64, "pattern": {"kind": "causal"}}, 64, 64, 4),
        ({"head_dim": 64, "pattern": {**LISTS, "block": {"q": 64, "kv": 64}}}, 64, 64, 4),
        ({"head_dim": 96}, 64, 64, 2),
        ({"head_dim": 256}, 64, 64, 1),
        ({"pattern": LISTS}, 64, 128, 1),
    ],
)
def test_tile_and_stages_that_are_left_out_fit(change: dict[str, Any], m: int, n: int, stages: int) -> None:
    spec = parse_spec({**PARTS, **change})
    assert isinstance(spec, AttentionSpec)
    assert (spec.tile.m, spec.tile.n, spec.stages) == (m, n, stages)
    assert spec.schedule == "cooperative"
    assert not spec.stream_k_tail
    plan_for(find_spec({**PARTS, **change}))


def test_each_row_has_a_warpgroup_in_both_parts() -> None:
    plan = plan_for(find_spec({**PARTS, "head_dim": 64}))
    values = {constant.name: constant.value for constant in plan.constants}
    assert (values["kSubTiles"], values["kConsumerWarpgroups"], values["kSubTileWarpgroups"]) == (2, 4, 2)
    assert plan.threads == 5 * 128
    (left,) = (region for region in plan.shared if region.name == "Partials")
    assert left.bytes == 2 * 4 * 128 * (64 * 64 // 128 + 4)  # O of 64 x 64, two maxima and two sums of each thread
    assert plan.tile_queries == 128


def test_one_part_is_no_part_of_a_hash() -> None:
    assert parse_spec({**FIELDS, "kv_splits": 1}).hash == parse_spec(FIELDS).hash
    parts = parse_spec(PARTS)
    other = parse_spec(json.loads(parts.canonical_json()) | {"kv_splits": 1, "stream_k_tail": False})
    assert isinstance(parts, AttentionSpec) and isinstance(other, AttentionSpec)
    assert (other.tile, other.schedule, other.stages) == (parts.tile, parts.schedule, parts.stages)
    assert parts.hash != other.hash


def test_both_parts_count_as_work_and_as_bytes() -> None:
    plan = plan_for(find_spec(PARTS))
    assert (plan.flops, plan.bytes) == (2 * 4 * 64 * 64 * 128, 2 * 2 * 64 * 128 * 2)  # a step of each part


PROGRAM = """\
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
%(declarations)sstruct WorkTile {};
struct Tile { int batch, head, first_query; };
%(constants)s
%(seqlen_info)s
%(pattern)s
%(kv_blocks_of)s
// For every tile a line with the blocks of all sub-tiles, behind the number of them that the first one has, and one
// with those of the whole tile.
int main(int, char** words) {
  const Params p = params_of(std::atoi(words[1]), std::atoi(words[2]), std::atoi(words[3]));
  for (int first = 0; first < p.q_len; first += kTileM) {
    std::printf("%%d", kv_blocks_of(p, %(work)s{kBatch, 0, first}, 0).count);
    for (int sub_tile = 0; sub_tile < kSubTiles; ++sub_tile) {
      KvBlockIterator blocks = kv_blocks_of(p, %(work)s{kBatch, 0, first}, sub_tile);
      for (int i = 0; i < blocks.count; ++i) std::printf(" %%d", blocks.at(i));
    }
    std::puts("");
    KvBlockIterator blocks(p, kBatch, 0, first);
    std::printf("%%d", (blocks.count + 1) / 2);
    for (int i = 0; i < blocks.count; ++i) std::printf(" %%d", blocks.at(i));
    std::puts("");
  }
}
"""


@pytest.mark.parametrize(
    "pattern",
    [
        {"kind": "dense"},
        {"kind": "causal"},
        {"kind": "prefix_lm"},
        {"kind": "sliding_window", "left": 300, "right": 20},
        {"kind": "sliding_window"},
    ],
)
def test_the_two_parts_are_the_whole(pattern: dict[str, Any], recorded: Callable[..., None], tmp_path: Path) -> None:
    """The kernel's own division, run on the host: the first half of the steps, rounded up, and then the others."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    named = find_spec({**PARTS, "pattern": pattern})
    assert isinstance(named.spec, AttentionSpec)
    source = render(named)
    begin, parts_begin = (
        source.index("// Pattern: "),
        source.index("__device__ __forceinline__ KvBlockIterator kv_blocks_of("),
    )
    program = PROGRAM % {
        "declarations": declarations([named.spec.pattern]),
        "constants": "\n".join(f"constexpr {c.ctype} {c.name} = {c.literal};" for c in plan_for(named).constants),
        "seqlen_info": seqlen_info(plan_for(named)),
        "pattern": source[begin : source.index("// One tile of work", begin)],
        "work": "{}, " if named.spec.pattern.serpentine else "",
        "kv_blocks_of": source[parts_begin : source.index("\n}\n", parts_begin) + 3],
    }
    recorded(program)
    (tmp_path / "main.cpp").write_text(program, encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", "-O1", "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    counts = set()
    lengths = ((1, 1), (64, 64), (65, 129), (700, 700), (300, 1000), (1000, 40), (5, 2000))
    for problem in problems(named.spec.pattern, lengths):
        run = subprocess.run([tmp_path / "main", *map(str, problem)], check=True, capture_output=True, text=True)
        lines = run.stdout.splitlines()
        assert lines[::2] == lines[1::2]
        counts |= {len(line.split()) - 1 for line in lines}
    assert {1, 3} <= counts and any(count % 2 == 0 for count in counts)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("kv_splits", {"kv_splits": 3}),
        ("kv_splits", {"arch": "sm_89"}),
        ("kv_splits", {"pattern": {"kind": "block_lists", "block": {"q": 64, "kv": 64}}}),
        ("kv_splits", {"pattern": {"kind": "strided", "stride": 3, "local": 1, "block": 64}}),
        ("kv_splits", {"pattern": {**LISTS, "block": {"q": 64, "kv": 64}}, "share_kv_loads": True}),
        ("stream_k_tail", {"stream_k_tail": True}),
        ("schedule", {"schedule": "ping_pong", "tile": {"m": 128, "n": 64}}),
        ("schedule", {"schedule": "ping_pong"}),
        ("kv_splits", {"kv_splits": True}),
        ("kv_splits", {"kv_splits": 2.0}),
        ("kv_splits", {"kv_splits": "2"}),
        ("pack_gqa", {"pack_gqa": 2}),
        ("tile.m", {"tile": {"m": 192, "n": 64}}),
        ("tile.m", {"tile": {"m": 128, "n": 64}}),
        ("tile.m", {"head_dim": 64, "tile": {"m": 128, "n": 80}}),
        ("stages", {"stages": 3}),
        ("pattern.block.q", {"head_dim": 64, "pattern": {**LISTS, "block": {"q": 64, "kv": 64}}, "tile": {"m": 128}}),
        ("tile.n", {"pattern": LISTS, "tile": {"n": 64}}),
        ("tile.n", {"pattern": LISTS, "tile": {"n": 256}}),
        ("head_dim", {"head_dim": 192, "pattern": LISTS}),
    ],
)
def test_what_it_is_not_written_for_is_refused(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as caught:
        plan_for(find_spec({**PARTS, **change}))
    assert caught.value.field == field
