"""Calls without a GPU: CPU tensors stand in for tensors on an H100, and a stand-in driver accepts launches without
running them.

Such a call has only its host overhead up to the driver, which benchmarks/host_calls.py counts and times.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from codegen.library import NamedSpec, find_spec, shipped_specs
from codegen.planning import plan_for
from codegen.select.paged import prefill_fields
from runtime.driver import context, launch, streams, tensor_map, workspace
from runtime.kernel import kernel_class
from runtime.kernels import (
    arguments,
    attention,
    attention_backward,
    attention_fp8,
    block_mask,
    bsr_arguments,
    bsr_preparation,
    bsr_scales,
    bsr_sddmm,
    bsr_spgemm,
    bsr_spmm,
    key_lists_backward,
    key_lists_forward,
    key_lists_paged,
    paged_attention,
    paged_prefill,
    quantize,
    select_topk,
    tile_copy,
)
from runtime.kernels.arguments import Signatures
from runtime.kernels.launches import Launches
from runtime.ops import (
    attention_calls,
    attention_checks,
    attention_differentiated,
    attention_gradients,
    attention_launches,
    bsr_calls,
    bsr_launches,
    paged_calls,
)
from runtime.ops import attention_fp8 as attention_calls_fp8

DEVICE_NAME = "NVIDIA H100 80GB HBM3"
ARCH, SM_COUNT, STREAM = "sm_90a", 132, 7
_OF_CHECKS = (
    *(arguments, attention, attention_backward, attention_fp8),
    *(bsr_arguments, bsr_preparation, bsr_scales, bsr_sddmm, bsr_spmm),
    *(key_lists_backward, key_lists_forward, key_lists_paged),
    *(paged_attention, paged_prefill, quantize, select_topk, tile_copy),
    *(attention_checks, attention_calls_fp8),
)


class _Any:
    """Contains everything."""

    def __contains__(self, item: object) -> bool:
        return True


def _nothing(*arguments: Any, **options: Any) -> None:
    """Stands for a check of a tensor's device."""


def _checked(name: str, tensor: Any, *others: Any) -> None:
    """Stands for the check of an operand: refuses a gradient as that does, and accepts any device."""
    if isinstance(tensor, torch.Tensor):
        arguments.refuse_gradient(name, tensor)


def _launched(*arguments: Any) -> tuple[int]:
    """Stands for a launch that the driver took."""
    return (0,)


def kernel_object(spec: str | NamedSpec) -> Any:
    """A kernel object whose launches the driver takes and does not run; to be called within ``pretended``."""
    named = find_spec(spec) if isinstance(spec, str) else spec
    plan = plan_for(named)
    loaded: Any = launch.LoadedKernel.__new__(launch.LoadedKernel)
    loaded.plan, loaded.layout = plan, launch.ParameterLayout.of(plan.params)
    loaded._function = loaded._prologue = loaded._epilogue = 0
    loaded._launch = loaded._launch_by = _launched
    loaded._sm_counts = {None: SM_COUNT}
    loaded.library = SimpleNamespace(launched=_Any(), keep=_nothing)
    compiled: Any = SimpleNamespace(named=named, plan=plan)
    return kernel_class(named.spec)(compiled, loaded)


def paged_kernel(index: int | None, dtype: str, cache: str, head_dim: int) -> Any:
    """The kernel object of calls over pages of a kind."""
    fields = {"op": "paged_attention", "arch": ARCH, "dtype": dtype, "head_dim": head_dim}
    return kernel_object(find_spec(fields if cache == "same" else {**fields, "cache": cache}))


def prefill_kernel(index: int | None, dtype: str, head_dim: int, pack: int, **options: Any) -> Any:
    """The kernel object of calls over pages with many queries per request."""
    named = find_spec(prefill_fields(ARCH, dtype, head_dim, pack, **options))
    return kernel_object(next((shipped for shipped in shipped_specs() if shipped.spec == named.spec), named))


def _check_undone(owner: Any, name: str, value: Any) -> None:
    """Check that nothing else has replaced an attribute: undone later, it would bring back this stand-in for good."""
    if getattr(owner, name) is not value:
        raise RuntimeError(f"{owner}.{name} was replaced within pretended(), and is not undone before its end")


@contextmanager
def pretended() -> Iterator[None]:
    """Let calls with tensors of the CPU go as far as the driver."""
    kept = cache(lambda named, device: kernel_object(named))
    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any, **more: Any) -> None:
            stack.enter_context(patch.object(owner, name, value, **more))
            stack.callback(_check_undone, owner, name, value)

        for module in _OF_CHECKS:
            put(module, "check_tensor", _checked)
        put(bsr_calls, "check_place", _nothing)
        put(paged_calls, "check_place", _nothing)
        put(paged_calls, "_kernel", cache(paged_kernel))
        put(paged_calls, "_prefill_kernel", cache(prefill_kernel))
        put(paged_calls, "_dividing_kernels", lambda index, head_dim: ())
        put(paged_calls, "arch_of", lambda device: ARCH)
        put(paged_calls, "_launches", Launches())
        put(bsr_spgemm, "check_on_gpu", _nothing)
        put(block_mask, "device_of", lambda device, tensors: torch.device("cpu"))
        put(block_mask, "entered", lambda index: nullcontext())
        for module in (attention_calls, attention_gradients, bsr_calls):
            put(module, "arch_of", lambda device: ARCH)
            put(module, "_loaded", kept)
            put(module, "_routes", Signatures())
        put(bsr_calls, "_samplers", Signatures())
        put(attention_differentiated, "_permitted", Signatures())
        put(bsr_launches.launches, "_kept", {})
        put(attention_launches.launches, "_kept", {})
        put(attention_gradients._launches, "_kept", {})
        put(attention_calls_fp8, "_routes", Signatures())
        attention_calls._kernel_of.cache_clear()
        stack.callback(attention_calls._kernel_of.cache_clear)
        put(torch.cuda, "get_device_name", lambda device=None: DEVICE_NAME)
        put(torch.cuda, "is_current_stream_capturing", lambda: False)
        put(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, create=True)
        put(streams, "_lasting", _Any())
        put(workspace, "_counters", {})
        put(workspace, "_kept", lambda device, stream, number: torch.zeros(number, dtype=torch.int32))
        put(tensor_map.MapEncoder, "_encode", lambda self, address: struct.pack("<Q", address) * 16)
        stack.enter_context(patch.dict(context._primary, {None: (1, lambda: (0, 1))}))
        yield
