"""The attention cases, as far as they go without a GPU: random shapes, inputs, what a right and a wrong kernel get."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from codegen.library import find_spec
from codegen.spec import AttentionSpec
from runtime.verify.common import poisoned_memory, tolerance

torch = pytest.importorskip("torch")

from runtime.kernels.attention import AttentionResult  # noqa: E402
from runtime.verify import attention  # noqa: E402
from runtime.verify.common import Outcome, summary  # noqa: E402

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in attention.CASES}


def spec_of(name: str) -> AttentionSpec:
    spec = find_spec(name).spec
    assert isinstance(spec, AttentionSpec)
    return spec


class Oracle:
    """Stands for a kernel: the oracle's own result, rounded, and then spoiled."""

    def __init__(self, name: str, case: attention.Case, spoil: Callable[[Any, Any], None] = lambda out, lse: None):
        self.spec, self.case, self.spoil = spec_of(name), case, spoil

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *indices: Any,
        scale: float | None,
        out: Any,
        sink: Any,
        return_lse: bool = True,
    ) -> AttentionResult:
        inputs = attention.Inputs(q, k, v, indices, sink)
        exact, lse, _ = attention.oracle(self.spec, replace(self.case, scale=scale), inputs)
        out.copy_(exact)
        lse = lse.float()
        self.spoil(out, lse)
        return AttentionResult(out, lse if return_lse else None)


def run(kernel: Oracle) -> Outcome:
    return attention.run_case(kernel, kernel.case, CPU)  # type: ignore[arg-type]


def test_names_are_unique() -> None:
    names = [case.name for case in (*attention.CASES, *attention.SHARE_KV_CASES, *attention.random_cases())]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("name", "sizes"), [("l4_dense_d64", [8, 32, 40, 56]), ("l4_block_lists_d256", [8, 248])])
def test_cases_of_heads_of_fewer_elements(name: str, sizes: list[int]) -> None:
    plain = spec_of(name)
    padded = plain.model_copy(update={"pad_heads": True})
    before, cases = attention.cases_of(plain), attention.cases_of(padded)
    found = [case.columns for case in cases[len(before) :]]
    assert cases[: len(before)] == before and not any(case.columns for case in before)
    assert set(sizes) <= set(found) and all(d and d % 8 == 0 and d < plain.head_dim for d in found)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_nan_follows_the_columns_of_a_smaller_head(layout: str) -> None:
    case = attention.Case("smaller", q_len=20, kv_len=30, layout=layout, columns=40, spread=2.0)
    inputs = attention.make_inputs(spec_of("l4_dense_d64"), case, CPU)
    for tensor in (inputs.q, inputs.k, inputs.v):
        assert tensor.shape[3] == 40 and tensor.isfinite().all()
        whole = tensor.as_strided((*tensor.shape[:3], 64), tensor.stride())
        assert whole[..., 40:].isnan().all()
    assert attention.softmax_scale(spec_of("l4_dense_d64"), case) == 40**-0.5


@pytest.mark.parametrize("spoils", [False, True])
def test_columns_beyond_a_smaller_head_must_stay(spoils: bool) -> None:
    def spoil(out: Any, lse: Any) -> None:
        if spoils:
            out.as_strided((*out.shape[:3], 64), out.stride())[0, 0, 0, 40] = 0.0

    outcome = run(Oracle("l4_dense_d64", attention.Case("smaller", q_len=20, kv_len=30, columns=40), spoil))
    assert outcome.passed is not spoils
    assert ("columns beyond the head dimension were written" in outcome.problem) is spoils


def test_the_table_has_what_matters() -> None:
    cases = attention.CASES
    assert {1, 2, 3, 4, 8} <= {case.heads // case.kv_heads for case in cases}
    assert any(case.q_len < case.kv_len for case in cases) and any(case.q_len > case.kv_len for case in cases)
    assert {case.values for case in cases} == {"normal", "equal_keys", "huge_logit", "large_products"}
    assert {case.counts for case in cases} == {"random", "empty", "full", "mixed"}


def test_random_shapes_are_the_same_every_time() -> None:
    first, second = attention.random_cases(), attention.random_cases()
    assert first == second
    assert len(first) == attention.RANDOM_SHAPES == 100
    assert first[0].name == "random_000" and first[-1].name == "random_099"
    assert first[17].describe() == "B1 H6:2 S286x44 bshd lists random"


def test_random_shapes_stay_small() -> None:
    for case in attention.random_cases():
        assert 1 <= case.batch <= 3
        assert case.heads % case.kv_heads == 0 and 1 <= case.heads // case.kv_heads <= 8 and case.heads <= 8
        assert 1 <= case.q_len <= 1500 and 1 <= case.kv_len <= 1500
        assert case.scale is None or 0.02 <= case.scale <= 0.3
        assert case.batch * case.heads * case.q_len * case.kv_len * 8 < 2**28  # bytes of the oracle's scores


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("batch", {1, 2, 3}),
        ("lists", {"random", "repeated", "out_of_range", "padded"}),
        ("counts", {"random", "mixed", "full", "empty"}),
        ("shared_lists", {False, True}),
        ("full_lists", {False, True}),
        ("layout", {"bhsd", "bshd"}),
        ("expanded", {False, True}),
    ],
)
def test_random_shapes_have_every_option(option: str, values: set[Any]) -> None:
    assert {getattr(case, option) for case in attention.random_cases()} == values


def test_random_shapes_have_every_group_and_edge() -> None:
    cases = attention.random_cases()
    assert {case.heads // case.kv_heads for case in cases} == set(range(1, 9))
    assert {case.scale is None for case in cases} == {False, True}
    lengths = [length for case in cases for length in (case.q_len, case.kv_len)]
    assert {length % 64 for length in lengths} >= {0, 1, 63}
    assert 2 <= sum(length > 700 for length in lengths) <= 20
    assert any(case.q_len < case.kv_len for case in cases) and any(case.q_len > case.kv_len for case in cases)


@pytest.mark.parametrize("name", ["h100_dense", "h100_topk32_d64"])
def test_values_are_what_the_case_says(name: str) -> None:
    spec = spec_of(name)

    def products(case: attention.Case) -> tuple[attention.Inputs, Any]:
        inputs = attention.make_inputs(spec, case, CPU)
        keys = inputs.k.double().repeat_interleave(case.heads // case.kv_heads, 1)
        return inputs, inputs.q.double() @ keys.transpose(2, 3)

    inputs, scores = products(BY_NAME["equal_keys"])
    assert torch.equal(inputs.k, inputs.k[:, :, :1].expand_as(inputs.k)) and scores.std() > 1

    inputs, scores = products(case := BY_NAME["huge_logit"])
    logits = scores * attention.softmax_scale(spec, case)
    huge = logits > 1e3
    assert huge.sum(-1).unique().tolist() == [0, 1]
    assert float(huge.any(-1).double().mean()) == pytest.approx(0.2, abs=0.01)
    assert torch.allclose(logits[huge], torch.tensor(attention.HUGE_LOGIT, dtype=torch.float64), rtol=2e-3)
    assert logits[~huge].abs().max() < 8
    winner = inputs.v[:, :, case.kv_len // 2 + 3].abs()
    assert winner.min() >= 1.099 and winner.max() <= 1.401

    inputs, scores = products(BY_NAME["large_products"])
    assert float(scores.abs().max()) == pytest.approx(attention.LARGEST_PRODUCT, rel=2e-3)
    assert inputs.q.isfinite().all() and inputs.k.isfinite().all()


def test_every_weight_is_the_same_where_keys_are_equal() -> None:
    case, spec = BY_NAME["equal_keys"], spec_of("h100_dense")
    inputs = attention.make_inputs(spec, case, CPU)
    out, lse, _ = attention.oracle(spec, case, inputs)
    assert torch.allclose(out, inputs.v.double().mean(2, keepdim=True).expand_as(out), atol=1e-12)
    logit = (inputs.q.double() * inputs.k[:, :, :1].double()).sum(-1) * attention.softmax_scale(spec, case)
    assert torch.allclose(lse, logit + math.log(case.kv_len), atol=1e-12)


@pytest.mark.parametrize("name", ["h100_topk16", "h100_block_lists"])
def test_empty_rows_are_mixed_with_full_ones(name: str) -> None:
    case, spec = BY_NAME["empty_and_full_rows"], spec_of(name)
    pattern_block = spec.pattern.fixed_block
    assert pattern_block is not None
    rows = attention.multiplicity(spec, case, attention.make_inputs(spec, case, CPU)).sum(-1)[0, :, :: pattern_block.q]
    assert 0.2 < (rows == 0).double().mean() < 0.8
    assert (rows == rows.max()).any()


@pytest.mark.parametrize("masks", ["random", "shared", "apart", "hidden", "few"])
def test_bits_of_cases(masks: str) -> None:
    spec = spec_of("h100_lists128_bits")
    case = attention.Case("small", batch=2, heads=3, kv_heads=3, q_len=300, kv_len=1000, masks=masks, counts="random")
    counts, lists, *full, bits = attention.make_inputs(spec, case, CPU).indices
    assert counts is not None and lists is not None and bits is not None and len(full) == 2
    entries = int(counts.max()) if masks == "few" else lists.shape[3]
    assert bits.shape == (*((1, 1) if masks == "shared" else (2, 3)), 3, entries, 512) and bits.dtype == torch.int32
    assert bits.is_contiguous() == (masks != "apart") and bits.stride(4) == 1
    blocks = bits.flatten(0, 3)
    if masks == "hidden":
        assert not blocks.any()
        return
    if masks != "shared":  # there are too few blocks
        assert (blocks == 0).all(1).any() and (blocks == -1).all(1).any()  # a block of no pair, and one of all
    rows = blocks[~((blocks == 0) | (blocks == -1)).all(1)].view(-1, 4)
    assert 0.05 < (rows == 0).all(1).double().mean() < 0.25  # queries that see none
    assert (blocks < 0).any() and (blocks > 0).any()


def test_cases_of_bits_are_for_masks_of_bits() -> None:
    assert set(attention.BITS_CASES) <= set(attention.cases_of(spec_of("h100_lists128_bits")))
    assert not set(attention.BITS_CASES) & set(attention.cases_of(spec_of("h100_block_lists")))


def test_hidden_blocks_are_as_if_they_were_not_listed() -> None:
    spec = spec_of("l4_lists64_bits")
    case = replace(next(case for case in attention.BITS_CASES if case.name == "hidden_blocks"), q_len=90)
    out, lse, weight = attention.oracle(spec, case, attention.make_inputs(spec, case, CPU))
    assert not weight.any() and not out.any() and torch.isneginf(lse).all()


def values_of_batches(case: attention.Case) -> list[int]:
    """The values that a case draws for the prefixes of its batches."""
    (values,) = attention.make_inputs(spec_of("h100_prefix_lm"), case, CPU).indices
    assert values is not None and values.dtype == torch.int32
    return values.tolist()


def test_values_of_batches_are_at_every_edge() -> None:
    with_values = attention.cases_of(spec_of("h100_prefix_lm"))
    assert set(attention.PER_BATCH_CASES) <= set(with_values)
    assert not set(attention.PER_BATCH_CASES) & set(attention.cases_of(spec_of("h100_causal")))
    found = {case.name: values_of_batches(replace(case, q_len=5)) for case in with_values}
    assert found["edges_of_batches"] == [0, 1, 351, 699, 700]
    assert found["edges_and_few_keys"] == [0, 1, 167, 332, 333]
    inside = found["edges_of_batches"][2], found["edges_and_few_queries"][2]
    assert all(step - 2 > value % step > 1 for value in inside for step in (64, 80))  # in the middle of a step
    out = found["values_out_of_range"]
    assert out[::2] == [-1, 503, -(2**31), 2**31 - 1, -1] and all(0 <= value <= 500 for value in out[1::2])
    assert found["empty_rows"] == [0] and found["full_rows"] == [512] and found["shared_lists"] != [0]
    assert len(found["shared_lists"]) == 1 < len(found["plain"])


@pytest.mark.parametrize("case", attention.PER_BATCH_CASES, ids=lambda case: case.name)
def test_the_oracle_sees_the_prefix_of_each_batch(case: attention.Case) -> None:
    spec = spec_of("h100_prefix_lm")
    inputs = attention.make_inputs(spec, case, CPU)
    weight = attention.multiplicity(spec, case, inputs)
    assert weight.shape == (case.batch, case.heads, case.q_len, case.kv_len)
    for batch, value in enumerate(values_of_batches(case)):
        first = max(0, min(value, case.kv_len), min(1 + case.kv_len - case.q_len, case.kv_len))
        assert weight[batch, -1, 0].tolist() == [1.0] * first + [0.0] * (case.kv_len - first)


def test_padded_lists_name_each_block_at_most_once() -> None:
    spec = spec_of("h100_topk64")
    case = replace(BY_NAME["plain"], lists="padded", q_len=300, kv_len=300)
    (lists,) = attention.make_inputs(spec, case, CPU).indices
    assert lists is not None
    assert lists.shape[3] == 64 and lists.dtype == torch.int32
    assert lists.sort(-1).values[..., -3:].flatten(0, 2).unique(dim=0).tolist() == [[0, 1, 2]]
    assert (lists == -1).sum(-1).unique().tolist() == [61]


@pytest.mark.parametrize("case", attention.SHARE_KV_CASES, ids=lambda case: case.name)
def test_every_second_list_has_entries_of_the_one_before(case: attention.Case) -> None:
    spec = spec_of("h100_topk32_b64_shared")
    assert case in attention.cases_of(spec) and case not in attention.cases_of(spec_of("h100_topk32_d64_b64"))
    (lists,) = attention.make_inputs(spec, case, CPU).indices
    assert lists is not None and case.overlap is not None
    assert lists.shape == (case.batch, case.heads, -(-case.q_len // 64), 32)
    assert (lists.sort(-1).values != lists).any()
    for row in range(0, lists.shape[2] - 1, 2):
        first, second = (Counter(lists[-1, -1, one].tolist()) for one in (row, row + 1))
        common = (first & second).total()
        assert common == 32 * case.overlap if case.lists == "random" else common >= 32 * case.overlap
        assert case.lists != "repeated" or first.total() > len(first)


@pytest.mark.parametrize("case", ["equal_keys", "huge_logit", "large_products", "gqa_4_to_1", "empty_and_full_rows"])
@pytest.mark.parametrize("name", ["h100_causal", "h100_topk32_bf16", "h100_block_lists"])
def test_a_correctly_rounded_result_passes(name: str, case: str) -> None:
    outcome = run(Oracle(name, BY_NAME[case]))
    assert outcome.passed, outcome


@pytest.mark.parametrize("case", ["plain", "huge_sinks", "sinks_and_no_keys"])
def test_a_sink_is_part_of_the_result(case: str) -> None:
    spec = spec_of("h100_window1k_sink")
    (chosen,) = (found for found in attention.cases_of(spec) if found.name == case)
    chosen = replace(chosen, q_len=min(chosen.q_len, 300), kv_len=min(chosen.kv_len, 300))
    assert run(Oracle("h100_window1k_sink", chosen)).passed

    class Forgetful(Oracle):
        def __call__(self, *tensors: Any, sink: Any, **named: Any) -> AttentionResult:
            return super().__call__(*tensors, sink=torch.full_like(sink, -math.inf), **named)

    assert not run(Forgetful("h100_window1k_sink", chosen)).passed


def test_wrong_results_fail() -> None:
    case = BY_NAME["huge_logit"]

    def infinite(out: Any, lse: Any) -> None:
        out[0, 0, 0, 0] = torch.inf

    def undefined(out: Any, lse: Any) -> None:
        out[0, 0, 0, 0] = torch.nan

    def one_ulp(out: Any, lse: Any) -> None:
        out[:, :, 300] *= 1 + 2**-9

    def wrong_lse(out: Any, lse: Any) -> None:
        lse[0, 0, 0] += 10

    for spoil in (infinite, undefined, one_ulp, wrong_lse):
        assert not run(Oracle("h100_dense", case, spoil)).passed, spoil.__name__


def outcome(name: str, error: float, torch_error: float | None, allowed: float, problem: str = "") -> Outcome:
    return Outcome(name, f"shape of {name}", error, torch_error, allowed, problem)


def test_many_outcomes_are_told_as_one() -> None:
    found = summary("all", [outcome("a", 1e-3, None, 2e-3), outcome("b", 3e-4, 2e-4, 4e-4), outcome("c", 0, 0, 1e-3)])
    assert found.passed and found.name == "all"
    assert (found.max_error, found.torch_error, found.tolerance) == (1e-3, 2e-4, 2e-3)
    assert found.description == "3 of 3 passed, errors at most 1.50 of torch's and 0.75 of what is allowed"
    assert summary("all", [outcome("a", 1e-3, None, 2e-3)]).torch_error is None


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (outcome("b", 5e-4, 2e-4, 4e-4), "b (shape of b): error 0.0005, allowed 0.0004"),
        (outcome("b", math.nan, 2e-4, 4e-4), "b (shape of b): error nan, allowed 0.0004"),
        (outcome("b", 0.0, 2e-4, 4e-4, "two runs differ"), "b (shape of b): error 0, allowed 0.0004, two runs differ"),
    ],
)
def test_one_failure_among_many_is_named(failure: Outcome, says: str) -> None:
    for order in ([outcome("a", 1e-3, None, 2e-3), failure], [failure, outcome("a", 1e-3, None, 2e-3)]):
        found = summary("all", order)
        assert not found.passed
        assert found.problem == says
        assert found.description.startswith("1 of 2 passed, ")
        assert math.isnan(found.max_error) == math.isnan(failure.max_error)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("h100_dense", ["MONOTONE_CASES"]),
        ("h100_window1k_sink", ["SINK_CASES", "MONOTONE_CASES"]),
        ("h100_topk32_b64_shared", ["MONOTONE_CASES", "SHARE_KV_CASES"]),
        ("h100_window", ["MONOTONE_CASES", "WINDOW_CASES"]),
        ("h100_window2k", ["MONOTONE_CASES"]),
        ("l4_dense_wmma", []),
    ],
)
def test_options_have_cases_of_their_own(name: str, more: list[str]) -> None:
    groups = [attention.CASES, *(getattr(attention, group) for group in more)]
    assert [case.name for case in attention.cases_of(spec_of(name))] == [case.name for all_ in groups for case in all_]


@pytest.mark.parametrize("name", ["h100_window", "h100_sink_window"])
def test_cases_have_windows_of_all_kinds(name: str) -> None:
    spec = spec_of(name)
    cases = [*attention.cases_of(spec), *(attention.fitted(case, spec) for case in attention.random_cases())]
    windows = [(*case.window, case.q_len, case.kv_len) for case in cases if case.window is not None]
    assert len(windows) == len(cases)
    kinds = {
        "one key": sum(left == right == 0 for left, right, *_ in windows),
        "less than a block": sum(0 < left < 64 for left, *_ in windows),
        "the keys": sum(left == kv_len - 1 for left, _, _, kv_len in windows),
        "longer than the sequence": sum(left >= q_len + kv_len for left, _, q_len, kv_len in windows),
        "to the right": sum(0 < right < kv_len for _, right, _, kv_len in windows),
        "all to the right": sum(right > kv_len for _, right, _, kv_len in windows),
        "causal": sum(right == 0 for _, right, *_ in windows),
    }
    assert min(kinds.values()) >= 3, kinds
    sinks = [case.sink_keys for case in cases]
    if name == "h100_window":
        assert set(sinks) == {None}
    else:
        assert {0, 64} <= set(sinks) and any(case.sink_keys > case.kv_len for case in cases if case.sink_keys)
    plain = spec_of("h100_causal")
    assert all(case.window is None for case in attention.cases_of(plain))


@pytest.mark.parametrize("name", ["h100_window", "h100_sink_window"])
def test_the_window_of_a_case_decides_what_is_seen(name: str) -> None:
    spec = spec_of(name)
    case = attention.Case("seen", q_len=40, kv_len=60, window=(7, 2), sink_keys=3)
    case = attention.fitted(case, spec)
    inputs = attention.make_inputs(spec, case, CPU)
    given = {"window": (7, 2), "sink_keys": 3} if name == "h100_sink_window" else {"window": (7, 2)}
    assert inputs.options() == inputs.numbers == given
    seen = attention.multiplicity(spec, case, inputs)[0, 0]
    for query in range(40):
        own = query + 20
        keys = {key for key in range(60) if own - 7 <= key <= own + 2}
        keys |= {0, 1, 2} if "sink_keys" in given else set()
        assert {int(key) for key in seen[query].nonzero()} == keys


def test_a_softcap_has_a_case_of_its_own() -> None:
    fields = spec_of("h100_causal").model_dump(mode="json", by_alias=True)
    spec = find_spec({**fields, "softcap": 30.0}).spec
    assert isinstance(spec, AttentionSpec)
    plain = attention.cases_of(spec_of("h100_causal"))
    assert set(attention.cases_of(spec)) - set(plain) == set(attention.SOFTCAP_CASES)


def test_two_runs_that_differ_fail() -> None:
    case = replace(BY_NAME["plain"], q_len=128, kv_len=128)
    calls: list[int] = []

    def second_result(out: Any, lse: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            out[0, 0, 5, 3] = torch.nextafter(out[0, 0, 5, 3], torch.full_like(out[0, 0, 5, 3], torch.inf))

    def second_lse(out: Any, lse: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            lse[0, 0, 5] += 1e-6 * lse[0, 0, 5].abs()

    for spoil in (second_result, second_lse):
        calls.clear()
        found = run(Oracle("h100_dense", case, spoil))
        assert len(calls) == 3 and found.problem == "two runs differ", spoil.__name__


def test_a_result_that_differs_without_an_lse_fails() -> None:
    class Wrong(Oracle):
        def __call__(self, *tensors: Any, **named: Any) -> Any:
            found = super().__call__(*tensors, **named)
            if not named.get("return_lse", True):
                found.out[0, 0, 5, 3] += 1
            return found

    class Anyway(Oracle):
        def __call__(self, *tensors: Any, **named: Any) -> Any:
            return super().__call__(*tensors, **{**named, "return_lse": True})

    case = replace(BY_NAME["plain"], q_len=128, kv_len=128)
    assert run(Wrong("h100_dense", case)).problem == "the result differs without an LSE"
    assert run(Anyway("h100_dense", case)).problem == "an LSE was returned without return_lse"


def test_a_result_without_lse_is_judged_too() -> None:
    class Alone(Oracle):
        def __call__(self, *tensors: Any, **named: Any) -> Any:
            return AttentionResult(super().__call__(*tensors, **named).out, None)

    def spoiled(out: Any, lse: Any) -> None:
        out[0, 0, 5] += 1

    case = replace(BY_NAME["plain"], q_len=128, kv_len=128)
    assert run(Alone("h100_dense", case)).passed and not run(Alone("h100_dense", case, spoiled)).passed


def test_torch_sets_the_tolerance_where_it_computes_the_same() -> None:
    small = replace(BY_NAME["own_scale"], q_len=64, kv_len=100)
    spec = spec_of("h100_causal")
    inputs = attention.make_inputs(spec, small, CPU)
    exact, _, weight = attention.oracle(spec, small, inputs)
    theirs = attention.torch_result(spec, small, inputs, weight)
    assert theirs is not None and (theirs.double() - exact).abs().max() < 2e-3
    found = run(Oracle("h100_causal", small))
    assert found.torch_error is not None and 0 < found.torch_error < 2e-3
    bound = max(2 * found.torch_error, 2.0**-11 * float(exact.abs().max()))
    assert found.tolerance == pytest.approx(min(2e-3, bound))
    for other in (spec_of("h100_window1k_sink"), find_spec({**spec.model_dump(by_alias=True), "softcap": 30.0}).spec):
        assert isinstance(other, AttentionSpec)
        assert attention.torch_result(other, small, inputs, weight) is None
    assert attention.torch_result(spec, small, inputs, weight * 2) is None  # a pair that counts twice


def test_the_scale_of_a_case_is_that_of_the_oracle() -> None:
    case, spec = BY_NAME["own_scale"], spec_of("h100_causal")
    assert attention.softmax_scale(spec, case) == case.scale == 0.31
    assert attention.softmax_scale(spec, BY_NAME["plain"]) == 128**-0.5


def test_tensors_lie_as_the_case_says() -> None:
    spec = spec_of("h100_dense")
    inputs = attention.make_inputs(spec, BY_NAME["transposed"], CPU)
    assert inputs.q.shape == (2, 4, 500, 128) and inputs.k.shape == inputs.v.shape == (2, 2, 600, 128)
    for tensor in (inputs.q, inputs.k, inputs.v):
        assert tensor.transpose(1, 2).is_contiguous() and not tensor.is_contiguous()
    for name, strides in (("expanded", {0}), ("plain", {4 * 1024 * 128})):
        inputs = attention.make_inputs(spec, BY_NAME[name], CPU)
        assert {inputs.k.stride(0), inputs.v.stride(0)} == strides and inputs.q.is_contiguous()


def test_logits_rise_and_fall_as_the_case_says() -> None:
    spec = spec_of("h100_dense")
    for case, sign in zip(attention.MONOTONE_CASES, (1, -1), strict=True):
        inputs = attention.make_inputs(spec, case, CPU)
        ramp = (inputs.q[0, 0, 0, 0] * inputs.k[0, 0, :, 0]).double() * attention.softmax_scale(spec, case)
        assert float(ramp[-1] - ramp[0]) == pytest.approx(sign * attention.RISE, rel=5e-3)
        assert (sign * ramp.diff() >= 0).all()


def test_huge_sinks_are_huge() -> None:
    (case,) = (each for each in attention.SINK_CASES if each.sinks == "huge")
    sink = attention.make_inputs(spec_of("h100_window1k_sink"), case, CPU).sink
    assert sink is not None and sink.tolist() == [1e4, -1e4] * (case.heads // 2)


def test_the_two_lists_split_the_key_blocks() -> None:
    spec = spec_of("h100_block_lists")
    case = replace(BY_NAME["full_rows"], counts="full")
    _, partial, _, full = attention.make_inputs(spec, case, CPU).indices
    assert partial is not None and full is not None
    blocks = torch.cat([partial, full], 3).sort(-1).values
    assert (blocks == torch.arange(blocks.shape[3])).all() and min(partial.shape[3], full.shape[3]) >= 1
    _, partial, _, full = attention.make_inputs(spec, BY_NAME["one_pair"], CPU).indices
    assert partial is not None and full is not None and partial.shape[3] == full.shape[3] == 1
    assert len(attention.make_inputs(spec, BY_NAME["one_list"], CPU).indices) == 2


def test_an_entry_of_the_number_of_blocks_names_none() -> None:
    spec, case = spec_of("h100_topk32"), replace(BY_NAME["plain"], batch=1, q_len=128, kv_len=256)
    inputs = attention.make_inputs(spec, case, CPU)
    lists = torch.full_like(inputs.indices[0], 2)  # there are blocks 0 and 1
    assert not attention.multiplicity(spec, case, replace(inputs, indices=(lists,))).any()


@pytest.mark.parametrize(
    ("theirs", "largest", "allowed"),
    [(None, 100.0, 2e-3), (1e-4, 0.1, 2e-4), (1e-4, 1.0, 2.0**-11), (9e-4, 1.0, 1.8e-3), (1.0, 1.0, 2e-3)],
)
def test_an_error_is_held_to_the_best_that_is_known(theirs: float | None, largest: float, allowed: float) -> None:
    assert tolerance("fp16", theirs, largest) == pytest.approx(allowed)


def test_new_memory_is_poisoned_for_a_while() -> None:
    with poisoned_memory():
        assert torch.empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_inputs_depend_on_the_name_of_a_case_alone() -> None:
    spec, case = spec_of("h100_causal"), replace(BY_NAME["plain"], q_len=8, kv_len=8)
    first = attention.make_inputs(spec, case, CPU)
    torch.rand(3)
    assert torch.equal(attention.make_inputs(spec, case, CPU).q, first.q)
    assert not torch.equal(attention.make_inputs(spec, replace(case, name="other"), CPU).q, first.q)
