"""Specs drawn by the day: what is accepted has a plan within its architecture's limits, and a source."""

from __future__ import annotations

from dataclasses import replace

import drawn_specs
import pytest
from drawn_specs import SUITE, command, draw, what_reads_otherwise

from codegen.library import NamedSpec, find_spec, shipped_specs
from codegen.plan import Plan
from codegen.planning import plan_for


def test_drawn_specs_have_plans_and_sources(request: pytest.FixtureRequest) -> None:
    """``python tests/stress/sample_specs.py --plan 10000`` has more."""
    seed = request.config.option.kernel_seed
    drawing = draw(SUITE["plan"], seed)
    assert not drawing.failures, f"{drawing.failures}; the same again: {command(seed)}"
    assert len({named.spec.hash for named in drawing.specs}) == SUITE["plan"]


def test_a_seed_has_its_specs() -> None:
    first = [named.stem for named in draw(6, 20260101).specs]
    assert [named.stem for named in draw(3, 20260101).specs] == first[:3]
    assert [named.stem for named in draw(6, 20260102).specs] != first


def test_what_is_accepted_reads_its_own_json() -> None:
    """Those that are drawn do; here the operators and options that are not drawn, and what would be told."""
    for named in shipped_specs():
        assert not what_reads_otherwise(named.spec), named.stem
    spec = find_spec("h100_dense").spec
    stray = spec.model_copy(update={"stages": 9})
    assert what_reads_otherwise(stray).startswith("its own JSON is refused: stages: ")
    assert what_reads_otherwise(spec, "another") == "its own JSON has another source"


def test_a_failure_is_told_with_its_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(named: NamedSpec) -> Plan:
        plan = plan_for(named)
        calls.append(named)
        if len(calls) == 1:
            raise KeyError("absent")
        return replace(plan, threads=2048) if len(calls) == 2 else plan

    calls: list[NamedSpec] = []
    monkeypatch.setattr(drawn_specs, "plan_for", fails)
    drawing = draw(3, 0)
    assert [named.stem for named in drawing.specs] == [calls[2].stem]
    assert "KeyError: 'absent'; {'op'" in drawing.failures[0]
    assert drawing.failures[1].startswith(f"{calls[1].stem}: 2048 threads, at most 1024 are allowed; {{")
