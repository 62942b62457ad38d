"""Gradients of packed sequences, compiled: none of a sample of patterns, head sizes and options spills.

The whole product is 272 kernels, and takes three minutes: ``SAMPLE`` of them are drawn by ``--kernel-seed``.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from codegen.errors import SpecError
from codegen.library import NamedSpec, find_spec
from codegen.planning import plan_for
from runtime.compile.compiler import compile_spec
from runtime.compile.inspection import resources

pytestmark = pytest.mark.nvrtc
SAMPLE = 10
PATTERNS: tuple[dict[str, Any], ...] = (
    {"kind": "dense"},
    {"kind": "causal"},
    {"kind": "causal", "align": "top_left"},
    {"kind": "sliding_window"},
    {"kind": "sliding_window", "left": 255, "right": 0},
    {"kind": "sink_window"},
    {"kind": "sink_window", "sink": 4, "left": 511, "right": 0},
)
PRODUCT = list(
    itertools.product(
        ("sm_90a", "sm_89"),
        ("dq", "dkdv", "dq_dkdv"),
        (64, 96, 128, 192, 256),
        PATTERNS,
        ("fp16", "bf16"),
        (None, 30.0),
    )
)


def planned(number: int, seed: int) -> NamedSpec:
    """The spec of a number: those that no kernel is written for are passed over."""
    draw = random.Random(f"{seed} {number}")
    while True:
        arch, gradients, head_dim, pattern, dtype, softcap = draw.choice(PRODUCT)
        fields = {"op": "attention_backward", "layout": "varlen", "arch": arch, "gradients": gradients}
        fields |= {"head_dim": head_dim, "pattern": pattern, "dtype": dtype, "softcap": softcap}
        try:
            named = find_spec(fields)
            plan_for(named)
        except SpecError:
            continue
        return named


@pytest.mark.parametrize("number", range(SAMPLE))
def test_no_kernel_spills(number: int, request: pytest.FixtureRequest) -> None:
    named = planned(number, request.config.option.kernel_seed)
    compiled = compile_spec(named)
    used = resources(compiled)
    assert (used.spill_bytes, used.stack_bytes) == (0, 0), named.spec.canonical_json()
    assert "warning" not in compiled.log.lower(), compiled.log
