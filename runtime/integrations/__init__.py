"""Attention backends for transformers, diffusers, vLLM, SGLang and vLLM-Omni.

Each library is an extra of this package, and is imported when the backend is registered.
"""

from __future__ import annotations

from runtime.integrations.choosers import Chooser, TopKSelection, chooser_of
from runtime.integrations.diffusers_attention import diffusers_attention, register_diffusers
from runtime.integrations.sglang.registration import register_sglang
from runtime.integrations.transformers_attention import register_transformers
from runtime.integrations.transformers_batching import register_transformers_batching
from runtime.integrations.transformers_context import ContextParallel
from runtime.integrations.vllm.registration import register_vllm

__all__ = [
    "Chooser",
    "ContextParallel",
    "TopKSelection",
    "chooser_of",
    "diffusers_attention",
    "register_diffusers",
    "register_sglang",
    "register_transformers",
    "register_transformers_batching",
    "register_vllm",
]
