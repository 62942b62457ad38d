"""Paths whose bytes are no text in the locale: their names have surrogates, which no encoding writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from codegen import render
from codegen.library import NamedSpec
from codegen.planning import plan_for


def test_templates_are_read_wherever_they_are(
    named: NamedSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout below such a folder renders the same source: in the C locale each letter beyond ASCII is one."""
    usual = render.render_plan(plan_for(named), named.origin)
    odd = tmp_path / os.fsdecode(b"\xff\xc3\xbc")
    odd.symlink_to(render.TEMPLATES)
    monkeypatch.setattr(render, "TEMPLATES", odd)
    assert render.render_plan(plan_for(named), named.origin) == usual
