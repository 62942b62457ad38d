"""The queries that dK and dV walk over, run on the host: their pairs are those of the pattern's definition.

What tests/templates/test_key_blocks.py does for keys: a host program of the pieces prints, for each tile of keys, the
steps of queries and the pairs that a kernel then sees.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from batch_values import declarations, numbered, problems, seqlen_info

from codegen.library import find_spec
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.render import render_plan, render_template
from codegen.spec import AttentionBackwardSpec

PATTERNS: tuple[dict[str, Any], ...] = (
    {"kind": "dense"},
    {"kind": "causal"},
    {"kind": "causal", "align": "top_left"},
    {"kind": "sliding_window"},
    {"kind": "sink_window"},
    {"kind": "sliding_window", "left": 0, "right": 0},
    {"kind": "sliding_window", "left": 100, "right": 37},
    {"kind": "sliding_window", "left": 300, "right": 0},
    {"kind": "sink_window", "sink": 1, "left": 0, "right": 0},
    {"kind": "sink_window", "sink": 4, "left": 130, "right": 70},
    {"kind": "sink_window", "sink": 128, "left": 127, "right": 0},
    {"kind": "sink_window", "sink": 200, "left": 126, "right": 254},
    *(
        {"kind": "strided", "stride": stride, "local": local, "block": block, "causal": causal}
        for stride, local, block in ((2, 0, 64), (3, 1, 64), (2, 1, 128))
        for causal in (True, False)
    ),
    {"kind": "prefix_lm"},
)
TILES = ((64, 128), (80, 128), (128, 128), (64, 64), (16, 64))  # queries of a step, keys of a tile
LENGTHS = (
    *((1, 1), (1, 50), (1, 700), (17, 50), (128, 128), (129, 127), (64, 320), (300, 300), (70, 501), (300, 40)),
    *((400, 129), (260, 1)),
)
PROGRAM = """\
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
%(declarations)s%(kernels)s
void (*const kPrint[])(const Params&) = {%(names)s};
int main(int count, char** words) {
  for (int i = 2; i < count; i += 3) {
    kPrint[std::atoi(words[1])](params_of(std::atoi(words[i]), std::atoi(words[i + 1]), std::atoi(words[i + 2])));
  }
}
"""
KERNEL = """
namespace kernel_%(index)d {
%(constants)s
%(seqlen_info)s
%(piece)s
// For each tile of keys a line with its steps (* behind a masked one), then for each of its keys one with its queries.
void print(const Params& p) {
  for (int first = 0; first < p.kv_len; first += kTileN) {
    QueryBlockIterator blocks(p, kBatch, 0, first);
    for (int i = 0; i < blocks.count; ++i) {
      const int step = blocks.at(i);
      std::printf("%%d%%s ", step, %(masked)s ? "*" : "");
    }
    std::puts("");
    for (int key = first; key < min(first + kTileN, p.kv_len); ++key) {
      std::string queries(p.q_len, '.');
      for (int i = 0; i < blocks.count; ++i) {
        const int step = blocks.at(i);
        for (int query = step * kTileM; query < min((step + 1) * kTileM, p.q_len); ++query) {
          if (!%(masked)s || %(visible)s) queries.at(query) = 'x';
        }
      }
      std::puts(queries.c_str());
    }
  }
}
}  // namespace kernel_%(index)d
"""


def plan_of(pattern: dict[str, Any], m: int, n: int) -> Plan:
    fields = {"op": "attention_backward", "arch": "sm_90a", "gradients": "dkdv", "head_dim": 64, "pattern": pattern}
    return plan_for(find_spec({**fields, "tile": {"m": m, "n": n}}))


PLANS = [plan_of(pattern, *tile) for pattern in PATTERNS for tile in TILES]


def spec_of(plan: Plan) -> AttentionBackwardSpec:
    assert isinstance(plan.spec, AttentionBackwardSpec)
    return plan.spec


def piece(plan: Plan) -> str:
    """The pattern's part of a source."""
    return render_template(plan, f"attention_backward/queries/{spec_of(plan).pattern.queries}.cuh.j2").strip()


def check_pieces(plans: Iterable[Plan]) -> None:
    for plan in plans:
        assert piece(plan) in render_plan(plan)


def kernel(index: int, plan: Plan) -> str:
    """One kernel's part of the host program."""
    masks = spec_of(plan).pattern.masks_pairs
    return KERNEL % {
        "index": index,
        "constants": "\n".join(f"constexpr {c.ctype} {c.name} = {c.literal};" for c in plan.constants),
        "seqlen_info": seqlen_info(plan),
        "piece": piece(plan),
        "masked": "blocks.masked(i, step)" if masks else "false",
        "visible": "visible(p, kBatch, query, key)" if masks else "true",
    }


def program(plans: Sequence[Plan]) -> str:
    """The host program of some kernels."""
    return PROGRAM % {
        "declarations": declarations(spec_of(plan).pattern for plan in plans),
        "kernels": "".join(map(kernel, range(len(plans)), plans)),
        "names": ", ".join(f"kernel_{index}::print" for index in range(len(plans))),
    }


@pytest.mark.parametrize("kind", sorted({pattern["kind"] for pattern in PATTERNS}))
def test_query_blocks_are_those_of_the_definition(kind: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    plans = [plan for plan in PLANS if spec_of(plan).pattern.kind == kind]
    check_pieces(plans[:1])  # rendering all takes longer than the rest
    source = program(plans)
    recorded(source)
    check_pieces(plans)
    (tmp_path / "main.cpp").write_text(source, encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", "-O1", "-Wall", "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    for index, plan in enumerate(plans):
        check([tmp_path / "main", str(index)], plan)


def check(command: list[Any], plan: Plan) -> None:
    """Compare what the program prints for one kernel with the definition."""
    spec = spec_of(plan)
    step, tile = spec.tile.m, spec.tile.n
    given = problems(spec.pattern, LENGTHS)
    words = [str(number) for problem in given for number in problem]
    run = subprocess.run([*command, *words], check=True, capture_output=True, text=True)
    lines = iter(run.stdout.splitlines())
    for q_len, kv_len, value in given:
        pattern = numbered(spec.pattern, value)
        values = {tensor.name: value for tensor in pattern.index_tensors if tensor.per_batch}
        for first in range(0, kv_len, tile):
            where = (
                f"{pattern.stem()}, steps of {step}: q_len {q_len}, kv_len {kv_len}, value {value}, keys from {first}"
            )
            listed = next(lines).split()
            keys = range(first, min(first + tile, kv_len))
            pairs = [
                "".join(".x"[bool(pattern.visible(q, k, q_len, kv_len, values))] for q in range(q_len)) for k in keys
            ]
            assert [next(lines) for _ in keys] == pairs, where
            for word in listed:
                begin = int(word.rstrip("*")) * step
                of_step = "".join(row[begin : begin + step] for row in pairs)
                assert "x" in of_step, f"{where}: step {word} holds no visible pair"
                # Keys and queries beyond the last ones count as hidden.
                whole = begin + step <= q_len and first + tile <= kv_len
                assert not whole or word.endswith("*") == ("." in of_step), f"{where}: step {word}"
    assert next(lines, None) is None
