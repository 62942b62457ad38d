"""Kernels whose mask is an expression compile, whatever it calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from compiled_code import code_key

from codegen.library import find_spec
from codegen.render import generate
from runtime.compile.compiler import compile_spec

pytestmark = pytest.mark.nvrtc

EVERYTHING = (
    "log2(float(q_idx + 1)) < exp(c[kv_idx]) + tanh(c[q_idx]) and max(c[kv_idx], -1.5) > c[7] "
    "and min(float(kv_idx), c[3]) != sqrt(c[5]) and int(c[head]) // 3 > -5 and q_idx % max(kv_idx, 1) != 2 "
    "and where(q_idx > kv_idx, c[kv_idx], -inf) < inf"
)
KERNELS: tuple[dict[str, Any], ...] = (
    {"op": "attention", "arch": "sm_90a"},
    {"op": "attention", "arch": "sm_89"},
    *(
        {"op": "attention_backward", "arch": arch, "gradients": gradients}
        for arch in ("sm_90a", "sm_89")
        for gradients in ("dq", "dkdv")
    ),
)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: " ".join(kernel.values()))
def test_a_mask_that_calls_everything(kernel: dict[str, Any], recorded: Callable[..., None]) -> None:
    pattern = {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": EVERYTHING, "aux": {"c": "fp32[64]"}}
    named = find_spec({**kernel, "dtype": "bf16", "head_dim": 64, "pattern": pattern})
    recorded(generate(named).source, code_key(generate(named)))
    compiled = compile_spec(named)
    assert "warning" not in compiled.log
    assert not any(map(int, re.findall(r"(\d+) bytes spill", compiled.log)))
