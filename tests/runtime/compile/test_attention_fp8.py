"""FP8 attention: registers suffice, by mma.sync and for the pipeline of wgmma too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from compiled_code import code_key
from fp8_specs import MMA_SYNC_KERNELS
from stress.sample_specs import fits_the_compiler

from codegen.library import find_spec
from codegen.render import generate
from runtime.compile.compiler import compile_spec
from runtime.compile.inspection import resources

pytestmark = pytest.mark.nvrtc

KERNELS: dict[str, dict[str, Any]] = {
    "dense": {"pattern": {"kind": "dense"}},
    "lists of 64": {"pattern": {"kind": "topk", "k": 32, "block": {"q": 64, "kv": 64}}},
    "two lists, a softcap": {
        "pattern": {"kind": "block_lists", "block": {"q": 128, "kv": 128}, "mask": "causal"},
        "softcap": 20.0,
    },
    "d 96, causal": {"pattern": {"kind": "causal"}, "head_dim": 96},
    "d 256": {"pattern": {"kind": "dense"}, "head_dim": 256},
    "promoted every 4 steps": {"pattern": {"kind": "dense"}, "accumulate_every": 4, "tile": {"m": 128, "n": 128}},
    "never promoted": {"pattern": {"kind": "dense"}, "accumulate_every": 0},
}


@pytest.mark.parametrize("name", KERNELS)
def test_products_are_not_serialized(name: str, recorded: Callable[..., None]) -> None:
    """ptxas waits for each wgmma by itself where it runs out of registers for several, and says so (C7511)."""
    named = find_spec({"op": "attention", "arch": "sm_90a", "dtype": "e4m3", "head_dim": 128, **KERNELS[name]})
    recorded(generate(named).source, code_key(generate(named)))
    compiled = compile_spec(named)
    assert "serialized" not in compiled.log
    assert resources(compiled).spill_bytes == 0


@pytest.mark.parametrize("arch", ["sm_89", "sm_120"])
@pytest.mark.parametrize("name", MMA_SYNC_KERNELS)
def test_mma_sync_does_not_spill(name: str, arch: str, recorded: Callable[..., None]) -> None:
    fields = {"op": "attention", "arch": arch, "dtype": "e4m3", "head_dim": 128, **MMA_SYNC_KERNELS[name]}
    named = find_spec(fields)
    if not fits_the_compiler(named):
        pytest.skip(f"the compiler does not know {arch}")
    recorded(generate(named).source, code_key(generate(named)))
    used = resources(compile_spec(named))
    assert (used.spill_bytes, used.stack_bytes) == (0, 0)
