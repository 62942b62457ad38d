"""Copies of K and V from pages by the kernel of prefill, run on the host: each row of a step comes from its page.

A host program of the pieces prints the copies of each lane for every tile and step. Rows of V that no query of a tile
sees are zeros, and pages outside of the cache are hidden, whatever tables, lengths and windows hold.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from codegen.library import find_spec
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.render import render_template

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the host program with")
NUMBERS = (
    *("q_len", "sequences", "has_bounds", "has_lengths", "request_queries", "request_keys", "max_keys", "pages"),
    *("page_shift", "page_mask", "table_stride", "copy_shift", "heads", "window_left", "sink_keys", "paged"),
)
PROGRAM = """\
#include <algorithm>
#include <cstdio>
#include <vector>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
using int64 = long long;
using uint32 = unsigned;
struct { unsigned x; } threadIdx;
const int *readable, *readable_end;
inline int __ldg(const int* word) {
  if (word < readable || word >= readable_end) std::puts("outside");
  return *word;
}
struct TensorMap { int id; };
struct Params {
  int %(numbers)s;
  const int *cu_seqlens_q, *seq_lens, *block_table;
  TensorMap k_map{0}, k_part_map{1}, v_map{2}, v_part_map{3}, v_row_map{4};
};
// Lanes run one after the other: shuffles read `pages`, and votes are counted in a run without copies.
int pages[32];
bool counts_votes, all;
inline int __shfl_sync(unsigned, int, int lane) { return pages[lane]; }
inline uint32 __ballot_sync(unsigned, bool vote) { return static_cast<uint32>(vote) << threadIdx.x; }
inline bool __all_sync(unsigned, bool vote) {
  if (counts_votes) all &= vote;
  return all;
}
inline void tma_load_4d(uint32 to, const TensorMap* map, uint32, int column, int row, int head, int page) {
  if (!counts_votes) std::printf("copy %%d %%u %%d %%d %%d %%d\\n", map->id, to, column, row, head, page);
}
%(constants)s
constexpr int kRowBytes = 128;
struct Tile { int batch, head, first_query; };
%(seqlen_info)s
%(loads)s
int main() {
  // Numbers, then bounds, lengths and the table, each after its size.
  Params p;
  int* const fields[] = {%(fields)s};
  for (int* field : fields) std::scanf("%%d", field);
  std::vector<int> words;
  int sizes[3], begins[3];
  for (int i = 0; i < 3; ++i) {
    std::scanf("%%d", &sizes[i]);
    begins[i] = words.size();
    for (int j = 0, word; j < sizes[i]; ++j) std::scanf("%%d", &word), words.push_back(word);
  }
  readable = words.data();
  readable_end = readable + words.size();
  p.cu_seqlens_q = readable + begins[0];
  p.seq_lens = readable + begins[1];
  p.block_table = p.paged ? readable + begins[2] : nullptr;
  for (int batch = 0; batch < p.sequences; ++batch) {
    const SeqlenInfo seqlen(p, batch);
    for (int first = 0; first < seqlen.q_len(); first += kTileM) {
      const Tile tile{batch, 0, first};
      const VisibleKeys visible(p, batch, first);
      for (int block = 0; block * kTileN < seqlen.kv_end(); ++block) {
        std::printf("step %%d %%d %%d %%d\\n", batch, seqlen.q_len(), first, block);
        uint32 hidden = 0;
        for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) {
          pages[threadIdx.x] = page_of_lane(p, tile, visible, block);
        }
        all = true;
        for (const bool counting : {true, false}) {
          counts_votes = counting;
          for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) {
            const int page = pages[threadIdx.x];
            hidden |= hidden_parts(p, page);
            load_step(p, 0, 0, page, block, 5);
            load_v_step(p, 0, 0, page, block, 5, visible);
          }
        }
        std::printf("hidden %%u\\n", hidden);
      }
    }
  }
}
"""


def plan_of(head_dim: int, n: int) -> Plan:
    fields = {"op": "attention", "arch": "sm_90a", "layout": "paged", "pattern": {"kind": "sink_window"}}
    return plan_for(find_spec({**fields, "head_dim": head_dim, "dtype": "bf16", "tile": {"m": 128, "n": n}}))


def program(plan: Plan) -> str:
    """The host program of a kernel."""
    return PROGRAM % {
        "numbers": ", ".join(NUMBERS),
        "fields": ", ".join(f"&p.{name}" for name in NUMBERS),
        "constants": "\n".join(f"constexpr {c.ctype} {c.name} = {c.literal};" for c in plan.constants),
        "seqlen_info": render_template(plan, "attention/seqlen_info/paged.cuh.j2"),
        "loads": render_template(plan, "attention/sm90a/page_loads.cuh.j2"),
    }


class Call(NamedTuple):
    """A call over pages.

    Attributes:
        numbers: values of NUMBERS.
        bounds: cu_seqlens_q.
        lengths: seq_lens.
        table: rows of block_table.
    """

    numbers: dict[str, int]
    bounds: list[int]
    lengths: list[int]
    table: list[list[int]]

    def words(self) -> str:
        """Standard input of the program."""
        flat = [page for row in self.table for page in row]
        parts = [[self.numbers[name] for name in NUMBERS]]
        parts += [[len(each), *each] for each in (self.bounds, self.lengths, flat)]
        return " ".join(str(word) for part in parts for word in part)


ROWS = 64, 16, 64, 16, 1
"""Keys per copy of each tensor map."""
EXTREMES = -(2**31), 2**31 - 1, -1, 0, 1, 2**24


def drawn(source: random.Random) -> Call:
    """A small call; tables, lengths and bounds may hold anything."""
    requests, size, width = source.randint(1, 4), 16 << source.randint(0, 4), source.randint(1, 5)
    pages, tokens, most = source.randint(1, 20), source.randint(1, 400), size * width

    def any_of(low: int, high: int) -> int:
        return source.choice(EXTREMES) if source.random() < 0.1 else source.randint(low, high)

    paged, has_bounds, has_lengths = source.random() < 0.8, source.random() < 0.8, source.random() < 0.8
    table = [[any_of(0, pages - 1) for _ in range(width)] for _ in range(requests)]
    most = most if paged else source.randint(1, 500)
    bounds = sorted(source.randint(0, tokens) for _ in range(requests + 1))
    numbers = {
        **{"q_len": tokens, "sequences": requests, "has_bounds": has_bounds, "has_lengths": has_lengths},
        **{"request_queries": 0 if has_bounds else tokens // requests, "request_keys": 0 if has_lengths else most},
        **{
            "max_keys": most,
            "pages": pages if paged else requests,
            "page_shift": size.bit_length() - 1 if paged else 31,
        },
        **{"page_mask": size - 1 if paged else 2**31 - 1, "table_stride": width if paged else 0, "heads": 1},
        "copy_shift": 4 if paged and size < 64 else 6,
        "window_left": source.choice((2**24, 0, 1, source.randint(0, 300))),
        **{"sink_keys": source.choice((0, 0, 1, 17, 2**24)), "paged": paged},
    }
    changed = [any_of(bound, bound) for bound in bounds]
    lengths = [any_of(0, most) for _ in range(requests)]
    return Call({name: int(value) for name, value in numbers.items()}, changed, lengths, table)


def check_step(call: Call, plan: Plan, step: tuple[int, ...], copies: list[tuple[int, ...]], hidden: int) -> None:
    """Each row of a step is copied once for each group of columns, from its place or from outside of the cache."""
    of = call.numbers
    batch, queries, first, block = step
    length = call.lengths[batch] if of["has_lengths"] else of["max_keys"]
    length = max(0, min(length, of["max_keys"]))
    begin = first + length - queries - of["window_left"]
    n, groups = plan.spec.tile.n, plan.spec.head_dim // 64  # type: ignore[union-attr]
    rows: dict[tuple[bool, int, int], tuple[int, ...]] = {}
    for which, to, column, row, head, page in copies:
        assert head == 5 and to % 128 == 0 and column % 64 == 0
        group, at = divmod(to // 128, n)
        assert group == column // 64 < groups
        for i in range(ROWS[which]):
            place = which > 1, group, at + i
            assert place not in rows, "copied twice"
            rows[place] = page, row + i
    assert len(rows) == 2 * groups * n
    wrong = 0
    for i in range(n):
        key = block * n + i
        page = call.table[batch][key >> of["page_shift"]] if of["paged"] and key < of["max_keys"] else batch
        right = page, key & of["page_mask"]
        seen = key < length and (key >= begin or key < of["sink_keys"])
        there = 0 <= page < of["pages"]
        if seen and not there:
            wrong |= 1 << i // 16
        for group in range(groups):
            of_k, of_v = rows[False, group, i], rows[True, group, i]
            if seen and there:
                assert of_k == right and of_v == right
            else:
                assert not 0 <= of_v[0] < of["pages"] or (not seen and not there), (key, of_v)
    assert hidden & wrong == wrong
    seen_parts = {
        i // 16 for i in range(n) if (key := block * n + i) < length and (key >= begin or key < of["sink_keys"])
    }
    assert all(hidden >> part & 1 == wrong >> part & 1 for part in seen_parts), "a page of the cache is hidden"


@pytest.mark.parametrize(("head_dim", "n"), [(64, 128), (128, 128), (192, 64)])
def test_rows_come_from_their_pages(head_dim: int, n: int, recorded: Callable[..., None], tmp_path: Path) -> None:
    plan = plan_of(head_dim, n)
    text = program(plan)
    recorded(text, "page loads")
    (tmp_path / "loads.cpp").write_text(text)
    flags = ["-O1", "-fsanitize=signed-integer-overflow,shift-exponent", "-fsanitize-undefined-trap-on-error"]
    command = ["g++", "-std=c++17", *flags, "-o", str(tmp_path / "loads"), str(tmp_path / "loads.cpp")]
    subprocess.run(command, check=True, capture_output=True)
    source, steps = random.Random(head_dim), 0
    for _ in range(150):
        call = drawn(source)
        ran = subprocess.run([tmp_path / "loads"], input=call.words(), capture_output=True, text=True, check=True)
        assert "outside" not in ran.stdout
        step: tuple[int, ...] = ()
        copies: list[tuple[int, ...]] = []
        for line in ran.stdout.splitlines():
            word, *numbers = line.split()
            values: Any = tuple(map(int, numbers))
            if word == "step":
                step, copies = values, []
            elif word == "copy":
                copies.append(values)
            else:
                check_step(call, plan, step, copies, values[0])
                steps += 1
    assert steps > 150
