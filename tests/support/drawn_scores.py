"""Scores and masks drawn as functions of torch: their values by torch, by their trees, and by a program in C++.

Torch's are of the function itself, those of scores in float64 with derivatives by autograd. The program has what
kernels have, in float32.
"""

from __future__ import annotations

import math
import random
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from expression_program import helpers

from codegen.expressions.arithmetic import LARGEST
from codegen.expressions.cuda import printed
from codegen.expressions.derivative import derivative
from codegen.expressions.kernel_form import LOG2_E, kernel_form
from codegen.expressions.nodes import Aux, Item, Literal, Node, Type, Variable
from codegen.expressions.parse import parse_expression
from codegen.expressions.text import text_of
from runtime.expressions.evaluate import each_value, evaluate
from runtime.expressions.order import operands_first
from runtime.expressions.trace import Traced, trace_mask, trace_score

SCALE = 0.125
POINTS = 12
SIZES = {"batch": 2, "heads": 3, "q_len": 11, "kv_len": 13}
LEAST_FLOAT = -LARGEST
HIDDEN = -1e30
"""What is below hides a pair (docs/reference/expressions.md)."""
SHAPES = {"gain": (), "slope": (3,), "bias": (3, 9), "row": (11,), "key": (13,)}
NUMBERS = (0.5, 2.0, -1.5, 3.0, 0.1, -0.25, 1.0, 20.0, 0.0, 1e-3)
ENDS = (LARGEST, -LARGEST, 3e38, -3e38, 2.4e38, 1.2e38, 1e30, -1e30, 1e-30, 1e-38, 1e-40, -1e-40, 1e19, 1e-19)
PROGRAM = """\
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#define __device__
#define __forceinline__ inline
using std::abs;
using std::max;
using std::min;
using int64 = long long;
%(helpers)s
float ex2(float x) { return static_cast<float>(std::exp2(static_cast<double>(x))); }
float rcp(float x) { return 1.0f / x; }
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
struct Place { int batch, head, query, key, first_key; float column, qk; };
%(cases)s
int main() {
%(calls)s
}
"""


class Drawn:
    """A random score in Python, and its tensors.

    Args:
        seed: of what is drawn.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._made: list[str] = []
        self.source = self._whole()
        drawn = torch.Generator().manual_seed(seed)
        self.tensors = {name: torch.randn(shape, generator=drawn) for name, shape in SHAPES.items()}

    def function(self, **tensors: torch.Tensor) -> Any:
        """The function, which captures these tensors."""
        doc = torch.arange(13) // 4
        return eval(f"lambda s, b, h, q, k: {self.source}", {"torch": torch, "doc": doc, **tensors})

    def _whole(self) -> str:
        score = self._float(self._random.choice([1, 2, 3, 4]))
        if "s" not in score.replace("s.dtype", "").replace("slope", ""):
            score = f"(s + {score})"
        kind = self._random.randrange(7)
        least, largest, truth = "torch.finfo(torch.float32).min", "torch.finfo(torch.float32).max", self._truth(1)
        masked = {
            0: f"{score} + ({truth}) * {least}",
            1: f"{score} - ({truth}) * {largest}",
            2: f"{score} + torch.where({truth}, 0.0, {least})",
            3: f"({score}).masked_fill({truth}, {least})",
        }
        return masked.get(kind, score)

    def _float(self, depth: int) -> str:
        if self._made and self._random.random() < 0.15:  # an equal part
            return self._random.choice(self._made)
        made = self._leaf() if depth == 0 else self._operation(depth - 1)
        self._made.append(made)
        return made

    def _number(self) -> str:
        return repr(self._random.choice(ENDS if self._random.random() < 0.15 else NUMBERS))

    def _leaf(self) -> str:
        leaves = ["s", "s", "s", "gain", "slope[h]", "bias[h, (q - k + 4).clamp(0, 8)]", "row[q]", "key[k]"]
        leaves += ["(q - k).to(s.dtype)", f"torch.full_like(s, {self._number()})"]
        return self._random.choice(leaves)

    def _operation(self, depth: int) -> str:
        number, power = self._number(), self._random.choice([2, 3, 5, 7, -1, -3, 4])
        factor = self._random.choice(NUMBERS[:6])
        kind, one = self._random.randrange(22), self._float(depth)
        two = self._float(depth) if kind in (0, 1, 2, 3, 4, 5) else ""
        return [
            *(f"({one} + {two})", f"({one} - {two})", f"({one} * {two})", f"torch.minimum({one}, {two})"),
            *(f"torch.maximum({one}, {two})", f"torch.where({self._truth(1)}, {one}, {two})"),
            *(f"({one} * {number})", f"({number} * {one})", f"({one} / {number})", f"({one} + {number})"),
            *(f"torch.tanh({one})", f"({number} * torch.tanh({one}))", f"({number} * torch.tanh({one} / {factor}))"),
            *(f"torch.exp(-({one}).abs())", f"({number} * torch.exp({one} * 0.1))", f"(-{one})", f"({one}).abs()"),
            *(f"torch.sigmoid({one})", f"torch.sqrt(({one}).abs() + 1.0)", f"({one}) ** {abs(power) % 4}"),
            *(f"({one} * torch.full_like(s, {factor}) ** {power})", f"torch.log(({one}).abs() + 1.0)"),
        ][kind].replace("/ 0.0)", "/ 3.0)")

    def _truth(self, depth: int) -> str:
        leaves = ["k > q", "(q - k).abs() < 3", "doc[q] != doc[k]", "h == 1", "k % 3 == 0", "q <= k"]
        if depth == 0 or self._random.random() < 0.5:
            return self._random.choice(leaves)
        return f"({self._truth(depth - 1)}) {self._random.choice('&|')} (~({self._truth(depth - 1)}))"


class DrawnMask(Drawn):
    """A random mask in Python, and its tensors."""

    def function(self, **tensors: torch.Tensor) -> Any:
        """The function, which captures these tensors."""
        given = {"torch": torch, "doc": torch.arange(13) // 4, "hidden": torch.arange(13) % 5 == 1, **tensors}
        return eval(f"lambda b, h, q, k: {self.source}", given)

    def _whole(self) -> str:
        return self._truth(self._random.choice([1, 2, 3, 4]))

    def _truth(self, depth: int) -> str:
        if depth == 0:
            return self._compared()
        kind, one = self._random.randrange(8), self._truth(depth - 1)
        if kind < 5:
            return f"({one} {'&|^&|'[kind]} ({self._truth(depth - 1)}))"
        if kind == 5:
            return f"(~({one}))"
        return f"torch.where({one}, {self._truth(depth - 1)}, {self._truth(depth - 1)})" if kind == 6 else one

    def _compared(self) -> str:
        if self._random.random() < 0.1:
            return self._random.choice(["hidden[k]", "(k >= 0)", "torch.logical_not(hidden[q])"])
        of = self._whole_number if self._random.random() < 0.7 else self._looked_up
        other = of() if self._random.random() < 0.8 else self._random.choice(["0", "3", "-2", "7"])
        return f"({of()} {self._random.choice(['<', '<=', '>', '>=', '==', '!='])} {other})"

    def _whole_number(self) -> str:
        leaf = self._random.choice(
            ["q", "k", "h", "b", "doc[q]", "doc[k]", "(q - k)", "(k - q).abs()", "(q + k)", "-q"]
        )
        number = self._random.choice([1, 2, 3, 5, 7, -2, -3])
        changed = ["{0}", "{0}", "{0}", "({0} // {1})", "({0} % {1})", "({0} * {1})", "({0} + {1})"]
        changed += [
            "torch.minimum({0}, k)",
            "torch.maximum({0}, q)",
            "({0}).clamp(0, 6)",
            "torch.where(k > q, {0}, {1})",
        ]
        return self._random.choice(changed).format(leaf, number)

    def _looked_up(self) -> str:
        leaf = self._random.choice(["gain", "slope[h]", "bias[h, (q - k + 4).clamp(0, 8)]", "row[q]", "key[k]"])
        return self._random.choice(["{0}", "({0} * 0.5)", "({0} + row[q])", "torch.tanh(key[k] + {0})"]).format(leaf)


@dataclass
class Form:
    """What a kernel computes, and what it should be.

    Attributes:
        what: the value, the derivative by the score, or by an element.
        tree: the form.
        wanted: by torch's function and autograd; by an element, as the tree has it.
        exact: places where nothing on the way leaves what float32 can hold.
    """

    what: str
    tree: Node
    wanted: torch.Tensor
    exact: torch.Tensor
    largest: torch.Tensor


@dataclass
class Case:
    """A score with its places.

    Attributes:
        source: in Python.
        traced: its tree.
        values: of variables, in float64.
        forms: what kernels compute of it.
    """

    source: str
    traced: Traced
    values: dict[str, Any]
    columns: torch.Tensor
    forms: list[Form] = field(default_factory=list)


def case_of(seed: int) -> Case:
    """Draw a score and compare its tree with torch; what kernels have of it is in its forms.

    Raises:
        AssertionError: naming the score.
    """
    drawn = Drawn(seed)
    traced = trace_score(drawn.function(**drawn.tensors))
    text = text_of(traced.node)
    assert text_of(parse_expression(text, traced.aux, score=True)) == text
    given = torch.Generator().manual_seed(seed)
    places, columns = _places(given)
    score = (torch.randn(POINTS, generator=given) * 3 + 0.00314159).double().requires_grad_()
    doubles = {name: tensor.double().requires_grad_() for name, tensor in drawn.tensors.items()}
    value = drawn.function(**doubles)(score, *places.values()) + 0.0 * score
    grads = torch.autograd.grad(value.sum(), [score, *doubles.values()], allow_unused=True)
    of_tables = dict(zip(doubles, grads[1:], strict=True))
    values = {**places, "score": score.detach(), "q_len": SIZES["q_len"], "kv_len": SIZES["kv_len"]}
    values |= {"qk": values["score"] / SCALE, "scale_log2": SCALE * LOG2_E, "first_key": places["kv_idx"] - columns}
    values |= {"column": columns.double(), "column_of_pair": columns.double()}
    found = Case(drawn.source, traced, values, columns)
    tensors = {name: _source(traced, drawn, name, doubles).detach() for name in traced.aux}
    _fill(found, tensors, value.detach(), grads[0])
    _compare_tables(found, drawn, doubles, of_tables)
    return found


def mask_case_of(seed: int) -> Case:
    """Draw a mask and compare its tree with torch; what kernels have of it is its only form.

    Raises:
        AssertionError: naming the mask.
    """
    drawn = DrawnMask(seed)
    function = drawn.function(**drawn.tensors)
    traced = trace_mask(function)
    text = text_of(traced.node)
    assert text_of(parse_expression(text, traced.aux, score=False)) == text
    given = torch.Generator().manual_seed(seed)
    places, columns = _places(given)
    values = {**places, "q_len": SIZES["q_len"], "kv_len": SIZES["kv_len"], "first_key": places["kv_idx"] - columns}
    values |= {"column": columns.double(), "column_of_pair": columns.double(), "qk": torch.zeros(POINTS).double()}
    everywhere = torch.ones(POINTS, dtype=torch.bool)
    wanted = torch.as_tensor(function(*places.values())).expand(POINTS).double()
    found = Case(drawn.source, traced, values, columns)
    right = evaluate(traced.node, values, traced.tensors).expand(POINTS).double()
    _same(found, "the mask of the tree", right, wanted, everywhere, 0.0)
    found.forms.append(Form("the mask", traced.node, wanted, everywhere, torch.zeros(POINTS)))
    return found


def _places(given: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Places of pairs, and the columns of their keys."""
    places = {
        name: torch.randint(0, size, (POINTS,), generator=given)
        for name, size in zip(("batch", "head", "q_idx", "kv_idx"), SIZES.values(), strict=True)
    }
    return places, torch.minimum(torch.randint(0, 5, (POINTS,), generator=given), places["kv_idx"])


def _source(traced: Traced, drawn: Drawn, name: str, doubles: dict[str, torch.Tensor]) -> torch.Tensor:
    of = traced.tensors[name]
    return next((doubles[each] for each, tensor in drawn.tensors.items() if tensor is of), of)


def _fill(case: Case, tensors: dict[str, torch.Tensor], value: torch.Tensor, by_score: torch.Tensor) -> None:
    node = case.traced.node
    trees = [("the value", node, LOG2_E, value)]
    trees.append(("the derivative by the score", derivative(node, Variable("score")), 1.0, by_score))
    items = dict.fromkeys(each for each in operands_first(node) if isinstance(each, Item) and each.type is Type.FLOAT)
    trees += [(f"the derivative by {text_of(item)}", derivative(node, item), 1.0, None) for item in items]
    in_place, inside = _inside(node, case.values, tensors)
    for what, tree, factor, wanted in trees:
        largest, exact = _inside(tree, case.values, tensors)
        exact &= inside
        right = evaluate(tree, case.values, tensors).expand(POINTS)
        largest = torch.maximum(largest, in_place).clamp(min=1e-30)
        if wanted is None:
            by_torch = right
        else:
            by_torch = wanted
            _same(case, f"{what} of the tree", right, wanted, exact & wanted.isfinite(), 2e-7 * largest)
        form = kernel_form(tree, factor)
        most, _ = _inside(form, case.values, tensors)
        most = most.where(most.isfinite(), largest)  # 2^x within tanh may be infinite
        size = torch.stack([most, largest, (by_torch * factor).abs().nan_to_num(nan=0.0)]).amax(0)
        case.forms.append(Form(what, form, by_torch * factor, exact, size))
        of_form = evaluate(form, case.values, tensors).expand(POINTS)
        _same(case, f"{what} of the form", of_form, by_torch * factor, exact, 2e-7 * case.forms[-1].largest)


def _inside(tree: Node, values: Any, tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest that a tree computes, its numbers and unseen integers left out, and where float32 can have all."""
    largest, inside = torch.zeros(POINTS, dtype=torch.float64), torch.ones(POINTS, dtype=torch.bool)
    for node, value in each_value(tree, values, tensors):
        if isinstance(node, Literal):  # beside one that is far from 1 float32 has no digits left; the least hides
            inside = inside & (not 1e18 < abs(node.value) < LARGEST and not 0 < abs(node.value) < 1e-18)
        elif node.type is Type.FLOAT:
            size = value.detach().abs().expand(POINTS)
            largest = torch.fmax(largest, size.nan_to_num(nan=math.inf))
            inside = inside & (size < 1e37) & ((size == 0) | (size > 1e-34))
    return largest, inside


def _same(case: Case, what: str, found: Any, wanted: Any, where: Any, within: Any) -> None:
    wrong = where & ~((found - wanted).abs() <= within)
    assert not wrong.any(), _told(case, what, found, wanted, wrong)


def _told(case: Case, what: str, found: Any, wanted: Any, wrong: Any) -> str:
    at = int(wrong.nonzero()[0])
    place = {name: float(each[at]) if isinstance(each, torch.Tensor) else each for name, each in case.values.items()}
    text = text_of(case.traced.node)
    return f"{what}: {float(found[at])}, not {float(wanted[at])}\n  {case.source}\n  {text}\n  at {place}"


def _compare_tables(case: Case, drawn: Drawn, doubles: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Sum derivatives by elements up, as kernels do, and compare them with the gradients of the tensors."""
    node = case.traced.node
    items = dict.fromkeys(each for each in operands_first(node) if isinstance(each, Item) and each.type is Type.FLOAT)
    tensors = {name: _source(case.traced, drawn, name, doubles) for name in case.traced.aux}
    sums = dict.fromkeys(doubles, 0.0)
    if not all(form.exact.all() for form in case.forms):
        return
    for item, form in zip(items, case.forms[2:], strict=True):
        element = evaluate(item, case.values, tensors).expand(POINTS)
        of = next(name for name, each in doubles.items() if each is tensors[item.aux.name])
        (part,) = torch.autograd.grad((element * form.wanted).sum(), doubles[of])
        sums[of] = sums[of] + part
    largest = max(float(form.largest.max()) for form in case.forms)
    for name, total in sums.items():
        right = torch.zeros(SHAPES[name]) if wanted[name] is None else wanted[name]
        error = float((torch.as_tensor(total) - right).abs().max())
        assert not error > 1e-6 * largest, f"the gradient of {name} is off by {error}: {case.source}"


def check_programs(cases: Sequence[Case], folder: Path) -> int:
    """Compile what kernels have of scores, compare in float32, and return how many values there were.

    Where float32 holds all that is computed the value is torch's, but for roundings: those of torch in float32 too.
    Where the score itself is finite in float32 the value is a number, infinite at most where it hides or is beyond.
    """
    lines = iter(_run(cases, folder))
    count = 0
    for case in cases:
        singles = {
            name: each.float() if isinstance(each, torch.Tensor) and each.dtype == torch.float64 else each
            for name, each in case.values.items()
        }
        finite = torch.ones(POINTS, dtype=torch.bool)
        for node, value in each_value(case.traced.node, singles, case.traced.tensors):
            if node.type is Type.FLOAT:
                finite &= value.isfinite().expand(POINTS)
        for form in case.forms:
            found = torch.tensor([float(next(lines)) for _ in range(POINTS)], dtype=torch.float64)
            single = evaluate(form.tree, singles, case.traced.tensors).expand(POINTS).double()
            lost = (single - form.wanted).abs().nan_to_num(nan=0.0, posinf=0.0)
            _same(case, f"{form.what} in C++", found, form.wanted, form.exact, 1e-4 * form.largest + 20 * lost)
            lost_all = form.exact & ~(lost <= 1e-2 * form.largest)
            assert not lost_all.any(), _told(case, f"{form.what} in float32", single, form.wanted, lost_all)
            if form.what == "the value":
                wanted = form.wanted.clamp(-LARGEST, LARGEST)
                right = (found <= LARGEST) & ((found > HIDDEN) | (wanted < HIDDEN / 2))
                wrong = finite & ~right & ~(form.largest.isfinite() & (form.largest > LARGEST / 2) & (found > 0))
                assert not wrong.any(), _told(case, f"{form.what} in C++", found, wanted, wrong)
            count += POINTS
    return count


def _run(cases: Sequence[Case], folder: Path) -> list[str]:
    texts, calls = [], []
    for number, case in enumerate(cases):
        texts.append(f"namespace case_{number} {{\n{''.join(_functions(case))}}}")
        for form in range(len(case.forms)):
            for at in range(POINTS):
                given = [int(case.values[name][at]) for name in ("batch", "head", "q_idx", "kv_idx", "first_key")]
                floats = f"{int(case.columns[at])}.0f, {_literal(float(case.values['qk'][at].float()))}"
                calls.append(f"  case_{number}::form_{form}({{{', '.join(map(str, given))}, {floats}}});")
    named = ("floor_div", "floor_mod", "clamp_index", "kInfinity", "kMinusInfinity", "kNan")
    source = PROGRAM % {"helpers": helpers(named), "cases": "\n".join(texts), "calls": "\n".join(calls)}
    (folder / "scores.cpp").write_text(source, encoding="utf-8")
    command = ["g++", "-std=c++17", "-O0", "-w", "-ffp-contract=off", "scores.cpp", "-o", "scores"]
    compiled = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr[:3000]
    return subprocess.run([folder / "scores"], capture_output=True, text=True, check=True).stdout.split()


def _functions(case: Case) -> Iterator[str]:
    """A score's kernel parameters, tensors, and a function for each of its forms."""
    sizes = {f"aux_{n}_size{axis}": size for n, t in case.traced.tensors.items() for axis, size in enumerate(t.shape)}
    numbers = {"q_len": SIZES["q_len"], "kv_len": SIZES["kv_len"], **sizes}
    members = "".join(f" int {name} = {value};" for name, value in numbers.items())
    yield f"struct Params {{{members} float scale_log2 = {_literal(SCALE * LOG2_E)}; }};\n"
    for name, aux in case.traced.aux.items():
        yield _load(aux, case.traced.tensors[name])
    for number, form in enumerate(case.forms):
        made = printed(form.tree)
        yield f"void form_{number}(Place at) {{\n  Params p;\n"
        yield "  auto [batch, head, query, key, first_key, column, qk] = at;\n"
        yield "".join(f"  {each}\n" for each in (*made.column, *made.row, *made.pair))
        yield f'  const float value = {made.result};\n  std::printf("%.9g\\n", value);\n}}\n'


def _load(aux: Aux, tensor: torch.Tensor) -> str:
    ctype = {torch.int64: "int64", torch.bool: "bool"}.get(tensor.dtype, "float")
    values = ", ".join(map(_literal, tensor.flatten().tolist()))
    names = "ijkl"[: tensor.ndim]
    place = "0"
    for name, size in zip(names, tensor.shape, strict=True):
        place = f"({place}) * {size} + at({name}, {size})"
    at = "int at(int i, int size) { if (i < 0 || i >= size) std::exit(3); return i; }"
    given = "".join(f", int {name}" for name in names)
    table = f"namespace of_{aux.name} {{ {at} const {ctype} all[] = {{{values}}}; }}\n"
    body = (
        f"using namespace of_{aux.name}; using of_{aux.name}::at; return all[{place}];"
        if names
        else (f"return of_{aux.name}::all[0];")
    )
    return table + f"{ctype} load_{aux.name}(const Params& p{given}) {{ {body} }}\n"


def _literal(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else f"static_cast<float>({value!r})"
