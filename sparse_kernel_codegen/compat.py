"""Calls of FlexAttention, FlashAttention and torch with their arguments, and this package's kernels."""

from __future__ import annotations

import sparse_kernel_codegen._ours
from runtime.compat import *
from runtime.compat import __all__ as __all__
