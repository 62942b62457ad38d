"""Heads of fewer elements than a kernel's: columns that there are not count as zeros, are not read and not written."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from codegen.library import find_spec, unnamed_stem  # noqa: E402
from codegen.parse import parse_spec  # noqa: E402
from codegen.spec import AttentionSpec  # noqa: E402
from runtime import load_kernel  # noqa: E402
from runtime.kernels.attention import AttentionKernel  # noqa: E402
from runtime.verify.attention import Case, fitted, head_size_cases, run_case  # noqa: E402

HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
TOPK = {"kind": "topk", "k": 9, "block": {"q": 64, "kv": 64}}
WINDOW = {"kind": "sliding_window", "left": 200, "right": 3}
# Every head size, every pattern and every kernel template; bf16, packed heads, parts of keys, shared loads, a sink.
SM_90A: tuple[dict[str, Any], ...] = (
    {"head_dim": 64, "pattern": {"kind": "dense"}},
    {"head_dim": 96, "pattern": {"kind": "causal"}, "dtype": "bf16"},
    {"head_dim": 128, "pattern": {"kind": "dense"}},
    {"head_dim": 128, "pattern": {"kind": "causal"}, "pack_gqa": 4},
    {"head_dim": 128, "pattern": WINDOW, "softcap": 20.0},
    {"head_dim": 128, "pattern": {"kind": "prefix_lm"}},
    {"head_dim": 128, "pattern": {**TOPK, "block": {"q": 16, "kv": 64}}, "pack_gqa": 2},
    {"head_dim": 128, "pattern": TOPK, "share_kv_loads": True, "schedule": "cooperative", "tile": {"m": 128, "n": 64}},
    {"head_dim": 128, "pattern": TOPK, "kv_splits": 2, "schedule": "cooperative", "tile": {"m": 64, "n": 64}},
    {"head_dim": 128, "pattern": {"kind": "block_lists", "block": {"q": 128, "kv": 128}, "mask": "causal"}},
    {"head_dim": 192, "pattern": {"kind": "strided", "stride": 5, "local": 2, "block": 64}, "dtype": "bf16"},
    {"head_dim": 256, "pattern": {"kind": "sink_window", "sink": 4, "left": 200, "right": 0}, "sink": True},
)
PADDED: tuple[dict[str, Any], ...] = (
    {"head_dim": 64, "pattern": {"kind": "causal"}},
    {"head_dim": 96, "pattern": WINDOW, "dtype": "bf16"},
    {"head_dim": 128, "pattern": {"kind": "dense"}},
    {"head_dim": 128, "pattern": TOPK, "pack_gqa": 8},
    {"head_dim": 128, "pattern": {"kind": "causal"}, "mma": "wmma"},
    {"head_dim": 192, "pattern": {"kind": "prefix_lm"}, "sink": True},
    {"head_dim": 256, "pattern": {"kind": "block_lists", "block": {"q": 64, "kv": 32}, "mask": "causal"}},
)
KERNELS = [
    *(pytest.param({"op": "attention", "arch": "sm_90a", **fields}, marks=HOPPER) for fields in SM_90A),
    *({"op": "attention", "arch": "sm_89", "pad_heads": True, **fields} for fields in PADDED),
]


def stem(fields: dict[str, Any]) -> str:
    return unnamed_stem(parse_spec(fields))


def load(fields: dict[str, Any]) -> AttentionKernel:
    kernel = load_kernel(fields, forward_compatible=fields["arch"] != "sm_90a")
    assert isinstance(kernel, AttentionKernel)
    return kernel


def cases(spec: AttentionSpec) -> tuple[Case, ...]:
    """Return cases of the smaller head sizes, one of them with expanded K and V, one with few queries."""
    sizes = head_size_cases(spec)
    more = (
        Case("expanded_columns", batch=3, heads=8, q_len=130, kv_len=500, expanded=True, columns=24),
        Case("one_query_of_few_columns", batch=2, heads=8, q_len=1, kv_len=300, columns=48),
    )
    return (*sizes, *(fitted(case, spec) for case in more))


@pytest.mark.parametrize("fields", KERNELS, ids=stem)
def test_heads_of_fewer_elements(fields: dict[str, Any]) -> None:
    kernel = load(fields)
    outcomes = [run_case(kernel, case, torch.device("cuda", 0)) for case in cases(kernel.spec)]
    wrong = [outcome for outcome in outcomes if not outcome.passed]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("name", [pytest.param("h100_dense", marks=HOPPER), "padded"])
def test_zeros_in_place_of_the_columns_that_there_are_not_give_the_same(name: str) -> None:
    """Bit for bit, with the scale of the smaller head."""
    l4 = {**find_spec("l4_dense").spec.model_dump(mode="json", by_alias=True), "pad_heads": True}
    kernel = load_kernel(name if name != "padded" else l4, forward_compatible=True)
    assert isinstance(kernel, AttentionKernel)
    q, k, v = (torch.randn(2, 4, 333, 80, device="cuda").half() for _ in range(3))
    out, lse = kernel(q, k, v)
    wide = (torch.nn.functional.pad(t, (0, 48)) for t in (q, k, v))
    expected, expected_lse = kernel(*wide, scale=80**-0.5)
    assert lse is not None and expected_lse is not None
    assert out.shape == q.shape and out.is_contiguous()
    assert torch.equal(out, expected[..., :80]) and torch.equal(lse, expected_lse)
    assert not expected[..., 80:].any()
