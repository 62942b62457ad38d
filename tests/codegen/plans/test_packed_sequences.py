"""Kernels of packed sequences: tiles of a launch, what they refuse, and the search for the sequence of a tile."""

from __future__ import annotations

import itertools
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.patterns import PATTERNS
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.plans.lengths import query_tiles
from codegen.problem import AttentionShape
from codegen.render import generate, render_template

HOPPER: dict[str, Any] = {
    "op": "attention",
    "arch": "sm_90a",
    "head_dim": 128,
    "pattern": {"kind": "causal"},
    "tile": {"m": 128, "n": 128},
    "layout": "varlen",
}
LISTS = {"kind": "block_lists", "block": {"q": 128, "kv": 128}}
ADA = {**HOPPER, "arch": "sm_89", "mma": "mma", "tile": {"m": 64, "n": 64}}
PROGRAM = """\
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
using int64 = long long;
inline int __ldg(const int* word) { return *word; }
struct Params { int q_len, kv_len, sequences, heads; const int *cu_seqlens_q, *cu_seqlens_k; };
%s
int main(int count, char** words) {
  int bounds[512], tile_queries = std::atoi(words[1]), tiles = std::atoi(words[2]);
  for (int i = 3; i < count; ++i) bounds[i - 3] = std::atoi(words[i]);
  const Params p = {1 << 20, 1 << 20, count - 4, 1, bounds, bounds};
  for (int tile = 0; tile < tiles; ++tile) {
    const int sequence = sequence_of_tile(p, tile, tile_queries);
    std::printf("%%d %%d\\n", sequence, first_query_of_tile(p, tile, tile_queries, sequence));
  }
}
"""


def plan_of(fields: dict[str, Any], **changes: Any) -> Plan:
    return plan_for(find_spec({**fields, **changes}))


@pytest.mark.parametrize("fields", [HOPPER, ADA], ids=["sm_90a", "sm_89"])
def test_a_launch_has_room_for_the_tiles_of_every_sequence(fields: dict[str, Any]) -> None:
    plan = plan_of(fields)
    shape = AttentionShape(1, 8, 2, 1000, 900, sequences=7)
    launch = plan.problem(shape, 100)
    tiles = 1000 // plan.tile_queries + 7
    assert launch.numbers["query_tiles"] == tiles and launch.tiles == launch.numbers["tiles"] == 8 * tiles
    assert launch.numbers["sequences"] == 7
    assert {param.name for param in plan.params} >= {"cu_seqlens_q", "cu_seqlens_k", "sequences"}
    padded = plan_of({**fields, "layout": "padded"})
    assert "sequences" not in padded.problem(AttentionShape(1, 8, 2, 1000, 900), 100).numbers


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pattern": {"kind": "prefix_lm"}}, "pattern.kind: is prefix_lm, which is not written for layout varlen"),
        (
            {"pattern": {**LISTS, "mask": "bits"}},
            "pattern.mask: is not written for layout varlen; allowed: none, causal",
        ),
        ({**ADA, "pattern": LISTS}, "arch: is sm_89; lists in packed sequences are for: sm_90a"),
        ({"kv_lengths": True}, "kv_lengths: is not written for layout varlen; leave it out"),
        ({"pack_gqa": 2}, "pack_gqa: is not written"),
        ({"pattern": {"kind": "dense"}, "stream_k_tail": True}, "stream_k_tail"),
        ({"kv_splits": 2, "tile": {"m": 64, "n": 64}, "schedule": "cooperative"}, "kv_splits: is not written"),
        ({"score": {"value": "score + 1"}}, "score: is not written"),
        ({"dtype": "e4m3"}, "dtype: is e4m3, which is not written for layout varlen; allowed: fp16, bf16"),
        ({"layout": "packed"}, "layout"),
        ({"arch": "sm_89", "mma": "wmma", "tile": {"m": 64, "n": 64}}, "layout: is varlen; allowed with wmma: padded"),
    ],
)
def test_what_is_not_written_for_packed_sequences_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        plan_of(HOPPER, **changes)


@pytest.mark.parametrize(
    "kind", [name for name, pattern in PATTERNS.items() if pattern.packs_sequences and not pattern.lists]
)
@pytest.mark.parametrize("fields", [HOPPER, ADA], ids=["sm_90a", "sm_89"])
def test_nothing_behind_the_search_reads_the_lengths_of_all_sequences(fields: dict[str, Any], kind: str) -> None:
    source = generate(find_spec({**fields, "pattern": {"kind": kind}})).source
    text = source[source.index("// Pattern: ") :]
    assert "SeqlenInfo seqlen(p, " in text and not re.findall(r"p\.(?:q_len|kv_len)", text)


@pytest.mark.parametrize("tile_queries", [64, 192])
def test_every_query_is_in_one_tile(tile_queries: int, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    piece = render_template(plan_of(HOPPER), "attention/seqlen_info/varlen.cuh.j2")
    (tmp_path / "main.cpp").write_text(PROGRAM % piece, encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", "-O1", "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    draw = random.Random(tile_queries)
    for case in range(40):
        lengths = [draw.choice((0, 0, 1, 63, 64, 65, 191, 192, 193, draw.randint(0, 2000))) for _ in range(1 + case)]
        before, after = draw.choice(((0, 0), (draw.randint(1, 700), draw.randint(0, 700))))
        bounds = list(itertools.accumulate(lengths, initial=before))
        tokens = bounds[-1] + after
        tiles = query_tiles(AttentionShape(1, 1, 1, tokens, tokens, sequences=len(lengths)), tile_queries)
        words = [str(number) for number in (tile_queries, tiles, *bounds)]
        run = subprocess.run([tmp_path / "main", *words], capture_output=True, text=True, check=True)
        seen = [0] * tokens
        for line in run.stdout.splitlines():
            sequence, first = map(int, line.split())
            for query in range(first, min(first + tile_queries, lengths[sequence])):
                seen[bounds[sequence] + query] += 1
        assert seen == [0] * before + [1] * sum(lengths) + [0] * after, (lengths, before, after)
