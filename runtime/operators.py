"""One record per operator, with the locations of its parts in the packages of the runtime.

A part is given as module and name, and imported by the package that uses it, so that this module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from codegen.spec import AttentionSpec, KeyListsForwardSpec, Spec


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Parts of an operator.

    Attributes:
        kernel: class of what ``load_kernel`` returns.
        verification: its cases and their oracle, a ``Verification``.
        workload: function from a kernel and its sizes to the reference workload, a ``Workload``.
        inputs: function from a problem and a device to the inputs of ``codegen tune``; None for an operator without
            problems.
        example: function from a spec to an example of its sparsity in the report; None for dense operands.
        fp8: record of kernels with FP8 inputs, if their calls differ.
        paged: record of kernels over pages, if their calls differ.
    """

    kernel: str
    verification: str
    workload: str
    inputs: str | None = None
    example: str | None = None
    fp8: Operator | None = None
    paged: Operator | None = None


_ATTENTION = Operator(
    kernel="runtime.kernels.attention:AttentionKernel",
    verification="runtime.verify.attention:VERIFICATION",
    workload="runtime.tools.bench.measurement:attention_workload",
    inputs="runtime.tools.tune.data:AttentionInputs",
    example="runtime.tools.report.patterns:pattern_example",
)
OPERATORS: dict[str, Operator] = {
    "attention": replace(
        _ATTENTION,
        fp8=replace(
            _ATTENTION,
            kernel="runtime.kernels.attention_fp8:Fp8AttentionKernel",
            verification="runtime.verify.attention_fp8:VERIFICATION",
        ),
        paged=Operator(
            kernel="runtime.kernels.paged_prefill:PagedPrefillKernel",
            verification="runtime.verify.paged_attention:PREFILL_VERIFICATION",
            workload="runtime.tools.bench.measurement:prefill_workload",
        ),
    ),
    "attention_backward": Operator(
        kernel="runtime.kernels.attention_backward:AttentionBackwardKernel",
        verification="runtime.verify.gradients:VERIFICATION",
        workload="runtime.tools.bench.measurement:backward_workload",
        example="runtime.tools.report.patterns:pattern_example",
    ),
    "block_mask": Operator(
        kernel="runtime.kernels.block_mask:BlockMaskKernel",
        verification="runtime.verify.block_mask:VERIFICATION",
        workload="runtime.tools.bench.measurement:block_mask_workload",
    ),
    "bsr_spmm": Operator(
        kernel="runtime.kernels.bsr_spmm:BsrSpmmKernel",
        verification="runtime.verify.bsr_spmm:VERIFICATION",
        workload="runtime.tools.bench.measurement:bsr_workload",
        inputs="runtime.tools.tune.data:SpmmInputs",
        example="runtime.tools.report.patterns:stored_example",
    ),
    "bsr_sddmm": Operator(
        kernel="runtime.kernels.bsr_sddmm:BsrSddmmKernel",
        verification="runtime.verify.bsr_sddmm:VERIFICATION",
        workload="runtime.tools.bench.measurement:sddmm_workload",
        inputs="runtime.tools.tune.data:SddmmInputs",
        example="runtime.tools.report.patterns:sampled_example",
    ),
    "bsr_spgemm": Operator(
        kernel="runtime.kernels.bsr_spgemm:BsrSpgemmKernel",
        verification="runtime.verify.bsr_spgemm:VERIFICATION",
        workload="runtime.tools.bench.measurement:spgemm_workload",
        inputs="runtime.tools.tune.data:SpgemmInputs",
        example="runtime.tools.report.patterns:product_example",
    ),
    "key_lists_backward": Operator(
        kernel="runtime.kernels.key_lists_backward:KeyListsBackwardKernel",
        verification="runtime.verify.key_lists:VERIFICATION",
        workload="runtime.tools.bench.measurement:key_lists_workload",
    ),
    "key_lists_forward": Operator(
        kernel="runtime.kernels.key_lists_forward:KeyListsForwardKernel",
        verification="runtime.verify.key_lists:FORWARD_VERIFICATION",
        workload="runtime.tools.bench.measurement:key_lists_forward_workload",
        paged=Operator(
            kernel="runtime.kernels.key_lists_paged:KeyListsPagedKernel",
            verification="runtime.verify.key_lists:FORWARD_VERIFICATION",
            workload="runtime.tools.bench.measurement:key_lists_paged_workload",
        ),
    ),
    "paged_attention": Operator(
        kernel="runtime.kernels.paged_attention:PagedAttentionKernel",
        verification="runtime.verify.paged_attention:VERIFICATION",
        workload="runtime.tools.bench.measurement:paged_workload",
    ),
    "quantize": Operator(
        kernel="runtime.kernels.quantize:QuantizeKernel",
        verification="runtime.verify.quantize:VERIFICATION",
        workload="runtime.tools.bench.measurement:quantize_workload",
    ),
    "select_topk": Operator(
        kernel="runtime.kernels.select_topk:SelectTopkKernel",
        verification="runtime.verify.select_topk:VERIFICATION",
        workload="runtime.tools.bench.measurement:select_workload",
    ),
    "tile_copy": Operator(
        kernel="runtime.kernels.tile_copy:TileCopyKernel",
        verification="runtime.verify.tile_copy:VERIFICATION",
        workload="runtime.tools.bench.measurement:copy_workload",
    ),
}
"""Records by operator name."""


def operator_of(spec: Spec) -> Operator:
    """Record of a spec's operator."""
    found = OPERATORS[spec.op]
    if isinstance(spec, AttentionSpec | KeyListsForwardSpec) and spec.layout == "paged":
        return found.paged or found
    return found.fp8 or found if spec.is_fp8 else found


def part(place: str) -> Any:
    """Import a part of an operator, named ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
