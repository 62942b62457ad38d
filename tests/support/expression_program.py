"""Expressions as CUDA in a program for the host, which prints their values beside those of a reference in Python."""

from __future__ import annotations

import math
import random
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from drawn_expressions import (
    AUX,
    ONE_FOR_ALL,
    SIZES,
    NoValueError,
    Value,
    elements,
    float32,
    stored_size,
    value_of,
)

from codegen.expressions.cuda import Printed, printed
from codegen.expressions.nodes import Aux, Node, Type
from codegen.layout import lay_out
from codegen.render import environment

PROGRAM = """\
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#define __device__
#define __forceinline__ inline
using std::abs;
using std::max;
using std::min;
using int64 = long long;
%(helpers)s
int64 to_int(float x) {
  if (std::isnan(x) || x < -9223372036854775808.0f) return -9223372036854775807LL - 1;
  return x >= 9223372036854775808.0f ? 9223372036854775807LL : static_cast<int64>(x);
}
float expression_exp(float x) { return static_cast<float>(std::exp(static_cast<double>(x))); }
float expression_log2(float x) { return static_cast<float>(std::log2(static_cast<double>(x))); }
float expression_sqrt(float x) { return std::sqrt(x); }
float expression_tanh(float x) { return static_cast<float>(std::tanh(static_cast<double>(x))); }
float expression_min(float a, float b) { return std::isnan(a) || std::isnan(b) ? kNan : b < a ? b : a; }
float expression_max(float a, float b) { return std::isnan(a) || std::isnan(b) ? kNan : b > a ? b : a; }
void put(bool value) { std::printf("%%d\\n", value); }
void put(int64 value) { std::printf("%%lld\\n", value); }
void put(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  std::printf("%%u\\n", std::isnan(value) ? 0x7FC00000u : bits);
}
int place(int before, int index, int size, bool one_for_all) {
  if (one_for_all) return before;
  if (index < 0 || index >= size) std::exit(3);
  return before * size + index;
}
struct Params { int q_len, kv_len%(sizes)s; };
%(loads)s
%(functions)s
int main() {
%(calls)s
}
"""
# What compilers say of an expression that is silly as it was drawn, not as it was printed.
SILLY = ("-Wno-tautological-compare", "-Wno-div-by-zero", "-Wno-overflow", "-Wno-shift-overflow")


def helpers(named: Sequence[str]) -> str:
    module = environment().get_template("expressions/helpers.cuh.j2").module
    return lay_out(module.expression_helpers(named))  # type: ignore[attr-defined]


def literal(value: Value, ctype: str) -> str:
    if ctype == "bool":
        return str(value).lower()
    if ctype == "float":
        return f"__builtin_bit_cast(float, {bits_of(float(value))}u)"
    return f"{value}" if -(2**31) < value < 2**31 else f"static_cast<int64>({value % 2**64}ULL)"


def bits_of(value: float) -> int:
    return 0x7FC00000 if math.isnan(value) else struct.unpack("I", struct.pack("f", value))[0]


def load(aux: Aux) -> str:
    """The function that looks an element up, and stops the program where there is none."""
    ctype = {"int32": "int", "int64": "int64", "bool": "bool"}.get(aux.dtype, "float")
    names, axes = "ijkl", range(len(aux.dims))
    body = "0"
    for axis in axes:
        alone = str((aux.name, axis) in ONE_FOR_ALL).lower()
        body = f"place({body}, {names[axis]}, {stored_size(aux, axis)}, {alone})"
    values = ", ".join(literal(value, ctype) for value in elements(aux))
    arguments = "".join(f", int {names[axis]}" for axis in axes)
    table = f"const {ctype} k_{aux.name}[] = {{{values}}};\n"
    return table + f"{ctype} load_{aux.name}(const Params& p{arguments}) {{ return k_{aux.name}[{body}]; }}\n"


def function(index: int, node: Node, result: Printed) -> str:
    """Columns come first: they use nothing of rows."""
    lines = [f"  {each}" for each in (*result.column, *result.row, *result.pair)]
    ctype = {Type.BOOL: "bool", Type.INT: "int64", Type.FLOAT: "float"}[node.type]
    given = "const Params& p, int batch, int head, int query, int key, float score"
    body = "\n".join([*lines, f"  const {ctype} value = {result.result};", "  put(value);"])
    return f"void tree_{index}({given}) {{\n{body}\n}}"


def cases(node: Node, result: Printed, number: int = 12) -> list[tuple[dict[str, Value], Value]]:
    """Values of variables, and what comes of them; without tensors they may be as large as they can be."""
    drawn, found = random.Random(repr(node)), []
    for _ in range(number):
        sizes = dict(SIZES)
        if not result.reads and drawn.random() < 0.5:
            sizes |= {"q_len": drawn.choice([1, 2**30]), "kv_len": drawn.choice([5, 2**30])}
        variables: dict[str, Value] = {"q_len": sizes["q_len"], "kv_len": sizes["kv_len"]}
        for name, size in (("q_idx", "q_len"), ("kv_idx", "kv_len"), ("batch", "batch"), ("head", "heads")):
            variables[name] = drawn.choice([0, sizes[size] - 1, drawn.randrange(sizes[size])])
        variables["score"] = float32(drawn.choice([0.0, -1.5, drawn.gauss(0, 10), -math.inf, 1e30]))
        try:
            found.append((variables, value_of(node, variables)))
        except NoValueError:
            continue
    return found


def outputs(
    nodes: Sequence[Node], folder: Path, recorded: Callable[..., None] | None = None
) -> list[tuple[Node, dict[str, Value], Value, str]]:
    """Compile all of some trees as one program and return what it prints beside what it should.

    Args:
        nodes: the trees.
        folder: where the program is built.
        recorded: ends a test whose run is known (tests/support/recorded.py).
    """
    results = [printed(node) for node in nodes]
    wanted = [cases(node, result) for node, result in zip(nodes, results, strict=True)]
    calls = []
    for index, of_tree in enumerate(wanted):
        for variables, _ in of_tree:
            sizes = [variables["q_len"], variables["kv_len"]]
            sizes += [stored_size(aux, axis) for aux in AUX for axis in range(len(aux.dims))]
            numbers = ", ".join(str(variables[name]) for name in ("batch", "head", "q_idx", "kv_idx"))
            score = literal(variables["score"], "float")
            calls.append(f"  tree_{index}(Params{{{', '.join(map(str, sizes))}}}, {numbers}, {score});")
    source = PROGRAM % {
        "helpers": helpers(("floor_div", "floor_mod", "clamp_index", "kInfinity", "kMinusInfinity", "kNan")),
        "sizes": "".join(f", aux_{aux.name}_size{axis}" for aux in AUX for axis in range(len(aux.dims))),
        "loads": "".join(map(load, AUX)),
        "functions": "\n".join(map(function, range(len(nodes)), nodes, results)),
        "calls": "\n".join(calls),
    }
    if recorded is not None:
        recorded(source, repr(wanted))
    (folder / "main.cpp").write_text(source, encoding="utf-8")
    command = ["g++", "-std=c++17", "-O0", "-Wall", "-Wparentheses", "-Werror", *SILLY, "main.cpp", "-o", "main"]
    compiled = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr[:3000]
    run = subprocess.run([folder / "main"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"exit code {run.returncode}; 3: an index outside"
    flat = [(node, *case) for node, of_tree in zip(nodes, wanted, strict=True) for case in of_tree]
    return [(*case, line) for case, line in zip(flat, run.stdout.splitlines(), strict=True)]


def check(nodes: Sequence[Node], folder: Path, recorded: Callable[..., None] | None = None) -> int:
    """Compare, and return how many values there were."""
    found = outputs(nodes, folder, recorded)
    for node, variables, value, line in found:
        expected = bits_of(float(value)) if node.type is Type.FLOAT else int(value)
        # g++ 12 makes -0 of 0.0f - false, and of what it takes for that.
        is_zero = node.type is Type.FLOAT and value == 0 and int(line) in (bits_of(0.0), bits_of(-0.0))
        assert is_zero or int(line) == expected, f"{printed(node)} of {variables}: {line}, not {value}"
    return len(found)
