"""``kv_lengths``: what the walk over key blocks leaves out and masks, run on the host as in test_key_blocks, and what
specs, plans and calls know of it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_values import PROBLEMS_OF_LENGTHS as PROBLEMS
from batch_values import declarations, lengths_of, numbered, seqlen_info, window_or

from codegen.library import find_spec, shipped_specs
from codegen.patterns import PatternBase
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.render import render_plan, render_template
from codegen.spec import AttentionSpec

PATTERNS: list[dict[str, Any]] = [
    {"kind": "dense"},
    {"kind": "causal"},
    {"kind": "causal", "align": "top_left"},
    {"kind": "prefix_lm"},
    {"kind": "sliding_window"},
    {"kind": "sink_window"},
    {"kind": "sliding_window", "left": 100, "right": 37},
    {"kind": "sink_window", "sink": 4, "left": 130, "right": 70},
    {"kind": "sink_window", "sink": 200, "left": 30, "right": 0},
    *(
        {"kind": "strided", "stride": stride, "local": local, "block": 64, "causal": causal}
        for stride, local in ((2, 0), (5, 2))
        for causal in (True, False)
    ),
]
# (architecture, rows, keys of a step, further fields)
TILES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("sm_90a", 128, 128, {"pack_gqa": 8}),
    ("sm_90a", 64, 64, {"kv_splits": 2}),
    ("sm_89", 16, 32, {}),
]
PROGRAM = """\
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
%(declarations)s
%(constants)s
%(seqlen_info)s
%(pattern)s
// For each tile a line with the blocks of its steps, and of the same in parts of two; then one for each query.
int main(int, char** word) {
  const Params p = params_of(std::atoi(word[1]), std::atoi(word[2]), std::atoi(word[3]), std::atoi(word[4]));
  for (int first = 0; first < p.q_len; first += %(rows)d) {
    KvBlockIterator blocks(p, kBatch, 0, first);
    std::string listed, rows[%(rows)d];
    for (std::string& row : rows) row.assign(p.kv_len, '.');
    for (int i = 0; i < blocks.count; ++i) {
      const int block = blocks.at(i);
      listed += std::to_string(block) + " ";
      for (int key = block * kTileN; key < min((block + 1) * kTileN, SeqlenInfo(p, kBatch).kv_end()); ++key)
        for (int row = 0; row < %(rows)d; ++row)
          if (!(%(masked)s) || %(visible)s) rows[row].at(key) = 'x';
    }
    std::puts(listed.c_str());
    %(parts)s
    for (int row = 0; row < min(%(rows)d, p.q_len - first); ++row) std::puts(rows[row].c_str());
  }
}
"""
PARTS = """listed.clear();
    for (int begin = 0; begin < blocks.count + 3; begin += 2) {
      KvBlockIterator part(p, kBatch, 0, first);
      part.restrict_to(begin, 2);
      for (int i = 0; i < part.count; ++i) listed += std::to_string(part.at(i)) + " ";
    }
    std::puts(listed.c_str());"""


def plan_of(fields: dict[str, Any]) -> Plan:
    return plan_for(find_spec({"op": "attention", "head_dim": 64, "kv_lengths": True, **fields}))


def plans() -> list[Plan]:
    found = []
    for pattern in PATTERNS:
        for arch, m, n, more in TILES:
            if "kv_splits" in more and pattern["kind"] in ("sink_window", "strided"):
                continue
            if n >= 64 or pattern["kind"] != "strided" or n == pattern["block"] // 2:
                found.append(plan_of({"arch": arch, "pattern": pattern, "tile": {"m": m, "n": n}, **more}))
    return found


def pattern_of(plan: Plan) -> PatternBase:
    assert isinstance(plan.spec, AttentionSpec)
    return plan.spec.pattern


def rows_of(plan: Plan) -> int:
    """Queries that have one range of key blocks."""
    assert isinstance(plan.spec, AttentionSpec)
    return plan.tile_queries // (plan.sub_tiles if plan.spec.kv_splits == 1 else 1)


def host_program(plan: Plan) -> str:
    pattern = pattern_of(plan)
    return PROGRAM % {
        "declarations": declarations([pattern], kv_lengths=True),
        "constants": "\n".join(f"constexpr {c.ctype} {c.name} = {c.literal};" for c in plan.constants),
        "seqlen_info": seqlen_info(plan),
        "pattern": render_template(plan, str(plan.flags.pattern_template)),
        "masked": "blocks.masked(i, block)" if pattern.masks_pairs and not plan.flags.skip_masked else "false",
        "visible": "visible(p, kBatch, first + row, key)"
        if pattern.masks_pairs and not plan.flags.skip_masked
        else "true",
        "rows": rows_of(plan),
        "parts": PARTS if plan.flags.partial_range else "",
    }


@pytest.mark.parametrize(
    "plan",
    [plan for plan in plans() if not plan.flags.skip_masked],
    ids=lambda plan: f"{plan.spec.pattern.stem()}-{plan.spec.arch}-{plan.tile_queries}x{plan.spec.tile.n}",
)
def test_no_step_lies_behind_the_length_and_no_pair_is_lost(
    plan: Plan, recorded: Callable[..., None], tmp_path: Path
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    text = host_program(plan)
    recorded(text)
    (tmp_path / "main.cpp").write_text(text, encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    keys, rows = plan.spec.tile.n, rows_of(plan)  # type: ignore[union-attr]
    for q_len, kv_len in PROBLEMS:
        prefix = window_or(kv_len // 3, pattern_of(plan))
        pattern = numbered(pattern_of(plan), prefix)
        values = pattern.values_of([prefix])
        shown = [
            "".join(".x"[bool(pattern.visible(query, key, q_len, kv_len, values))] for key in range(kv_len))
            for query in range(q_len)
        ]
        for length in lengths_of(kv_len):
            words = map(str, (tmp_path / "main", q_len, kv_len, prefix, length))
            lines = iter(subprocess.run([*words], check=True, capture_output=True, text=True).stdout.splitlines())
            end = max(0, min(length, kv_len))
            for first in range(0, q_len, rows):
                where = f"q_len {q_len}, kv_len {kv_len}, length {length}, queries from {first}"
                steps = next(lines).split()
                assert len(set(steps)) == len(steps) and all(int(step) * keys < end for step in steps), where
                if plan.flags.partial_range:
                    assert next(lines).split() == steps, where
                if plan.stream_k is not None:
                    assert len(steps) <= pattern.stream_k_units(kv_len, rows, keys), where
                for query in range(first, min(first + rows, q_len)):
                    assert next(lines) == shown[query][:end].ljust(kv_len, "."), f"{where}: query {query}"


def test_an_option_that_no_other_kernel_knows_of() -> None:
    for named in shipped_specs():
        if isinstance(named.spec, AttentionSpec) and not named.spec.kv_lengths:
            plan = plan_for(named)
            assert "kv_lengths" not in named.spec.canonical_json()
            assert not any("kv_lengths" in param.name for param in plan.params)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
def test_the_lengths_come_last(arch: str) -> None:
    lists = {"kind": "block_lists", "block": {"q": 64, "kv": 64}}
    plan = plan_of({"arch": arch, "pattern": lists})
    names = [tensor.name for tensor in plan.spec.index_tensors]  # type: ignore[union-attr]
    assert names[-1] == "kv_lengths" and names[:-1] == [tensor.name for tensor in pattern_of(plan).index_tensors]
    params = {param.name: param.ctype for param in plan.params}
    assert (params["kv_lengths"], params["kv_lengths_batch_stride"]) == ("const int*", "int64")


def test_a_tile_of_a_dense_matrix_may_be_without_steps_where_a_batch_may_be_without_keys() -> None:
    fields = {"arch": "sm_90a", "pattern": {"kind": "dense"}}
    assert plan_of(fields).flags.named()["may_be_empty"]
    assert not plan_of({**fields, "kv_lengths": False}).flags.named()["may_be_empty"]
    topk = {"kind": "topk", "k": 4, "block": {"q": 128, "kv": 64}}
    assert not plan_of({**fields, "pattern": topk}).flags.named()["may_be_empty"]


def test_listed_blocks_behind_the_length_are_none_that_a_tensor_has() -> None:
    topk = {"kind": "topk", "block": {"q": 128, "kv": 64}}
    for arch in ("sm_90a", "sm_89"):
        source = render_plan(plan_of({"arch": arch, "pattern": topk}))
        assert "constexpr int kNoBlock = (1 << 30) / kBlockKeys;" in source
        assert "key_blocks = (seqlen.kv_end() + kBlockKeys - 1) / kBlockKeys;" in source
        assert ": kNoBlock" in source and ": key_blocks" not in source
