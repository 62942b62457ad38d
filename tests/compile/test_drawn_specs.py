"""Specs drawn by the day compile without spills."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compile import sample_specs
from drawn_specs import SUITE, command, draw

from runtime.compile.compiler import Compiled
from runtime.compile.inspection import Usage, resources


@pytest.mark.parametrize("number", range(SUITE["compile"]))
def test_drawn_specs_compile_without_spills(number: int, request: pytest.FixtureRequest) -> None:
    """``python tests/compile/sample_specs.py --plan 10000 --compile 500`` has more."""
    seed = request.config.option.kernel_seed
    named = draw(number + 1, seed).specs[number]
    if not sample_specs.fits_the_compiler(named):
        pytest.skip(f"NVRTC does not know {named.spec.arch}")
    wrong = sample_specs.what_is_wrong(named)
    assert not wrong, f"{wrong}; the same again: {command(seed)}"


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
