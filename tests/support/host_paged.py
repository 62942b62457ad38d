"""Kernels of attention over pages that run on the host, thread by thread: tests/support/host has what a GPU would do.

What is run is the generated source, but for the helpers that are one instruction each. Thread blocks run one after
another, in an order drawn by a seed.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_launch
import torch
from host_kernel import HEADERS
from host_sm90a import without

from codegen.library import NamedSpec
from codegen.plan import Plan
from codegen.render import generate
from runtime.kernels import arguments, paged_attention
from runtime.kernels.paged_attention import TENSORS, PagedAttentionKernel

INSTRUCTIONS = (
    *("cp_async_16", "cp_async_commit", "cp_async_wait", "mma_m16n8k16", "ldmatrix_x4", "ldmatrix_x4_trans", "pack"),
    *("ex2", "lg2", "atomic_add_acq_rel"),
)
OF_E4M3 = ("cp_async_4", "widen_pair", "widen", "pack_out")
FRAME = """\
#include "threads.h"
#include "instructions.h"
#include "paged.h"
%s
static void prepare(int grid, bool late, unsigned order, const long long* ranges, int number) {
  static unsigned char shared_memory[%d] __attribute__((aligned(1024)));
  memory = shared_memory;
  memory_bytes = sizeof shared_memory;
  copies_late = late;
  seed = order;
  gridDim.x = grid;
  readable.clear();
  for (int i = 0; i < number; ++i) {
    const char* begin = reinterpret_cast<const char*>(ranges[2 * i]);
    readable.push_back({begin, begin + ranges[2 * i + 1]});
  }
}
// Runs all thread blocks, each at its place in an order drawn by the seed.
static void run_blocks() {
  std::vector<int> blocks(gridDim.x);
  for (int i = 0; i < gridDim.x; ++i) blocks[i] = i;
  for (int i = gridDim.x - 1; i > 0; --i) {
    seed = seed * 1664525u + 1013904223u;
    std::swap(blocks[i], blocks[(seed >> 8) %% (i + 1)]);
  }
  for (const int block : blocks) {
    blockIdx.x = block;
    run_block(kThreads);
  }
}
"""
PROGRAM = """\
extern "C" void run(const void* params, int grid, bool late, unsigned order, const long long* ranges, int number) {
  prepare(grid, late, order, ranges, number);
  const Params p = *static_cast<const Params*>(params);
  body = [&] { %s(p); };
  run_blocks();
}
"""


def for_the_host(source: str) -> str:
    """A generated source as C++ that the headers of tests/support/host complete."""
    for name in (*INSTRUCTIONS, *OF_E4M3):
        source, replaced = without(source, name)
        assert replaced or name in OF_E4M3, f"{name} is not in the source"
    source = re.sub(r"extern __shared__ .*;", "unsigned char* shared = memory;", source)
    assert "asm" not in re.sub(r"//.*", "", source), "an instruction that tests/support/host does not have"
    return source


def compiled(source: str, plan: Plan, folder: Path, program: str | None = None) -> ctypes.CDLL:
    """Compile a generated source for the host.

    Args:
        source: the CUDA source.
        plan: its plan.
        folder: where the library is built.
        program: the functions that the library has; by default ``run``, which runs the kernel.
    """
    text = FRAME % (for_the_host(source), plan.shared_bytes) + (PROGRAM % plan.stem if program is None else program)
    (folder / "kernel.cpp").write_text(text, encoding="utf-8")
    spec: Any = plan.spec
    bf16 = ["-DBF16"] if spec.dtype == "bf16" and spec.cache == "same" else []  # of products
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-I{HEADERS}", *bf16]
    subprocess.run(["g++", *options, "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


def ranges_of(tensors: Sequence[torch.Tensor]) -> Any:
    """Address and bytes of the memory of each tensor."""
    words = [word for t in tensors for s in (t.untyped_storage(),) for word in (s.data_ptr(), s.nbytes())]
    return (ctypes.c_longlong * len(words))(*words)


class HostLoaded(host_launch.HostLoaded):
    """Stands for a kernel in the driver.

    Attributes:
        late: whether copies happen when they are waited for, or at once.
        tensors: what the kernel may read.
    """

    def __init__(self, run: Any, plan: Plan, blocks: int) -> None:
        super().__init__(run, plan, blocks)
        self.late = True
        self.tensors: Sequence[torch.Tensor] = ()

    def slots(self, device: Any) -> int:
        """Thread blocks that run concurrently, however many a real SM would hold."""
        return self.sm_count(device)

    def launch(self, signature: Any, addresses: Any, stream: int, *, prologue: bool = True) -> None:
        """Run the kernel."""
        self.point(signature, addresses)
        ranges = ranges_of(self.tensors)
        self._run(signature.block, signature.grid, self.late, self.order, ranges, len(ranges) // 2)


class HostKernel(PagedAttentionKernel):
    """A kernel of attention over pages that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path, blocks: int = 7, source: str | None = None) -> None:
        generated = generate(named)
        run = compiled(generated.source if source is None else source, generated.plan, folder).run
        self.host = HostLoaded(run, generated.plan, blocks)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]

    def attend_checked(self, given: Any, options: Any, *, validate: bool = False) -> Any:
        """Check a call and compute it."""
        inputs = zip(TENSORS, given, strict=True)
        self.host.tensors = [t for name, t in inputs if t is not None and name not in ("out", "workspace")]
        return super().attend_checked(given, options, validate=validate)

    def attend(self, given: Any, options: Any) -> Any:
        """Compute attention, with the checks of a first call each time."""
        return self.attend_checked(given, options)[1]


def on_cpu(monkeypatch: Any) -> None:
    """Let kernels take tensors of the CPU."""
    for module in (arguments, paged_attention):
        monkeypatch.setattr(module, "check_tensor", lambda *given: None)
