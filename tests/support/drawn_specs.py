"""Specs that are accepted, drawn by a seeded generator from ``likely_specs``; each is planned and rendered.

The same seed gives the same specs as long as plans accept the same, and the first ones of a longer drawing are those of
a shorter one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from likely_specs import likely_fields

from codegen.errors import SpecError
from codegen.library import NamedSpec, unnamed_stem
from codegen.parse import parse_spec
from codegen.plain import json_value
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.render import render_plan, seal_is_intact
from codegen.spec import Spec

MOST_THREADS = 1024
SUITE = {"plan": 40, "compile": 3}
"""How many specs each run of the tests draws; others each day."""


@dataclass
class Drawing:
    """What a seed gave.

    Attributes:
        draws: how many specs were drawn, refused ones and such that were there already too.
        specs: those that are accepted, all different.
        failures: of those that are neither refused nor planned and rendered as they should be, what is wrong.
    """

    draws: int = 0
    specs: list[NamedSpec] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def draw(count: int, seed: int, step: Callable[[Drawing], object] = lambda drawing: None) -> Drawing:
    """Draw until so many specs were accepted or failed; call ``step`` after each."""
    generator, drawing, seen = random.Random(seed), Drawing(), set()
    while len(drawing.specs) + len(drawing.failures) < count:
        fields = likely_fields(generator.choice)
        drawing.draws += 1
        try:
            spec = parse_spec(fields)
            if spec.hash in seen:
                continue
            named = NamedSpec(unnamed_stem(spec), spec)
            plan = plan_for(named)
            seen.add(spec.hash)
            if wrong := what_is_wrong(plan):
                drawing.failures.append(f"{named.stem}: {wrong}; {spec.canonical_json()}")
            else:
                drawing.specs.append(named)
        except SpecError:
            continue
        except Exception as error:
            drawing.failures.append(f"{type(error).__name__}: {error}; {fields}")
        step(drawing)
    return drawing


def what_is_wrong(plan: Plan) -> str:
    """Return what a plan has that its architecture has not, or what is wrong with its source; "" if nothing is."""
    arch, registers = plan.arch, plan.registers
    if plan.shared_bytes > arch.shared_memory_per_block:
        return f"{plan.shared_bytes} bytes of shared memory, at most {arch.shared_memory_per_block} are allowed"
    if not registers.needed <= registers.limit <= arch.registers_per_thread:
        return f"{registers.needed} registers of {registers.limit}, at most {arch.registers_per_thread} are allowed"
    if plan.threads > MOST_THREADS:
        return f"{plan.threads} threads, at most {MOST_THREADS} are allowed"
    source = render_plan(plan)
    if not (source.isascii() and seal_is_intact(source)):
        return "its source is not sealed ASCII"
    return what_reads_otherwise(plan.spec, source)


def what_reads_otherwise(spec: Spec, source: str = "") -> str:
    """Return what differs in the spec that the canonical JSON of a spec is read as; "" if nothing does.

    Args:
        spec: that was accepted.
        source: that of its kernel; "": not looked at.
    """
    text = spec.canonical_json()
    try:
        again = parse_spec(json_value(text))
    except SpecError as error:
        return f"its own JSON is refused: {error}"
    if (again, again.hash, again.canonical_json()) != (spec, spec.hash, text):
        return f"its own JSON is another spec, {again.canonical_json()}"
    same = not source or render_plan(plan_for(NamedSpec(unnamed_stem(again), again))) == source
    return "" if same else "its own JSON has another source"


def command(seed: int) -> str:
    """Return the command that repeats what a run of the tests draws."""
    counts = " ".join(f"--{name} {count}" for name, count in SUITE.items())
    return f"python tests/stress/sample_specs.py {counts} --seed {seed}"
