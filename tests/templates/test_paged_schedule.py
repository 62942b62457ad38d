"""The division of attention over pages: the kernel's own code, run on the host, gives each step to one thread block."""

from __future__ import annotations

import ctypes
import platform
import shutil
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import host_paged  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from codegen.plan import Plan  # noqa: E402
from codegen.problem import PagedShape  # noqa: E402
from codegen.render import generate  # noqa: E402
from runtime.driver.launch import ParameterLayout  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
PROGRAM = """\
struct Record {
  int block, request, kv_head, first_row, rows, q_begin, steps, sink_steps, window_step, first, last, part, parts;
  int counter, first_slot, second_slot, third_slot, entries;
};
// Writes the runs of all thread blocks as one thread of each sees them; returns their number.
extern "C" int runs(const void* params, int grid, unsigned order, int thread, const long long* ranges, int number,
    Record* to, int room) {
  prepare(grid, false, order, ranges, number);
  const Params p = *static_cast<const Params*>(params);
  int count = 0;
  body = [&] {
    Range range;
    if (!find_range(p, range, memory)) return;
    Run run;
    while (next_run(p, range, run)) {
      const Parts parts = find_parts(p, range, run);
      const Tile& tile = run.tile;
      const Request& request = tile.request;
      if (threadIdx.x == thread && count < room) {
        to[count] = {blockIdx.x, tile.index, tile.kv_head, tile.first_row, tile.rows, request.q_begin, request.steps,
            request.sink_steps, request.window_step, run.first, run.last, parts.mine, parts.count,
            parts.first, part_slot(p, parts, 0), part_slot(p, parts, 1), part_slot(p, parts, 2), tile.entries};
      }
      if (threadIdx.x == thread) ++count;
    }
  };
  run_blocks();
  return count;
}
extern "C" int quotient_of(unsigned n, unsigned divisor, unsigned reciprocal) {
  return quotient(n, divisor, reciprocal);
}
"""
INTS = (
    *("block", "request", "kv_head", "first_row", "rows", "q_begin", "steps", "sink_steps", "window_step"),
    *("first", "last", "part", "parts", "counter", "first_slot", "second_slot", "third_slot", "entries"),
)
RANGES = ("block", "request", "kv_head", "first", "last", "part", "parts")
ROOM = 20000
MAX_KEYS = 1 << 20


class Record(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in INTS)


class Host(NamedTuple):
    """The schedule of a kernel, compiled for the host."""

    plan: Plan
    runs: Any
    quotient: Any


@dataclass(frozen=True)
class Launch:
    """A launch: its lengths and numbers.

    Attributes:
        kv_lens: keys of each request.
        q_lens: queries of each request.
        group: query heads per KV head.
        kv_heads: heads of K and V.
        blocks: thread blocks that run concurrently.
        most_parts: as of the kernel.
        window: keys before and after a query's own, then those at the beginning.
        lists: entries of a list, and the keys of one; (0, 1) without lists.
        packed: whether bounds are given; otherwise all requests have as many queries as the first.
        bounds: bounds in place of those of q_lens.
        before: tokens of no request before the first one, and as many behind the last one; with bounds.
        seed: of the order of thread blocks.
    """

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    group: int = 1
    kv_heads: int = 1
    blocks: int = 7
    most_parts: int = 0
    window: tuple[int, int, int] = (2**29, 0, 0)
    lists: tuple[int, int] = (0, 1)
    packed: bool = True
    bounds: tuple[int, ...] = ()
    before: int = 0
    seed: int = field(default=1, compare=False)

    @property
    def starts(self) -> list[int]:
        """First token of each request, then the end of the last."""
        found = [self.before]
        for length in self.q_lens:
            found.append(found[-1] + length)
        return found

    @property
    def tokens(self) -> int:
        """Tokens of q."""
        return max(1, self.starts[-1] + self.before)


@pytest.fixture(scope="module", params=[16, 64], ids=["one warp", "four warps"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Host:
    spec = {"op": "paged_attention", "arch": "sm_89", "dtype": "fp16", "head_dim": 64, "stages": 4}
    generated = generate(find_spec({**spec, "tile": {"m": 16, "n": request.param}}))
    folder = tmp_path_factory.mktemp("schedule")
    compiled = host_paged.compiled(generated.source, generated.plan, folder, PROGRAM)
    return Host(generated.plan, compiled.runs, compiled.quotient_of)


def constant(plan: Plan, name: str) -> int:
    (found,) = [int(each.value) for each in plan.constants if each.name == name]
    return found


def args_of(host: Host, launch: Launch) -> Any:
    sizes = len(launch.kv_lens), launch.tokens, launch.group * launch.kv_heads, launch.kv_heads, MAX_KEYS
    shape = PagedShape(*sizes, *launch.lists, most_parts=launch.most_parts)
    return host.plan.problem(shape, launch.blocks)


def runs_of(host: Host, launch: Launch, thread: int = 0) -> list[Record]:
    """Runs of a launch, as a thread of each thread block sees them."""
    args, layout = args_of(host, launch), ParameterLayout.of(host.plan.params)
    numbers: dict[str, float] = {name: 0 for name, kind in layout.types.items() if kind in ("i32", "i64", "f32")}
    left, right, sink = launch.window
    lists = torch.zeros(max(1, launch.lists[0]), dtype=torch.int32)  # all tokens and KV heads share one
    numbers |= args.numbers
    numbers |= {"max_keys": MAX_KEYS, "request_queries": launch.q_lens[0], "page_shift": 31, "page_mask": 2**31 - 1}
    numbers |= {"window_left": left, "window_right": right, "sink_keys": sink}
    block = bytearray(layout.pack(numbers))
    lengths = torch.tensor(launch.kv_lens, dtype=torch.int32)
    bounds = torch.tensor(launch.bounds or launch.starts, dtype=torch.int32)
    given = {"seq_lens": lengths} | ({"cu_seqlens_q": bounds} if launch.packed else {})
    given |= {"lists": lists} if launch.lists[0] else {}
    for name, tensor in given.items():
        ctypes.c_longlong.from_buffer(block, layout.offsets[name]).value = tensor.data_ptr()
    tensors = lengths, bounds, lists
    ranges = host_paged.ranges_of(tensors)
    found = (Record * ROOM)()
    params = (ctypes.c_char * len(block)).from_buffer(block)
    count = host.runs(params, args.tiles, launch.seed, thread, ranges, len(tensors), found, ROOM)
    assert 0 <= count < ROOM
    return list(found[:count])


def tiles_of(host: Host, launch: Launch) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Rows and steps of each tile, by request, KV head and first row, from the lengths alone."""
    tile, step = (constant(host.plan, name) for name in ("kTileM", "kTileN"))
    left, _, sink = launch.window
    found = {}
    for request, (keys, queries) in enumerate(zip(launch.kv_lens, launch.q_lens, strict=True)):
        entries, entry_keys = launch.lists
        rows = queries * launch.group
        end = -(-keys // step)
        window = min(max(0, keys - queries - left) // step, end)
        steps = max(1, min(-(-sink // step), window) + end - window)
        if entries:
            steps = max(1, -(-entries * entry_keys // step))
            starts = [token * launch.group + row for token in range(queries) for row in range(0, launch.group, tile)]
            sizes = [min(tile, launch.group - start % launch.group) for start in starts]
        else:
            starts = list(range(0, rows, tile))
            sizes = [min(tile, rows - start) for start in starts]
        for head in range(launch.kv_heads):
            found |= {(request, head, start): (size, steps) for start, size in zip(starts, sizes, strict=True)}
    return found


def slot_of(run: Record, part: int) -> int:
    return int(run.first_slot if part == 0 else run.second_slot + (part - 1) * (run.third_slot - run.second_slot))


def check(host: Host, launch: Launch) -> None:
    """Every step of every tile is in one run; parts have places and counters of their own."""
    runs, args = runs_of(host, launch), args_of(host, launch)
    tiles: dict[tuple[int, int, int], list[Record]] = defaultdict(list)
    for run in runs:
        if not run.rows:  # of a token of no request
            assert launch.before and launch.lists[0] and not run.entries
            continue
        assert run.entries == launch.lists[0]
        tiles[run.request, run.kv_head, run.first_row].append(run)
    expected = tiles_of(host, launch)
    assert set(tiles) == set(expected)
    floats = constant(host.plan, "kTileM") * (constant(host.plan, "kHeadDim") + 2)
    slots, counters = args.scratch["partials"] // 4 // floats, args.counters["counters"]
    taken: set[int] = set()
    counted: set[int] = set()
    for place, parts in tiles.items():
        rows, steps = expected[place]
        parts.sort(key=lambda run: run.first)
        assert all((run.rows, run.steps, run.parts) == (rows, steps, len(parts)) for run in parts)
        assert [run.part for run in parts] == list(range(len(parts)))
        assert [run.first for run in parts] == [0, *(run.last for run in parts[:-1])] and parts[-1].last == steps
        assert all(run.first < run.last for run in parts)
        if len(parts) == 1:
            continue
        places = {tuple(slot_of(run, part) for part in range(len(parts))) for run in parts}
        assert len(places) == 1, "thread blocks disagree on the places of parts"
        (mine,) = places
        assert all(0 <= slot < slots for slot in mine) and len({*mine}) == len(mine)
        assert taken.isdisjoint(mine)
        taken.update(mine)
        (counter,) = {run.counter for run in parts}
        assert 0 <= counter < counters and counter not in counted
        counted.add(counter)
        if launch.most_parts:
            assert len(parts) <= launch.most_parts


def check_keys(host: Host, launch: Launch) -> None:
    """The steps of a tile have the keys that its rows see, and no key twice."""
    step = constant(host.plan, "kTileN")
    left, right, sink = launch.window
    for run in runs_of(host, launch):
        if run.first:
            continue
        numbers = range(run.steps)
        keys = [i if i < run.sink_steps else i - run.sink_steps + run.window_step for i in numbers]
        assert len({*keys}) == len(keys)
        length, queries = launch.kv_lens[run.request], launch.q_lens[run.request]
        for row in (0, run.rows - 1):
            position = length - queries + (run.first_row + row) // launch.group
            last = min(length - 1, position + right)
            seen = {key // step for key in (max(0, position - left), last) if 0 <= key <= last}
            seen |= {key // step for key in range(0, min(sink, last + 1), step)}
            assert seen <= {*keys}


GROUPS = st.sampled_from([1, 2, 4, 5, 8, 16, 24])
LENGTHS = st.one_of(st.integers(0, 40), st.integers(0, 600), st.integers(0, 9000))
QUERIES = st.one_of(st.integers(0, 2), st.integers(0, 20), st.integers(0, 90))
NUMBERS = st.sampled_from([0, 1, 5, 16, 17, 64, 200, 1000])
WINDOWS = st.one_of(
    st.just((2**29, 0, 0)), st.just((2**29, 2**29, 0)), st.tuples(NUMBERS, NUMBERS, st.one_of(st.just(0), NUMBERS))
)


@st.composite
def launches(draw: st.DrawFn) -> Launch:
    requests = draw(st.lists(st.tuples(LENGTHS, QUERIES), min_size=1, max_size=draw(st.sampled_from([1, 3, 12, 70]))))
    packed = draw(st.booleans())
    queries = max(1, requests[0][1])
    q_lens = tuple(length for _, length in requests) if packed else (min(queries, 8),) * len(requests)
    before = draw(st.sampled_from([0, 0, 3])) if packed else 0
    launch = Launch(
        tuple(keys for keys, _ in requests),
        q_lens if any(q_lens) else (1, *q_lens[1:]),
        draw(GROUPS),
        draw(st.sampled_from([1, 1, 2, 3])),
        draw(st.integers(1, 40)),
        draw(st.sampled_from([0, 0, 3, 16])),
        draw(WINDOWS),
        draw(st.sampled_from([(0, 1), (0, 1), (0, 1), (1, 1), (300, 1), (9, 64), (16, 128), (500, 4)])),
        packed,
        before=before,
        seed=draw(st.integers(0, 9)),
    )
    tiles = sum(launch.q_lens) * launch.kv_heads * -(-launch.group // 16) if launch.lists[0] else 0
    return launch if tiles < 2000 else Launch(launch.kv_lens, launch.q_lens, 1, 1, launch.blocks)


@example(Launch((65536, *range(100, 131)), (1,) * 32, 4, 8, 40))
@example(Launch((0, 0, 0), (1, 0, 2), 16, 1, 5))
@example(Launch((40000,), (1,), 16, 1, 40, most_parts=16))
@example(Launch((9000, 8000, 7000), (1, 1, 1), 2, 1, 7, most_parts=16))
@example(Launch((9000, 300), (1, 3), 8, lists=(30, 64), before=5))
@example(Launch((5, 9000), (3, 3), 24, 3, 13, most_parts=3, packed=False))
@example(Launch((9000, 300), (1, 3), 24, 2, 33, lists=(500, 4), most_parts=16))
@settings(max_examples=300)
@given(launch=launches())
def test_each_step_of_each_tile_is_in_one_run(host: Host, launch: Launch) -> None:
    check(host, launch)


@pytest.mark.parametrize(
    ("requests", "kv_heads", "blocks", "parts", "used"),
    [(16, 2, 66, 2, 64), (1, 3, 54, 18, 54), (64, 2, 66, 1, 64), (33, 1, 34, 1, 33)],
)
def test_tiles_of_one_length_have_thread_blocks_of_their_own(
    host: Host, requests: int, kv_heads: int, blocks: int, parts: int, used: int
) -> None:
    launch = Launch((9000,) * requests, (1,) * requests, 4, kv_heads, blocks)
    check(host, launch)
    runs = runs_of(host, launch)
    assert {run.parts for run in runs} == {parts} and {run.block for run in runs} == {*range(used)}


@example(requests=16, kv_heads=2, blocks=66, steps=140)
@example(requests=64, kv_heads=2, blocks=66, steps=140)
@example(requests=1, kv_heads=4, blocks=264, steps=32)
@settings(max_examples=100)
@given(requests=st.integers(1, 70), kv_heads=st.integers(1, 4), blocks=st.integers(1, 80), steps=st.integers(1, 200))
def test_the_host_divides_lists_as_the_kernel_divides_requests(
    host: Host, requests: int, kv_heads: int, blocks: int, steps: int
) -> None:
    """Tiles of one length are divided in the same way, whether lists or lengths make them."""
    keys = steps * constant(host.plan, "kTileN")
    dense = Launch((keys,) * requests, (1,) * requests, 4, kv_heads, blocks)
    listed = replace(dense, lists=(steps, constant(host.plan, "kTileN")))
    found, others = (
        [(*(getattr(run, name) for name in RANGES),) for run in runs_of(host, of)] for of in (dense, listed)
    )
    assert found == others


@example(n=2**31 - 1, divisor=1)
@example(n=2**31 - 1, divisor=2**30)
@settings(max_examples=1000)
@given(n=st.integers(0, 2**31 - 1), divisor=st.one_of(st.integers(1, 300), st.integers(1, 2**30)))
def test_a_product_and_a_comparison_divide(host: Host, n: int, divisor: int) -> None:
    multiple = n // divisor * divisor
    for number in {n, multiple, max(0, multiple - 1)}:
        assert host.quotient(number, divisor, (2**31 - 1) // divisor) == number // divisor


@example(Launch((9000,) * 5, (1,) * 5, 4, 2, 31))
@example(Launch((9000,) * 5, (1,) * 5, 4, 2, 4, most_parts=16))
@settings(max_examples=100)
@given(launch=launches())
def test_requests_of_one_length_are_divided_as_others(host: Host, launch: Launch) -> None:
    equal = replace(launch, kv_lens=launch.kv_lens[:1] * len(launch.kv_lens))
    check(host, equal)


@example(Launch((9000, 300, 20), (1, 40, 2), 2, window=(100, 30, 40)))
@example(Launch((64, 65, 63), (1, 1, 1), 2, window=(0, 0, 1)))
@settings(max_examples=100)
@given(launch=launches())
def test_steps_have_the_keys_of_windows(host: Host, launch: Launch) -> None:
    if not launch.lists[0]:
        check_keys(host, launch)


@settings(max_examples=40)
@given(launch=launches(), thread=st.integers(0, 127))
def test_all_threads_of_a_thread_block_have_the_same_runs(host: Host, launch: Launch, thread: int) -> None:
    found, others = (runs_of(host, launch, each) for each in (0, thread % host.plan.threads))
    assert [bytes(run) for run in found] == [bytes(run) for run in others]


@settings(max_examples=80)
@given(launch=launches(), more=st.lists(st.tuples(LENGTHS, QUERIES), max_size=5))
def test_parts_of_batch_invariant_calls_depend_on_their_request(
    host: Host, launch: Launch, more: list[tuple[int, int]]
) -> None:
    """In another batch, on a device with more thread blocks, a request is divided in the same way."""
    if launch.lists[0]:
        return
    kv_lens, q_lens = launch.kv_lens, launch.q_lens
    alone = Launch(kv_lens, q_lens, launch.group, launch.kv_heads, launch.blocks, 16, launch.window)
    others = tuple(keys for keys, _ in more), tuple(queries for _, queries in more)
    beside = Launch((*others[0], *kv_lens), (*others[1], *q_lens), launch.group, launch.kv_heads, 23, 16, launch.window)

    def parts(of: Launch, before: int) -> set[tuple[int, ...]]:
        return {
            (run.request - before, run.kv_head, run.first_row, run.first, run.last, run.part, run.parts)
            for run in runs_of(host, of)
            if run.request >= before
        }

    assert parts(alone, 0) == parts(beside, len(more))


EXTREMES = -(2**31), -(2**31) + 1, 2**31 - 1, MAX_KEYS, MAX_KEYS + 1, 2**24
ANYTHING = st.one_of(st.integers(-9, 100), st.sampled_from(EXTREMES))


@settings(max_examples=150)
@given(launch=launches(), data=st.data())
def test_any_lengths_and_bounds_are_harmless(host: Host, launch: Launch, data: st.DataObject) -> None:
    """Loads lie in the tensors, which the host checks, and so do the rows of all runs."""
    count = len(launch.kv_lens)
    lengths = tuple(data.draw(st.lists(ANYTHING, min_size=count, max_size=count)))
    bounds = tuple(data.draw(st.lists(ANYTHING, min_size=count + 1, max_size=count + 1)))
    spoiled = Launch(
        *(lengths, launch.q_lens, launch.group, launch.kv_heads, launch.blocks, launch.most_parts, launch.window),
        *(launch.lists, True, bounds, launch.before),
    )
    args, tokens, step = args_of(host, launch), launch.tokens, constant(host.plan, "kTileN")
    assert args.units < 2**31
    for run in runs_of(host, spoiled):
        assert 0 < run.steps <= max(MAX_KEYS, launch.lists[0] * launch.lists[1]) // step + 1
        assert 0 <= run.request < count and 0 <= run.kv_head < launch.kv_heads
        if run.rows > 0:
            first, last = run.first_row // launch.group, (run.first_row + run.rows - 1) // launch.group
            assert run.q_begin + first >= 0 and run.q_begin + last < tokens
        assert run.parts == 1 or 0 <= run.counter < args.counters["counters"]


@pytest.mark.parametrize("most_parts", [0, 16])
def test_falling_bounds_give_no_more_work_than_is_counted(host: Host, most_parts: int) -> None:
    """Requests that share all tokens would have more units of work together than 32 bits count."""
    launch = Launch((MAX_KEYS,) * 5, (3000, 0, 3000, 0, 3000), 24, most_parts=most_parts)
    spoiled = Launch(launch.kv_lens, launch.q_lens, 24, most_parts=most_parts, bounds=(0, 9000, 0, 9000, 0, 9000))
    assert args_of(host, launch).units < 2**31
    assert runs_of(host, spoiled) == []
