"""Kernels of block lists that run on the host, thread by thread: tests/support/host has what a GPU would do."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_launch
import torch
from host_kernel import HEADERS

from codegen.library import NamedSpec
from codegen.plan import Plan
from codegen.render import generate
from runtime.kernels.arguments import aux_in_order
from runtime.kernels.block_mask import BlockMaskKernel, BlockMaskLists, checked_shape

CPU = torch.device("cpu")
PROGRAM = """\
#include "threads.h"
#include "votes.h"
%(source)s
extern "C" void run(const void* params, int grid, int kernel, unsigned order) {
  static unsigned char shared_memory[%(shared_bytes)d] __attribute__((aligned(1024)));
  memory = shared_memory;
  memory_bytes = sizeof shared_memory;
  seed = order;
  const Params p = *static_cast<const Params*>(params);
  void (*const kernels[])(Params) = {%(kernels)s};
  body = [&] { kernels[kernel](p); };
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) run_block(kThreads);
}
"""


def compiled(source: str, plan: Plan, folder: Path) -> Any:
    """Compile a generated source for the host."""
    source, replaced = re.subn(r"extern __shared__ .*;", "unsigned char* shared = memory;", source)
    assert replaced == 1 and "asm" not in re.sub(r"//.*", "", source), (
        "an instruction that tests/support/host does not have"
    )
    assert plan.epilogue is not None
    before = "nullptr" if plan.prologue is None else plan.prologue.symbol
    kernels = ", ".join((before, plan.stem, plan.epilogue.symbol))
    program = PROGRAM % {"source": source, "shared_bytes": plan.shared_bytes, "kernels": kernels}
    (folder / "kernel.cpp").write_text(program, encoding="utf-8")
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-fwrapv", "-frounding-math", f"-I{HEADERS}"]
    subprocess.run(["g++", *options, "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


class HostLoaded(host_launch.HostLoaded):
    """Stands for kernels in the driver."""

    def __init__(self, source: str, plan: Plan, folder: Path) -> None:
        super().__init__(compiled(source, plan, folder).run, plan)

    def launch(self, signature: Any, addresses: Any, stream: int, *, prologue: bool = True) -> None:
        """Run all three kernels, one after the other."""
        self.point(signature, addresses)
        grids = (signature.prologue_grid if self.plan.prologue else 0, signature.grid, signature.epilogue_grid)
        for number, grid in enumerate(grids):
            self._run(signature.block, grid, number, self.order)


class HostKernel(BlockMaskKernel):
    """A kernel of block lists that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path, source: str | None = None) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source if source is None else source, generated.plan, folder)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]

    def __call__(
        self,
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        *,
        aux: Mapping[str, torch.Tensor] | None = None,
        device: Any = None,
    ) -> BlockMaskLists:
        tensors = aux_in_order(aux, self._aux.declared)
        return self._run(checked_shape(batch, heads, q_len, kv_len), tensors, CPU)
