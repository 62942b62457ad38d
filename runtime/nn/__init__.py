"""Layers of torch.nn with block-sparse weights."""

from __future__ import annotations

from runtime.nn.linear import BlockSparseLinear

__all__ = ["BlockSparseLinear"]
