"""Kernels of gradients by mma.sync that run on the host, thread by thread: tests/support/host has what a GPU would do.

What is run is the generated source, but for the helpers that are one instruction each.
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_launch
import torch

from codegen.library import NamedSpec
from codegen.plan import Plan
from codegen.render import generate
from runtime.kernels.attention_backward import AttentionBackwardKernel, AttentionGradients

HEADERS = Path(__file__).with_name("host")
INSTRUCTIONS = (
    *("cp_async_16", "cp_async_commit", "cp_async_wait", "mma_m16n8k16", "ldmatrix_x4"),
    "ex2",
)
OF_SOME = (  # of dQ, dK and dV; of a softcap and scores; of masks of bits
    *("ldmatrix_x4_trans", "pack"),
    *("rcp", "lg2"),
    "load_word",
)
PROGRAM = """\
#include "threads.h"
#include "instructions.h"
%(source)s
extern "C" void run(const void* params, int grid, int prologue, bool late, unsigned order, const long long* ranges,
    int number) {
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
  body = [&] { prologue ? %(prologue)s(p) : %(kernel)s(p); };
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) run_block(prologue ? %(prologue_threads)d : kThreads);
}
"""


def compiled(source: str, plan: Plan, folder: Path) -> Any:
    """Compile a generated source for the host.

    Args:
        source: the CUDA source.
        plan: its plan.
        folder: where the library is built.
    """
    for name in (*INSTRUCTIONS, *OF_SOME):
        definition = (
            rf"(template <[^\n]*>\n)?__device__ __forceinline__ \w+ {name}\([^{{]*\{{(?:[^\n]*\}}\n|.*?\n\}}\n)"
        )
        source, replaced = re.subn(definition, "", source, count=1, flags=re.DOTALL)
        assert replaced or name in OF_SOME, f"{name} is not in the source"
    # Of fp16, two elements are widened in one piece of assembly.
    widened = "found.x = widened(pair); found.y = widened(pair >> 16);\n"
    source = re.sub(r'  asm\("\{\\n".*?: "r"\(pair\)\);\n', widened, source, flags=re.DOTALL)
    source = re.sub(r'asm\("cvt\.f32\.f16 %0, %1;" : "=f"\((\w+)\) : "h"\((.*)\)\);', r"\1 = of_half(\2);", source)
    source = re.sub(r"extern __shared__ .* (\w+)\[\];", r"unsigned char* \1 = memory;", source)
    source = source.replace("__shared__ int", "static int")
    source = re.sub(r'asm volatile\(""[^;]*;', "", source)  # which no instruction follows from
    assert "asm" not in re.sub(r"//.*", "", source), "an instruction that tests/support/host does not have"
    assert plan.prologue is not None
    program = PROGRAM % {
        "source": source,
        "shared_bytes": plan.shared_bytes,
        "prologue": plan.prologue.symbol,
        "prologue_threads": plan.prologue.threads,
        "kernel": plan.stem,
    }
    (folder / "kernel.cpp").write_text(program, encoding="utf-8")
    bf16 = ["-DBF16"] if plan.spec.dtype == "bf16" else []
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", f"-I{HEADERS}", *bf16]
    subprocess.run(["g++", *options, "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


class HostLoaded(host_launch.HostLoaded):
    """Stands for a kernel in the driver.

    Attributes:
        late: whether copies happen when they are waited for, or at once.
        tensors: what copies may read, beside the statistics.
    """

    def __init__(self, source: str, plan: Plan, folder: Path) -> None:
        super().__init__(compiled(source, plan, folder).run, plan)
        self.late = True
        self.tensors: Sequence[torch.Tensor] = ()

    def launch(self, signature: Any, addresses: Any, stream: int, *, prologue: bool = True) -> None:
        """Run the prologue and the kernel."""
        self.point(signature, addresses)
        heads = "batch_heads" if "batch_heads" in self.layout.offsets else "heads"
        rows = self._number(signature.block, heads) * self._number(signature.block, "padded_q_len")
        stats = addresses["stats"], rows * 8
        storages = (tensor.untyped_storage() for tensor in self.tensors)
        ranges = [*stats, *(word for s in storages for word in (s.data_ptr(), s.nbytes()))]
        given = (ctypes.c_longlong * len(ranges))(*ranges)
        for grid, before in ((signature.prologue_grid, 1), (signature.grid, 0)):
            if prologue or not before:
                self._run(signature.block, grid, before, self.late, self.order, given, len(ranges) // 2)

    def _number(self, block: Any, name: str) -> int:
        found: int = struct.unpack_from("<i", block, self.layout.offsets[name])[0]
        return found


class HostKernel(AttentionBackwardKernel):
    """A kernel of gradients that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path, source: str | None = None) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source if source is None else source, generated.plan, folder)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]

    def __call__(self, q: Any, k: Any, v: Any, *indices: Any, out: Any, dout: Any, lse: Any, **more: Any) -> Any:
        self.host.tensors = (q, k, v, dout)
        found: AttentionGradients = super().__call__(q, k, v, *indices, out=out, dout=dout, lse=lse, **more)
        return found
