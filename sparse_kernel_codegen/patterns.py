"""Sparsity patterns of attention."""

from __future__ import annotations

import sparse_kernel_codegen._ours
from runtime.patterns import *
from runtime.patterns import __all__ as __all__
