"""Compiles, caches, loads and calls the kernels that :mod:`codegen` generates."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from codegen.errors import CodegenError, ExportError, SpecError
from runtime.errors import (
    ArgumentError,
    CacheError,
    CollectiveError,
    CompileError,
    DeviceError,
    NoJitError,
    ToolchainError,
    UnverifiedError,
    torch_needed,
)
from runtime.receipts.mode import verified_only

if TYPE_CHECKING:
    from runtime import compat, nn, patterns
    from runtime.kernel import Kernel, load_kernel
    from runtime.kernels.attention import AttentionResult
    from runtime.key_lists import KeyLists
    from runtime.ops.attention import block_sparse_attention, block_sparse_attention_fp8
    from runtime.ops.block_mask import create_block_mask
    from runtime.ops.bsr import bsr_matmul, bsr_sddmm
    from runtime.ops.bsr_explain import explain_matmul
    from runtime.ops.explain import explain_attention
    from runtime.ops.explain_packed import explain_paged_attention, explain_varlen_attention
    from runtime.ops.merge import merge_attention
    from runtime.ops.paged import paged_attention, paged_workspace
    from runtime.ops.quantize import QuantizedMatrix, quantize_matrix
    from runtime.ops.quantize_attention import QuantizedAttention, quantize_attention
    from runtime.ops.quantized_operands import quantized_operands
    from runtime.ops.select_topk import select_topk_blocks
    from runtime.ops.static_scales import scales_of
    from runtime.ops.varlen import varlen_attention
    from runtime.prepare.bsr_matrix import BsrMatrix, prepare_bsr
    from runtime.prepare.prepared import PreparedBsr, PreparedLists
    from runtime.prepare.problem import bsr_problem
    from runtime.reference import reference_attention

# These need torch and are imported on first use, so that the command line works without it.
_NEED_TORCH = {
    "AttentionResult": "runtime.kernels.attention",
    "BsrMatrix": "runtime.prepare.bsr_matrix",
    "Kernel": "runtime.kernel",
    "PreparedBsr": "runtime.prepare.prepared",
    "PreparedLists": "runtime.prepare.prepared",
    "QuantizedAttention": "runtime.ops.quantize_attention",
    "QuantizedMatrix": "runtime.ops.quantize",
    "block_sparse_attention": "runtime.ops.attention",
    "block_sparse_attention_fp8": "runtime.ops.attention",
    "bsr_matmul": "runtime.ops.bsr",
    "bsr_problem": "runtime.prepare.problem",
    "bsr_sddmm": "runtime.ops.bsr",
    "compat": "runtime.compat",
    "create_block_mask": "runtime.ops.block_mask",
    "explain_attention": "runtime.ops.explain",
    "explain_matmul": "runtime.ops.bsr_explain",
    "explain_paged_attention": "runtime.ops.explain_packed",
    "explain_varlen_attention": "runtime.ops.explain_packed",
    "KeyLists": "runtime.key_lists",
    "load_kernel": "runtime.kernel",
    "merge_attention": "runtime.ops.merge",
    "nn": "runtime.nn",
    "paged_attention": "runtime.ops.paged",
    "paged_workspace": "runtime.ops.paged",
    "patterns": "runtime.patterns",
    "prepare_bsr": "runtime.prepare.bsr_matrix",
    "quantize_attention": "runtime.ops.quantize_attention",
    "quantize_matrix": "runtime.ops.quantize",
    "quantized_operands": "runtime.ops.quantized_operands",
    "reference_attention": "runtime.reference",
    "scales_of": "runtime.ops.static_scales",
    "select_topk_blocks": "runtime.ops.select_topk",
    "varlen_attention": "runtime.ops.varlen",
}

# Former names and their successors, until the first release.
_RENAMED = {
    "QuantisedAttention": "QuantizedAttention",
    "QuantisedMatrix": "QuantizedMatrix",
    "quantise_attention": "quantize_attention",
    "quantise_matrix": "quantize_matrix",
    "quantised_operands": "quantized_operands",
}

__all__ = [
    "ArgumentError",
    "AttentionResult",
    "BsrMatrix",
    "CacheError",
    "CodegenError",
    "CollectiveError",
    "CompileError",
    "DeviceError",
    "ExportError",
    "Kernel",
    "KeyLists",
    "NoJitError",
    "PreparedBsr",
    "PreparedLists",
    "QuantizedAttention",
    "QuantizedMatrix",
    "SpecError",
    "ToolchainError",
    "UnverifiedError",
    "block_sparse_attention",
    "block_sparse_attention_fp8",
    "bsr_matmul",
    "bsr_problem",
    "bsr_sddmm",
    "compat",
    "create_block_mask",
    "explain_attention",
    "explain_matmul",
    "explain_paged_attention",
    "explain_varlen_attention",
    "load_kernel",
    "merge_attention",
    "nn",
    "paged_attention",
    "paged_workspace",
    "patterns",
    "prepare_bsr",
    "quantize_attention",
    "quantize_matrix",
    "quantized_operands",
    "reference_attention",
    "scales_of",
    "select_topk_blocks",
    "varlen_attention",
    "verified_only",
]


def __getattr__(name: str) -> Any:
    """Import a name that needs torch. A former name gives its successor and a DeprecationWarning."""
    if name in _RENAMED:
        warnings.warn(
            f"runtime.{name} is deprecated: use sparse_kernel_codegen.{_RENAMED[name]}",
            DeprecationWarning,
            stacklevel=2,
        )
        name = _RENAMED[name]
    if name in _NEED_TORCH:
        with torch_needed(name):
            module = importlib.import_module(_NEED_TORCH[name])
        return module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")
