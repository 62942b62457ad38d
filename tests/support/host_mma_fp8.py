"""FP8 kernels by mma.sync that run on the host, thread by thread: tests/support/host has what a GPU would do.

What is run is the generated source, but for the helpers that are one instruction each.
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
from runtime.kernels.attention_fp8 import Fp8AttentionKernel

INSTRUCTIONS = ("cp_async_commit", "cp_async_wait", "ldmatrix_x4")
OF_ATTENTION = ("cp_async_16", "ex2", "lg2", "pack", "pack_e4m3", "ctaid_x")
OF_SOME = (
    *OF_ATTENTION,
    *("cp_async_16_part", "rcp", "tid_x", "load_word", "mma_e4m3_e4m3", "mma_e4m3_e5m2", "mma_e5m2_e5m2"),
)
PROGRAM = """\
#include "threads.h"
#include "instructions.h"
#include "mma_fp8.h"
%(source)s
extern "C" void run(const void* params, int grid, bool late, unsigned order, const long long* ranges, int number) {
  static unsigned char shared_memory[%(shared_bytes)d] __attribute__((aligned(1024)));
  memory = shared_memory;
  memory_bytes = sizeof shared_memory;
  copies_late = late;
  seed = order;
  readable.clear();
  for (int i = 0; i < number; ++i) {
    const char* begin = reinterpret_cast<const char*>(ranges[2 * i]);
    readable.push_back({begin, begin + ranges[2 * i + 1]});
  }
  const Params p = *static_cast<const Params*>(params);
  body = [&] { %(kernel)s(p); };
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) run_block(kThreads);
}
"""


def compiled(source: str, plan: Plan, folder: Path) -> Any:
    """Compile a generated source for the host."""
    for name in (*INSTRUCTIONS, *OF_SOME):
        source, replaced = without(source, name)
        assert replaced or name in OF_SOME, f"{name} is not in the source"
    source = re.sub(r"extern __shared__ .*;", "unsigned char* shared = memory;", source)
    assert "asm" not in re.sub(r"//.*", "", source), "an instruction that tests/support/host does not have"
    program = PROGRAM % {"source": source, "shared_bytes": plan.shared_bytes, "kernel": plan.stem}
    (folder / "kernel.cpp").write_text(program, encoding="utf-8")
    bf16 = ["-DBF16"] if plan.output == "bf16" else []
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-I{HEADERS}", *bf16]
    subprocess.run(["g++", *options, "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


class HostLoaded(host_launch.HostLoaded):
    """Stands for a kernel in the driver.

    Attributes:
        late: whether copies happen when they are waited for, or at once.
        tensors: what copies may read.
    """

    def __init__(self, source: str, plan: Plan, folder: Path) -> None:
        super().__init__(compiled(source, plan, folder).run, plan)
        self.late = True
        self.tensors: Sequence[torch.Tensor] = ()

    def launch(self, signature: Any, addresses: Any, stream: int, *, prologue: bool = True) -> None:
        """Run the kernel."""
        self.point(signature, addresses)
        ranges = [word for t in self.tensors for s in (t.untyped_storage(),) for word in (s.data_ptr(), s.nbytes())]
        given = (ctypes.c_longlong * len(ranges))(*ranges)
        self._run(signature.block, signature.grid, self.late, self.order, given, len(ranges) // 2)


class HostKernel(Fp8AttentionKernel):
    """An FP8 kernel that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path, source: str | None = None) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source if source is None else source, generated.plan, folder)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]

    def __call__(self, q: Any, k: Any, v_t: Any, *indices: Any, **named: Any) -> Any:
        self.host.tensors = (q, k, v_t)
        return super().__call__(q, k, v_t, *indices, **named)
