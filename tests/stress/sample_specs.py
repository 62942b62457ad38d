"""Draws specs that are accepted, plans and renders each, and compiles some of them with NVRTC. Needs no GPU.

    python tests/stress/sample_specs.py --plan 10000 --compile 500 --seed 1

The first ones that were drawn are compiled; those of an architecture that the compiler is too old for are left out.
Prints a line for each that fails, with the spec: it has no plan within its architecture's limits, no source, does not
compile, or has spills or a stack frame. The last line tells how many there were, the seed, and the compiler, which is
that of the environment; exit code 1 if one failed. With --seconds it compiles as many as that time allows.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from drawn_specs import Drawing, draw  # noqa: E402 - not installed

from codegen.arch import ARCHS  # noqa: E402
from codegen.errors import CodegenError  # noqa: E402
from codegen.library import NamedSpec  # noqa: E402
from codegen.tools.explain import launch_registers  # noqa: E402
from runtime.compile import toolchain  # noqa: E402
from runtime.compile.compiler import Compiled, compile_spec  # noqa: E402
from runtime.compile.inspection import resources  # noqa: E402

REPORT_SECONDS = 30


def fits_the_compiler(named: NamedSpec) -> bool:
    """Return whether the compiler of the environment knows the architecture."""
    return toolchain.nvrtc().version >= ARCHS[named.spec.arch].since_cuda


def what_is_wrong(named: NamedSpec) -> str:
    """Compile a spec; return why that fails or what the kernel keeps in local memory, or "" if neither."""
    try:
        return _spills(compile_spec(named))
    except CodegenError as error:
        return f"{named.stem}: {error}; {named.spec.canonical_json()}"


def _spills(compiled: Compiled) -> str:
    used, registers = resources(compiled), compiled.plan.registers
    if used.spill_bytes == used.stack_bytes == 0:
        return ""
    return (
        f"{compiled.named.stem}: {used.spill_bytes} bytes of spill stores and loads, {used.stack_bytes} of stack; "
        f"{used.registers} registers at launch of {launch_registers(compiled.plan)}; the plan reckons with "
        f"{registers.needed} of {registers.limit}; {compiled.named.spec.canonical_json()}"
    )


class Progress:
    """Says on stderr how far it is, twice a minute."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def __call__(self, done: int, of: int, what: str) -> None:
        if time.monotonic() - self._told > REPORT_SECONDS:
            self._told = time.monotonic()
            print(f"{what}: {done} of {of}", file=sys.stderr, flush=True)


def compile_all(specs: list[NamedSpec], jobs: int, seconds: float) -> tuple[int, int]:
    """Compile specs, and print what is wrong with them; return how many were compiled, and how many failed."""
    until, compiled, failed, progress = time.monotonic() + seconds, 0, 0, Progress()

    def one(named: NamedSpec) -> str | None:
        return what_is_wrong(named) if time.monotonic() < until else None

    with ThreadPoolExecutor(jobs) as pool:
        for wrong in pool.map(one, specs):
            compiled += wrong is not None
            if wrong:
                failed += 1
                print(f"FAILED {wrong}", flush=True)
            progress(compiled, len(specs), "compiled")
    return compiled, failed


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=int, default=200, help="specs to plan and render (200)")
    parser.add_argument("--compile", type=int, help="of them, how many to compile (all)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time (all cores)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no compilation after this time")
    options = parser.parse_args(arguments)
    progress = Progress()

    def step(drawing: Drawing) -> None:
        progress(len(drawing.specs), options.plan, "planned")

    drawing = draw(options.plan, options.seed, step)
    for failure in drawing.failures:
        print(f"FAILED {failure}", flush=True)
    planned, without = len(drawing.specs), len(drawing.failures)
    print(f"{planned} specs planned and rendered of {drawing.draws} drawn, {without} failures; seed {options.seed}")
    wanted = drawing.specs[: options.compile]
    specs = list(filter(fits_the_compiler, wanted))
    compiled, failed = compile_all(specs, options.jobs, options.seconds)
    print(
        f"{compiled} of them compiled, {failed} failures, spills or stack frames; "
        f"{len(specs) - compiled} not reached, {len(wanted) - len(specs)} of architectures that it does not know; "
        f"{' '.join(toolchain.compiler_version())}"
    )
    return int(without + failed > 0)


if __name__ == "__main__":
    sys.exit(main())
