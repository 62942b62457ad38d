"""Attention for vLLM."""

from __future__ import annotations

import sparse_kernel_codegen._ours
from runtime.integrations.vllm import *
from runtime.integrations.vllm import __all__ as __all__
