"""``codegen new``: a spec file for a problem, chosen by ``codegen.select``, with the reasons."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen.arch import KIB
from codegen.devices import arch_of
from codegen.errors import MOST_OF_PLACE, CodegenError, SpecError
from codegen.files import holds, is_file
from codegen.library import NamedSpec, find_spec, read_spec, shipped_specs
from codegen.plan import Plan
from codegen.receipts import state
from codegen.render import generate, render
from codegen.select.choice import Choice, choose, planned
from codegen.select.problem import BsrProblem, Problem, parse_problem, problem_fields
from codegen.select.table import measurements
from codegen.spec import Spec
from codegen.tools.explain import occupancy
from codegen.wording import in_comment, one_line, shown
from codegen.yaml_text import flow_text

SUFFIXES = (".yaml", ".yml")
SIZES = ("batch x heads", "q_len", "kv_len", "m", "n", "k")
"""Axes of a problem that are sizes."""
ATTENTION_SIZES = "heads=16,q_len=8192,kv_len=8192"
BSR_SIZES = "m=4096,n=4096,k=4096,density=0.1"
"""Sizes of a problem, as an example."""
_WIDTH = 118  # columns of a comment's text


@dataclass(frozen=True)
class NewSpec:
    """A spec file before it is written.

    Attributes:
        named: the spec, named by its file.
        text: contents of the file.
        problem: its problem.
        choice: the choice of its kernel.
        plan: its plan.
    """

    named: NamedSpec
    text: str
    problem: Problem
    choice: Choice
    plan: Plan

    @property
    def shipped(self) -> str:
        """Name of the shipped kernel with the same spec, or ""."""
        return next((each.stem for each in shipped_specs() if each.spec == self.named.spec), "")

    @property
    def _sizes(self) -> str:
        """Size fields of the problem, as ``--problem`` takes them."""
        return f"{BSR_SIZES if isinstance(self.problem, BsrProblem) else ATTENTION_SIZES},..."

    @property
    def _receipt(self) -> str:
        """State of the shipped kernel's receipt, in a sentence."""
        named = find_spec(self.shipped)
        found = state(named, render(named))
        return f"Its receipt: {found.standing.value}, {found.explanation}"

    def reasons(self) -> dict[str, str]:
        """Reasons for the spec, by their subjects."""
        told = {"problem": str(self.problem), "chosen by": f"{self.choice.rule}: {self.choice.reason}"}
        if not any(place is not None for name, place in self.problem.places().items() if name in SIZES):
            told["sizes"] = f"not given, so they did not decide; to give them: --problem {self._sizes}"
        if self.choice.dense:
            told["dense"] = f"a dense product is faster there: {self.choice.dense}"
        if self.shipped:
            told["shipped"] = f"{self.shipped} is the same kernel: use that name. {self._receipt}"
        room = self.plan.arch.shared_memory_per_block
        told["tile"] = ", ".join(f"{name} {size}" for name, size in self.plan.spec.tile.model_dump().items())
        told["shared memory"] = f"{self.plan.shared_bytes / KIB:.1f} of {room / KIB:.0f} KB"
        registers = self.plan.registers
        told["registers"] = f"{registers.accumulators} of {registers.limit} for accumulators and fragments"
        told["occupancy"] = occupancy(self.plan)
        return told


def problem_asked_for(
    device: str | None, head_dim: int | None, pattern: str | None, rest: str | None
) -> tuple[Problem, str | None]:
    """The problem that the command's options describe, and the device by its name in the table of measurements.

    Args:
        device: a GPU or an architecture.
        head_dim: elements per head.
        pattern: kind and fields, such as ``topk,k=32,block=128``.
        rest: other fields of the problem: ``FIELD=VALUE,...``.

    Raises:
        SpecError: for an option that is missing, given twice or illegal.
    """
    told = dict(problem_fields(rest or ""))
    given = {"arch": device and arch_of(device), "head_dim": head_dim, "pattern": pattern and pattern_fields(pattern)}
    for name, value in given.items():
        if value is not None and name in told:
            raise SpecError(f"problem.{name}", "is given twice: as an option and in --problem")
        if value is not None:
            told[name] = value
    if "arch" not in told:
        raise SpecError("--device", "is missing; name a GPU or an architecture, or use --interactive")
    attention = told.get("op", "attention") == "attention"
    for name in ("head_dim", "pattern") if attention else ():
        if name not in told:
            raise SpecError(f"--{name.replace('_', '-')}", "is missing; give it, or use --interactive")
    return parse_problem({"op": "attention", **told}), _measured_device(device)


def pattern_fields(text: str) -> Any:
    """Fields of a pattern from a command line: its kind, followed by its fields.

    Raises:
        SpecError: for a part that is not FIELD=VALUE.
    """
    kind, comma, rest = text.replace(" ", "").partition(",")
    fields = "".join(f",pattern.{part}" for part in rest.split(",")) if comma else ""
    return problem_fields(f"pattern={kind}{fields}")["pattern"]


def _measured_device(device: str | None) -> str | None:
    """Name of a device in rows of the table, if they have it."""
    words = re.findall(r"\w+", device or "")
    names = sorted({row.device for row in measurements()})
    return next((name for name in names if words and words[-1].lower() in name.lower().split()), None)


def new_spec(path: Path, problem: Problem, device: str | None = None) -> NewSpec:
    """Choose a kernel for a problem, and return the file for its spec.

    Raises:
        SpecError: for an illegal name, or a problem without a kernel.
    """
    if path.suffix not in SUFFIXES:
        raise SpecError("FILE", f"is {shown(str(path))}; the name of a spec file ends in {' or '.join(SUFFIXES)}")
    choice = planned(choose(problem, device=device))
    text = text_of(problem, choice)
    named = read_spec(path, text)
    if named.spec != choice.spec:  # YAML reads a value differently
        raise SpecError("", "the file would not hold the chosen spec", str(path))
    return NewSpec(named, text, problem, choice, generate(named).plan)


def check_may_write(path: Path, text: str | None, *, force: bool) -> None:
    """Reject overwriting a file that has other contents than a text.

    Raises:
        CodegenError: unless ``force`` is set.
    """
    if is_file(path) and not force and (text is None or not holds(path, text)):
        place = one_line(str(path), MOST_OF_PLACE)
        raise CodegenError(f"{place} exists and was not changed; --force overwrites it")


def text_of(problem: Problem, choice: Choice) -> str:
    """Text of a spec file, with its purpose as a comment at the top."""
    remarks = [f"For {problem}.", f"Chosen by codegen new ({choice.rule}): {choice.reason}."]
    comments = [line for remark in remarks for line in textwrap.wrap(in_comment(remark), _WIDTH)]
    return "\n".join(f"# {line}" for line in comments) + "\n" + yaml_of(choice.spec)


def yaml_of(spec: Spec) -> str:
    """Spec as YAML, without options that are off."""
    used = json.loads(spec.canonical_json())
    every = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    fields = {name: value for name, value in every.items() if name in used}
    return "".join(f"{name}: {flow_text(fields[name])}\n" for name in _order(spec, fields))


def _order(spec: Spec, fields: Mapping[str, Any]) -> list[str]:
    """Fields of a spec: the problem, the tuning, then options."""
    names = [field.alias or name for name, field in type(spec).model_fields.items()]
    places = {**dict.fromkeys(spec.options, 3), **dict.fromkeys(("tile", "mma", "copy", "schedule", "stages"), 2)}
    first = ("op", "arch", "dtype")
    ordered = sorted(names, key=lambda name: (0, first.index(name)) if name in first else (places.get(name, 1), 0))
    return [name for name in ordered if name in fields]
