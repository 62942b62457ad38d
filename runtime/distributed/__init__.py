"""Attention over several GPUs with ``torch.distributed``, for sequences too long for one GPU."""

from runtime.distributed.attention import context_parallel_attention, head_parallel_attention
from runtime.distributed.layout import Layout
from runtime.distributed.sends import SendPlan, Traffic, keys_received, local_lists, plan_sends
from runtime.distributed.symmetric import shared_keys

__all__ = [
    "Layout",
    "SendPlan",
    "Traffic",
    "context_parallel_attention",
    "head_parallel_attention",
    "keys_received",
    "local_lists",
    "plan_sends",
    "shared_keys",
]
