"""Masks of bits, run on the host: the pairs that a kernel hides are those whose bits are 0, and keys past the last one.

As in test_listed_steps, a host program is made of parts of generated sources. The 32 lanes of a warp run one after the
other, twice: the first round leaves what each shuffles, the second reads it.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from batch_values import seqlen_info

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.parse import parse_spec
from codegen.patterns import Block, PatternBase
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.render import generate

BATCHES, HEADS, ROWS, ENTRIES = 2, 3, 4, 3
BATCH, HEAD, ROW = 1, 2, 2  # of the tile that is looked at
PADDING = 5  # words between entries
HIDDEN = "-"

HEAD_OF_PROGRAM = """\
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
using uint32 = unsigned int;
using int64 = long long;
struct { int x; } threadIdx;
unsigned tid_x() { return threadIdx.x; }
struct Params {
  const int* mask_bits;
  int64 mask_bits_batch_stride, mask_bits_head_stride, mask_bits_row_stride, mask_bits_entry_stride;
  int mask_bits_length, q_len, kv_len;
};
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
int calls;  // shuffles of this lane so far
unsigned shuffled[64][32];
template <typename T>
T __shfl_sync(unsigned, T value, int from, int width = 32) {
  const int lane = threadIdx.x % 32, call = calls++;
  shuffled[call][lane] = static_cast<unsigned>(value);
  return static_cast<T>(shuffled[call][lane / width * width + from % width]);
}
bool __any_sync(unsigned, bool some) { return some; }  // not asked: each step is masked here
uint32 __funnelshift_lc(uint32 low, uint32 high, uint32 count) {
  return static_cast<uint32>((static_cast<unsigned long long>(high) << 32 | low) << min(count, 32u) >> 32);
}
template <typename T>
T __ldg(const T* word) { return *word; }
int reads;  // words of the mask
uint32 load_word(const uint32* word) { ++reads; return *word; }
"""
PROGRAM = """\
namespace %(name)s {
%(constants)s
%(seqlen_info)s
%(parts)s
// Prints a line for each thread that has scores: those of step i of a tile whose first query is first_query.
void print_step(const Params& p, int first_query, int i, const int* blocks, const bool* masked) {
  for (int warp = 0; warp < %(warps)d; ++warp) {
    float scores[32][%(scores)d];
    for (int round = 0; round < 2; ++round) {
      for (int lane = 0; lane < 32; ++lane) {
        threadIdx.x = warp * 32 + lane, calls = 0;
        %(lane)s
        std::copy_n(&s%(first)s, %(scores)d, scores[lane]);
      }
    }
    for (const auto& s : scores) {
      for (float score : s) std::putchar(score == kMinusInfinity ? '-' : 'x');
      std::putchar('\\n');
    }
  }
}
void run(const std::vector<int>& words) {
  Params p = {};
  p.mask_bits = words.data(), p.kv_len = %(kv_len)d, p.q_len = 1 << 20, p.mask_bits_length = %(entries)d;
  p.mask_bits_entry_stride = %(entry)d, p.mask_bits_row_stride = %(entries)d * %(entry)d;
  p.mask_bits_head_stride = %(rows)d * p.mask_bits_row_stride;
  p.mask_bits_batch_stride = %(heads)d * p.mask_bits_head_stride;
  const int blocks[] = {%(blocks)s};
  const bool masked[] = {%(masked)s};
  for (int i = 0; i < %(steps)d; ++i) print_step(p, %(first_query)d, i, blocks, masked);
}
}  // namespace %(name)s
"""
SM90A = """\
int meta_words[kStages * %(step_blocks)d] = {};
        for (int load = 0; load < %(step_blocks)d; ++load) {
          const int at = i * %(step_blocks)d + load;
          meta_words[load] = pack_block_meta(KvEnd(p, %(batch)d), blocks[at], masked[at]);
        }
        const BlockMeta meta(meta_words, 0, lane == 0);
        uint32 bits[%(step_blocks)d][2];
        float s[kTileN / 2] = {};
        read_mask_bits(bits, p, meta, i, %(head)d, %(batch)d, %(arguments)s);
        apply_mask(s, p, %(batch)d, meta, bits);"""
MMA_SYNC = """\
Step step;
        for (int load = 0; load < kStepBlocks; ++load) {
          step.block[load] = blocks[i * kStepBlocks + load], step.masked[load] = masked[i * kStepBlocks + load];
        }
        uint32 bits[kStepBlocks][kRowTiles][2];
        float s[kRowTiles][kTileN / 8][4] = {};
        read_mask_bits(bits, p, step, i, %(head)d, %(batch)d, %(arguments)s);
        apply_mask(s, KvEnd(p, %(batch)d), step, bits);"""
WMMA = """\
Step step;
        for (int load = 0; load < kStepBlocks; ++load) {
          step.block[load] = blocks[i * kStepBlocks + load], step.masked[load] = masked[i * kStepBlocks + load];
        }
        float s[kTileN / 2] = {};
        apply_mask(s, p, step, i, %(batch)d, %(head)d, %(arguments)s, KvEnd(p, %(batch)d));"""


@dataclass(frozen=True)
class Masks:
    """A kernel, and the tile of it that is looked at.

    Attributes:
        arch: architecture.
        block: queries and keys of a block.
        tile: rows and keys of a tile.
        heads: query heads of a pack.
        mma: instructions, if they are not the default.
        warp_rows: rows of a warp.
        part: which part of the query block it is: of warpgroups, or of tiles.
    """

    arch: str
    block: tuple[int, int]
    tile: tuple[int, int]
    heads: int = 1
    mma: str = ""
    warp_rows: int = 16
    part: int = 0

    @property
    def name(self) -> str:
        return "_".join(map(str, (self.mma or self.arch, *self.block, *self.tile, self.heads, self.warp_rows)))

    @property
    def plan(self) -> Plan:
        (q, kv), (m, n) = self.block, self.tile
        return plan_for(find_spec(self.fields(q, kv, m, n)))

    def fields(self, q: int, kv: int, m: int, n: int) -> dict[str, Any]:
        pattern = {"kind": "block_lists", "block": {"q": q, "kv": kv}, "mask": "bits"}
        fields = {"op": "attention", "arch": self.arch, "head_dim": 64, "pattern": pattern, "tile": {"m": m, "n": n}}
        more = {"pack_gqa": self.heads, "mma": self.mma, "warp_rows": self.warp_rows}
        return fields | {name: value for name, value in more.items() if value and (name, value) != ("pack_gqa", 1)}

    @property
    def step_blocks(self) -> int:
        return max(1, self.tile[1] // self.block[1])

    @property
    def block_steps(self) -> int:
        return max(1, self.block[1] // self.tile[1])

    @property
    def warps(self) -> int:
        return 4 if self.arch == "sm_90a" else self.tile[0] // self.warp_rows

    @property
    def first_query(self) -> int:
        """The first query of the rows that are looked at: of a warpgroup, or of a tile."""
        rows = self.block[0] * self.heads
        queries = 64 if self.arch == "sm_90a" else self.tile[0]
        return ROW * self.block[0] + (self.part * queries // self.heads if rows > queries else 0)


CASES = (
    Masks("sm_90a", (128, 128), (128, 128), part=1),
    Masks("sm_90a", (128, 128), (128, 64)),
    Masks("sm_90a", (128, 64), (128, 128), part=1),
    Masks("sm_90a", (128, 128), (64, 128), part=1),
    Masks("sm_90a", (64, 64), (192, 64)),
    Masks("sm_90a", (16, 64), (128, 64)),  # of a warpgroup's rows, 48 are padding
    Masks("sm_90a", (1, 128), (128, 64), heads=16),
    Masks("sm_90a", (64, 128), (128, 128), heads=8, part=3),
    Masks("sm_89", (64, 64), (64, 64), warp_rows=32),
    Masks("sm_89", (128, 128), (64, 64), part=1),
    Masks("sm_89", (64, 32), (16, 96), part=3),
    Masks("sm_89", (64, 64), (128, 32), heads=8, part=2),
    Masks("sm_89", (1, 64), (16, 64), heads=16),
    Masks("sm_89", (64, 64), (32, 32), mma="wmma", part=1),
    Masks("sm_89", (128, 32), (64, 64), mma="wmma", part=1),
)


def kv_len(case: Masks) -> int:
    """Keys: the last of the four key blocks is not whole."""
    return 3 * case.block[1] + 21


def entries(case: Masks) -> list[tuple[int, bool]]:
    """The key blocks of the list, and whether they are partial: the last ones are full, or not there."""
    listed = [(3, True), (0, True), (4, True), (3, False), (2, False)]
    return listed + [(4, False)] * (-len(listed) % case.step_blocks)


def words_of(case: Masks) -> list[int]:
    """The bits of every batch, head, query block and entry: words that differ."""
    drawn = random.Random(case.name)
    count = BATCHES * HEADS * ROWS * ENTRIES * (case.block[0] * case.block[1] // 32 + PADDING)
    return [drawn.getrandbits(32) - 2**31 for _ in range(count)]


def definition(source: str, name: str) -> str:
    """A function or struct of a source."""
    found = re.search(rf"(?m)^__device__ [^\n]*\b{name}\([^\n]*\}}$", source)  # of one line
    found = found or re.search(rf"(?ms)^(struct {name} \{{|__device__ [^\n]*\b{name}\().*?^\}};?$", source)
    assert found is not None, name
    return found.group()


def program(case: Masks) -> str:
    plan = case.plan
    source = generate(find_spec(case.fields(*case.block, *case.tile))).source
    listed = [(block, masked, step) for block, masked in entries(case) for step in range(case.block_steps)]
    first, row = case.first_query, "warp * 16 + lane / 4"
    if case.arch == "sm_90a":
        names, lane = ("mask_bits_of", "pack_block_meta", "BlockMeta", "read_mask_bits", "apply_mask"), SM90A
        packed = case.heads > 1 or case.block[0] < 64
        arguments = f"{first}, {row}" if packed else f"{first} + {row}"
        element, scores = "[0]", case.tile[1] // 2
    elif case.mma:
        names, lane = ("mask_bits_of", "Step", "lane_column", "apply_mask"), WMMA
        arguments, element, scores = f"{first} + warp * 16 + lane / 2", "[0]", case.tile[1] // 2
    else:
        names, lane = ("mask_bits_of", "Step", "read_mask_bits", "apply_mask"), MMA_SYNC
        row = "warp * kWarpRows + lane / 4"
        arguments = f"{first}, {row}" if case.heads > 1 else f"{first} + {row}"
        element, scores = "[0][0][0]", case.warp_rows * case.tile[1] // 32
    parts = [definition(source, name) for name in names]
    if "Step" in names:  # what it takes of a KvBlockIterator is not looked at here
        parts[1] = "struct Step { int block[kStepBlocks]; bool masked[kStepBlocks]; };"
    numbers = {"head": HEAD, "batch": BATCH, "arguments": arguments, "step_blocks": case.step_blocks}
    return PROGRAM % {
        "name": case.name,
        "constants": "\n".join(f"constexpr {c.ctype} {c.name} = {c.literal};" for c in plan.constants),
        "seqlen_info": seqlen_info(plan),
        "parts": "\n".join(parts),
        "warps": case.warps,
        "scores": scores,
        "first": element,
        "lane": lane % numbers,
        "kv_len": kv_len(case),
        "entry": case.block[0] * case.block[1] // 32 + PADDING,
        "entries": ENTRIES,
        "rows": ROWS,
        "heads": HEADS,
        "blocks": ", ".join(str(block * case.block_steps + step) for block, _, step in listed),
        "masked": ", ".join(str(masked).lower() for _, masked, _ in listed),
        "steps": len(listed) // case.step_blocks,
        "first_query": first,
    }


def host_program(case: Masks) -> str:
    main = f"""\
int main(int, char** arguments) {{
  std::vector<int> words(std::atoi(arguments[1]));
  if (std::fread(words.data(), 4, words.size(), stdin) != words.size()) return 1;
  {case.name}::run(words);
}}
"""
    return "".join([HEAD_OF_PROGRAM, program(case), main])


def output_of(text: str, words: list[int], folder: Path) -> list[str]:
    """Compile a program, and take the lines that it prints for a mask."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the host program with")
    (folder / "main.cpp").write_text(text, encoding="utf-8")
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-variable"]
    subprocess.run(["g++", *flags, "main.cpp", "-o", "main"], cwd=folder, check=True)
    command = [str(folder / "main"), str(len(words))]
    given = array("i", words).tobytes()
    return subprocess.run(command, check=True, capture_output=True, input=given).stdout.decode().split()


def place(case: Masks, lane: int, score: int) -> tuple[int, int]:
    """The row of a warp and the key of a step that a lane's score is of."""
    if case.mma:
        return lane // 2, score // 4 * 8 + lane % 2 * 4 + score % 4
    tile, score = divmod(score, case.tile[1] // 2)
    return tile * 16 + lane // 4 + score // 2 % 2 * 8, score // 4 * 8 + lane % 4 * 2 + score % 2


def sees(case: Masks, words: list[int], query: int, step: int, key: int) -> bool:
    """Whether a query of the block sees a key of a step, counted from the step's first one on."""
    (q, kv), n = case.block, case.tile[1]
    entry, column = divmod(step * n + key, kv)
    block, masked = entries(case)[entry]
    if block * kv + column >= kv_len(case):
        return False
    if not masked:
        return True
    stride = q * kv // 32 + PADDING
    first = (((BATCH * HEADS + HEAD) * ROWS + ROW) * ENTRIES + entry) * stride
    return bool(words[first + query * (kv // 32) + column // 32] >> column % 32 & 1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bits_hide_their_pairs_and_no_others(case: Masks, recorded: Callable[..., None], tmp_path: Path) -> None:
    text, words = host_program(case), words_of(case)
    recorded(text)
    lines = iter(output_of(text, words, tmp_path))
    pairs = hidden = 0
    for step in range(len(entries(case)) * case.block_steps // case.step_blocks):
        for warp in range(case.warps):
            for lane in range(32):
                for score, found in enumerate(next(lines)):
                    row, key = place(case, lane, score)
                    query = case.first_query % case.block[0] + (warp * case.warp_rows + row) // case.heads
                    if query >= case.block[0]:  # padding
                        continue
                    pairs, hidden = pairs + 1, hidden + (found == HIDDEN)
                    assert (found != HIDDEN) == sees(case, words, query, step, key), (step, warp, lane, score)
    assert next(lines, None) is None
    assert 0.3 < hidden / pairs < 0.8


def lists(kv: int, **fields: Any) -> PatternBase:
    spec = parse_spec(
        {
            **{"op": "attention", "arch": "sm_89", "head_dim": 64},
            "pattern": {"kind": "block_lists", "block": {"q": 64, "kv": kv}, "mask": "bits"},
            **fields,
        }
    )
    assert spec.op == "attention"
    return spec.pattern


def test_bits_are_an_index_tensor() -> None:
    pattern = lists(32)
    bits = pattern.index_tensors[-1]
    assert (bits.name, bits.dims) == ("mask_bits", ("batch", "heads", "query_blocks", "any", 64))
    assert bits.strided_axes == ("batch", "head", "row", "entry") and not bits.optional
    assert [tensor.strided_axes for tensor in pattern.index_tensors[:2]] == [("batch", "head", "row")] * 2
    assert pattern.fixed_block == Block(q=64, kv=32) and pattern.masks_by_bits and pattern.masks_pairs
    assert pattern.stem() == "lists_b64x32_bits" and not pattern.shift_invariant


def test_a_word_is_of_32_keys() -> None:
    with pytest.raises(SpecError, match=r"pattern\.mask: is 'bits'; it needs block\.kv of 32, 64 or 128, .* is 16"):
        lists(16)
