"""Exports a kernel and builds examples/driver_api for it, as its Makefile does."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from codegen.library import find_spec
from codegen.render import generate
from codegen.tools.sized_launch import sized_launch
from runtime.compile import toolchain
from runtime.export import export

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "driver_api"
KERNEL = "h100_causal"
SIZES = {"batch": 2, "heads": 8, "kv_heads": 4, "q_len": 1000, "kv_len": 1300}
COMPILER = shutil.which(os.environ.get("CC", "cc"))


def cuda_headers() -> Path | None:
    """Return the folder that has cuda.h, if there is one."""
    folders = toolchain.include_folders(("cuda_runtime_api.h",))
    return next((folder for folder in folders if (folder / "cuda.h").is_file()), None)


def exported(out: Path, sm_count: int) -> Path:
    """Export the kernel of the example; return its folder."""
    named = find_spec(KERNEL)
    return export(named, out, sized_launch(generate(named).plan, SIZES, sm_count)).folder


def compiled(arguments: list[str], program: Path) -> Path:
    """Compile C without a warning; return the program."""
    headers = cuda_headers()
    assert COMPILER is not None and headers is not None
    strict = ["-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror", "-O2", f"-I{headers}"]
    command = [COMPILER, *strict, *arguments, "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def built(folder: Path, libcuda: str, program: Path) -> Path:
    """Build the example for an exported kernel, with a driver's library; return the program."""
    return compiled([f"-I{folder}", str(EXAMPLE / "main.c"), libcuda, "-lm"], program)
