"""Kernels of block lists compile, whatever their mask calls."""

from __future__ import annotations

import pytest

from codegen.library import find_spec
from runtime.compile.compiler import compile_spec

pytestmark = pytest.mark.nvrtc

ONE_SIDE = (
    "log2(float(q_idx + 1)) < exp(c[kv_idx]) + tanh(c[q_idx]) and max(c[kv_idx], -1.5) > c[7] and kv_idx % 7 != 2 "
    "and min(float(kv_idx), c[3]) != sqrt(c[5]) and int(c[head]) // 3 > -5 "
    "and (on[batch] or where(on[q_idx], c[2], -inf) < 1)"
)
# What stays with pairs: operators on intervals of integers, of numbers and of truth values.
OF_PAIRS = (
    "(q_idx - kv_idx) % 3 + (q_idx - kv_idx) // 5 * (q_idx ^ kv_idx) >= (q_idx | kv_idx) - (q_idx & kv_idx) "
    "or (abs(q_idx - kv_idx) << 3) + ~(q_idx + kv_idx) > q_idx + kv_idx >> 2 "
    "or min(q_idx, kv_idx) != -max(q_idx, kv_idx) "
    "or where(q_idx == kv_idx, c[q_idx], -c[kv_idx]) * 2.0 - abs(c[q_idx] + c[kv_idx]) < max(min(c[0], c[kv_idx]), 1) "
    "or (bool(q_idx - kv_idx) ^ where(q_idx < kv_idx, on[q_idx], on[kv_idx])) "
    "and c[q_idx - kv_idx] == float(q_idx + kv_idx)"
)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
@pytest.mark.parametrize("mask", [ONE_SIDE, OF_PAIRS, "q_idx >= kv_idx"], ids=["one side", "pairs", "causal"])
def test_any_mask(mask: str, arch: str) -> None:
    aux = {name: each for name, each in {"c": "fp32[64]", "on": "bool[64]"}.items() if f"{name}[" in mask}
    pattern = {"kind": "block_lists", "block": {"q": 128, "kv": 64}, "mask": mask, "aux": aux}
    compiled = compile_spec(find_spec({"op": "block_mask", "arch": arch, "pattern": pattern}))
    assert "warning" not in compiled.log
