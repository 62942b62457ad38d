"""Scores drawn as functions of torch, beside autograd and a program in C++; more: tests/stress/expressions.py."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import drawn_scores  # noqa: E402

from codegen.expressions.declared import parse_aux  # noqa: E402
from codegen.expressions.nodes import ExpressionError  # noqa: E402
from codegen.patterns.block_lists import BlockLists  # noqa: E402
from runtime.expressions.masks import mask_of, score_of  # noqa: E402


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_values_and_derivatives_are_those_of_autograd(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    first = pytestconfig.option.kernel_seed * 1000
    cases = [drawn_scores.case_of(seed) for seed in range(first, first + 40)]
    assert drawn_scores.check_programs(cases, tmp_path) >= 40 * 2 * drawn_scores.POINTS


def test_constants_to_a_power_and_the_type_of_another_value() -> None:
    assert score_of(lambda s, b, h, q, k: s * torch.tensor(3.0) ** 3, None).text == "score * (3.0 * (3.0 * 3.0))"
    of_zeros = score_of(lambda s, b, h, q, k: s.to(torch.zeros((), dtype=torch.int64)), None)
    assert of_zeros.text == "float(int(score))"


def test_threads_that_trace_leave_torch_compile_as_it_was() -> None:
    import torch._dynamo

    entered, both, left = (threading.Event() for _ in range(3))

    def one(b, h, q, k):
        entered.set()
        both.wait(9)
        return q >= k

    def other(b, h, q, k):
        both.set()
        left.wait(9)
        return q > k

    first = threading.Thread(target=lambda: (mask_of(one, None), left.set()))
    second = threading.Thread(target=lambda: (entered.wait(9), mask_of(other, None)))
    for each in (first, second):
        each.start()
    for each in (first, second):
        each.join()
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_names_that_meet_those_of_the_source_are_refused() -> None:
    with pytest.raises(ExpressionError, match="t_stride0 is what the source calls a stride or a size of t"):
        parse_aux({"t": "fp32[q_len]", "t_stride0": "fp32[q_len]"})
    for name in ("type", "prefix_len"):
        with pytest.raises(ExpressionError, match="cannot be the name"):
            parse_aux({name: "fp32[]"})
    t, t_size0 = torch.ones(9), torch.ones(9)
    names = score_of(lambda s, b, h, q, k: s + t[q] + t_size0[q], None).declared
    assert parse_aux(names) and set(names) == {"t", "t_size02"}


def test_tensors_without_an_expression_are_refused() -> None:
    fields = {"kind": "block_lists", "block": {"q": 128, "kv": 128}, "aux": {"seen": "int32[batch, q_len]"}}
    with pytest.raises(ValueError, match="it has no aux tensors"):
        BlockLists.model_validate(fields)
