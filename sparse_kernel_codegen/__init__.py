"""Block-sparse attention and BSR products by generated CUDA kernels: the public names of this distribution.

    import sparse_kernel_codegen as skc
    from sparse_kernel_codegen.patterns import TopK

Names are imported on first use. ``import sparse_kernel_codegen`` alone needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codegen import __version__
    from codegen.library import find_spec
    from runtime import (
        ArgumentError,
        AttentionResult,
        BsrMatrix,
        CacheError,
        CodegenError,
        CollectiveError,
        CompileError,
        DeviceError,
        ExportError,
        Kernel,
        KeyLists,
        NoJitError,
        PreparedBsr,
        PreparedLists,
        QuantizedAttention,
        QuantizedMatrix,
        SpecError,
        ToolchainError,
        UnverifiedError,
        block_sparse_attention,
        block_sparse_attention_fp8,
        bsr_matmul,
        bsr_problem,
        bsr_sddmm,
        create_block_mask,
        explain_attention,
        explain_matmul,
        explain_paged_attention,
        explain_varlen_attention,
        load_kernel,
        merge_attention,
        paged_attention,
        paged_workspace,
        prepare_bsr,
        quantize_attention,
        quantize_matrix,
        quantized_operands,
        reference_attention,
        scales_of,
        select_topk_blocks,
        varlen_attention,
        verified_only,
    )
    from sparse_kernel_codegen import (
        compat,
        convert,
        distributed,
        export,
        integrations,
        nn,
        patterns,
        select,
        video,
    )

_SUBMODULES = frozenset(
    {
        "compat",
        "convert",
        "distributed",
        "export",
        "integrations",
        "nn",
        "patterns",
        "select",
        "video",
    }
)
_HOMES = {"__version__": "codegen", "find_spec": "codegen.library"}
"""Modules of the names that ``runtime`` does not export."""

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
    "__version__",
    "block_sparse_attention",
    "block_sparse_attention_fp8",
    "bsr_matmul",
    "bsr_problem",
    "bsr_sddmm",
    "compat",
    "convert",
    "create_block_mask",
    "distributed",
    "explain_attention",
    "explain_matmul",
    "explain_paged_attention",
    "explain_varlen_attention",
    "export",
    "find_spec",
    "integrations",
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
    "select",
    "select_topk_blocks",
    "varlen_attention",
    "verified_only",
    "video",
]


if not TYPE_CHECKING:  # else every name would be an attribute to a type checker

    def __getattr__(name: str) -> Any:
        """Import a public name on first use.

        Raises:
            AttributeError: if there is no such name.
            ImportError: if another project's ``codegen`` or ``runtime`` comes first on ``sys.path``.
            ToolchainError: if the name needs torch, which is not installed.
        """
        from importlib import import_module  # noqa: PLC0415 - a command starts without

        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import_module(f"{__name__}._ours")
        if name in _SUBMODULES:
            with import_module("runtime.errors").torch_needed(name):
                return import_module(f"{__name__}.{name}")
        found = getattr(import_module(_HOMES.get(name, "runtime")), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """The public names."""
    return __all__
