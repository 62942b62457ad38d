"""Renders, compiles and checks kernels of the added pattern, within a copy of the project."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import test_key_blocks
import test_query_blocks
import torch

from codegen.library import find_spec
from codegen.plan import Plan
from runtime import explain_attention
from runtime.compile.compiler import compile_spec
from runtime.patterns import Anticausal

PATTERN = {"kind": "anticausal"}
FORWARD = {"op": "attention", "dtype": "bf16", "head_dim": 64, "pattern": PATTERN}
SM90A = {**FORWARD, "arch": "sm_90a", "tile": {"m": 128, "n": 128}, "schedule": "ping_pong"}
SM89 = {**FORWARD, "arch": "sm_89", "tile": {"m": 64, "n": 64}, "mma": "mma"}
GRADIENT = {**FORWARD, "op": "attention_backward", "arch": "sm_90a", "gradients": "dkdv", "tile": {"m": 64, "n": 128}}


def compiled_program(text: str, name: str) -> Path:
    """Path of a host program."""
    source = Path(f"{name}.cpp")
    source.write_text(text, encoding="utf-8")
    subprocess.run(["g++", "-std=c++17", "-O1", "-Wall", source, "-o", name], check=True)
    return Path(name).absolute()


def check_pairs() -> None:
    """Compare the pairs that the templates walk over with the definition."""
    keys = [test_key_blocks.plan_of(PATTERN, *tile) for tile in test_key_blocks.TILES]
    queries = [test_query_blocks.plan_of(PATTERN, *tile) for tile in test_query_blocks.TILES]
    for module, plans in ((test_key_blocks, keys), (test_query_blocks, queries)):
        program = compiled_program(module.program(plans), module.__name__)
        for index, plan in enumerate(plans):
            assert isinstance(plan, Plan)
            module.check([program, str(index)], plan)


def main() -> None:
    """Run all of it."""
    check_pairs()
    for fields in (SM90A, SM89, GRADIENT):
        code = compile_spec(find_spec(fields), "cubin").code
        assert code.startswith(b"\x7fELF"), fields
    q = torch.empty(1, 4, 512, 64, dtype=torch.bfloat16, device="meta")
    sys.stdout.write(str(explain_attention(q, q, q, Anticausal(), arch="sm_90a", gradients=True)))


if __name__ == "__main__":
    sys.exit(main())
