"""``kv_lengths`` with every pattern and every template, and what lies behind a batch's keys."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from codegen.library import find_spec, unnamed_stem  # noqa: E402
from codegen.parse import parse_spec  # noqa: E402
from runtime import ArgumentError, load_kernel  # noqa: E402
from runtime.kernels.attention import AttentionKernel  # noqa: E402
from runtime.verify.attention import Case, cases_of, fitted, make_inputs, run_case  # noqa: E402

HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
TOPK = {"kind": "topk", "k": 9, "block": {"q": 64, "kv": 64}}
LISTS = {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "causal"}
STRIDED = {"kind": "strided", "stride": 5, "local": 2, "block": 64}
WINDOW = {"kind": "sliding_window", "left": 200, "right": 3}
COOPERATIVE = {"schedule": "cooperative"}
# Divided and whole tiles, schedules, masks by warpgroups and by pairs, parts of keys, shared loads, packed heads.
SM_90A: tuple[dict[str, Any], ...] = (
    {"pattern": {"kind": "dense"}},
    {"pattern": {"kind": "dense"}, "stream_k_tail": False, "head_dim": 64, "dtype": "bf16"},
    {"pattern": {"kind": "dense"}, "kv_splits": 2, **COOPERATIVE, "tile": {"m": 64, "n": 64}},
    {"pattern": {"kind": "dense"}, "pack_gqa": 4, "sink": True},
    {"pattern": {"kind": "causal"}},
    {"pattern": {"kind": "causal", "align": "top_left"}, **COOPERATIVE, "tile": {"m": 192, "n": 80}},
    {"pattern": {"kind": "causal"}, "kv_splits": 2, **COOPERATIVE, "tile": {"m": 64, "n": 64}, "dtype": "bf16"},
    {"pattern": {"kind": "prefix_lm"}},
    {"pattern": WINDOW, **COOPERATIVE, "tile": {"m": 192, "n": 80}},
    {"pattern": WINDOW, "softcap": 20.0, "head_dim": 256},
    {"pattern": {"kind": "sink_window", "sink": 200, "left": 100, "right": 0}, "head_dim": 96},
    {"pattern": STRIDED},
    {"pattern": STRIDED | {"causal": False}},
    {"pattern": TOPK},
    {"pattern": {**TOPK, "block": {"q": 128, "kv": 64}}, "tile": {"m": 128, "n": 128}},
    {"pattern": {"kind": "topk", "block": {"q": 16, "kv": 128}}, "pack_gqa": 2},
    {"pattern": TOPK, "kv_splits": 2, **COOPERATIVE, "tile": {"m": 64, "n": 64}},
    {"pattern": TOPK, "share_kv_loads": True, **COOPERATIVE, "tile": {"m": 128, "n": 64}},
    {"pattern": TOPK, "share_kv_loads": True, "query_grouping": "given", **COOPERATIVE, "tile": {"m": 128, "n": 64}},
    {"pattern": TOPK, "share_kv_loads": True, "query_grouping": "search", **COOPERATIVE, "tile": {"m": 128, "n": 64}},
    {"pattern": LISTS},
    {"pattern": LISTS | {"mask": "none"}, "tile": {"m": 192, "n": 64}, "head_dim": 64},
)
SM_89: tuple[dict[str, Any], ...] = (
    {"pattern": {"kind": "dense"}},
    {"pattern": {"kind": "causal"}, "head_dim": 64, "dtype": "bf16", "pad_heads": True},
    {"pattern": {"kind": "prefix_lm"}, "sink": True},
    {"pattern": WINDOW, "head_dim": 256},
    {"pattern": {"kind": "sink_window", "sink": 4, "left": 100, "right": 30}, "pack_gqa": 2},
    {"pattern": STRIDED, "head_dim": 192},
    {"pattern": TOPK},
    {"pattern": {"kind": "topk", "block": {"q": 64, "kv": 16}}},
    {"pattern": LISTS | {"block": {"q": 64, "kv": 128}}},
    {"pattern": {"kind": "dense"}, "mma": "wmma"},
    {"pattern": {"kind": "causal"}, "mma": "wmma", "head_dim": 64, "pad_heads": True},
    {"pattern": LISTS | {"block": {"q": 64, "kv": 32}}, "mma": "wmma"},
)
COMMON = {"op": "attention", "head_dim": 128, "kv_lengths": True}
KERNELS = [
    *(pytest.param({**COMMON, "arch": "sm_90a", **fields}, marks=HOPPER) for fields in SM_90A),
    *({**COMMON, "arch": "sm_89", **fields} for fields in SM_89),
]
NAMES = {"plain", "odd_lengths", "gqa_4_to_1", "many_tiles", "few_queries_many_keys", "shared_lists", "expanded"}
SHARED = {"same_lists", "three_quarters_in_common", "out_of_range_in_common"}
LENGTHS = {"edges_of_batches", "edges_and_few_queries", "edges_and_few_keys", "values_out_of_range", "one_list"}
EDGES = {"block_edges", "block_edges_and_one_query", "no_keys_in_any_batch", "a_length_for_all", "many_batches"}


def stem(fields: dict[str, Any]) -> str:
    return unnamed_stem(parse_spec(fields))


def load(fields: dict[str, Any] | str) -> AttentionKernel:
    kernel = load_kernel(fields, forward_compatible=find_spec(fields).spec.arch != "sm_90a")
    assert isinstance(kernel, AttentionKernel)
    return kernel


@pytest.mark.parametrize("fields", KERNELS, ids=stem)
def test_keys_behind_the_length_are_hidden(fields: dict[str, Any]) -> None:
    kernel = load(fields)
    cases = [case for case in cases_of(kernel.spec) if case.name in NAMES | SHARED | LENGTHS | EDGES or case.columns]
    assert {case.name for case in cases} >= LENGTHS | EDGES
    outcomes = [run_case(kernel, case, torch.device("cuda", 0)) for case in cases]
    wrong = [outcome for outcome in outcomes if not outcome.passed]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("fields", KERNELS, ids=stem)
def test_what_is_behind_the_length_has_no_effect(fields: dict[str, Any]) -> None:
    """The largest finite numbers, NaN and infinity."""
    kernel = load(fields)
    case = fitted(Case("garbage", batch=4, heads=4, kv_heads=2, q_len=333, kv_len=700, counts="edges"), kernel.spec)
    inputs = make_inputs(kernel.spec, case, torch.device("cuda", 0))
    clean = kernel(inputs.q, inputs.k, inputs.v, *inputs.indices, sink=inputs.sink)
    lengths = inputs.indices[-1]
    assert lengths is not None
    behind = (torch.arange(case.kv_len, device="cuda") >= lengths[:, None])[:, None, :, None]
    largest = torch.finfo(inputs.k.dtype).max if kernel.spec.dtype == "fp16" else 1e30
    for value_of_k, value_of_v in ((largest, -largest), (torch.nan, torch.nan), (torch.inf, -torch.inf)):
        k, v = inputs.k.masked_fill(behind, value_of_k), inputs.v.masked_fill(behind, value_of_v)
        out, lse = kernel(inputs.q, k, v, *inputs.indices, sink=inputs.sink)
        assert torch.equal(out, clean.out)
        assert lse is not None and clean.lse is not None and torch.equal(lse, clean.lse)


@pytest.mark.parametrize("name", [pytest.param("h100_causal_kv_lengths", marks=HOPPER), "l4_dense_kv_lengths"])
def test_lengths_are_checked(name: str) -> None:
    kernel = load(name)
    q, k, v = (torch.randn(2, 2, 200, 128, device="cuda").half() for _ in range(3))
    lengths = torch.tensor([200, 7], device="cuda", dtype=torch.int32)
    kernel(q, k, v, lengths, validate=True)
    kernel(q, k, v, kv_lengths=lengths[:1], validate=True)
    for wrong, message in (
        (None, r"kv_lengths: is missing: int32 \(batch 1 or 2\)"),
        (lengths.long(), r"kv_lengths: is torch\.int64, expected torch\.int32"),
        (lengths.repeat(2), r"kv_lengths: has shape \(4,\), expected \(batch 1 or 2\)"),
        (lengths.cpu(), "kv_lengths: is on cpu"),
        (lengths + 1, r"kv_lengths: is 201 at .*allowed: 0 to 200"),
        (-lengths, r"kv_lengths: is -200 at .*allowed: 0 to 200"),
    ):
        with pytest.raises(ArgumentError, match=message):
            kernel(q, k, v, kv_lengths=wrong, validate=True)
