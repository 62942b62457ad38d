"""What the package keeps from call to call: dropping it makes the next call the first of its kind."""

from __future__ import annotations

import functools
import sys

import torch

from runtime.kernels.arguments import Signatures
from runtime.kernels.launches import Launches
from runtime.receipts.mode import KeptByMode

STATEFUL = "runtime.driver.workspace"
PURE = ("codegen", "runtime.compile", "runtime.ops.attention_choice", "runtime.ops.bsr_choice")
"""Modules whose caches hold text, numbers and files, which no mode and no loaded kernel reaches."""


def forget() -> None:
    """Drop loaded kernels, routes, launches and memory of earlier calls."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("runtime."):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, functools._lru_cache_wrapper):
                if not str(value.__module__).startswith(PURE):
                    value.cache_clear()
            elif isinstance(value, KeptByMode):
                value.cache_clear()
            elif isinstance(value, Signatures | Launches) or (
                name == STATEFUL and key[0] == "_" != key[1] and hasattr(value, "clear")
            ):
                value.clear()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
