"""Turns at dQ, run on the host: the tiles of a step are those that walk over it, or thread blocks would wait for ever.

A host program prints, of each step of queries, the first and the last tile that ``AddingTiles`` tells, and of each tile
of keys the steps that ``QueryBlockIterator`` walks over.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from batch_values import declarations, lengths_of, problems, seqlen_info

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
    {"kind": "sliding_window", "left": 0, "right": 0},
    {"kind": "sliding_window", "left": 100, "right": 37},
    {"kind": "sliding_window", "left": 300, "right": 0},
    {"kind": "sliding_window", "left": 0, "right": 260},
)
LENGTHS = (
    *((1, 1), (1, 50), (1, 700), (17, 50), (128, 128), (129, 127), (64, 320), (300, 300), (70, 501), (300, 40)),
    *((400, 129), (260, 1), (1000, 640), (640, 1000)),
)
PROGRAM = """\
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
%(declarations)s%(kernels)s
void (*const kPrint[])(Params) = {%(names)s};
int main(int count, char** words) {
  const auto number = [&](int i) { return std::atoi(words[i]); };
  for (int i = 2; i < count; i += 4) {
    kPrint[number(1)](params_of(number(i), number(i + 1), number(i + 2), number(i + 3)));
  }
}
"""
KERNEL = """
namespace kernel_%(index)d {
%(constants)s
%(pieces)s
void print(Params p) {
  p.key_tiles = (p.kv_len + kTileN - 1) / kTileN;
  for (int step = 0; step < (p.q_len + kTileM - 1) / kTileM; ++step) {
    const AddingTiles tiles(p, kBatch, step);
    std::printf("%%d %%d ", tiles.first, tiles.last);
  }
  std::puts("");
  for (int tile = 0; tile < p.key_tiles; ++tile) {
    QueryBlockIterator blocks(p, kBatch, 0, tile * kTileN);
    const bool walks = %(walks)s;
    for (int i = blocks.count - 1; i >= 0 && walks; --i) {
      const Turn turn(p, kBatch, blocks.at(i), tile);
      std::printf("%%d %%d %%d ", blocks.at(i), turn.number, turn.is_last);
    }
    std::puts("");
  }
}
}  // namespace kernel_%(index)d
"""


def plan_of(pattern: dict[str, Any], head_dim: int, m: int, *, kv_lengths: bool) -> Plan:
    fields = {"op": "attention_backward", "arch": "sm_90a", "gradients": "dq_dkdv", "head_dim": head_dim}
    options = {"pattern": pattern, "kv_lengths": kv_lengths, "tile": {"m": m, "n": 128}}
    return plan_for(find_spec({**fields, **options}))


PLANS = [
    plan_of(pattern, *tile, kv_lengths=kv_lengths)
    for pattern in PATTERNS
    for tile in ((128, 16), (128, 64), (128, 80), (64, 128))
    for kv_lengths in (False, True)
]


def spec_of(plan: Plan) -> AttentionBackwardSpec:
    assert isinstance(plan.spec, AttentionBackwardSpec)
    return plan.spec


def pieces(plan: Plan) -> list[str]:
    """The parts of a source that say which tiles add to a step, and in which order."""
    spec, folder = spec_of(plan), "attention_backward"
    names = (
        f"{folder}/queries/{spec.pattern.queries}",
        f"{folder}/dq_order/{spec.pattern.dq_order}",
        f"{folder}/dq_order/turn",
    )
    lengths, end, _ = seqlen_info(plan).partition("\n};")  # of what follows, a source has what it uses
    texts = [lengths + end, *(render_template(plan, f"{name}.cuh.j2") for name in names)]
    return [text.strip() for text in texts if text.strip()]


def check_pieces(plans: Iterable[Plan]) -> None:
    for plan in plans:
        source = render_plan(plan)
        assert all(piece in source for piece in pieces(plan))


def kernel(index: int, plan: Plan) -> str:
    """One kernel's part of the host program."""
    return KERNEL % {
        "index": index,
        "constants": "\n".join(f"constexpr {c.ctype} {c.name} = {c.literal};" for c in plan.constants),
        "pieces": "\n".join(pieces(plan)),
        "walks": "tile * kTileN < SeqlenInfo(p, kBatch).kv_end()" if spec_of(plan).kv_lengths else "true",
    }


def program(plans: Sequence[Plan]) -> str:
    """The host program of some kernels."""
    declared = declarations((spec_of(plan).pattern for plan in plans), kv_lengths=True)
    declared = declared.replace("kv_lengths_batch_stride;", "kv_lengths_batch_stride; int key_tiles = 0;")
    assert "key_tiles" in declared
    return PROGRAM % {
        "declarations": declared,
        "kernels": "".join(map(kernel, range(len(plans)), plans)),
        "names": ", ".join(f"kernel_{index}::print" for index in range(len(plans))),
    }


@pytest.mark.parametrize("kind", sorted({pattern["kind"] for pattern in PATTERNS}))
def test_the_tiles_of_a_step_are_those_that_walk_over_it(
    kind: str, recorded: Callable[..., None], tmp_path: Path
) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    plans = [plan for plan in PLANS if spec_of(plan).pattern.kind == kind]
    check_pieces(plans[-1:])  # rendering all takes longer than the rest
    source = program(plans)
    recorded(source)
    check_pieces(plans)
    (tmp_path / "main.cpp").write_text(source, encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", "-O1", "-Wall", "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    for index, plan in enumerate(plans):
        check([tmp_path / "main", str(index)], spec_of(plan))


def check(command: list[Any], spec: AttentionBackwardSpec) -> None:
    """Compare the tiles of each step with the walks over it, as the program prints both for one kernel."""
    given = [
        (q_len, kv_len, value, length)
        for q_len, kv_len, value in problems(spec.pattern, LENGTHS)
        for length in (lengths_of(kv_len) if spec.kv_lengths else (0,))
    ]
    words = [str(number) for problem in given for number in problem]
    run = subprocess.run([*command, *words], check=True, capture_output=True, text=True)
    lines = iter([[int(word) for word in line.split()] for line in run.stdout.splitlines()])
    for q_len, kv_len, value, length in given:
        where = f"{spec.pattern.stem()}, steps of {spec.tile.m}: {q_len} x {kv_len}, value {value}, length {length}"
        told = next(lines)
        steps = list(zip(told[::2], told[1::2], strict=True))
        walks = [next(lines) for _ in range(-(-kv_len // spec.tile.n))]
        for step, (first, last) in enumerate(steps):
            turns = [
                (tile, number, bool(is_last))
                for tile, walk in enumerate(walks)
                for at, number, is_last in zip(walk[::3], walk[1::3], walk[2::3], strict=True)
                if at == step
            ]
            tiles = range(first, last + 1)
            expected = [(tile, number, tile == last) for number, tile in enumerate(tiles)]
            assert turns == expected, f"{where}: step {step}"
        assert all(0 <= at < len(steps) for walk in walks for at in walk[::3]), f"{where}: a step that is not there"
    assert next(lines, None) is None
