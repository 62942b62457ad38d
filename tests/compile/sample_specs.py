"""Draws specs that are accepted, compiles each with NVRTC, and reports which of them spill. Needs no GPU.

    python tests/compile/sample_specs.py --count 200 --seed 1

The same seed gives the same specs as long as plans accept the same; those of an architecture that the compiler is too
old for are drawn, and not compiled. Prints a line for each kernel that has spills or a
stack frame, with the plan's figure and the spec, and at the end how many there are; exit code 1 if there is one. The
compiler is that of the environment, which the last line names.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from likely_specs import accepted_specs  # noqa: E402 - not installed

from codegen.arch import ARCHS  # noqa: E402
from codegen.explain import launch_registers  # noqa: E402
from codegen.library import NamedSpec  # noqa: E402
from runtime.compile import toolchain  # noqa: E402
from runtime.compile.compiler import Compiled, compile_spec  # noqa: E402
from runtime.compile.inspection import resources  # noqa: E402


def fits_the_compiler(named: NamedSpec) -> bool:
    """Return whether the compiler of the environment knows the architecture."""
    return toolchain.nvrtc().version >= ARCHS[named.spec.arch].since_cuda


def what_is_wrong(compiled: Compiled) -> str:
    """Return what a kernel keeps in local memory, or "" if that is nothing."""
    used, registers = resources(compiled), compiled.plan.registers
    if used.spill_bytes == used.stack_bytes == 0:
        return ""
    return (
        f"{compiled.named.stem}: {used.spill_bytes} bytes of spill stores and loads, {used.stack_bytes} of stack; "
        f"{used.registers} registers at launch of {launch_registers(compiled.plan)}; the plan reckons with "
        f"{registers.needed} of {registers.limit}; {compiled.named.spec.canonical_json()}"
    )


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="specs (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilations at a time (all cores)")
    options = parser.parse_args()
    drawn = accepted_specs(options.count, options.seed)
    specs = list(filter(fits_the_compiler, drawn))
    spilling = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for done, future in enumerate(as_completed([pool.submit(compile_spec, named) for named in specs]), 1):
            if sys.stderr.isatty():
                print(f"\r{done} of {len(specs)}", end="\r", file=sys.stderr, flush=True)
            if wrong := what_is_wrong(future.result()):
                spilling += 1
                print(wrong, flush=True)
    compiler = " ".join(toolchain.compiler_version())
    left_out = f" ({len(drawn) - len(specs)} more are of architectures that it does not know)"
    told = f"{len(specs)} specs, {spilling} with spills or a stack frame; seed {options.seed}, {compiler}"
    print(told + left_out * (len(specs) < len(drawn)))
    return int(spilling > 0)


if __name__ == "__main__":
    sys.exit(main())
