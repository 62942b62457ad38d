"""Attention over videos: tokens in tiles, and windows of tiles."""

from __future__ import annotations

import sparse_kernel_codegen._ours
from runtime.video import *
from runtime.video import __all__ as __all__
