"""Kernels of gradients for sm_90a, which run on the host, thread by thread: see host_sm90a.py."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_launch
from host_sm90a import compiled, host_map

from codegen.library import NamedSpec
from codegen.plan import Plan
from codegen.render import generate
from runtime.kernels.attention_backward import AttentionBackwardKernel

PROGRAM = """\
#include <array>
#include "threads.h"
#include "instructions.h"
#include "hopper.h"
#include "integers.h"
%%(source)s
extern "C" void run(const void* params, const int* grids, bool late, unsigned order) {
  static unsigned char shared_memory[%%(shared_bytes)d] __attribute__((aligned(1024)));
  memory = shared_memory;
  memory_bytes = sizeof shared_memory;
  copies_late = late;
  seed = order;
  const Params& p = *static_cast<const Params*>(params);
  const auto run_grid = [&](int grid, int number, std::function<void()> kernel) {
    gridDim.x = grid;
    body = kernel;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
      reset_hopper();
      run_block(number);
    }
  };
  run_grid(grids[0], %(prologue_threads)d, [&] { %(prologue)s(p); });
  run_grid(grids[1], kThreads, [&] { %%(kernel)s(p); });
  %(epilogue)s
}
"""


def for_the_host(source: str) -> str:
    """A source whose pieces of assembly that are no function of their own are C++."""
    widened = "found.x = widened(pair); found.y = widened(pair >> 16);\n"
    source = re.sub(r'  asm\("\{\\n".*?: "r"\(pair\)\);\n', widened, source, flags=re.DOTALL)
    source = re.sub(r"  __shared__ __align__\(16\) unsigned short", "  static unsigned short", source)
    return source.replace("  __shared__ int sums", "  static int sums")


def program_of(plan: Plan) -> str:
    """The program that runs the kernels of a plan, one after another."""
    first, last = plan.prologue, plan.epilogue
    assert first is not None
    return PROGRAM % {
        "prologue": first.symbol,
        "prologue_threads": first.threads,
        "epilogue": f"run_grid(grids[2], {last.threads}, [&] {{ {last.symbol}(p); }});" if last else "",
    }


class HostLoaded(host_launch.HostLoaded):
    """Stands for a kernel in the driver, with its prologue and, if it has one, its epilogue.

    Attributes:
        late: whether copies happen when they are waited for, or at once.
    """

    def __init__(self, source: str, plan: Plan, folder: Path) -> None:
        super().__init__(compiled(for_the_host(source), plan, folder, program_of(plan)).run, plan)
        self.late = True

    def launch(self, signature: Any, addresses: Any, stream: int, *, prologue: bool = True) -> None:
        """Run the kernels."""
        assert prologue
        for tensor_map in signature.maps:
            tensor_map.place[:] = host_map(tensor_map.encoder, addresses[tensor_map.name])
        self.point(signature, addresses)
        grids = (ctypes.c_int * 3)(signature.prologue_grid, signature.grid, signature.epilogue_grid)
        self._run(signature.block, grids, self.late, self.order)


class HostKernel(AttentionBackwardKernel):
    """A kernel of gradients that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path, source: str | None = None) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source if source is None else source, generated.plan, folder)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]
