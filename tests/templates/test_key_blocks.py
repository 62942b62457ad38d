"""The key blocks of positional patterns, run on the host: their pairs are those of the definition.

The pattern's part of a generated source is plain C++ but for its qualifiers. A host program made of these parts prints,
for every tile, the blocks it lists and the pairs that a kernel then sees.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from batch_values import declarations, numbered, problems, seqlen_info

from codegen.library import find_spec, shipped_specs
from codegen.patterns import PATTERNS, PatternBase
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.render import render_plan, render_template
from codegen.spec import AttentionSpec

# (architecture, rows, keys, pack_gqa)
TILES = [
    ("sm_90a", 128, 128, 1),
    ("sm_90a", 128, 64, 1),
    ("sm_90a", 128, 64, 8),
    ("sm_90a", 128, 176, 1),
    ("sm_90a", 192, 80, 1),
    ("sm_90a", 256, 64, 1),
    ("sm_89", 16, 32, 1),
    ("sm_89", 64, 128, 1),
    ("sm_89", 64, 64, 8),
]
LENGTHS = [
    *[(1, 1), (1, 50), (1, 1000), (17, 50), (128, 128), (129, 127), (64, 320), (256, 256), (300, 300)],
    *[(70, 701), (130, 640), (9, 3000), (300, 40), (700, 129), (260, 1)],
]
SHIPPED = [named.spec.pattern for named in shipped_specs() if isinstance(named.spec, AttentionSpec)]
POSITIONAL = list(dict.fromkeys(pattern for pattern in SHIPPED if pattern.fixed_block is None))
VARIANTS: list[dict[str, Any]] = [
    {"kind": "causal", "align": "top_left"},
    {"kind": "sliding_window"},
    {"kind": "sink_window"},
    {"kind": "sliding_window", "left": 0, "right": 0},
    {"kind": "sliding_window", "left": 100, "right": 37},
    {"kind": "sliding_window", "left": 254, "right": 126},
    {"kind": "sink_window", "sink": 1, "left": 0, "right": 0},
    {"kind": "sink_window", "sink": 4, "left": 130, "right": 70},
    {"kind": "sink_window", "sink": 128, "left": 127, "right": 0},
    {"kind": "sink_window", "sink": 200, "left": 126, "right": 254},
    *(
        {"kind": "strided", "stride": stride, "local": local, "block": block, "causal": causal}
        for stride, local, block in ((2, 0, 64), (3, 1, 64), (5, 2, 64), (2, 1, 128), (3, 0, 128))
        for causal in (True, False)
    ),
]

PROGRAM = """\
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
%(declarations)sstruct Step { int block; bool masked; };
struct Kernel {
  void (*list)(const Params&, int first, int begin, int number, std::vector<Step>&);  // number -1: all of them
  bool (*visible)(const Params&, int query, int key);
  int tile_keys, sub_tile_rows;
  bool partial_range;
};
%(kernels)s
const Kernel kKernels[] = {%(names)s};

void print_steps(const std::vector<Step>& steps) {
  for (const Step& step : steps) std::printf("%%d%%s ", step.block, step.masked ? "*" : "");
  std::puts("");
}

// One line with the blocks of a tile (* behind a masked one), if it can be divided a line for each width of its parts
// with the blocks of all of them, then one line for each query. The last tile has no query.
void print_tiles(const Kernel& kernel, const Params& p) {
  for (int first = 0; first < p.q_len + kernel.sub_tile_rows; first += kernel.sub_tile_rows) {
    std::vector<Step> steps;
    kernel.list(p, first, 0, -1, steps);
    print_steps(steps);
    for (int width = 1; kernel.partial_range && width <= %(widest)d; ++width) {
      std::vector<Step> parts;
      const int end = steps.size() + 2 * width;  // as where other tiles have more steps
      for (int begin = 0; begin < end; begin += width) kernel.list(p, first, begin, width, parts);
      print_steps(parts);
    }
    for (int row = first; row < min(first + kernel.sub_tile_rows, p.q_len); ++row) {
      std::string pairs(p.kv_len, '.');
      for (const Step& step : steps) {
        const int begin = step.block * kernel.tile_keys;
        for (int key = begin; key < min(begin + kernel.tile_keys, p.kv_len); ++key) {
          if (!step.masked || kernel.visible(p, row, key)) pairs.at(key) = 'x';
        }
      }
      std::puts(pairs.c_str());
    }
  }
}

int main(int count, char** words) {
  for (int i = 2; i < count; i += 3) {
    const Params p = params_of(std::atoi(words[i]), std::atoi(words[i + 1]), std::atoi(words[i + 2]));
    print_tiles(kKernels[std::atoi(words[1])], p);
  }
}
"""
KERNEL = """
namespace kernel_%(index)d {
%(constants)s
%(seqlen_info)s
%(pattern)s
void list(const Params& p, int first, int begin, int number, std::vector<Step>& steps) {
  KvBlockIterator blocks(p, kBatch, 0, first);
%(restriction)s
  for (int i = 0; i < blocks.count; ++i) {
    const int block = blocks.at(i);
    steps.push_back({block, %(masked)s});
  }
}
bool is_visible(const Params& p, int query, int key) { return %(visible)s; }
const Kernel kernel = {list, is_visible, kTileN, %(sub_tile_rows)d, %(partial_range)s};
}  // namespace kernel_%(index)d
"""
WIDEST = 3  # work units of a part


def sub_tile_rows(plan: Plan) -> int:
    """Queries that have one range of key blocks."""
    return (
        plan.tile_queries // plan.sub_tiles if plan.sub_tiles > 1 and not plan.spec.kv_splits > 1 else plan.tile_queries
    )


def plan_of(pattern: dict[str, Any], arch: str, m: int, n: int, pack_gqa: int, kv_splits: int = 1) -> Plan:
    fields = {"op": "attention", "arch": arch, "head_dim": 64, "pattern": pattern, "pack_gqa": pack_gqa}
    return plan_for(find_spec({**fields, "tile": {"m": m, "n": n}, "kv_splits": kv_splits}))


def fits(fields: dict[str, Any], n: int) -> bool:
    """Whether a step may have ``n`` keys: the stripes of `strided` are a step, an equal part of one, or two."""
    return fields["kind"] != "strided" or n in (fields["block"] // 2, fields["block"], 2 * fields["block"])


PLANS = [
    plan_of(fields, *tile)
    for fields in [*(pattern.model_dump() for pattern in POSITIONAL), *VARIANTS]
    for tile in TILES
    if fits(fields, tile[2])
] + [
    plan_of(fields, "sm_90a", *tile, pack_gqa=1, kv_splits=2)
    for fields in [{"kind": "dense"}, {"kind": "causal"}, {"kind": "prefix_lm"}, *VARIANTS]
    if PATTERNS[fields["kind"]].supports_kv_splits
    for tile in ((64, 64), (128, 64), (64, 128))
]


def piece(plan: Plan) -> str:
    """The pattern's part of a source."""
    return render_template(plan, str(plan.flags.pattern_template)).strip()


def check_pieces(plans: Iterable[Plan]) -> None:
    for plan in plans:
        assert piece(plan) in render_plan(plan)


def kernel(index: int, plan: Plan) -> str:
    """One kernel's part of the host program."""
    masks = pattern_of(plan).masks_pairs
    return KERNEL % {
        "index": index,
        "sub_tile_rows": sub_tile_rows(plan),
        "constants": "\n".join(f"constexpr {c.ctype} {c.name} = {c.literal};" for c in plan.constants),
        "seqlen_info": seqlen_info(plan),
        "pattern": piece(plan),
        "masked": "blocks.masked(i, block)" if masks else "false",
        "visible": "visible(p, kBatch, query, key)" if masks else "true",
        "restriction": "  if (number >= 0) blocks.restrict_to(begin, number);" if plan.flags.partial_range else "",
        "partial_range": "true" if plan.flags.partial_range else "false",
    }


def pattern_of(plan: Plan) -> PatternBase:
    assert isinstance(plan.spec, AttentionSpec)
    return plan.spec.pattern


def program(plans: Sequence[Plan]) -> str:
    """The host program of some kernels."""
    return PROGRAM % {
        "kernels": "".join(map(kernel, range(len(plans)), plans)),
        "names": ", ".join(f"kernel_{index}::kernel" for index in range(len(plans))),
        "widest": WIDEST,
        "declarations": declarations(map(pattern_of, plans)),
    }


@cache
def definition(pattern: PatternBase, q_len: int, kv_len: int, value: int) -> list[str]:
    """The visible pairs as text, one line a query."""
    values = pattern.values_of([value])
    return [
        "".join(".x"[bool(pattern.visible(q, k, q_len, kv_len, values))] for k in range(kv_len)) for q in range(q_len)
    ]


def named(plan: Plan) -> str:
    """Name of a plan in messages."""
    parts = "-parts" if getattr(plan.flags, "parts", 1) > 1 else ""
    return f"{pattern_of(plan).stem()}-{plan.spec.arch}-{plan.tile_queries}x{plan.spec.tile.n}{parts}"


@pytest.mark.parametrize("kind", sorted({pattern_of(plan).kind for plan in PLANS}))
def test_key_blocks_are_those_of_the_definition(kind: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    plans = [plan for plan in PLANS if pattern_of(plan).kind == kind]
    check_pieces({plan.spec.arch: plan for plan in plans}.values())  # rendering all takes longer than the rest
    source = program(plans)
    recorded(source)
    check_pieces(plans)
    (tmp_path / "main.cpp").write_text(source, encoding="utf-8")
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True)
    for index, plan in enumerate(plans):
        check([tmp_path / "main", str(index)], plan)


def check(command: list[Any], plan: Plan) -> None:
    """Compare what the program prints for one kernel with the definition."""
    pattern = pattern_of(plan)
    values = {constant.name: int(constant.value) for constant in plan.constants}
    tile_rows, tile_keys = sub_tile_rows(plan), values["kTileN"]
    words = [str(number) for problem in problems(pattern, LENGTHS) for number in problem]
    run = subprocess.run([*command, *words], check=True, capture_output=True, text=True)
    lines = iter(run.stdout.splitlines())

    for q_len, kv_len, value in problems(pattern_of(plan), LENGTHS):
        pattern = numbered(pattern_of(plan), value)
        expected = definition(pattern, q_len, kv_len, value)
        for first in range(0, q_len + tile_rows, tile_rows):
            where = f"{named(plan)}: q_len {q_len}, kv_len {kv_len}, value {value}, queries from {first}"
            rows = expected[first : first + tile_rows]
            listed = next(lines).split()
            if plan.flags.partial_range:
                assert [next(lines).split() for _ in range(WIDEST)] == [listed] * WIDEST, f"{where}: parts of the tile"
            if plan.stream_k is not None:
                assert len(listed) <= pattern.stream_k_units(kv_len, tile_rows, tile_keys), where
            assert [next(lines) for _ in rows] == rows, where
            assert len(listed) == len({word.rstrip("*") for word in listed}), f"{where}: {listed} repeats a block"
            for word in listed:
                begin = int(word.rstrip("*")) * tile_keys
                pairs = "".join(row[begin : begin + tile_keys] for row in rows)
                assert "x" in pairs, f"{where}: block {word} is listed, but holds no visible pair"
                # A step that is longer than a block of `strided` may be masked for nothing.
                if word.endswith("*") and begin + tile_keys <= kv_len and tile_keys <= values.get("kBlock", tile_keys):
                    assert "." in pairs, f"{where}: block {word} is masked, but hides no pair"
    assert next(lines, None) is None
