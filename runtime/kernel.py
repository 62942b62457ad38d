"""load_kernel: from a spec to a callable on torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from codegen.alternatives import suggest_for
from codegen.errors import SpecError
from codegen.library import NamedSpec, shipped_file
from codegen.render import generate
from codegen.select import Choice, Problem, choose
from codegen.select.shipped import Verified
from codegen.spec import Spec
from codegen.wording import shown
from runtime.checks import check_flag, named_device
from runtime.compile import jit
from runtime.compile.cache import KernelCache
from runtime.compile.compiler import Compiled
from runtime.compile.exported import read_compiled
from runtime.compile.loading import code_of
from runtime.driver import process
from runtime.driver.context import entered
from runtime.driver.launch import LoadedKernel
from runtime.errors import ArgumentError, DeviceError, NoJitError
from runtime.kernels.arguments import check_device
from runtime.kernels.attention import AttentionKernel
from runtime.kernels.attention_backward import AttentionBackwardKernel
from runtime.kernels.block_mask import BlockMaskKernel
from runtime.kernels.bsr_sddmm import BsrSddmmKernel
from runtime.kernels.bsr_spgemm import BsrSpgemmKernel
from runtime.kernels.bsr_spmm import BsrSpmmKernel
from runtime.kernels.key_lists_backward import KeyListsBackwardKernel
from runtime.kernels.key_lists_forward import KeyListsForwardKernel
from runtime.kernels.key_lists_paged import KeyListsPagedKernel
from runtime.kernels.paged_attention import PagedAttentionKernel
from runtime.kernels.paged_prefill import PagedPrefillKernel
from runtime.kernels.quantize import QuantizeKernel
from runtime.kernels.select_topk import SelectTopkKernel
from runtime.kernels.tile_copy import TileCopyKernel
from runtime.log import logger
from runtime.operators import operator_of, part
from runtime.receipts import permit
from runtime.receipts.mode import is_on

Kernel = (
    AttentionKernel
    | AttentionBackwardKernel
    | BlockMaskKernel
    | BsrSpmmKernel
    | BsrSddmmKernel
    | BsrSpgemmKernel
    | QuantizeKernel
    | KeyListsBackwardKernel
    | KeyListsForwardKernel
    | KeyListsPagedKernel
    | PagedAttentionKernel
    | PagedPrefillKernel
    | SelectTopkKernel
    | TileCopyKernel
)

_NATIVE = "name a spec of the device's own architecture"


def load_kernel(
    spec: str | Path | Mapping[str, Any] | Spec | NamedSpec | Problem,
    problem: Problem | Mapping[str, Any] | None = None,
    *,
    forward_compatible: bool = False,
    device: torch.device | str | int | None = None,
    cache: KernelCache | None = None,
) -> Kernel:
    """Render, compile (or take from the cache) and load a kernel. Any thread may call this.

    Args:
        spec: path of a YAML spec, name of a shipped spec, mapping of fields, spec model, problem (``codegen.select``),
            or a folder that ``codegen export`` wrote (docs/guide/export.md), which needs no compilation. A word that
            names both a shipped spec and a folder means the spec. For a problem, or a mapping without ``tile`` or
            ``stages``, the table of measurements chooses the missing fields (docs/reference/select.md); given fields
            are never changed.
        problem: the problem, or sizes of it (``{"heads": 16, "q_len": 4096}``), that guides the choice for such a
            mapping. With a complete spec it has no effect, but must not contradict the spec.
        forward_compatible: run a kernel of an older architecture on a newer device, through PTX that the driver
            compiles. Kernels of ``a`` architectures (sm_90a) and exported kernels do not support this.
        device: CUDA device that must match the architecture; by default torch's current one.
        cache: kernel cache; by default the user's. An exported folder needs no cache.

    Returns:
        A callable kernel object; see :class:`~runtime.kernels.attention.AttentionKernel`,
        :class:`~runtime.kernels.attention_fp8.Fp8AttentionKernel`,
        :class:`~runtime.kernels.bsr_spmm.BsrSpmmKernel`, :class:`~runtime.kernels.bsr_sddmm.BsrSddmmKernel`,
        :class:`~runtime.kernels.attention_backward.AttentionBackwardKernel`,
        :class:`~runtime.kernels.block_mask.BlockMaskKernel`,
        :class:`~runtime.kernels.bsr_spgemm.BsrSpgemmKernel`,
        :class:`~runtime.kernels.key_lists_backward.KeyListsBackwardKernel`,
        :class:`~runtime.kernels.key_lists_forward.KeyListsForwardKernel`,
        :class:`~runtime.kernels.key_lists_paged.KeyListsPagedKernel`,
        :class:`~runtime.kernels.paged_attention.PagedAttentionKernel`,
        :class:`~runtime.kernels.paged_prefill.PagedPrefillKernel`,
        :class:`~runtime.kernels.quantize.QuantizeKernel`,
        :class:`~runtime.kernels.select_topk.SelectTopkKernel`
        and :class:`~runtime.kernels.tile_copy.TileCopyKernel`.

    Raises:
        SpecError: if the name is unknown or the spec is invalid.
        ArgumentError: if ``device`` is not a CUDA device of this machine.
        DeviceError: if there is no GPU, or a GPU of another architecture (the message suggests a spec for it), or if
            the process was forked after the first use of CUDA.
        ToolchainError, CompileError, CacheError: if the kernel cannot be built.
        SpillError: if the installed compiler's code for a shipped kernel spills registers and its receipt's code does
            not.
        NoJitError: if the kernel needs compilation and CODEGEN_NO_JIT=1 forbids it.
        UnverifiedError: if the kernel has no receipt, within ``verified_only``.
        ExportError, FileError: if the folder is not an exported kernel or was modified; if the file in CODEGEN_RECORD
            cannot be written.
    """
    process.claim(torch_forked=torch.cuda._is_in_bad_fork())
    check_flag("forward_compatible", forward_compatible)
    if cache is not None and not isinstance(cache, KernelCache):
        raise ArgumentError("cache", f"is {type(cache).__name__}, expected a KernelCache")
    if device is not None:
        named_device("device", device)
    folder = _folder(spec)
    if folder is not None:
        if is_on():
            permit.check_exported(folder)
        return _load_exported(folder, problem, device, forward_compatible)
    where = _device(device) if torch.cuda.is_available() else None
    device_name = None if where is None else torch.cuda.get_device_name(where)

    def choose_among(verified: Verified | None) -> Choice:
        return choose(spec, problem, device=device_name, verified=verified)

    choice = permit.chosen(choose_among) if is_on() else choose_among(None)
    named = choice.named
    if choice.rule != "written":
        logger().debug("%s: %s: %s", named.stem, choice.rule, choice.reason)
    generated = generate(named)
    if where is None:
        raise DeviceError(f"{named.stem} cannot be loaded: torch sees no CUDA device (`codegen compile` needs none)")
    check_device(named, where, forward_compatible)
    native = torch.cuda.get_device_capability(where) == generated.plan.arch.compute_capability
    if not native and jit.is_forbidden():
        raise NoJitError(named.stem, named.spec.hash, "the driver would compile its PTX for this device", _NATIVE)
    return _loaded(code_of(generated, "cubin" if native else "ptx", cache), where)


def _folder(spec: object) -> Path | None:
    """Folder of an exported kernel; None for the name or fields of a spec."""
    if not isinstance(spec, str | Path) or (isinstance(spec, str) and shipped_file(spec) is not None):
        return None
    try:
        return Path(spec) if Path(spec).is_dir() else None
    except (OSError, ValueError):
        return None


def _load_exported(
    folder: Path, problem: object, device: torch.device | str | int | None, forward_compatible: bool
) -> Kernel:
    """Load an exported kernel."""
    if problem is not None:
        raise SpecError("problem", f"is given with {folder}, an exported kernel without choices: leave it out")
    if forward_compatible:
        raise ArgumentError("forward_compatible", f"is True, but {folder} has no PTX, only a cubin: leave it out")
    compiled = read_compiled(folder)
    named, arch = compiled.named, compiled.plan.arch
    if not torch.cuda.is_available():
        raise DeviceError(f"{named.stem} cannot be loaded: torch sees no CUDA device")
    where = _device(device)
    have = torch.cuda.get_device_capability(where)
    if have != arch.compute_capability:
        here = f"{torch.cuda.get_device_name(where)} is sm_{have[0]}{have[1]}"
        what = f"{named.stem} was exported for {arch.name}, and {here}: export a kernel of its architecture"
        raise DeviceError(f"{what}; {suggest_for(named.spec, have)}")
    return _loaded(compiled, where)


def _loaded(compiled: Compiled, where: torch.device) -> Kernel:
    with entered(where.index):
        loaded = LoadedKernel(compiled)
    return kernel_class(compiled.named.spec)(compiled, loaded)


def kernel_class(spec: Spec) -> Callable[[Compiled, LoadedKernel], Kernel]:
    """Class of the kernel objects of a spec."""
    found: type[Kernel] = part(operator_of(spec).kernel)
    return found


def _device(device: torch.device | str | int | None) -> torch.device:
    """CUDA device with its number; by default torch's current one.

    Raises:
        ArgumentError: if it is not a CUDA device or does not exist.
    """
    found = named_device("device", "cuda" if device is None else device)
    if found.type != "cuda":
        raise ArgumentError("device", f"is {shown(device)}, expected a CUDA device, such as 'cuda:0'")
    index, count = torch.cuda.current_device() if found.index is None else found.index, torch.cuda.device_count()
    if index >= count:
        raise ArgumentError("device", f"is {shown(device)}, torch sees {count} CUDA devices, 0 to {count - 1}")
    return torch.device("cuda", index)
