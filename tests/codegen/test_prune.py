"""What a source defines and does not use is dropped."""

from __future__ import annotations

import pytest

from codegen.prune import prune, same_code

KERNEL = 'extern "C" __global__ void k(const __grid_constant__ Params p) {\n  use(kTileM);\n}\n'


@pytest.mark.parametrize(
    "unused",
    [
        "constexpr int kUnused = 3;  // kTileM of them",
        "// Why there is this\n// constant.\nconstexpr int kUnused[2] = {\n  1, 2};",
        "constexpr int kUnused = 128, kNeither = 4;",
        "using half = unsigned short;",
        "// One of them.\nstruct Unused {\n  int use;\n};",
        "struct alignas(64) Unused {\n  int x;\n};",
        "template <int kDepth>\nstruct Unused {\n  int x[kDepth];\n};",
        "__device__ __forceinline__ void unused() { use(0); }",
        '__device__ __forceinline__ void unused(\n    int a, int b) {\n  asm volatile("{ use");\n}',
        "template <int kRows>\n__device__ __forceinline__ int unused(int (&a)[kRows]) {\n  return unused(a);\n}",
        # Of two that know only each other, neither is used.
        "constexpr int kUnused = 1;\nconstexpr int kNeither = kUnused;",
        "// Byte offsets:\nconstexpr int kUnused = 3;  // a\nconstexpr int kNeither = 4;",
    ],
)
def test_unused_definitions_are_dropped(unused: str) -> None:
    used = "__device__ __forceinline__ void use(int) {}\n\nconstexpr int kTileM = 64;  // rows\n\n"
    assert prune(f"{used}{unused}\n\n{KERNEL}") == f"{used}\n{KERNEL}"


@pytest.mark.parametrize(
    "used",
    [
        "constexpr int kOther = 3, kTileM = 2;",
        "constexpr int kRows = 3;\nconstexpr int kTileM = kRows;",
        "constexpr int kRows = 3;\nstatic_assert(kRows == 3);\nconstexpr int kTileM = 4;",
        "struct Tile {\n  int x;\n};\n__device__ int kTileM(Tile t) { return t.x; }",
        "// Overloads:\n__device__ int kTileM() { return 0; }\n__device__ int kTileM(int x) { return x; }",
    ],
)
def test_used_definitions_stay(used: str) -> None:
    text = f"{used}\n\n{KERNEL.replace('use(', 'f(')}"
    assert prune(text) == text


def test_a_heading_stays_with_what_is_left_below_it() -> None:
    text = f"// Byte offsets:\nconstexpr int kA = 3;\nconstexpr int kTileM = 4;\n\n{KERNEL.replace('use(', 'f(')}"
    assert prune(text) == text.replace("constexpr int kA = 3;\n", "")


def test_comments_elsewhere_stay() -> None:
    text = f"// Roles:\n//   warp 0 loads\n\n// Nothing below.\n\nconstexpr int kTileM = 4;\n\n{KERNEL}"
    assert prune(text) == text


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("int f(int a, int b);\nint g();", True),
        ("int f(\n    int a, int b);  // two\n\nint g();", True),
        ("int f(int a,\n      int b);\nint g();", True),
        ("int f(int a, int c);\nint g();", False),
        ("int f(int a, int b);\n#pragma once\nint g();", False),
    ],
)
def test_breaks_of_lines_and_comments_are_no_code(other: str, same: bool) -> None:
    assert same_code("int f(int a, int b);\nint g();", other) is same


def test_a_blank_in_a_literal_is_code() -> None:
    assert not same_code('asm("( a");', 'asm("(a");')
