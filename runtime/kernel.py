"""load_kernel: from a spec to something that can be called with torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from codegen.library import NamedSpec
from codegen.render import generate
from codegen.select import Problem, choose
from codegen.spec import AttentionSpec, BsrSddmmSpec, BsrSpgemmSpec, Spec, TileCopySpec
from runtime.compile.cache import KernelCache
from runtime.compile.compiler import compile_generated
from runtime.driver import process
from runtime.driver.launch import LoadedKernel
from runtime.errors import DeviceError
from runtime.kernels.arguments import check_device
from runtime.kernels.attention import AttentionKernel
from runtime.kernels.bsr_sddmm import BsrSddmmKernel
from runtime.kernels.bsr_spgemm import BsrSpgemmKernel
from runtime.kernels.bsr_spmm import BsrSpmmKernel
from runtime.kernels.tile_copy import TileCopyKernel

Kernel = AttentionKernel | BsrSpmmKernel | BsrSddmmKernel | BsrSpgemmKernel | TileCopyKernel


def load_kernel(
    spec: str | Path | Mapping[str, Any] | Spec | NamedSpec | Problem,
    problem: Problem | Mapping[str, Any] | None = None,
    *,
    forward_compatible: bool = False,
    device: torch.device | str | int | None = None,
    cache: KernelCache | None = None,
) -> Kernel:
    """Render, compile (or take from the cache) and load a kernel.

    Args:
        spec: path of a YAML spec, name of a shipped spec, mapping of fields, spec model, or a problem
            (``codegen.select``). Of a mapping without ``tile`` or ``stages``, and of a problem, what is left out is
            chosen by the table of measurements (docs/select.md); what a spec says is never changed.
        problem: beside such a mapping, its problem, or sizes of it (``{"heads": 16, "q_len": 4096}``), by which the
            choice is made. Beside a whole spec nothing depends on it, but it must not contradict it.
        forward_compatible: allow a kernel of an older architecture to run on a newer device, through PTX that the
            driver compiles. Kernels of ``a`` architectures (sm_90a) cannot.
        device: CUDA device the architecture is checked against; by default torch's current one.
        cache: kernel cache; by default the user's.

    Returns:
        A callable; see :class:`~runtime.kernels.attention.AttentionKernel`,
        :class:`~runtime.kernels.bsr_spmm.BsrSpmmKernel`, :class:`~runtime.kernels.bsr_sddmm.BsrSddmmKernel`,
        :class:`~runtime.kernels.bsr_spgemm.BsrSpgemmKernel` and :class:`~runtime.kernels.tile_copy.TileCopyKernel`.

    Raises:
        SpecError: for an unknown name or an illegal spec.
        DeviceError: without a GPU, or with one of another architecture: names the spec that would serve there. In a
            process that was forked after the first use of CUDA.
        ToolchainError, CompileError, CacheError: when the kernel cannot be built.
    """
    process.claim(torch_forked=torch.cuda._is_in_bad_fork())
    device_name = torch.cuda.get_device_name(device) if torch.cuda.is_available() else None
    named = choose(spec, problem, device=device_name).named
    generated = generate(named)
    if not torch.cuda.is_available():
        raise DeviceError(f"{named.stem} cannot be loaded: torch sees no CUDA device (`codegen compile` needs none)")
    where = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
    check_device(named, where, forward_compatible)
    native = torch.cuda.get_device_capability(where) == generated.plan.arch.compute_capability
    compiled = compile_generated(generated, "cubin" if native else "ptx", cache)
    with torch.cuda.device(where):
        torch.cuda.current_stream()  # the driver needs a context before it loads anything
        loaded = LoadedKernel(compiled)
    if isinstance(named.spec, AttentionSpec):
        return AttentionKernel(compiled, loaded)
    if isinstance(named.spec, BsrSddmmSpec):
        return BsrSddmmKernel(compiled, loaded)
    if isinstance(named.spec, BsrSpgemmSpec):
        return BsrSpgemmKernel(compiled, loaded)
    if isinstance(named.spec, TileCopySpec):
        return TileCopyKernel(compiled, loaded)
    return BsrSpmmKernel(compiled, loaded)
