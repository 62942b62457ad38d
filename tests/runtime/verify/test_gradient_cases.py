"""The cases of gradients, as far as they go without a GPU: drawn specs have some, and wrong gradients fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from each import for_each
from likely_specs import accepted_specs

from codegen.library import find_spec
from codegen.spec import AttentionBackwardSpec

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402

from runtime.kernels.attention_backward import AttentionGradients  # noqa: E402
from runtime.verify import attention_backward  # noqa: E402
from runtime.verify.attention import Case  # noqa: E402

SMALL = Case("small", heads=4, kv_heads=2, q_len=140, kv_len=200)
Spoil = Callable[[dict[str, Any], int], None]


@cache
def drawn() -> list[AttentionBackwardSpec]:
    """Drawn specs of gradients."""
    specs = [named.spec for named in accepted_specs(150, 5, ("sm_90a",))]
    return [spec for spec in specs if isinstance(spec, AttentionBackwardSpec)]


class Definition:
    """Stands for a kernel: the gradients by the definition, rounded to its type, and then spoilt."""

    def __init__(self, spec: AttentionBackwardSpec, spoil: Spoil) -> None:
        self.spec, self.spoil, self.calls = spec, spoil, 0

    def __call__(
        self, q: Any, k: Any, v: Any, *lists: Any, out: Any, dout: Any, lse: Any, scale: Any
    ) -> AttentionGradients:
        lists, lengths = (lists[:-1], lists[-1]) if self.spec.kv_lengths else (lists, None)
        shape = (*q.shape[:3], k.shape[2])
        seen = attention_oracle.times_seen(self.spec.pattern.model_dump_json(), lists, shape, lengths)
        found = attention_oracle.gradients(q, k, v, out, lse, dout, seen, scale=scale, softcap=self.spec.softcap)
        made = {name: torch.empty_like(t).copy_(found[name]) for name, t in (("dq", q), ("dk", k), ("dv", v))}
        self.calls += 1
        self.spoil(made, self.calls)
        wanted = ("dq",) if self.spec.gradients == "dq" else ("dk", "dv")
        return AttentionGradients(*(made[name] if name in wanted else None for name in ("dq", "dk", "dv")), stats=lse)


def outcome_of(spec: Any, spoil: Spoil = lambda made, call: None, case: Case = SMALL) -> Any:
    kernel: Any = Definition(spec, spoil)
    return attention_backward.run_case(kernel, case, torch.device("cpu"))


def scaled(made: dict[str, Any], call: int) -> None:
    for gradient in made.values():
        gradient.mul_(1.05)


def one_row(made: dict[str, Any], call: int) -> None:
    for gradient in made.values():
        gradient[-1, -1, 77] *= 2.0


def second_run_differs(made: dict[str, Any], call: int) -> None:
    if call == 2:
        for gradient in made.values():
            gradient.view(torch.int16)[0, 0, 0, 0] ^= 1  # the last bit: far less than an error may be


def left_out(made: dict[str, Any], call: int) -> None:
    for gradient in made.values():
        gradient[0, 0, 3] = float("nan")


def test_drawn_specs_are_of_both_kernels_and_of_lists_too() -> None:
    assert {spec.gradients for spec in drawn()} == {"dq", "dkdv", "dq_dkdv"}
    assert any(spec.pattern.fixed_block is None for spec in drawn()) and any(
        spec.pattern.fixed_block for spec in drawn()
    )


@for_each("spec", drawn, lambda spec: spec.canonical_json())
def test_drawn_specs_have_cases_and_right_gradients_pass(spec: AttentionBackwardSpec) -> None:
    cases = attention_backward.cases_of(spec)
    assert len(cases) > 20
    smallest = min(cases, key=lambda case: case.batch * case.heads * case.q_len * case.kv_len)
    for case in (SMALL, smallest):
        outcome = outcome_of(spec, case=case)
        assert outcome.passed, outcome


@pytest.mark.parametrize("name", ["h100_dense_dq", "h100_topk_dkdv"])
@pytest.mark.parametrize("spoil", [scaled, one_row, left_out, second_run_differs])
def test_wrong_gradients_fail(name: str, spoil: Spoil) -> None:
    spec = find_spec(name).spec
    assert outcome_of(spec).passed
    outcome = outcome_of(spec, spoil)
    assert not outcome.passed
    assert ("two runs of" in outcome.problem) is (spoil in (second_run_differs, left_out))  # NaN equals nothing


def test_weights_of_a_pair_that_is_listed_often_are_rounded_each_time() -> None:
    """One key, listed 300 times: each weight is 1/300, which bf16 has not, and their sum is as far off."""
    weight = torch.tensor(1 / 300).bfloat16().double()

    def as_kernels(made: dict[str, Any], call: int) -> None:
        made["dv"].copy_(made["dv"].double() * 300 * weight)

    pattern = {"kind": "topk", "k": 300, "block": {"q": 128, "kv": 64}}
    fields = {"op": "attention_backward", "arch": "sm_90a", "dtype": "bf16", "gradients": "dkdv", "head_dim": 128}
    spec = find_spec({**fields, "pattern": pattern}).spec
    case = Case("one_pair", heads=1, kv_heads=1, q_len=1, kv_len=1, lists="repeated")
    assert outcome_of(spec, case=case).passed
    assert outcome_of(spec, as_kernels, case).passed
    assert not outcome_of(spec, scaled, case).passed


def test_a_gradient_where_no_pair_is_seen_fails() -> None:
    def spoil(made: dict[str, Any], call: int) -> None:
        made["dq"][0, 0, 0, 0] = 1e-7  # less than any tolerance

    spec, case = find_spec("h100_causal_dq_bf16").spec, replace(SMALL, q_len=200, kv_len=140)
    assert outcome_of(spec, case=case).passed
    assert "dq is not 0 where no pair is seen" in outcome_of(spec, spoil, case).problem
