"""Conversions between block-sparse formats of other libraries and :mod:`sparse_kernel_codegen.patterns`."""

from __future__ import annotations

import sparse_kernel_codegen._ours
from runtime.convert import *
from runtime.convert import __all__ as __all__
