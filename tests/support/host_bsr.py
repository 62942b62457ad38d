"""BSR x dense and sampled products for sm_90a in 16 bits that run on the host, thread by thread.

The headers are those in tests/support/host.
What is run is the generated source, but for the helpers that are one instruction each. Sums of the tensor core are in
fp32 here, which they are not on a GPU.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_launch
from host_sm90a import HEADERS, INSTRUCTIONS, WGMMA_16, host_map, product_of_halves, without

from codegen.library import NamedSpec
from codegen.plan import Plan
from codegen.render import generate
from runtime.driver.launch import BlockSize
from runtime.kernels.bsr_sddmm import BsrSddmmKernel
from runtime.kernels.bsr_spmm import BsrSpmmKernel

OF_BSR = (
    *INSTRUCTIONS,
    *(
        "tma_load_2d",
        "tma_load_3d",
        "tma_store_3d",
        "mma_m16n8k16",
        "load_streamed",
        "load_cached",
        "low_halves",
        "high_halves",
        "widen",
    ),
)
PROGRAM = """\
#include <array>
#include "threads.h"
static Number blockDim;
#include "instructions.h"
#include "hopper.h"
#include "bsr.h"
%(source)s
extern "C" void run(const void* params, int grid, int block, bool late, unsigned order) {
  static unsigned char shared_memory[%(shared_bytes)d] __attribute__((aligned(1024)));
  memory = shared_memory;
  memory_bytes = sizeof shared_memory;
  copies_late = late;
  seed = order;
  gridDim.x = grid;
  blockDim.x = block;
  const Params& p = *static_cast<const Params*>(params);
  body = [&] { %(kernel)s(p); };
  for (int i = 0; i < grid; ++i) {
    blockIdx.x = order %% 2 ? grid - 1 - i : i;  // thread blocks run in any order
    reset_hopper();
    run_block(block);
  }
}
"""


def compiled(source: str, plan: Plan, folder: Path) -> Any:
    """Compile a generated source for the host."""
    products = []
    for name, definition in dict(map(product_of_halves, WGMMA_16.finditer(source))).items():
        products.append(definition)
        source, removed = without(source, name)
        assert removed, name
    for name in OF_BSR:
        source, _ = without(source, name)
    source = re.sub(r"extern __shared__ .*;", "\n#define shared memory\n", source)
    source = re.sub(r'asm volatile\(""[^;]*;', ";", source)
    source = source.replace("static_cast<uint32>(__cvta_generic_to_shared(shared))", "0")
    assert "asm" not in re.sub(r"//.*", "", source), "an instruction that tests/support/host does not have"
    text = PROGRAM % {
        "source": "\n".join(products) + source,
        "shared_bytes": plan.shared_bytes + 128 * 1024,  # a descriptor may reach beyond
        "kernel": plan.stem,
    }
    (folder / "kernel.cpp").write_text(text, encoding="utf-8")
    bf16 = ["-DBF16"] if plan.output == "bf16" else []
    options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-D__maxnreg__(x)=", f"-I{HEADERS}", *bf16]
    subprocess.run(["g++", *options, "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


class HostLoaded(host_launch.HostLoaded):
    """Stands for a kernel in the driver.

    Attributes:
        late: whether copies happen when they are waited for, or at once.
    """

    def __init__(self, source: str, plan: Plan, folder: Path, blocks: int) -> None:
        super().__init__(compiled(source, plan, folder).run, plan, blocks)
        self.late = True

    def _config(self, grid: int, size: BlockSize) -> int:
        """Threads per block."""
        return size.threads

    def launch(self, signature: Any, addresses: Any, stream: int, *, prologue: bool = True) -> None:
        """Run the kernel."""
        for tensor_map in signature.maps:
            tensor_map.place[:] = host_map(tensor_map.encoder, addresses[tensor_map.name])
        self.point(signature, addresses)
        self._run(signature.block, signature.grid, signature.config, self.late, self.order)


class HostSpmm(BsrSpmmKernel):
    """A bsr_spmm kernel that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path, source: str | None = None, blocks: int = 58) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source if source is None else source, generated.plan, folder, blocks)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]


class HostSddmm(BsrSddmmKernel):
    """A bsr_sddmm kernel that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path, source: str | None = None, blocks: int = 5) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source if source is None else source, generated.plan, folder, blocks)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]
