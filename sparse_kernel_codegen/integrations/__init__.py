"""Attention of this package in transformers, diffusers and vLLM-Omni."""

from __future__ import annotations

import sparse_kernel_codegen._ours
from runtime.integrations import *
from runtime.integrations import __all__ as __all__
