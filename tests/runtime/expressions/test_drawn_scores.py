"""Scores and masks drawn as functions of torch, beside a program in C++ too; more: tests/stress/expressions.py."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import drawn_scores  # noqa: E402
from drawn_specs import what_reads_otherwise  # noqa: E402

from codegen.errors import SpecError  # noqa: E402
from codegen.expressions.declared import parse_aux  # noqa: E402
from codegen.expressions.nodes import ExpressionError  # noqa: E402
from codegen.expressions.text import text_of  # noqa: E402
from codegen.parse import parse_spec  # noqa: E402
from codegen.patterns.block_lists import BlockLists  # noqa: E402
from runtime.expressions.masks import mask_of, score_of  # noqa: E402
from runtime.expressions.trace import Traced, trace_mask, trace_score  # noqa: E402

LISTS = {"kind": "block_lists", "block": {"q": 128, "kv": 128}}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_values_and_derivatives_are_those_of_autograd(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    first = pytestconfig.option.kernel_seed * 1000
    cases = [drawn_scores.case_of(seed) for seed in range(first, first + 40)]
    assert drawn_scores.check_programs(cases, tmp_path) >= 40 * 2 * drawn_scores.POINTS


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_masks_are_those_of_torch(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    first = pytestconfig.option.kernel_seed * 1000
    cases = [drawn_scores.mask_case_of(seed) for seed in range(first, first + 60)]
    assert drawn_scores.check_programs(cases, tmp_path) == 60 * drawn_scores.POINTS


def test_specs_with_expressions_read_their_own_json(pytestconfig: pytest.Config) -> None:
    first, accepted = pytestconfig.option.kernel_seed * 1000, Counter[str]()
    ops = (
        {"op": "attention", "head_dim": 64},
        {"op": "attention_backward", "head_dim": 64, "gradients": "dq"},
        {"op": "block_mask"},
    )
    for seed in range(first, first + 66):
        mask, score = (
            trace(drawn(seed).function(**drawn(seed).tensors))
            for drawn, trace in ((drawn_scores.DrawnMask, trace_mask), (drawn_scores.Drawn, trace_score))
        )
        fields = {**ops[seed % 3], "arch": "sm_90a", "pattern": {**LISTS, **declared("mask", mask)}}
        if seed % 2 and fields["op"] != "block_mask":
            fields["score"] = declared("value", score)
        if seed % 10 == 9:  # whose tensors are nobody's
            del fields["pattern"]["mask"]
        try:
            spec = parse_spec(fields)
        except SpecError:  # a mask that hides all, tensors without a mask
            continue
        accepted[spec.op] += 1
        assert not (wrong := what_reads_otherwise(spec)), f"{wrong}: {fields}"
    assert min(accepted[each["op"]] for each in ops) >= 10


def declared(name: str, traced: Traced) -> dict[str, Any]:
    return {name: text_of(traced.node), "aux": {each: str(aux) for each, aux in traced.aux.items()}}


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
    with pytest.raises(ExpressionError, match="t_stride0 collides with the stride or size parameters of t"):
        parse_aux({"t": "fp32[q_len]", "t_stride0": "fp32[q_len]"})
    for name in ("type", "prefix_len"):
        with pytest.raises(ExpressionError, match="cannot be the name"):
            parse_aux({name: "fp32[]"})
    t, t_size0 = torch.ones(9), torch.ones(9)
    names = score_of(lambda s, b, h, q, k: s + t[q] + t_size0[q], None).declared
    assert parse_aux(names) and set(names) == {"t", "t_size02"}


def test_tensors_without_an_expression_are_refused() -> None:
    fields = {"kind": "block_lists", "block": {"q": 128, "kv": 128}, "aux": {"seen": "int32[batch, q_len]"}}
    with pytest.raises(ValueError, match="this mask takes no aux tensors"):
        BlockLists.model_validate(fields)
