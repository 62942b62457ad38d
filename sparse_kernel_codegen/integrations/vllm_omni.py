"""Attention of vLLM-Omni."""

from __future__ import annotations

import sparse_kernel_codegen._ours
from runtime.integrations.vllm_omni import attention

__all__ = ["attention"]
