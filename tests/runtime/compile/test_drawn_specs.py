"""Specs drawn by the day compile without spills."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn_specs import SUITE, command, draw
from stress import sample_specs

from codegen.errors import SpecError
from codegen.library import find_spec
from codegen.planning import plan_for
from runtime.compile.compiler import Compiled
from runtime.compile.inspection import Usage, resources

pytestmark = pytest.mark.nvrtc


@pytest.mark.parametrize("number", range(SUITE["compile"]))
def test_drawn_specs_compile_without_spills(number: int, request: pytest.FixtureRequest) -> None:
    """``python tests/stress/sample_specs.py --plan 10000 --compile 500`` has more."""
    seed = request.config.option.kernel_seed
    named = draw(number + 1, seed).specs[number]
    if not sample_specs.fits_the_compiler(named):
        pytest.skip(f"NVRTC does not know {named.spec.arch}")
    wrong = sample_specs.what_is_wrong(named)
    assert not wrong, f"{wrong}; the same again: {command(seed)}"


LISTS = {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "none"}
GRADIENT = {"op": "attention_backward", "arch": "sm_120", "dtype": "bf16", "gradients": "dkdv", "head_dim": 192}
PRODUCT = {"op": "bsr_spmm", "arch": "sm_90a", "dtype": "e4m3", "b_layout": "column_major", "mma": "mma"}
TABLE = {"value": "score + t[batch, head, q_idx, kv_idx]", "aux": {"t": "fp32[batch, heads, q_len, kv_len]"}}
PACKED = {"op": "attention", "arch": "sm_90a", "dtype": "e5m2", "head_dim": 128, "pack_gqa": 32, "score": TABLE}
WINDOW = {"kind": "sliding_window", "left": 200, "right": 9}
SPILLED = {
    "lists of gradients": GRADIENT | {"pattern": LISTS, "score": {"value": "score + log2(1.0 + abs(q_idx - kv_idx))"}},
    "lists with a mask": GRADIENT
    | {"pattern": LISTS | {"mask": "q_idx % 3 == kv_idx % 5"}, "score": {"value": "float(kv_idx)"}},
    "a product in FP8": PRODUCT | {"block": {"rows": 32, "cols": 128}, "tile": {"n": 128, "k": 128}},
    "packed heads and a table": PACKED | {"pattern": WINDOW},
}
"""Kernels that spilled: the lists in their prologue, the others in the main one."""


@pytest.mark.parametrize("name", SPILLED)
def test_what_spilled_does_no_more(name: str) -> None:
    named = find_spec(SPILLED[name])
    if not sample_specs.fits_the_compiler(named):
        pytest.skip(f"NVRTC does not know {named.spec.arch}")
    assert not sample_specs.what_is_wrong(named)


def test_what_would_spill_is_refused() -> None:
    with pytest.raises(SpecError, match=r"block\.rows: is 128; allowed with mma, e4m3 and sm_90a: 32 "):
        plan_for(find_spec(PRODUCT | {"block": {"rows": 128, "cols": 128}}))
    with pytest.raises(
        SpecError,
        match=r"tile\.n: is 128; with pack_gqa .*, a score that reads a table of four axes leaves registers for 64",
    ):
        plan_for(find_spec(PACKED | {"pattern": WINDOW, "tile": {"m": 128, "n": 128}}))


def test_a_spill_is_told_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def spilling(compiled: Compiled) -> Usage:
        return replace(resources(compiled), spill_bytes=8)

    monkeypatch.setattr(sample_specs, "resources", spilling)
    assert sample_specs.main(["--plan", "2", "--compile", "1", "--seed", "3"]) == 1
    told = capsys.readouterr().out.splitlines()
    stem = draw(1, 3).specs[0].stem
    assert told[0].startswith("2 specs planned and rendered of ") and told[0].endswith(" drawn, 0 failures; seed 3")
    assert told[1].startswith(f"FAILED {stem}: 8 bytes of spill stores and loads, 0 of stack; ")
    assert told[2].startswith("1 of them compiled, 1 failures, spills or stack frames; 0 not reached, 0 of arch")
