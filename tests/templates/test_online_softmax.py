"""Online softmax of the WGMMA and mma.sync kernels: their own lines, run on the host for two rows, against float64."""

from __future__ import annotations

import math
import random
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from each import looped
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.library import find_spec
from codegen.planning import plan_for
from codegen.render import render_plan

DENSE = {"kind": "dense"}
LISTS = {"kind": "topk", "k": 64, "block": {"q": 128, "kv": 64}}
SQUARE_LISTS = {"kind": "topk", "k": 64, "block": {"q": 64, "kv": 64}}
CAUSAL = {"kind": "causal"}
WGMMA: dict[str, Any] = {"arch": "sm_90a", "head_dim": 64, "stages": 2}
SHARED: dict[str, Any] = {**WGMMA, "share_kv_loads": True, "schedule": "cooperative"}
MMA: dict[str, Any] = {"arch": "sm_89", "head_dim": 128, "stages": 2}  # half a step at a time, in groups of 16 keys
KERNELS: dict[str, dict[str, Any]] = {
    "every key": {**WGMMA, "pattern": DENSE},
    "a diagonal": {**WGMMA, "pattern": CAUSAL},
    "lists": {**WGMMA, "pattern": LISTS},
    "lists, K and V shared": {**SHARED, "pattern": SQUARE_LISTS},
    "keys in two parts": {**WGMMA, "pattern": DENSE, "kv_splits": 2},
    "bf16": {**WGMMA, "pattern": DENSE, "dtype": "bf16"},
    "mma.sync": {**MMA, "pattern": DENSE},
    "mma.sync, bf16": {**MMA, "pattern": DENSE, "dtype": "bf16"},
    "mma.sync, whole steps": {**MMA, "pattern": DENSE, "stages": 4},
    "mma.sync, a step is a group": {**MMA, "pattern": DENSE, "stages": 4, "head_dim": 64},
}
KEYS = 64  # of a step
EPSILON = {"fp16": 2.0**-11, "bf16": 2.0**-8}  # of a rounded weight
HIDDEN = -math.inf
# A thread stands for the four that share a row, so it has all of a row's keys: 16 of a step.
COMMON = """\
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __any_sync(lanes, some) (some)
using uint32 = std::uint32_t;
using std::fmaxf;
inline float ex2(float x) { return std::exp2(x); }
inline void quad_max(float (&)[2]) {}
inline int __float_as_int(float x) { int bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __int_as_float(int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
constexpr bool kHalf = %(half)d;
// The bits of a number from 0 on, rounded to 16 bits.
inline uint32 narrow(float x) {
  if (!kHalf) return (__float_as_int(x) + 0x7FFFu + (__float_as_int(x) >> 16 & 1)) >> 16;
  if (!(x < 65520.0f)) return x != x ? 0x7FFF : 0x7C00;
  if (x < 6.103515625e-05f) return std::nearbyint(x * 16777216.0f);
  const uint32 bits = __float_as_int(x) - (112 << 23);
  return (bits + 0xFFF + (bits >> 13 & 1)) >> 13;
}
inline float widen(uint32 bits) {
  if (!kHalf) return __int_as_float(bits << 16);
  if (bits >= 0x7C00) return __int_as_float(bits > 0x7C00 ? 0x7FC00000 : 0x7F800000);
  return bits < 0x400 ? bits / 16777216.0f : __int_as_float((bits << 13) + (112 << 23));
}
inline uint32 pack(float low, float high) { return narrow(low) | narrow(high) << 16; }
struct Params { float scale_log2; };
constexpr float kLeastLogit = -1e30f, kMinusInfinity = -INFINITY;
constexpr int kTileN = %(keys)d, kHeadDim = 64;
float most = 0.0f;  // of all weights that are multiplied
// o += weight times value for two pairs of a row.
void multiply(float* o, uint32 weights, const float* values) {
  for (int i = 0; i < 2; ++i) {
    const float weight = widen(weights >> i * 16 & 0xFFFF);
    most = fmaxf(most, weight);
    *o += weight * values[i];
  }
}
void tell(const float (&sums)[2], const float (&of_values)[2], const float (&row_max)[2], int raises) {
  for (int row = 0; row < 2; ++row) {
    std::printf("%%.9g %%.9g ", sums[row] == 0 ? 0 : of_values[row] / sums[row], row_max[row] + std::log2(sums[row]));
  }
  std::printf("%%d %%.9g", raises, most);
}
"""
# Each reads steps, keys, the scale, and for each step the scores and the values of this thread's pairs.
READ = """\
  const int count = std::atoi(word[1]);
  const Params p{static_cast<float>(std::atof(word[2]))};
  std::vector<float> read(count * kTileN);
  if (std::fread(read.data(), 4, read.size(), stdin) != read.size()) return 1;
"""
WGMMA_PROGRAM = """\
%(functions)s
int main(int, char** word) {
%(read)s
  float o[kHeadDim / 2] = {}, s[kTileN / 2], row_max[2] = {kLeastLogit, kLeastLogit}, row_sum[2] = {};
  float step_max[2], rescale[2];
  uint32 p_frag[kTileN / 16][4];
  int raised = 0;
  for (int i = 0; i < count; ++i) {
    const float* values = read.data() + i * kTileN + kTileN / 2;
    std::memcpy(s, values - kTileN / 2, sizeof s);
    const float before[2] = {row_max[0], row_max[1]};
    if (i == 0) {
%(first_step)s
    } else {
%(further_step)s
      raised += row_max[0] != before[0] || row_max[1] != before[1];
    }
    for (int j = 0; j < kTileN / 4; ++j) multiply(o + j %% 2 * 2, p_frag[j / 4][j %% 4], values + j * 2);
  }
  tell(row_sum, {o[0], o[2]}, row_max, raised);
}
"""
MMA_PROGRAM = """\
constexpr int kRowTiles = 1, kRowBytes = 1, kGroupKeys = %(group)d, kHalfStep = %(half_step)d;
const float* values;  // of a step
void compute_pv_group(float (&o)[1][kHeadDim / 8][4], const uint32 (&p_frag)[1][kGroupKeys / 16][4], uint32 key) {
  const float* from = values + key / 2;
  for (int j = 0; j < kGroupKeys / 4; ++j) multiply(&o[0][0][j %% 2 * 2], p_frag[0][j / 4][j %% 4], from + j * 2);
}
%(functions)s
int main(int, char** word) {
%(read)s
  float o[1][kHeadDim / 8][4] = {}, s[1][kTileN / 8][4], row_max[1][2] = {{kLeastLogit, kLeastLogit}};
  float row_sum[1][2] = {};
  int raised = 0;
  for (int i = 0; i < count; ++i) {
    values = read.data() + i * kTileN + kTileN / 2;
    std::memcpy(s, values - kTileN / 2, sizeof s);
    const float before[2] = {row_max[0][0], row_max[0][1]};
    raise_row_max(o, row_sum, row_max, s, p.scale_log2);
    compute_pv_gemm<0, kHalfStep>(o, row_sum, row_max, s, p.scale_log2, 0);
    if (kHalfStep < kTileN / kGroupKeys) {
      compute_pv_gemm<kHalfStep, kTileN / kGroupKeys>(o, row_sum, row_max, s, p.scale_log2, 0);
    }
    raised += i > 0 && (row_max[0][0] != before[0] || row_max[0][1] != before[1]);
  }
  tell(row_sum[0], {o[0][0][0], o[0][0][2]}, row_max[0], raised);
}
"""


def program_of(kernel: dict[str, Any]) -> str:
    """The host program of a kernel."""
    fields = {"op": "attention", "tile": {"m": 128, "n": KEYS}, **kernel}
    plan = plan_for(find_spec(fields))
    source = render_plan(plan)
    values: dict[str, Any] = {"half": plan.spec.dtype == "fp16", "keys": KEYS, "read": READ}
    if kernel["arch"] == "sm_90a":
        softmax = (
            r"// Online softmax with lazy rescaling.*?\n"
            r"(?=__device__ __forceinline__ (?:float4\* partial_place|void store_(?:lse|partial|tile))\()"
        )
        functions = re.search(softmax, source, re.DOTALL)
        consume = source[source.index("consume(const Params") :]
        first = re.search(r" *take_step_max\(.*?;\n *raise_row_max\(.*?;[^\n]*\n *scale_apply_exp2\(.*?;\n", consume)
        taken = re.search(
            r" *take_step_max\(.*?;\n *const bool raises = .*?;\n *if \(raises\) raise_row_max\(.*?;\n", consume
        )
        used = re.search(r" *if \(raises\) rescale_rows\(.*?;\n *scale_apply_exp2\(.*?;\n", consume)
        assert functions and first and taken and used
        program = WGMMA_PROGRAM
        values |= {"functions": functions[0], "first_step": first[0], "further_step": taken[0] + used[0]}
    else:
        softmax = r"// Online softmax with lazy rescaling.*?\n(?=extern)"
        functions = re.search(softmax, source, re.DOTALL)
        assert functions
        # Without the products themselves: the program has its own.
        own = re.sub(r"// o \+= P V for this warp's rows and one group.*?\n}\n", "", functions[0], flags=re.DOTALL)
        assert "ldmatrix" not in own and "compute_pv_group(" in own
        constants = {constant.name: constant.value for constant in plan.constants}
        group = constants["kGroupKeys"]
        program = MMA_PROGRAM
        values |= {"functions": own, "group": group, "half_step": constants.get("kHalfStep", KEYS // int(group))}
    return (COMMON + program) % values


Recorded = Callable[..., None]
Rows = Sequence[Sequence[Sequence[float]]]  # [step][row][key]


class Softmax:
    """The host program of one kernel, compiled when it first runs."""

    def __init__(self, folder: Path, kernel: dict[str, Any]) -> None:
        self.folder, self.source, self.epsilon = folder, program_of(kernel), EPSILON[kernel.get("dtype", "fp16")]

    @cached_property
    def program(self) -> Path:
        if shutil.which("g++") is None:
            pytest.skip("no g++ to compile the host program with")
        (self.folder / "main.cpp").write_text(self.source, encoding="utf-8")
        options = ("-std=c++17", "-O1", "-Wno-unknown-pragmas")
        subprocess.run(["g++", *options, "main.cpp", "-o", "main"], cwd=self.folder, check=True)
        return self.folder / "main"

    def run(self, scores: Rows, values: Rows) -> tuple[list[float], list[float], int, float]:
        """Return the rows' results, their log2 of the sum of 2^score, steps that raised row_max, the largest weight."""
        laid = b"".join(
            struct.pack(f"{KEYS // 2}f", *(step[j // 2 % 2][j // 4 * 2 + j % 2] for j in range(KEYS // 2)))
            for pair in zip(scores, values, strict=True)
            for step in pair
        )
        words = [self.program, str(len(scores)), "1.0"]
        output = subprocess.run(words, input=laid, check=True, capture_output=True).stdout.split()
        numbers = [float(word) for word in output]
        return numbers[0:4:2], numbers[1:4:2], int(numbers[4]), numbers[5]

    def check(self, scores: Rows, values: Rows) -> int:
        """Compare with float64; return how many steps raised row_max."""
        results, logs, raised, most = self.run(scores, values)
        assert most <= 2.0  # a weight below 2 may be rounded to it
        for row in (0, 1):
            of_row = [[key for step in all_steps for key in step[row]] for all_steps in (scores, values)]
            seen = [(s, v) for s, v in zip(*of_row, strict=True) if s != HIDDEN]
            if not seen:
                assert results[row] == 0.0 and logs[row] == -math.inf
                continue
            top = max(s for s, _ in seen)
            weights = [2.0 ** (s - top) for s, _ in seen]
            total = math.fsum(weights)
            products = [w * v for w, (_, v) in zip(weights, seen, strict=True)]
            # Each weight is rounded; single precision adds a little for large scores and long sums.
            slack = (self.epsilon + 1e-6 + 1e-7 * abs(top)) * math.fsum(map(abs, products)) / total
            assert abs(results[row] - math.fsum(products) / total) <= slack + 1e-7 * len(seen)
            assert logs[row] == pytest.approx(top + math.log2(total), abs=1e-4, rel=2e-7)
        return raised


@pytest.fixture(params=KERNELS, scope="module")
def softmax(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Softmax:
    return Softmax(tmp_path_factory.mktemp("softmax"), KERNELS[request.param])


@pytest.fixture(scope="module")
def of_the_day(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> list[Softmax]:
    """Some of the kernels, others each day."""
    names = random.Random(pytestconfig.option.kernel_seed).sample(sorted(KERNELS), 3)
    return [Softmax(tmp_path_factory.mktemp("softmax"), KERNELS[name]) for name in names]


def rows(steps: int, value: Callable[[int, int, int], float]) -> list[list[list[float]]]:
    return [[[value(step, row, key) for key in range(KEYS // 4)] for row in (0, 1)] for step in range(steps)]


def noise(step: int, row: int, key: int) -> float:
    """Return a number between -1 and 1 that looks random, exact in single precision."""
    return ((step * 7919 + row * 104729 + key * 1299709 + 12345) * 2654435761 % 2**32 // 2**16 - 2**15) / 2**15


def single(x: float) -> float:
    """Return a number in single precision."""
    found: float = struct.unpack("f", struct.pack("f", x))[0]
    return found


@looped
@pytest.mark.parametrize("steps", [1, 2, 5, 15, 16, 40])
@pytest.mark.parametrize("spread", [0.0, 0.5, 8.0, 64.0])
def test_scores_that_are_much_alike_raise_no_row_max(
    softmax: Softmax, recorded: Recorded, steps: int, spread: float
) -> None:
    recorded(softmax.source)
    scores = rows(steps, lambda *at: spread * noise(*at))
    raised = softmax.check(scores, rows(steps, lambda *at: noise(at[2], *at[:2])))
    if spread <= 0.5:
        assert raised == 0


@looped
@pytest.mark.parametrize(("above", "raised"), [(0.5, 0), (0.99, 0), (1.0, 1), (30.0, 1)])
def test_a_step_raises_row_max_from_twice_its_weight_on(
    softmax: Softmax, recorded: Recorded, above: float, raised: int
) -> None:
    recorded(softmax.source)
    scores = rows(8, lambda *at: above if at == (4, 1, 7) else 0.0 if at[2] == 0 else -1.0)
    assert softmax.check(scores, rows(8, noise)) == raised


@looped
@pytest.mark.parametrize("rise", [0.5, 3.0, 20.0, -0.5, -3.0, -20.0])
@pytest.mark.parametrize("steps", [3, 30])
def test_scores_that_rise_or_fall_from_step_to_step(
    softmax: Softmax, recorded: Recorded, rise: float, steps: int
) -> None:
    recorded(softmax.source)
    scores = rows(steps, lambda *at: rise * at[0] + noise(*at))
    raised = softmax.check(scores, rows(steps, lambda *at: noise(at[1], *at[::2])))
    if rise == 20.0:
        assert raised == steps - 1


@looped
@pytest.mark.parametrize("step", [0, 1, 2, 19])
def test_the_weight_of_a_key_that_decides_its_row_is_exact(softmax: Softmax, recorded: Recorded, step: int) -> None:
    recorded(softmax.source)
    here = (step, 1, 5)
    scores = rows(20, lambda *at: 10000.3 if at == here else noise(*at))
    values = rows(20, lambda *at: 1.3125 if at == here else noise(*at))
    assert softmax.run(scores, values)[0][1] == pytest.approx(1.3125, rel=1e-6)
    softmax.check(scores, values)


@looped
@pytest.mark.parametrize("hidden", [1, 3, 20])
def test_steps_without_keys_change_nothing(softmax: Softmax, recorded: Recorded, hidden: int) -> None:
    recorded(softmax.source)
    for first in (True, False):
        scores = rows(20, lambda *at, first=first: HIDDEN if (at[0] < hidden) == first else -300.0 + noise(*at))
        softmax.check(scores, rows(20, noise))


@looped
@pytest.mark.parametrize("step", [0, 1, 7])
def test_a_row_without_keys_stays_as_it_is_while_the_other_moves(
    softmax: Softmax, recorded: Recorded, step: int
) -> None:
    recorded(softmax.source)

    def score(*at: int) -> float:
        if at[0] != step:
            return noise(*at)
        return HIDDEN if at[1] == 0 else 30.0 + noise(*at)

    softmax.check(rows(20, score), rows(20, noise))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_scores(of_the_day: list[Softmax], data: st.DataObject) -> None:
    steps = data.draw(st.integers(1, 24))
    level = data.draw(st.lists(st.floats(-2000, 2000, width=32), min_size=steps, max_size=steps))
    spread = data.draw(st.sampled_from([0.0, 1.0, 30.0]))
    scores = rows(steps, lambda *at: single(level[at[0]] + spread * noise(*at)))
    for softmax in of_the_day:
        softmax.check(scores, rows(steps, noise))
