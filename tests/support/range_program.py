"""Masks over blocks in a program for the host, beside the same masks of all their pairs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import expression_program
from drawn_expressions import AUX, SIZES, stored_size
from host_kernel import HEADERS

from codegen.expressions.nodes import Node
from codegen.expressions.ranges import Looked, Ranges, ranges_of
from codegen.layout import lay_out
from codegen.render import environment

PROGRAM = """\
#include "arithmetic.h"
%(ranges)s
%(loads)s
%(trees)s
int main() {
%(calls)s
}
"""
TREE = """\
namespace tree_%(number)d {
%(structs)s
%(functions)s
Truth truth_of_block(const Params& p, int batch, int head, Range queries, Range keys, const RowRanges& rows,
    const ColumnRanges& columns) {
%(statements)s
  return %(result)s;
}
bool visible(const Params& p, int batch, int head, int query, int key) {
%(pair)s
}
void run(const Params& p, int block_q, int block_kv) {
  int told = 0, wrong = 0, uniform = 0;
  for (int batch = 0; batch < %(batch)d; ++batch) {
    for (int head = 0; head < %(heads)d; ++head) {
      for (int first = 0; first < p.q_len; first += block_q) {
        const Range queries = {first, min(first + block_q, p.q_len) - 1};
        RowRanges rows;
%(rows)s
        for (int first_key = 0; first_key < p.kv_len; first_key += block_kv) {
          const Range keys = {first_key, min(first_key + block_kv, p.kv_len) - 1};
          ColumnRanges columns;
%(columns)s
          const Truth found = truth_of_block(p, batch, head, queries, keys, rows, columns);
          Truth right = 0;
          for (int query = queries.low; query <= queries.high; ++query) {
            for (int key = keys.low; key <= keys.high; ++key) right |= visible(p, batch, head, query, key) ? kYes : kNo;
          }
          told += found != kEither;
          uniform += right != kEither;
          wrong += (right & ~found) != 0;
        }
      }
    }
  }
  std::printf("%%d %%d %%d\\n", wrong, told, uniform);
}
}
"""
OPERATORS = """\
#include "arithmetic.h"
%(ranges)s
// Each function of intervals beside the operator on all values that are in these, of some that are far apart and some
// that are close to each other.
const int64 kIntegers[] = {kLeast, kLeast + 1, -(1LL << 62), -(1LL << 31) - 1, -65, -64, -9, -8, -7, -3, -1, 0, 1, 2,
    3, 5, 7, 8, 9, 63, 64, 1LL << 31, (1LL << 31) + 1, 1LL << 62, kLargest - 1, kLargest};
const float kFloats[] = {-3e38f, -1e30f, -7.5f, -1.0f, -1e-30f, 0.0f, 0.1f, 1.0f, 2.5f, 3.1f, 1e30f, 3e38f, kInfinity};
constexpr int kIntegerCount = sizeof kIntegers / sizeof *kIntegers, kFloatCount = sizeof kFloats / sizeof *kFloats;
bool has(Range a, int64 value) { return a.low <= value && value <= a.high; }
bool has(FloatRange a, float value) { return a.low != a.low || (a.low <= value && value <= a.high); }
bool has(Truth a, bool value) { return a & (value ? kYes : kNo); }

template <typename Of, typename Value, typename Function, typename Operator>
void check(const char* name, const Value* values, int count, Function of_ranges, Operator of_values) {
  long long wrong = 0, checked = 0, one = 0;
  for (int i = 0; i < count; ++i) {
    for (int j = i; j < count; ++j) {
      for (int k = 0; k < count; ++k) {
        for (int l = k; l < count; ++l) {
          const auto found = of_ranges(Of{values[i], values[j]}, Of{values[k], values[l]});
          for (int x = i; x <= j; ++x) {
            for (int y = k; y <= l; ++y) wrong += !has(found, of_values(values[x], values[y])), ++checked;
          }
        }
      }
    }
  }
  std::printf("%%s %%lld %%lld\\n", name, wrong, checked);
}
template <typename Function, typename Operator>
void of_integers(const char* name, Function of_ranges, Operator of_values) {
  check<Range>(name, kIntegers, kIntegerCount, of_ranges, of_values);
}
template <typename Function, typename Operator>
void of_floats(const char* name, Function of_ranges, Operator of_values) {
  check<FloatRange>(name, kFloats, kFloatCount, of_ranges, of_values);
}
template <typename Function, typename Operator>
void of_truths(const char* name, Function of_truths, Operator of_values) {
  int wrong = 0;
  for (Truth a = 1; a <= 3; ++a) {
    for (Truth b = 1; b <= 3; ++b) {
      Truth right = 0;
      for (int x = 0; x < 2; ++x) {
        for (int y = 0; y < 2; ++y) right |= has(a, x) && has(b, y) ? truth_of(of_values(x, y)) : 0;
      }
      wrong += of_truths(a, b) != right;
    }
  }
  std::printf("%%s %%d 9\\n", name, wrong);
}
#define RANGES(...) [](auto a, auto b) { return __VA_ARGS__; }
#define VALUES(...) [](auto a, auto b) { return __VA_ARGS__; }
// What an operator has no value for is compared with nothing: 0 // 0 is taken for what it may be anyway.
bool is_divisor(int64 a, int64 b) { return b != 0 && !(a == kLeast && b == -1); }
int main() {
  of_integers("+", RANGES(range_add(a, b)), VALUES(a + b));
  of_integers("-", RANGES(range_subtract(a, b)), VALUES(a - b));
  of_integers("*", RANGES(range_multiply(a, b)), VALUES(a * b));
  of_integers("//", RANGES(range_floor_div(a, b)), VALUES(is_divisor(a, b) ? floor_div(a, b) : kLeast));
  of_integers("%%", RANGES(range_floor_mod(a, b)), VALUES(b == -1 ? 0 : b == 0 ? kLeast : floor_mod(a, b)));
  of_integers("&", RANGES(range_and(a, b)), VALUES(a & b));
  of_integers("|", RANGES(range_or(a, b)), VALUES(a | b));
  of_integers("^", RANGES(range_xor(a, b)), VALUES(a ^ b));
  of_integers("min", RANGES(range_min(a, b)), VALUES(min(a, b)));
  of_integers("max", RANGES(range_max(a, b)), VALUES(max(a, b)));
  of_integers("neg", RANGES(range_negate(a)), VALUES(-a));
  of_integers("~", RANGES(range_not(a)), VALUES(~a));
  of_integers("abs", RANGES(range_abs(a)), VALUES(a < 0 ? -a : a));
  of_integers("<<", RANGES(range_shift_left(a, range_of(5))), VALUES(a * 32));
  of_integers(">>", RANGES(range_shift_right(a, range_of(5))), VALUES(a >> 5));
  of_integers("where", RANGES(range_where(kEither, a, b)), VALUES(a ^ b ? a : b));
  of_integers("where not", RANGES(range_where(kNo, a, b)), VALUES(b));
  of_integers("<", RANGES(range_less(a, b)), VALUES(a < b));
  of_integers("==", RANGES(range_equal(a, b)), VALUES(a == b));
  of_integers("float", RANGES(float_range_of_range(a)), VALUES(static_cast<float>(a)));
  of_floats("+ of floats", RANGES(float_range_add(a, b)), VALUES(a + b));
  of_floats("- of floats", RANGES(float_range_subtract(a, b)), VALUES(a - b));
  of_floats("* of floats", RANGES(float_range_multiply(a, b)), VALUES(a * b));
  of_floats("min of floats", RANGES(float_range_min(a, b)), VALUES(min(a, b)));
  of_floats("max of floats", RANGES(float_range_max(a, b)), VALUES(max(a, b)));
  of_floats("neg of floats", RANGES(float_range_negate(a)), VALUES(-a));
  of_floats("abs of floats", RANGES(float_range_abs(a)), VALUES(std::fabs(a)));
  of_floats("where of floats", RANGES(float_range_where(kEither, a, b)), VALUES(a < b ? b : a));
  of_floats("< of floats", RANGES(float_range_less(a, b)), VALUES(a < b));
  of_floats("== of floats", RANGES(float_range_equal(a, b)), VALUES(a == b));
  const auto is_none = [](FloatRange a) { return a.low != a.low && a.high != a.high; };
  of_floats("NaN", RANGES(truth_of(true)), [=](float a, float b) {
    const FloatRange x = {a, a}, none = float_range_of(kNan);
    return is_none(float_range_add(x, none)) && is_none(float_range_multiply(none, x)) &&
           is_none(float_range_min(x, none)) && is_none(float_range_min(none, x)) &&
           is_none(float_range_max(x, none)) && is_none(float_range_max(none, x)) &&
           is_none(float_range_union(none, x)) && is_none(float_range_abs(none)) &&
           float_range_less(x, none) == kEither && float_range_less(none, x) == kEither &&
           float_range_equal(none, none) == kEither;
  });
  of_truths("and", truth_and, [](bool a, bool b) { return a && b; });
  of_truths("or", truth_or, [](bool a, bool b) { return a || b; });
  of_truths("xor", truth_xor, [](bool a, bool b) { return a != b; });
  of_truths("not", [](Truth a, Truth) { return truth_not(a); }, [](bool a, bool) { return !a; });
}
"""
BITS = """\
using uint32 = unsigned;
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
"""
UNIONS = {"Range": "range_union({0}, {1})", "FloatRange": "float_range_union({0}, {1})", "Truth": "({0} | {1})"}
POINTS = {"Range": "range_of", "FloatRange": "float_range_of", "Truth": "truth_of"}


def struct(name: str, looked: Sequence[Looked]) -> str:
    return f"struct {name} {{\n" + "".join(f"  {each.ctype} {each.name};\n" for each in looked) + "};"


def function(side: str, index: str, each: Looked) -> str:
    made = each.printed
    lines = "".join(f"  {part}\n" for part in (*made.column, *made.row, *made.pair))
    given = f"const Params& p, int batch, int head{index}"
    return f"{each.value} {side}_{each.name}({given}) {{\n{lines}  return {made.result};\n}}"


def over(side: str, each: Looked) -> str:
    """Statements that find what a part is over a block."""
    indices = {"row": "queries", "column": "keys"}[side]
    name, value = f"{side}s.{each.name}", f"{POINTS[each.ctype]}({side}_{each.name}(p, batch, head, i))"
    found = UNIONS[each.ctype].format(name, value)
    return f"for (int i = {indices}.low; i <= {indices}.high; ++i) {name} = i == {indices}.low ? {value} : {found};"


def tree(number: int, mask: Node) -> str:
    found: Ranges = ranges_of(mask)
    pair = expression_program.printed(mask)
    sides = (("row", ", int query", found.rows), ("column", ", int key", found.columns), ("fixed", "", found.fixed))
    return TREE % {
        "number": number,
        "structs": struct("RowRanges", found.rows) + "\n" + struct("ColumnRanges", found.columns),
        "functions": "\n".join(function(side, index, each) for side, index, looked in sides for each in looked),
        "statements": "\n".join(f"  {each}" for each in found.statements),
        "result": found.result,
        "pair": "\n".join(
            [*(f"  {part}" for part in (*pair.column, *pair.row, *pair.pair)), f"  return {pair.result};"]
        ),
        "batch": SIZES["batch"],
        "heads": SIZES["heads"],
        "rows": "\n".join(over("row", each) for each in found.rows),
        "columns": "\n".join(over("column", each) for each in found.columns),
    }


def ranges(params: str) -> str:
    """Return the functions of intervals and what they need, behind the kernel's parameters."""
    named = ("floor_div", "floor_mod", "clamp_index", "kInfinity", "kMinusInfinity", "kNan")
    before = expression_program.PROGRAM.partition("struct Params")[0] % {"helpers": expression_program.helpers(named)}
    module: Any = environment().get_template("expressions/ranges.cuh.j2").module
    return before + params + BITS + lay_out(module.types()) + lay_out(module.operators())


def output_of(
    program: str, folder: Path, optimized: str, recorded: Callable[..., None] | None = None
) -> list[list[str]]:
    """Compile a program, run it, and return the words of its lines.

    Args:
        program: the source.
        folder: where it is built.
        optimized: level of optimization.
        recorded: ends a test whose run is known (tests/support/recorded.py).
    """
    if recorded is not None:
        recorded(program)
    (folder / "main.cpp").write_text(program, encoding="utf-8")
    options = ["-std=c++17", optimized, "-w", "-fwrapv", "-frounding-math", f"-I{HEADERS}"]
    command = ["g++", *options, "main.cpp", "-o", "main"]
    compiled = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr[:3000]
    run = subprocess.run([folder / "main"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"exit code {run.returncode}; 3: an index outside"
    return [line.rsplit(maxsplit=2) for line in run.stdout.splitlines()]


def outcomes(
    masks: Sequence[Node], block: tuple[int, int], folder: Path, recorded: Callable[..., None] | None = None
) -> list[tuple[int, int, int]]:
    """Return of each mask of how many blocks something wrong is told, how many are told, how many could be."""
    axes = [(aux, axis) for aux in AUX for axis in range(len(aux.dims))]
    sizes = [SIZES["q_len"], SIZES["kv_len"], *(stored_size(*each) for each in axes)]
    names = ["q_len", "kv_len", *(f"aux_{aux.name}_size{axis}" for aux, axis in axes)]
    given = f"Params{{{', '.join(map(str, sizes))}}}, {block[0]}, {block[1]}"
    program = PROGRAM % {
        "ranges": ranges(f"struct Params {{ int {', '.join(names)}; }};\n"),
        "loads": "".join(map(expression_program.load, AUX)),
        "trees": "\n".join(tree(number, mask) for number, mask in enumerate(masks)),
        "calls": "\n".join(f"  tree_{number}::run({given});" for number in range(len(masks))),
    }
    lines = output_of(program, folder, "-O0", recorded)
    return [(int(wrong), int(told), int(uniform)) for wrong, told, uniform in lines]


def operators(folder: Path, recorded: Callable[..., None] | None = None) -> dict[str, tuple[int, int]]:
    """Return of each operator how many values its interval has not, and how many were looked at."""
    found = output_of(OPERATORS % {"ranges": ranges("")}, folder, "-O1", recorded)
    return {name: (int(wrong), int(checked)) for name, wrong, checked in found}
