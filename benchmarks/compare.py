"""Times variants of a row's kernel beside each other, as the figures of the ladders are taken.

    python benchmarks/compare.py topk32 schedule=cooperative tile.n=64,stages=4
    python benchmarks/compare.py topk32 stages=3 --data std4
    python benchmarks/compare.py spmm_b64 tile.n=256,tile.k=64,stages=4 templates=../before/templates

The row is one of attention.py or of bsr.py. Its own kernel comes first; each further argument is a variant: fields of
the spec, dotted, and ``templates``, a folder to render from instead of the project's. A result is compared with the
exact one before it is timed. Printed are effective TFLOPS of calls back to back and, in brackets, of single ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attention
import bsr
import torch
from harness import OURS, TOLERANCE, Fields, reason
from records import PLAIN

import codegen.render
from codegen.parse import parse_spec
from codegen.spec import AttentionSpec
from runtime.tools.bench.data_sets import DATA
from runtime.tools.bench.timing import Call, back_to_back, single_calls

ROWS = {row.name: (module, row) for module in (bsr, attention) for row in module.ROWS}


@dataclass(frozen=True)
class Variant:
    """A kernel beside the row's own: its name in the table, what its spec has otherwise, where its templates are."""

    label: str
    fields: Fields
    templates: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read ``field=value,...``; a value is JSON, or a word."""
        fields: Fields = {}
        templates = None
        for part in text.split(","):
            name, equals, value = part.partition("=")
            if not (name and equals and value):
                raise argparse.ArgumentTypeError(f"{part!r}: a variant is field=value,field=value,...")
            if name == "templates":
                templates = Path(value)
                if not templates.is_dir():
                    raise argparse.ArgumentTypeError(f"templates: {value} is no folder")
                continue
            try:
                fields[name] = json.loads(value)
            except json.JSONDecodeError:
                fields[name] = value
        return cls(text, fields, templates)

    def applied(self, fields: Fields) -> Fields:
        """A spec's fields with those of the variant in their place."""
        changed: Fields = json.loads(json.dumps(fields))
        for name, value in self.fields.items():
            *parents, last = name.split(".")
            inner = changed
            for parent in parents:
                inner = inner.setdefault(parent, {})
            inner[last] = value
        return changed


@contextmanager
def rendered_from(templates: Path | None) -> Iterator[None]:
    """Have kernels rendered from other templates; what was rendered before is forgotten, and again afterwards."""
    if templates is None:
        yield
        return
    codegen.render.generate.cache_clear()
    try:
        with patch.object(codegen.render, "TEMPLATES", templates.resolve()):
            yield
    finally:
        codegen.render.generate.cache_clear()


def problem_of(name: str, data: str) -> tuple[Any, float, Callable[[Any, torch.Tensor], float]]:
    """A row's problem, its FLOPs, and what measures the error of a result."""
    module, row = ROWS[name]
    if module is attention:
        row = replace(row, data=data)
        spec = parse_spec(row.fields)
        assert isinstance(spec, AttentionSpec)
        problem = attention.make_problem(row, spec)
        return problem, attention.flops(row, spec, problem.lists), attention.largest_error
    problem = bsr.make_problem(row)
    return problem, bsr.flops(problem), lambda problem, out: bsr.largest_error(problem, OURS, out)


def compare(name: str, variants: Sequence[Variant], data: str = PLAIN) -> list[str]:
    """Make, check and time the variants of a row; return a line for each."""
    module, _ = ROWS[name]
    problem, work, error_of = problem_of(name, data)
    base = json.loads(problem.spec.canonical_json())
    calls: dict[str, Call] = {}
    failed: dict[str, str] = {}
    for variant in variants:
        try:
            own = replace(problem, spec=parse_spec(variant.applied(base)))
            with rendered_from(variant.templates):
                call = module.ours(own)[OURS]
            error = error_of(own, call())
        except Exception as failure:
            failed[variant.label] = reason(failure)
            continue
        if error <= TOLERANCE:
            calls[variant.label] = call
        else:
            failed[variant.label] = f"wrong result: off by {error:.1e} of the largest element"
    by_call, in_a_row = single_calls(calls), back_to_back(calls)
    lines = [f"{label}: {work / in_a_row[label] / 1e9:.0f} ({work / by_call[label] / 1e9:.0f})" for label in calls]
    return [*lines, *(f"{label}: no time: {why}" for label, why in failed.items())]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("row", choices=ROWS, metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("variants", nargs="*", type=Variant.parse, metavar="FIELD=VALUE,...", help="kernels beside it")
    parser.add_argument("--data", choices=DATA, default=PLAIN, metavar="NAME", help=f"of {', '.join(DATA)}")
    options = parser.parse_args(arguments)
    if options.data != PLAIN and ROWS[options.row][0] is bsr:
        parser.error(f"--data is {options.data}; allowed for a row of bsr.py: {PLAIN}")
    return options


@torch.no_grad()
def main() -> None:
    options = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU")
    print(f"{options.row} on {torch.cuda.get_device_name()}: {options.data}, TFLOPS back to back (single calls)")
    for line in compare(options.row, [Variant("as it is", {}), *options.variants], options.data):
        print(f"  {line}")


if __name__ == "__main__":
    main()
