"""Kernels of attention for sm_90a that run on the host, thread by thread, with the headers in tests/support/host.

What is run is the generated source, but for the helpers that are one instruction each. Sums of the tensor core are in
fp32 here, which they are not on a GPU.
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_launch

from codegen.encode_tiled import ELEMENT_BYTES
from codegen.library import NamedSpec
from codegen.plan import Plan
from codegen.plans.attention.fp8 import is_fp8
from codegen.render import generate
from codegen.spec import AttentionSpec
from runtime.kernels.attention import AttentionKernel
from runtime.kernels.attention_fp8 import Fp8AttentionKernel

HEADERS = Path(__file__).with_name("host")
INSTRUCTIONS = (
    *("mbarrier_init", "fence_mbarrier_init", "mbarrier_arrive", "mbarrier_arrive_expect_tx", "mbarrier_wait"),
    *("prefetch_tensormap", "tma_load_4d", "tma_load_5d", "tma_store_4d", "tma_store_5d", "tma_store_commit"),
    *("tma_store_wait_read", "fence_proxy_async", "setmaxnreg_dec", "setmaxnreg_inc"),
    *("wgmma_fence", "wgmma_commit", "wgmma_wait", "ldmatrix_x4", "stmatrix_x4"),
    *("bar_sync", "bar_arrive", "ex2", "rcp", "lg2", "pack", "pack_e4m3"),
    *("cp_async_16", "cp_async_commit", "cp_async_wait", "widen_pair", "widen", "pack_out"),  # of e4m3 caches
    # Of gradients:
    *(
        "tma_load_bytes",
        "tma_store_bytes",
        "tma_reduce_add",
        "tma_reduce_add_s32",
        "tma_store_wait",
        "fence_proxy_async_global",
    ),
    *("load_acquire", "store_release", "atomic_add_acq_rel", "stmatrix_x4_trans"),
    *("launch_dependents", "wait_for_prerequisites"),
    "load_word",  # of masks of bits
)
WGMMA = re.compile(r"wgmma_m64n(\d+)k32_(registers|shared)(_v)?(_first)?\(\n")
UPPER_HALF = re.compile(r"constexpr uint32 kDescriptorUpperHalf = (0x\w+);")
WGMMA_16 = re.compile(r"wgmma_m64n(\d+)k16_(registers|shared|shared_m_major)_(k_major|mn_major)(_first)?\(\n? *float")
PROGRAM = """\
#include <array>
#include "threads.h"
#include "instructions.h"
#include "hopper.h"
#include "e4m3_cache.h"
extern "C" void let_read(const long long* ranges, int number) {
  readable.clear();
  for (int i = 0; i < number; ++i) {
    const char* begin = reinterpret_cast<const char*>(ranges[2 * i]);
    readable.push_back({begin, begin + ranges[2 * i + 1]});
  }
}
%(source)s
extern "C" void run(const void* params, int grid, bool late, unsigned order) {
  static unsigned char shared_memory[%(shared_bytes)d] __attribute__((aligned(1024)));
  memory = shared_memory;
  memory_bytes = sizeof shared_memory;
  copies_late = late;
  seed = order;
  gridDim.x = grid;
  const Params& p = *static_cast<const Params*>(params);
  body = [&] { %(kernel)s(p); };
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    reset_hopper();
    run_block(kThreads);
  }
}
"""


def without(source: str, name: str) -> tuple[str, int]:
    """Return a source without the definition of a helper, and how many there were."""
    definition = rf"(template <[^\n]*>\n)?__device__ __forceinline__ \w+ {name}\([^{{]*\{{(?:[^\n]*\}}\n|.*?\n\}}\n)"
    return re.subn(definition, "", source, count=1, flags=re.DOTALL)


def product(match: re.Match[str], spec: AttentionSpec, v_upper: str) -> str:
    """Return a wgmma of the host."""
    n, place, of_v, first = match.groups()
    registers = place == "registers"
    a = "const unsigned (&a)[4]" if registers else "unsigned a"
    accumulate = "" if first else ", int accumulate"
    wide = str(spec.dtype == "e5m2").lower()
    upper = v_upper if of_v else "kHostUpperHalf"
    operands = ("a, 0" if registers else "nullptr, a") + f", b, {upper}, {n}, {'false' if first else 'accumulate != 0'}"
    return (
        f"inline void {match.group(0)[:-2]}(float (&d)[{int(n) // 2}], {a}, unsigned b{accumulate}) {{\n"
        f"  issue({{d, {operands}, {'false' if of_v else wide}, {wide}}});\n}}\n"
    )


def product_of_halves(match: re.Match[str], upper: str = "kHostUpperHalf") -> tuple[str, str]:
    """The name of a wgmma with operands of 16 bits, and its definition for the host, for descriptors' upper halves."""
    n, place, b_major, first = match.groups()
    name = f"wgmma_m64n{n}k16_{place}_{b_major}{first or ''}"
    registers = place == "registers"
    a = "const unsigned (&a)[4]" if registers else "unsigned a"
    operands = ("a, 0" if registers else "nullptr, a") + f", b, {upper}, {n}, {'false' if first else 'accumulate != 0'}"
    majors = f"{str(place == 'shared_m_major').lower()}, {str(b_major == 'mn_major').lower()}"
    accumulate = "" if first else ", int accumulate"
    return name, (
        f"inline void {name}(float (&d)[{int(n) // 2}], {a}, unsigned b{accumulate}) {{\n"
        f"  issue({{d, {operands}, false, false, true, {majors}}});\n}}\n"
    )


def compiled(source: str, plan: Plan, folder: Path, program: str = PROGRAM) -> Any:
    """Compile a generated source for the host; ``program`` has its place, and the function ``run``."""
    spec = plan.spec
    narrow = "kNarrowDescriptorUpperHalf" in re.sub(r"//.*", "", source)
    products = []
    for match in {found.group(0): found for found in WGMMA.finditer(source)}.values():
        assert isinstance(spec, AttentionSpec) and is_fp8(spec)
        products.append(product(match, spec, "0x80000020" if narrow else "kHostUpperHalf"))
        source, _ = without(source, match.group(0)[:-2])
    found = UPPER_HALF.search(source)
    upper = found[1] if found else "kHostUpperHalf"
    for name, definition in dict(product_of_halves(match, upper) for match in WGMMA_16.finditer(source)).items():
        products.append(definition)
        source, removed = without(source, name)
        assert removed, name
    for name in INSTRUCTIONS:
        source, _ = without(source, name)
    source = re.sub(r"extern __shared__ .*?(\w+)\[\];.*", r"unsigned char* \1 = memory;", source)
    source = re.sub(r'asm volatile\(""[^;]*;', ";", source)
    source = source.replace("static_cast<uint32>(__cvta_generic_to_shared(shared))", "0")
    assert "asm" not in re.sub(r"//.*", "", source), "an instruction that tests/support/host does not have"
    text = program % {
        "source": "\n".join(products) + source,
        "shared_bytes": plan.shared_bytes + 128 * 1024,  # a descriptor may reach beyond
        "kernel": plan.stem,
    }
    (folder / "kernel.cpp").write_text(text, encoding="utf-8")
    in_fp16 = isinstance(spec, AttentionSpec) and spec.has_codes  # products
    bf16 = ["-DBF16"] if plan.output == "bf16" and not in_fp16 else []
    # A static variable of an inline function is otherwise that of the kernel loaded first, of its size.
    apart = "-fno-gnu-unique"
    options = ["-std=c++20", "-O2", "-fPIC", "-shared", "-w", apart, f"-I{HEADERS}", *bf16]
    subprocess.run(["g++", *options, "kernel.cpp", "-o", "kernel.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


def host_map(encoder: Any, address: int) -> bytes:
    """Return what stands for a tensor map on the host: HostMap of tests/support/host/hopper.h."""
    how, rank = encoder.how, len(encoder.how.box)
    element = ELEMENT_BYTES[how.dtype or encoder.dtype]
    rest = (0,) * (5 - rank)
    strides = (element, *(stride * element for stride in encoder.strides), *rest)
    numbers = (rank, element, how.swizzle, *encoder.dims, *rest, *how.box, *rest, *strides)
    return struct.pack("<Q18i", address, *numbers).ljust(128, b"\0")


class HostLoaded(host_launch.HostLoaded):
    """Stands for a kernel in the driver.

    Attributes:
        library: the compiled program.
        late: whether copies happen when they are waited for, or at once.
    """

    def __init__(self, source: str, plan: Plan, folder: Path, blocks: int) -> None:
        self.library = compiled(source, plan, folder)
        super().__init__(self.library.run, plan, blocks)
        self.late = True

    def launch(self, signature: Any, addresses: Any, stream: int, *, prologue: bool = True) -> None:
        """Run the kernel."""
        for tensor_map in signature.maps:
            tensor_map.place[:] = host_map(tensor_map.encoder, addresses[tensor_map.name])
        self.point(signature, addresses)
        self._run(signature.block, signature.grid, self.late, self.order)


class HostKernel(Fp8AttentionKernel):
    """An FP8 kernel that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path, source: str | None = None, blocks: int = 3) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source if source is None else source, generated.plan, folder, blocks)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]


class HostAttention(AttentionKernel):
    """A kernel with operands of 16 bits that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path, source: str | None = None, blocks: int = 3) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source if source is None else source, generated.plan, folder, blocks)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]
