"""Masks over blocks in a program for the host, beside the same masks of all their pairs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

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
  int decided = 0, wrong = 0, blocks = 0;
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
          ++blocks;
          decided += found != kEither;
          wrong += (right & ~found) != 0;
        }
      }
    }
  }
  std::printf("%%d %%d %%d\\n", wrong, decided, blocks);
}
}
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


def outcomes(masks: Sequence[Node], block: tuple[int, int], folder: Path) -> list[tuple[int, int, int]]:
    """Return of each mask how many blocks are told wrong, how many are told, and how many there are."""
    before = expression_program.PROGRAM.partition("struct Params")[0] % {
        "helpers": expression_program.helpers(
            ("floor_div", "floor_mod", "clamp_index", "kInfinity", "kMinusInfinity", "kNan")
        )
    }
    sizes = [SIZES["q_len"], SIZES["kv_len"], *(stored_size(aux, axis) for aux in AUX for axis in range(len(aux.dims)))]
    names = ["q_len", "kv_len", *(f"aux_{aux.name}_size{axis}" for aux in AUX for axis in range(len(aux.dims)))]
    params = f"struct Params {{ int {', '.join(names)}; }};\n"
    module = environment().get_template("expressions/ranges.cuh.j2").module
    ranges = (
        "using uint32 = unsigned;\ninline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }\n"
    )
    ranges += lay_out(module.types()) + lay_out(module.operators())  # type: ignore[attr-defined]
    program = PROGRAM % {
        "ranges": before + params + ranges,
        "loads": "".join(map(expression_program.load, AUX)),
        "trees": "\n".join(tree(number, mask) for number, mask in enumerate(masks)),
        "calls": "\n".join(
            f"  tree_{number}::run(Params{{{', '.join(map(str, sizes))}}}, {block[0]}, {block[1]});"
            for number in range(len(masks))
        ),
    }
    (folder / "main.cpp").write_text(program, encoding="utf-8")
    options = ["-std=c++17", "-O0", "-w", "-fwrapv", "-frounding-math", f"-I{HEADERS}"]
    compiled = subprocess.run(
        ["g++", *options, "main.cpp", "-o", "main"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert compiled.returncode == 0, compiled.stderr[:3000]
    run = subprocess.run([folder / "main"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"exit code {run.returncode}; 3: an index outside"
    lines = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    return [(wrong, told, blocks) for wrong, told, blocks in lines]
