"""Kernels in folders that are loaded without a compiler."""

from __future__ import annotations

import sparse_kernel_codegen._ours
from runtime.export import Exported, export

__all__ = ["Exported", "export"]
