"""Which function of a source a line is in."""

from __future__ import annotations

import itertools
import re

import pytest

from codegen.library import GENERATED
from codegen.tools.outline import Function, Outline, Stage, functions

SOURCE = """\
// __device__ int no_function() {
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};
__device__ __forceinline__ void wait(int barrier) {
  asm volatile(
      "{\\n"
      ".reg .pred p; // }}\\n" ::"r"(barrier));
}
struct Tile {
  int head;  // {
  __device__ __forceinline__ Tile(int index)
      : head(index) {}
  __device__ int next() const { return head + 1; }
};
template <int kCount>
__device__ __forceinline__ void add(float (&x)[kCount]) {
  for (int i = 0; i < kCount; ++i) {
    x[i] += 1;
  }
}
__device__ void consume(Tile tile) {
  wait(0);
  add(x);
}
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    kernel(const Params p) {
  auto copy = [&] {
    consume(tile);
  };
  wait(1);
}
"""
WAIT, ADD, CONSUME, KERNEL = 6, 19, 24, 31


def test_functions_have_names_and_lines() -> None:
    assert functions(SOURCE) == (
        Function("wait", 5, 9, True),
        Function("Tile::Tile", 12, 13, False),
        Function("Tile::next", 14, 14, False),
        Function("add", 17, 21, False),
        Function("consume", 22, 25, False),
        Function("kernel", 26, 32, False),
    )


@pytest.mark.parametrize(
    ("lines", "name", "line"),
    [
        ((ADD, CONSUME, KERNEL), "consume / add", ADD),
        ((WAIT, 23, KERNEL), "consume", 23),  # one PTX instruction is no stage
        ((WAIT, KERNEL), "kernel", KERNEL),
        ((ADD, CONSUME, 29, KERNEL), "consume / add", ADD),  # from a lambda of the kernel
        ((14, ADD, CONSUME, KERNEL), "consume / add", ADD),  # two at most, the outer ones
        ((KERNEL,), "kernel", KERNEL),
    ],
)
def test_the_stage_is_what_the_kernel_calls(lines: tuple[int, ...], name: str, line: int) -> None:
    assert Outline(SOURCE).stage(lines) == Stage(name, line)


@pytest.mark.parametrize("lines", [(), (1,), (4000,)])
def test_what_is_in_no_function_has_no_stage(lines: tuple[int, ...]) -> None:
    assert Outline(SOURCE).stage(lines) is None


def test_of_generated_sources_every_function_is_found() -> None:
    for path in sorted(GENERATED.rglob("*.cu")):
        source = path.read_text(encoding="utf-8")
        found, lines = functions(source), source.splitlines()
        names = re.findall(r"^(?!\s*//).*\b(?:__device__|__global__)", source, re.MULTILINE)
        assert path.stem in {each.name for each in found}, path
        assert len(found) == len(names), path
        assert all(one.last < other.first for one, other in itertools.pairwise(found)), path
        assert all(lines[each.last - 1].partition("//")[0].rstrip().endswith("}") for each in found), path
