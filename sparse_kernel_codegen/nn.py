"""Layers with block-sparse weights, as :mod:`torch.nn` has layers with dense ones."""

from __future__ import annotations

import sparse_kernel_codegen._ours
from runtime.nn import *
from runtime.nn import __all__ as __all__
