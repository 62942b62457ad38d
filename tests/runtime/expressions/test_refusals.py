"""What a tree cannot say is refused, by name and with the line of the user's function."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from known_functions import BATCH, LENGTH, causal  # noqa: E402
from torch.nn.attention.flex_attention import and_masks  # noqa: E402

from codegen.expressions.nodes import ExpressionError, operation  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.expressions.functions import FUNCTIONS  # noqa: E402
from runtime.expressions.trace import trace_mask, trace_score  # noqa: E402

TABLE, ONE = torch.ones(BATCH, LENGTH, dtype=torch.int64), torch.tensor([3])
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "and": (lambda b, h, q, k: q > k and q > 3, r"tests a value for truth.* &, \|, ~"),
    "not": (lambda b, h, q, k: not q > k, "tests a value for truth"),
    "chain": (lambda b, h, q, k: 0 <= q - k < 5, "tests a value for truth.* a < b < c"),
    "min": (lambda b, h, q, k: min(q, k) > 3, "torch.minimum"),
    "in": (lambda b, h, q, k: q in (1, 2), "tests a value for truth"),
    "item": (lambda b, h, q, k: q - k < ONE.item(), "calls item.*reads a value now.*without dims"),
    "list": (lambda b, h, q, k: [1, 2][q] == k, "needs a Python integer.*captured tensor"),
    "range": (lambda b, h, q, k: [one for one in range(q)], "needs a Python integer"),
    "math": (lambda b, h, q, k: math.exp(q) > 1, "needs a Python float.*torch.exp for math.exp"),
    "int": (lambda b, h, q, k: int(q / 2) > k, r"needs a Python integer.*x.long\(\)"),
    "round": (lambda b, h, q, k: torch.floor(q / 2) > k, "calls floor, which rounds"),
    "unknown": (lambda b, h, q, k: torch.erfinv(q) > 1, "calls erfinv, which kernels do not support"),
    "loop": (lambda b, h, q, k: sum(q == one for one in TABLE[0]) > 0, "calls unbind, which kernels do not support"),
    "complex": (lambda b, h, q, k: q * 1j, "calls mul with 1j, expected a number"),
    "relu": (lambda b, h, q, k: torch.nn.functional.relu(q, inplace=True), "calls relu .*'inplace'"),
    "computed": (lambda b, h, q, k: (TABLE * 2)[b, q] > 0, "computes with TABLE, a tensor .* compute outside"),
    "random": (lambda b, h, q, k: torch.rand(()) > 0.5, "calls rand, which kernels do not support"),
    "in place": (lambda b, h, q, k: (q > k).logical_and_(q > 3), "calls logical_and_, which writes in place"),
    "write": (lambda b, h, q, k: TABLE.__setitem__((0, 0), 1), "writes in place"),
    "out": (lambda b, h, q, k: torch.add(q, k, out=TABLE) > 3, "calls add with arguments that kernels do not.*'out'"),
    "slice": (lambda b, h, q, k: TABLE[b, :][q] > 0, "indexes TABLE with slice"),
    "none": (lambda b, h, q, k: TABLE[None, b, q] > 0, r"has 3 indices of TABLE, which is int64\[2, 60\]"),
    "tensor index": (lambda b, h, q, k: TABLE[b, ONE] > 0, r"indexes TABLE with a tensor of shape \(1,\)"),
    "truth index": (lambda b, h, q, k: TABLE[b, q > k] > 0, "an index of TABLE is bool, expected int"),
    "beyond": (lambda b, h, q, k: TABLE[b, 60] > 0, "has the index 60 in a dim of 60"),
    "row": (lambda b, h, q, k: TABLE[b] > 0, r"computes with a row of shape \(60,\): index all its dims"),
    "whole": (lambda b, h, q, k: q < ONE, r"computes with ONE, a tensor of shape \(1,\): index it first"),
    "value indexed": (lambda b, h, q, k: q[0] > k, "indexes a value"),
    "dtype": (lambda b, h, q, k: TABLE_64[q] > 0, "torch.float64 .TABLE_64., expected one of torch.int32"),
    "five dims": (lambda b, h, q, k: DEEP[b] > 0, r"DEEP.* of the shape \(1, 1, 1, 1, 1\)"),
    "half": (lambda b, h, q, k: q.half() > 0, "calls half"),
    "to half": (lambda b, h, q, k: q.to(torch.float16) > 0, "torch.float16; expected one of torch.bool, "),
    "zero": (lambda b, h, q, k: q // 0 > k, "// divides by zero"),
    "float //": (lambda b, h, q, k: q // 2.0 > k, "// takes integers, but got int, float"),
    "trunc": (lambda b, h, q, k: torch.div(q, 2, rounding_mode="trunc") > k, "rounding_mode 'trunc'"),
    "shift": (lambda b, h, q, k: q >> k > 1, ">> takes a number of bits"),
    "power": (lambda b, h, q, k: q**k > 1, "raises to a variable power"),
    "huge": (lambda b, h, q, k: q > 1 << 70, "an integer of more than 64 bits"),
    "made": (lambda b, h, q, k: torch.tensor([1, 2])[q] > k, "creates a tensor of several numbers"),
    "sized": (lambda b, h, q, k: q.new_ones(3) > k, "creates a tensor with dims"),
    "own error": (lambda b, h, q, k: {}["no key"], "raises KeyError: 'no key'"),
    "attribute": (lambda b, h, q, k: q.no_such > 1, "raises AttributeError.*no_such"),
}
TABLE_64, DEEP = torch.ones(LENGTH, dtype=torch.float64), torch.ones(1, 1, 1, 1, 1)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_line(name: str) -> None:
    mask, told = REFUSED[name]
    with pytest.raises(ArgumentError, match=told) as caught:
        trace_mask(mask)
    assert caught.value.argument == "mask_mod" and "\n" not in str(caught.value)
    line = mask.__code__.co_firstlineno
    assert caught.value.reason.startswith(f'{mask.__code__.co_filename}:{line} ("{name}": (')


def test_a_condition_names_its_line_not_the_functions() -> None:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        far = q_idx - kv_idx
        if far > 3:
            return score
        return score * 2

    line = score_mod.__code__.co_firstlineno + 2
    with pytest.raises(ArgumentError, match=re.escape(f"score_mod: {__file__}:{line} (if far > 3:): tests a value")):
        trace_score(score_mod)


def test_augmented_assignment_is_refused() -> None:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = q_idx >= kv_idx
        seen &= kv_idx > 3
        return seen

    with pytest.raises(ArgumentError, match=r"\(seen &= kv_idx > 3\): calls .*use x = x \+ y"):
        trace_mask(mask)


def test_the_line_is_the_masks_behind_and_masks() -> None:
    with pytest.raises(ArgumentError, match='"item": ') as caught:
        trace_mask(and_masks(causal, REFUSED["item"][0]))
    assert f":{REFUSED['item'][0].__code__.co_firstlineno} " in caught.value.reason


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (3, "mask_mod: is 3, expected a function of batch, head, q_idx, kv_idx"),
        (lambda b, h, q_idx: q_idx > 1, "raises TypeError: .*called with batch, head, q_idx, kv_idx"),
        (lambda b, h, q_idx, kv_idx: q_idx, "returns a value of type int, expected bool: compare it"),
        (lambda b, h, q_idx, kv_idx: None, "returns None, expected a value"),
        (lambda b, h, q_idx, kv_idx: TABLE, "computes with .*, a tensor of shape"),
        (lambda b, h, q_idx, kv_idx: functools.reduce(lambda x, _: x + x, range(99), q_idx) > 1, "more than 1000"),
    ],
)
def test_what_a_function_is_and_returns(mask: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        trace_mask(mask)


def test_a_score_is_no_truth_value() -> None:
    with pytest.raises(ArgumentError, match=r"returns a bool.*torch.where\(mask, score"):
        trace_score(lambda score, b, h, q_idx, kv_idx: score > 1)


def test_a_line_of_the_package_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FUNCTIONS, "erfinv", functools.partial(operation, "no operation"))
    mask = REFUSED["unknown"][0]
    with pytest.raises(ArgumentError, match=f"{re.escape(__file__)}:{mask.__code__.co_firstlineno} .*raises KeyError"):
        trace_mask(mask)


def test_nothing_of_torch_is_changed_behind_a_trace() -> None:
    with pytest.raises(ArgumentError):
        trace_mask(REFUSED["and"][0])
    assert (torch.ones(2) + 1).tolist() == [2, 2] and not issubclass(ExpressionError, ArgumentError)
