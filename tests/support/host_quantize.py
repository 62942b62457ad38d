"""Quantize kernels that run on the host, thread by thread: tests/support/host has what a GPU would do."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_launch
from host_kernel import HEADERS
from host_streams import pretend_stream

from codegen.library import NamedSpec
from codegen.plan import Plan
from codegen.render import generate
from codegen.spec import QuantizeSpec
from runtime.kernels.quantize import QuantizeKernel

INSTRUCTIONS = ("widen", "code_pair", "load_acquire", "rcp")
PROGRAM = """\
#include "threads.h"
#include "codes.h"
%(source)s
extern "C" void run(const void* params, int grid, unsigned order) {
  static unsigned char shared_memory[%(shared_bytes)d] __attribute__((aligned(1024)));
  memory = shared_memory;
  memory_bytes = sizeof shared_memory;
  seed = order;
  gridDim.x = grid;
  const Params p = *static_cast<const Params*>(params);
  body = [&] { %(kernel)s(p); };
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) run_block(kThreads);
}
"""


def compiled(source: str, plan: Plan, folder: Path) -> Any:
    """Compile a generated source for the host."""
    for name in INSTRUCTIONS:
        definition = rf"__device__ __forceinline__ \w+ {name}\([^{{]*\{{.*?\n\}}\n"
        source, replaced = re.subn(definition, "", source, count=1, flags=re.DOTALL)
        assert replaced or name in ("load_acquire", "rcp"), f"{name} is not in the source"
    source = re.sub(r'asm volatile\(""[^;]*;', "", source)  # which no instruction follows from
    source = re.sub(r"extern __shared__ .*;", "unsigned char* shared = memory;", source)
    assert "asm" not in re.sub(r"//.*", "", source), "an instruction that tests/support/host does not have"
    program = PROGRAM % {"source": source, "shared_bytes": plan.shared_bytes, "kernel": plan.stem}
    (folder / "kernel.cpp").write_text(program, encoding="utf-8")
    assert isinstance(plan.spec, QuantizeSpec)
    types = [f"-D{name.upper()}" for name in (plan.spec.dtype, plan.spec.codes)]
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w", f"-I{HEADERS}", *types]
    subprocess.run(["g++", *options, "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


class HostLoaded(host_launch.HostLoaded):
    """Stands for a kernel in the driver."""

    def __init__(self, source: str, plan: Plan, folder: Path) -> None:
        super().__init__(compiled(source, plan, folder).run, plan)

    def launch(self, signature: Any, addresses: Any, stream: int, *, prologue: bool = True) -> None:
        """Run the kernel."""
        self.point(signature, addresses)
        self._run(signature.block, signature.grid, self.order)


class HostKernel(QuantizeKernel):
    """A quantize kernel that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path, source: str | None = None) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source if source is None else source, generated.plan, folder)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]


def on_cpu(monkeypatch: Any) -> None:
    """Let calls take tensors of the CPU."""
    from runtime.kernels import quantize

    monkeypatch.setattr(quantize, "check_tensor", lambda *arguments: None)
    monkeypatch.setattr(quantize, "is_elsewhere", lambda tensor: False)
    pretend_stream(monkeypatch)
