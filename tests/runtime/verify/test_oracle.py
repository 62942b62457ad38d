"""The oracle of the attention kernels against the definition, row by row, on the CPU; and what cases are made of."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from each import every_source, for_each

from codegen.spec import BsrSpmmSpec
from runtime.verify import bsr_spmm

torch = pytest.importorskip("torch")

from codegen.library import find_spec, shipped_specs  # noqa: E402
from codegen.parse import parse_spec  # noqa: E402
from codegen.planning import plan_for  # noqa: E402
from codegen.plans.bsr.balance import group_tiles  # noqa: E402
from codegen.spec import AttentionSpec  # noqa: E402
from runtime.kernels.attention import AttentionKernel  # noqa: E402
from runtime.verify.attention import CASES, Case, cases_of, fitted, make_inputs, oracle  # noqa: E402

pytestmark = pytest.mark.nvrtc

CPU = torch.device("cpu")
TOPK = {"kind": "topk", "k": 3, "block": {"q": 4, "kv": 64}}
LISTS = {"kind": "block_lists", "block": {"q": 4, "kv": 64}, "mask": "causal"}
BITS = {**LISTS, "mask": "bits"}


def spec_of(pattern: dict[str, Any], **options: Any) -> AttentionSpec:
    spec = parse_spec({"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": pattern, **options})
    assert isinstance(spec, AttentionSpec)
    return spec


def seen_by(spec: AttentionSpec, inputs: Any, where: tuple[int, int, int], lengths: tuple[int, int]) -> list[int]:
    """The keys of one row, one entry each time a key counts."""
    batch, head, query = where
    keys = range(lengths[1])
    if spec.kv_lengths:
        keys = range(min(lengths[1], max(0, int(inputs.indices[-1][batch]))))
    values = {name: t[0 if len(t) == 1 else batch] for name, t in spec.pattern.values_of(inputs.indices).items()}
    pattern = spec.pattern.with_numbers(inputs.numbers) if spec.pattern.is_general else spec.pattern
    shown = [key for key in keys if bool(pattern.visible(query, key, *lengths, values))]
    block = spec.pattern.fixed_block
    if block is None:
        return shown

    def row(tensor: Any) -> Any:
        b, h = (0 if size == 1 else i for size, i in zip(tensor.shape, (batch, head // spec.pack_gqa), strict=False))
        return tensor[b, h, query // block.q].tolist()

    names = [tensor.name for tensor in spec.pattern.index_tensors]
    given = dict(zip(names, inputs.indices, strict=False))
    if spec.pattern.kind == "topk":
        return [key for entry in row(given["kv_indices"]) for key in shown if key // block.kv == entry]
    partial = row(given["kv_indices"])[: row(given["kv_num_blocks"])]
    full = row(given["full_kv_indices"])[: row(given["full_kv_num_blocks"])]
    if spec.pattern.masks_by_bits:
        words = row(given["mask_bits"])
        place = query % block.q * block.kv
        hidden = [
            {key for key in range(block.kv) if not words[i][(place + key) // 32] >> key % 32 & 1}
            for i in range(len(partial))
        ]
    else:
        hidden = [set() for _ in partial]
    first = [
        key
        for entry, never in zip(partial, hidden, strict=True)
        for key in shown
        if key // block.kv == entry and key % block.kv not in never
    ]
    return first + [key for entry in full for key in keys if key // block.kv == entry]


@pytest.mark.parametrize(
    ("spec", "lists"),
    [
        (spec_of(TOPK, pack_gqa=4), "repeated"),
        (spec_of(TOPK, pack_gqa=4, sink=True), "out_of_range"),
        (spec_of(LISTS, pack_gqa=4, softcap=2), "random"),
        (spec_of(BITS, pack_gqa=4), "random"),
        (spec_of(BITS, pack_gqa=4), "out_of_range"),
        (spec_of(TOPK, kv_lengths=True), "out_of_range"),
        (spec_of(LISTS, kv_lengths=True), "random"),
        (spec_of({"kind": "causal"}, kv_lengths=True), "random"),
        (spec_of({"kind": "prefix_lm"}, kv_lengths=True), "out_of_range"),
        (spec_of({"kind": "causal"}, softcap=1.5, sink=True), "random"),
        (spec_of({"kind": "prefix_lm"}, softcap=1.5), "random"),
        (spec_of({"kind": "prefix_lm"}), "out_of_range"),
        (spec_of({"kind": "sliding_window", "left": 3, "right": 0}, sink=True, pack_gqa=2), "random"),
        (spec_of({"kind": "sliding_window"}), "random"),
        (spec_of({"kind": "sink_window"}, kv_lengths=True), "out_of_range"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.pattern.kind,
)
def test_oracle(spec: AttentionSpec, lists: str) -> None:
    # More queries than keys where the pattern is causal: the first rows see nothing.
    case = fitted(Case("small", batch=2, heads=4, kv_heads=2, q_len=9, kv_len=7 if lists == "random" else 150), spec)
    inputs = make_inputs(spec, Case(**{**case.__dict__, "lists": lists}), CPU)
    out, lse, _ = oracle(spec, case, inputs)
    group = case.heads // case.kv_heads
    for batch, head, query in torch.cartesian_prod(*map(torch.arange, (case.batch, case.heads, case.q_len))).tolist():
        keys = seen_by(spec, inputs, (batch, head, query), (case.q_len, case.kv_len))
        q, k, v = (t.double() for t in (inputs.q, inputs.k, inputs.v))
        logits = [
            float(q[batch, head, query] @ k[batch, head // group, key]) / math.sqrt(spec.head_dim) for key in keys
        ]
        if spec.softcap is not None:
            logits = [spec.softcap * math.tanh(logit / spec.softcap) for logit in logits]
        total = sum(map(math.exp, logits)) + (math.exp(float(inputs.sink[head])) if spec.sink else 0.0)
        row = torch.zeros(spec.head_dim, dtype=torch.float64)
        for key, logit in zip(keys, logits, strict=True):
            row += math.exp(logit) / total * v[batch, head // group, key]
        torch.testing.assert_close(out[batch, head, query], row)
        assert float(lse[batch, head, query]) == pytest.approx(math.log(total) if total else -math.inf)


@every_source
def test_every_case_has_whole_packs(named: Any) -> None:
    if not isinstance(named.spec, AttentionSpec):
        pytest.skip("not attention")
    cases = cases_of(named.spec)
    assert len({case.name for case in cases}) == len(cases) >= len(CASES)
    for case in cases:
        assert case.heads // case.kv_heads % named.spec.pack_gqa == 0 == case.heads % case.kv_heads
    if named.spec.pack_gqa == 1:
        assert tuple(replace(case, window=None, sink_keys=None) for case in cases[: len(CASES)]) == CASES


def kernel_of(name: str) -> AttentionKernel:
    """A kernel that is never launched, so it need not be compiled."""
    named = find_spec(name)
    return AttentionKernel(SimpleNamespace(named=named, plan=plan_for(named)), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("transposed", [False, True])
def test_packed_rows_are_queries_and_heads(transposed: bool) -> None:
    kernel = kernel_of("h100_topk32_gqa8_b64")
    q = torch.arange(2 * 16 * 5 * 128).view(2, 16, 5, 128)
    q = q.transpose(1, 2).contiguous().transpose(1, 2) if transposed else q
    mapped = kernel._mapped({"q": q, "k": q, "v": q, "o": q})
    assert mapped["k"] is mapped["v"] is q
    assert mapped["q"].shape == mapped["o"].shape == (2, 2, 5, 8, 128)
    assert mapped["q"].data_ptr() == q.data_ptr()
    for pack, query, head in ((0, 0, 0), (1, 4, 7), (0, 3, 5)):
        assert torch.equal(mapped["q"][1, pack, query, head], q[1, pack * 8 + head, query])


def test_other_kernels_map_their_tensors_as_they_are() -> None:
    tensors = {"q": torch.zeros(1, 2, 3, 128)}
    for name in ("h100_topk32", "l4_topk32"):
        assert kernel_of(name)._mapped(tensors) == tensors


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("h100_bsr_spmm_b16_balanced", [case.name for case in bsr_spmm.CUT_CASES]),
        ("h100_bsr_spmm_b16_gathered", [case.name for case in bsr_spmm.GATHER_CASES]),
        ("h100_bsr_spmm_b32_gathered", [case.name for case in bsr_spmm.GATHER_CASES]),
        ("l4_bsr_spmm_b64", ["several_groups"]),
        ("l4_bsr_spmm_wmma_b16", []),
        ("h100_bsr_spmm_b128_transposed", []),
    ],
)
def test_products_have_the_cases_of_their_kind(name: str, more: list[str]) -> None:
    assert [case.name for case in bsr_spmm.cases_of(plan_for(find_spec(name)))] == [
        case.name for case in bsr_spmm.CASES
    ] + more


BY_WGMMA = [named for named in shipped_specs() if isinstance(named.spec, BsrSpmmSpec) and named.spec.mma == "wgmma"]


@for_each("named", lambda: BY_WGMMA, lambda named: named.stem)
def test_tiles_that_are_taken_in_groups_have_a_case_with_two_and_a_part(named: Any) -> None:
    spec = named.spec
    group = {param.name for param in plan_for(named).params} & {"group_tiles"}
    cases = [case for case in bsr_spmm.cases_of(plan_for(named)) if case.name == "several_groups"]
    if not cases:
        return
    (case,) = cases
    width = group_tiles(spec, case.block_columns * spec.block.cols) * spec.tile.n
    assert group and width < case.n and 2 * width < case.n < 3 * width


def test_even_rows_have_half_of_the_blocks() -> None:
    plan = plan_for(find_spec("h100_bsr_spmm_b64"))
    case = bsr_spmm.Case("even", block_rows=5, block_columns=8, n=8, row_counts="even")
    counts = bsr_spmm.row_counts(plan, case, torch.Generator().manual_seed(0), CPU)
    assert counts.tolist() == [4] * 5


@pytest.mark.parametrize("name", ["l4_bsr_spmm_b64", "l4_bsr_spmm_b16"])
def test_a_matrix_of_several_groups_of_block_rows(name: str) -> None:
    spec = find_spec(name).spec
    assert isinstance(spec, BsrSpmmSpec)
    case = bsr_spmm.cases_of(plan_for(find_spec(name)))[-1]
    assert case.name == "several_groups" and case.row_counts == "random"  # half of the blocks: 32 MB
    assert (case.block_rows * spec.block.rows, case.block_columns * spec.block.cols) == (4096, 8192)
