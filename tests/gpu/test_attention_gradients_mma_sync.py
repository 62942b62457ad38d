"""Gradients by the kernels of sm_89, which newer GPUs run through PTX: the tests of those that a GPU would take itself.

pytest -n 0 tests/gpu/test_attention_gradients_mma_sync.py
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpu.test_attention_gradients import (  # noqa: E402
    test_a_hundred_runs_beside_a_busy_stream_have_the_same_bits,
    test_a_loss_may_depend_on_the_log_sum_exp,
    test_a_loss_of_the_log_sum_exp_with_sinks,
    test_block_masks_and_documents_have_gradients,
    test_compile_takes_a_training_step_whole,
    test_gradients_that_no_kernel_can_read_are_copied,
    test_graphs_of_both_passes_read_the_lists_of_each_replay,
    test_grouped_heads,
    test_head_sizes_that_are_filled_up,
    test_head_sizes_with_grouped_heads_and_odd_lengths,
    test_keys_behind_the_last_one_have_no_weight_beside_logits_far_below_zero,
    test_lengths,
    test_lengths_of_lists,
    test_options,
    test_options_with_other_patterns,
    test_patterns,
    test_strided_operands,
    test_what_is_behind_the_length_has_no_effect,
)
from gpu.test_expressions import test_gradients as test_masks_that_are_expressions  # noqa: E402

from codegen.arch import ARCHS  # noqa: E402
from codegen.library import NamedSpec  # noqa: E402
from runtime import load_kernel  # noqa: E402
from runtime.kernels.arguments import Signatures  # noqa: E402
from runtime.kernels.attention_backward import AttentionBackwardKernel  # noqa: E402
from runtime.ops import attention_gradients  # noqa: E402

__all__ = [
    "test_a_hundred_runs_beside_a_busy_stream_have_the_same_bits",
    "test_a_loss_may_depend_on_the_log_sum_exp",
    "test_a_loss_of_the_log_sum_exp_with_sinks",
    "test_block_masks_and_documents_have_gradients",
    "test_compile_takes_a_training_step_whole",
    "test_gradients_that_no_kernel_can_read_are_copied",
    "test_graphs_of_both_passes_read_the_lists_of_each_replay",
    "test_grouped_heads",
    "test_head_sizes_that_are_filled_up",
    "test_head_sizes_with_grouped_heads_and_odd_lengths",
    "test_keys_behind_the_last_one_have_no_weight_beside_logits_far_below_zero",
    "test_lengths",
    "test_lengths_of_lists",
    "test_masks_that_are_expressions",
    "test_options",
    "test_options_with_other_patterns",
    "test_patterns",
    "test_strided_operands",
    "test_what_is_behind_the_length_has_no_effect",
]
ARCH = "sm_89"
OLDER = torch.cuda.is_available() and torch.cuda.get_device_capability() < ARCHS[ARCH].compute_capability
pytestmark = pytest.mark.skipif(OLDER, reason=f"kernels of {ARCH} run on newer devices only")


@cache
def loaded(named: NamedSpec, device: torch.device) -> AttentionBackwardKernel:
    assert named.spec.arch == ARCH
    kernel = load_kernel(named, device=device, forward_compatible=True)
    assert isinstance(kernel, AttentionBackwardKernel)
    return kernel


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the backward pass take the kernels of sm_89, and see that it did."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    asked: list[NamedSpec] = []

    def load(named: NamedSpec, device: Any) -> AttentionBackwardKernel:
        asked.append(named)
        return loaded(named, device)

    monkeypatch.setattr(attention_gradients, "arch_of", lambda device: ARCH)
    monkeypatch.setattr(attention_gradients, "_loaded", load)
    monkeypatch.setattr(attention_gradients, "_routes", Signatures())  # routes keep kernels that are loaded
    yield
    assert asked
