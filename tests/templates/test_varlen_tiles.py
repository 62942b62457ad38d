"""Tiles, steps, statistics and turns of gradients of packed sequences, run on the host.

A host program of the pieces prints, for bounds of sequences, which tokens each tile covers, which queries its steps
show to its keys, where statistics and sums of dQ lie, and the turns at dQ. Bounds may also fall, or lie outside.
"""

from __future__ import annotations

import itertools
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from codegen.library import find_spec
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.problem import AttentionShape
from codegen.render import generate, render_plan, render_template
from codegen.spec import AttentionBackwardSpec

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the host program with")
FLAGS = ("-O1", "-fsanitize=signed-integer-overflow", "-fsanitize-undefined-trap-on-error")
"""Options of the compiler: a sum that overflows ends the program."""
PATTERNS: tuple[dict[str, Any], ...] = (
    {"kind": "dense"},
    {"kind": "causal"},
    {"kind": "causal", "align": "top_left"},
    {"kind": "sliding_window", "left": 100, "right": 37},
    {"kind": "sink_window", "sink": 4, "left": 130, "right": 70},
)
PROGRAM = """\
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#define __device__
#define __forceinline__ inline
#define __shared__
#define __align__(bytes) alignas(bytes)
using std::max;
using std::min;
using int64 = long long;
using uint32 = unsigned;
inline int __ldg(const int* word) { return *word; }
struct Params {
  int q_len, kv_len, sequences, heads, padded_q_len, query_tiles, key_tiles, heads_per_kv_head, head_group, query_steps;
  const int *cu_seqlens_q, *cu_seqlens_k, *rising_q, *rising_k;
};
struct { unsigned x; } blockIdx;
alignas(1024) unsigned char shared_memory[1 << 18];
constexpr float kMinusInfinity = -1.0f;
%(constants)s
%(seqlen_info)s
%(pieces)s
%(tile)s
int main(int count, char** words) {
  // Numbers of the launch, then bounds in q, then those in k.
  int numbers[10], q_bounds[512], k_bounds[512];
  for (int i = 0; i < 10; ++i) numbers[i] = std::atoi(words[1 + i]);
  for (int i = 0; i <= numbers[2]; ++i) {
    q_bounds[i] = std::atoi(words[11 + i]);
    k_bounds[i] = std::atoi(words[12 + numbers[2] + i]);
  }
  Params p;
  std::memcpy(&p, numbers, sizeof numbers);
  p.cu_seqlens_q = p.rising_q = q_bounds;
  p.cu_seqlens_k = p.rising_k = k_bounds;
  const int tiles = %(tiles)s;
  for (int index = 0; index < tiles; ++index) {
    blockIdx.x = index;
    const Tile tile(p%(index)s);
    Segment& segment = reinterpret_cast<Segment&>(shared_memory[kSegmentOffset]);
    segment = Segment(p, q_bounds, k_bounds, tile.batch);
    %(body)s
  }
}
"""
OF_QUERIES = """\
if (tile.first_query >= segment.queries) continue;
std::printf("tile %d %d %d %d %lld\\n", tile.head, segment.batch, segment.q_begin + tile.first_query,
    min(segment.queries - tile.first_query, kTileM), segment.stats_row(p, tile.head) + tile.first_query);
KvBlockIterator blocks(p, tile.batch, tile.head, tile.first_query);
for (int i = 0; i < blocks.count; ++i) {
  const int step = blocks.at(i);
  const int keys = min(segment.visible_keys - step * kTileN, kTileN);
  std::printf("step %d %d %d\\n", segment.kv_begin + step * kTileN, keys, %(masked)s);
}"""
OF_KEYS = """\
if (tile.first_key >= segment.keys) continue;
std::printf("tile %%d %%d %%d %%d %%lld\\n", tile.kv_head, segment.batch, segment.kv_begin + tile.first_key,
    min(segment.keys - tile.first_key, kTileN), segment.stats_row(p, tile.kv_head));
QueryBlockIterator blocks(p, tile.batch, tile.kv_head, tile.first_key);
const int count = tile.first_key < segment.visible_keys ? blocks.count : 0;
for (int i = 0; i < count; ++i) {
  const int step = blocks.at(i);
  const int queries = min(segment.queries - step * kTileM, kTileM);
  std::printf("step %%d %%d %%d", segment.q_begin + step * kTileM, queries, %(masked)s);
  %(turn)s
  std::puts("");
}"""
TURN = """\
const Turn turn(p, tile.batch, step, tile.number);
std::printf(" %d %d %d", segment.first_step() + step, turn.number, turn.is_last);"""


def plan_of(gradients: str, pattern: dict[str, Any], arch: str = "sm_90a", **fields: Any) -> Plan:
    given = {"op": "attention_backward", "arch": arch, "gradients": gradients, "head_dim": 64, "pattern": pattern}
    return plan_for(find_spec({**given, "layout": "varlen", **fields}))


def struct(source: str, name: str) -> str:
    """A struct of a source."""
    begin = source.index(f"struct {name} {{")
    return source[begin : source.index("\n};", begin) + 4]


def program(plan: Plan) -> str:
    """The host program of a kernel."""
    spec = plan.spec
    assert isinstance(spec, AttentionBackwardSpec)
    masked = "blocks.masked(i, step)" if spec.pattern.masks_pairs else "false"
    source, pieces = render_plan(plan), []
    if spec.by_queries:
        pieces.append(render_template(plan, f"attention/patterns/{spec.pattern.kind}.cuh.j2"))
        body, tiles, index = OF_QUERIES.replace("%(masked)s", masked), "p.heads * p.query_tiles", ""
    else:
        folder = "attention_backward"
        pieces.append(render_template(plan, f"{folder}/queries/{spec.pattern.queries}.cuh.j2"))
        turns = spec.gradients == "dq_dkdv"
        if turns:
            pieces += [render_template(plan, f"{folder}/dq_order/{n}.cuh.j2") for n in (spec.pattern.dq_order, "turn")]
        body = OF_KEYS % {"masked": masked, "turn": TURN if turns else ""}
        tiles, index = "p.heads / p.heads_per_kv_head * p.key_tiles", ", index" if turns else ""
    constants = "\n".join(f"constexpr {c.ctype} {c.name} = {c.literal};" for c in plan.constants)
    offset = next(region.offset for region in plan.shared if region.name == "Segment")
    lengths = render_template(plan, "attention/seqlen_info/varlen.cuh.j2")
    lengths = re.sub(r"  extern __shared__ .*\n", "", lengths)
    return PROGRAM % {
        "constants": f"{constants}\nconstexpr int kSegmentOffset = {offset};",
        "seqlen_info": lengths,
        "pieces": "\n".join(pieces),
        "tile": struct(source, "Tile"),
        "tiles": tiles,
        "index": index,
        "body": body,
    }


class Host:
    """A compiled program, and a launch of its kernel."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        (folder / "main.cpp").write_text(program(plan), encoding="utf-8")
        subprocess.run(["g++", "-std=c++17", *FLAGS, "main.cpp", "-o", "main"], cwd=folder, check=True)
        self._command = folder / "main"

    def run(self, q_tokens: int, k_tokens: int, q_bounds: list[int], k_bounds: list[int]) -> tuple[Any, dict[str, int]]:
        """Tiles with their steps, in the order of thread blocks, and the numbers of the launch, for two heads."""
        shape = AttentionShape(1, 2, 2, q_tokens, k_tokens, sequences=len(q_bounds) - 1)
        given = self.plan.problem(shape, 100).numbers
        names = ("q_len", "kv_len", "sequences", "heads", "padded_q_len", "query_tiles", "key_tiles")
        names += ("heads_per_kv_head", "head_group", "query_steps")
        words = [given.get(name, 0) for name in names]
        command = [self._command, *map(str, (*words, *q_bounds, *k_bounds))]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        tiles: list[tuple[list[int], list[list[int]]]] = []
        for line in lines:
            kind, *rest = line.split()
            if kind == "tile":
                tiles.append(([int(word) for word in rest], []))
            else:
                tiles[-1][1].append([int(word) for word in rest])
        return tiles, dict(given)


def drawn(source: random.Random) -> tuple[int, int, list[int], list[int]]:
    """Tokens and bounds of a problem."""

    def lengths(count: int) -> list[int]:
        some = (0, 0, 1, 63, 64, 65, 79, 80, 81, 127, 128, 129, source.randint(0, 400))
        return [source.choice(some) for _ in range(count)]

    count = source.randint(1, 7)
    q_lens = lengths(count)
    k_lens = q_lens if source.random() < 0.5 else lengths(count)
    before, after = source.choice(((0, 0), (source.randint(1, 200), source.randint(0, 300))))
    q_bounds, k_bounds = (list(itertools.accumulate(each, initial=before)) for each in (q_lens, k_lens))
    return q_bounds[-1] + after + (not q_bounds[-1]), k_bounds[-1] + after + (not k_bounds[-1]), q_bounds, k_bounds


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: "_".join(map(str, pattern.values())))
@pytest.mark.parametrize("gradients", ["dq", "dkdv", "dq_dkdv"])
def test_tiles_cover_every_token_and_show_what_the_pattern_does(
    gradients: str, pattern: dict[str, Any], recorded: Callable[..., None], tmp_path: Path
) -> None:
    if gradients == "dq_dkdv" and pattern["kind"] == "sink_window":
        pytest.skip("its tiles take no turns")
    plan = plan_of(gradients, pattern, tile={"m": 128, "n": 80} if gradients == "dq" else {"m": 64, "n": 128})
    recorded(program(plan))
    host, source = Host(plan, tmp_path), random.Random(gradients)
    for _ in range(25):
        check(host, *drawn(source))


def check(host: Host, q_tokens: int, k_tokens: int, q_bounds: list[int], k_bounds: list[int]) -> None:
    """Compare the tiles and steps of a launch with the definition."""
    spec = host.plan.spec
    assert isinstance(spec, AttentionBackwardSpec)
    where = f"{q_tokens} x {k_tokens} tokens, {q_bounds}, {k_bounds}"
    tiles, numbers = host.run(q_tokens, k_tokens, q_bounds, k_bounds)
    tokens = q_tokens if spec.by_queries else k_tokens
    covered = [[0] * tokens for _ in range(2)]
    rows: dict[tuple[int, int], int] = {}
    turns: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for order, ((head, batch, first, count, stats), steps) in enumerate(tiles):
        for token in range(first, first + count):
            covered[head][token] += 1
        if not 0 <= batch < len(q_bounds) - 1:
            assert not steps, f"{where}: tokens of no sequence have steps"
            continue
        q_len, k_len = (bounds[batch + 1] - bounds[batch] for bounds in (q_bounds, k_bounds))
        check_steps(spec, batch, first, count, steps, q_bounds[batch], k_bounds[batch], q_len, k_len, where)
        first_row = stats - (first - q_bounds[batch]) if spec.by_queries else stats
        rows[head, batch] = first_row
        for step in steps if spec.gradients == "dq_dkdv" else ():
            place, number, is_last = step[3:]
            assert 0 <= place < numbers["query_steps"], where
            turns.setdefault((head, place), []).append((number, order, is_last))
    assert all(each == 1 for of_head in covered for each in of_head), f"{where}: tiles do not cover each token once"
    for (head, batch), row in rows.items():  # rows of statistics of sequences are apart
        length = q_bounds[batch + 1] - q_bounds[batch]
        assert row % 128 == 0 and head * numbers["padded_q_len"] <= row, where
        assert row + length + 128 <= (head + 1) * numbers["padded_q_len"], where
        for (other_head, other), start in rows.items():
            assert other_head != head or other <= batch or row + length + 128 <= start, where
    for found in turns.values():
        numbers_of, orders, lasts = zip(*sorted(found), strict=True)
        assert numbers_of == tuple(range(len(found))), f"{where}: turns {found}"
        assert list(orders) == sorted(orders), f"{where}: a tile waits for one that begins later: {found}"
        assert lasts == (0,) * (len(found) - 1) + (1,), f"{where}: turns {found}"


def check_steps(
    spec: AttentionBackwardSpec,
    batch: int,
    first: int,
    count: int,
    steps: list[list[int]],
    q_begin: int,
    k_begin: int,
    q_len: int,
    k_len: int,
    where: str,
) -> None:
    """Compare the steps of a tile with the pairs of the pattern; a step without a mask shows all its pairs."""
    own = range(first, first + count)
    begin, other_begin, other_len = (q_begin, k_begin, k_len) if spec.by_queries else (k_begin, q_begin, q_len)

    def seen(one: int, other: int) -> bool:
        query, key = (one - begin, other - other_begin)
        query, key = (query, key) if spec.by_queries else (other - other_begin, one - begin)
        return bool(spec.pattern.visible(query, key, q_len, k_len))

    listed: set[int] = set()
    for other_first, number, masked, *_ in steps:
        others = range(other_first, other_first + number)
        assert number > 0 and not listed & set(others), f"{where}: step at {other_first} of sequence {batch}"
        listed |= set(others)
        ends = (own[0], own[-1]), (others[0], others[-1])
        whole = all(seen(one, other) for one in ends[0] for other in ends[1])  # of convex patterns
        assert masked or whole or spec.pattern.kind == "sink_window", f"{where}: a step is not masked"
    unlisted = [o for o in range(other_begin, other_begin + other_len) if o not in listed]
    for one in (own[0], own[len(own) // 2], own[-1]):
        assert not any(seen(one, other) for other in unlisted), f"{where}: pairs of {one} have no step"


@pytest.mark.parametrize("gradients", ["dq", "dkdv"])
def test_bounds_that_fall_or_lie_outside_read_nothing_outside(
    gradients: str, recorded: Callable[..., None], tmp_path: Path
) -> None:
    plan = plan_of(gradients, {"kind": "causal"})
    recorded(program(plan), "garbage")
    host, source = Host(plan, tmp_path), random.Random(1)
    for _ in range(60):
        tokens, count = source.randint(1, 900), source.randint(1, 6)
        of_q, of_k = (
            [source.choice((-(2**31), -7, 0, source.randint(0, 1200), 2**31 - 1)) for _ in range(count + 1)]
            for _ in range(2)
        )
        tiles, numbers = host.run(tokens, tokens, of_q, of_k)
        rows = 2 * numbers["padded_q_len"]
        for (_, _, first, length, stats), steps in tiles:
            assert first >= 0 and first + length <= tokens
            assert stats >= 0 and stats + 128 <= rows
            for step in steps:
                assert step[0] >= 0 and step[0] + step[1] <= tokens


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
@pytest.mark.parametrize("gradients", ["dq", "dkdv"])
def test_nothing_behind_the_search_reads_the_lengths_of_all_sequences(gradients: str, arch: str) -> None:
    for pattern in PATTERNS:
        plan = plan_of(gradients, pattern, arch)
        source = generate(find_spec(plan.spec)).source
        text = re.sub(r"first_of_tile<\d>\([^;]*;", "", source[source.index("// Pattern: ") :])
        assert not re.findall(r"p\.(?:q_len|kv_len)", text)


FORWARD = """\
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
%(seqlen_info)s
int main(int count, char** words) {
  // Tokens and sequences, then bounds.
  int bounds[512];
  for (int i = 3; i < count; ++i) bounds[i - 3] = std::atoi(words[i]);
  const int tokens = std::atoi(words[1]), sequences = std::atoi(words[2]), rows = %(rows)d;
  const Params p{tokens, tokens, sequences, 1, bounds, bounds};
  for (int tile = 0; tile < tokens / rows + sequences; ++tile) {
    const int batch = sequence_of_tile(p, tile, rows), first = first_query_of_tile(p, tile, rows, batch);
    const SeqlenInfo seqlen(p, batch);
    if (first >= seqlen.q_len()) continue;
    std::printf("%%d %%d %%d\\n", batch, seqlen.q_begin + first, min(rows, seqlen.q_len() - first));
  }
}
"""


@pytest.mark.parametrize("m", [64, 192])
def test_tiles_of_a_forward_pass_have_the_tokens_of_sequences(
    m: int, recorded: Callable[..., None], tmp_path: Path
) -> None:
    """Each token of a sequence is in one tile. Bounds that fall or lie outside name no token outside of the tensor."""
    fields = {"op": "attention", "arch": "sm_90a", "layout": "varlen", "pattern": {"kind": "causal"}, "head_dim": 64}
    tile = {"schedule": "cooperative", "tile": {"m": m, "n": 64}}
    plan = plan_for(find_spec({**fields, **tile}))
    text = FORWARD % {"seqlen_info": render_template(plan, "attention/seqlen_info/varlen.cuh.j2"), "rows": m}
    recorded(text, "forward")
    (tmp_path / "main.cpp").write_text(text, encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", *FLAGS, "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    source = random.Random(m)
    for number in range(120):
        tokens, count = source.randint(1, 900), source.randint(1, 6)
        rising = sorted(source.randint(0, tokens) for _ in range(count + 1))
        anything = [source.choice((-(2**31), -7, 0, source.randint(0, 1200), 2**31 - 1)) for _ in rising]
        bounds = rising if number % 2 else anything
        words = [str(each) for each in (tokens, count, *bounds)]
        run = subprocess.run([tmp_path / "main", *words], capture_output=True, text=True, check=True)
        tiles = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
        assert all(first >= 0 and first + rows <= tokens for _, first, rows in tiles)
        if bounds is rising:
            covered = sorted(token for _, first, rows in tiles for token in range(first, first + rows))
            assert covered == list(range(rising[0], rising[-1]))


RISING = """\
#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __shared__ static
using std::max;
using std::min;
inline int __ldg(const int* word) { return *word; }
constexpr int kPrologueThreads = %(threads)d;
thread_local struct { unsigned x; } threadIdx;
std::barrier<> everyone(kPrologueThreads);
int lanes_of[kPrologueThreads];
inline void __syncthreads() { everyone.arrive_and_wait(); }
inline int __shfl_up_sync(unsigned, int value, int lanes) {
  lanes_of[threadIdx.x] = value;
  everyone.arrive_and_wait();
  const int found = static_cast<int>(threadIdx.x %% 32) >= lanes ? lanes_of[threadIdx.x - lanes] : value;
  everyone.arrive_and_wait();
  return found;
}
%(function)s
int main(int count, char** words) {
  std::vector<int> from(count - 2), to(count - 2, -1);
  for (int i = 2; i < count; ++i) from[i - 2] = std::atoi(words[i]);
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kPrologueThreads; ++i) {
    threads.emplace_back([&, i] {
      threadIdx.x = i;
      write_rising(from.data(), to.data(), from.size(), std::atoi(words[1]));
    });
  }
  for (auto& thread : threads) thread.join();
  for (int each : to) std::printf("%%d ", each);
}
"""


def test_bounds_of_tiles_that_take_turns_rise(recorded: Callable[..., None], tmp_path: Path) -> None:
    source = generate(find_spec(plan_of("dq_dkdv", {"kind": "causal"}).spec)).source
    begin = source.index("__device__ __forceinline__ void write_rising(")
    function = source[begin : source.index("\n}\n", begin) + 3]
    text = RISING % {"threads": 64, "function": function}
    recorded(text)
    (tmp_path / "main.cpp").write_text(text, encoding="utf-8")
    subprocess.run(["g++", "-std=c++20", "-O1", "-pthread", "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    draw = random.Random(0)
    for count in (1, 2, 31, 32, 33, 64, 65, 150):
        given = [draw.choice((-5, 0, draw.randint(0, 900), 2000)) for _ in range(count)]
        run = subprocess.run([tmp_path / "main", "1000", *map(str, given)], capture_output=True, text=True, check=True)
        clamped = [max(0, min(each, 1000)) for each in given]
        assert [int(word) for word in run.stdout.split()] == list(itertools.accumulate(clamped, max))
