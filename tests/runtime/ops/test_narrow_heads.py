"""Heads of 72 and 80: kernels of their own where one is shipped, those of 96 elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from codegen.errors import SpecError  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.planning import plan_for  # noqa: E402
from runtime import explain_attention  # noqa: E402
from runtime.patterns import Causal, Dense, SlidingWindow, TopK  # noqa: E402

LISTS = TopK(torch.empty(1, 1, 8, 4, dtype=torch.int32, device="meta"))


def head_dim_of(head_dim: int, pattern: Any, arch: str = "sm_90a", **options: Any) -> int:
    """The head size of the kernel of a call in bf16."""
    q, k, v = (torch.empty(1, 4, 1024, head_dim, dtype=torch.bfloat16, device="meta") for _ in range(3))
    spec: Any = explain_attention(q, k, v, pattern, arch=arch, **options).choice.spec
    return int(spec.head_dim)


@pytest.mark.parametrize("pattern", [Dense(), Causal(), SlidingWindow(100)], ids=["dense", "causal", "window"])
@pytest.mark.parametrize(("head_dim", "found"), [(64, 64), (72, 80), (80, 80), (88, 96), (96, 96)])
def test_the_kernel_has_the_fewest_columns_that_fit(pattern: Any, head_dim: int, found: int) -> None:
    assert head_dim_of(head_dim, pattern) == found


def test_without_a_shipped_kernel_heads_are_filled_up_to_96() -> None:
    assert head_dim_of(80, LISTS) == 96
    assert head_dim_of(80, Causal(), softcap=30.0) == 96
    assert head_dim_of(80, Causal(), arch="sm_89") == 96


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"arch": "sm_89", "mma": "mma", "copy": "cp_async", "schedule": "multistage"}, "mma"),
        ({"arch": "sm_90a", "dtype": "e4m3"}, "dtype e4m3"),
    ],
)
def test_other_kernels_refuse_heads_of_80(fields: dict[str, Any], option: str) -> None:
    with pytest.raises(SpecError, match=f"^head_dim: is 80; allowed with {option}: 64, 96, 128, 192, 256$"):
        plan_for(find_spec({"op": "attention", "head_dim": 80, "pattern": {"kind": "causal"}, **fields}))
