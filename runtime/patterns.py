"""Sparsity patterns of a call: those of the specs, with the tensors that a call passes."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch


class Pattern:
    """Base of the patterns."""

    def spec_pattern(self) -> dict[str, Any]:
        """Return the pattern of the kernel's spec, as plain data."""
        raise NotImplementedError

    def index_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that a call passes beside q, k and v, in the kernel's order."""
        return ()


@dataclass(frozen=True, eq=False)
class Causal(Pattern):
    """Query i sees the keys up to its own position."""

    align: Literal["bottom_right", "top_left"] = "bottom_right"

    def spec_pattern(self) -> dict[str, Any]:
        """Return the pattern of the spec."""
        return {"kind": "causal", "align": self.align}


@dataclass(frozen=True, eq=False)
class PrefixLM(Pattern):
    """Query i of batch b sees the first ``prefix_len[b]`` keys and those up to its own position."""

    prefix_len: torch.Tensor

    def spec_pattern(self) -> dict[str, Any]:
        """Return the pattern of the spec."""
        return {"kind": "prefix_lm"}

    def index_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return ``prefix_len``."""
        return (self.prefix_len,)


@dataclass(frozen=True, eq=False)
class TopK(Pattern):
    """Each query block sees the key blocks of its list, all of them whole."""

    kv_indices: torch.Tensor
    _: KW_ONLY
    block: tuple[int, int] = (128, 128)

    def spec_pattern(self) -> dict[str, Any]:
        """Return the pattern of the spec."""
        return {"kind": "topk", "block": {"q": self.block[0], "kv": self.block[1]}}

    def index_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return ``kv_indices``."""
        return (self.kv_indices,)


@dataclass(frozen=True, eq=False)
class BlockLists(Pattern):
    """Each query block sees the first blocks of two lists, partial and full ones: FlexAttention's layout."""

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor | None = None
    full_kv_indices: torch.Tensor | None = None
    _: KW_ONLY
    block: tuple[int, int] = (128, 128)
    mask: Literal["none", "causal", "bits"] = "none"
    mask_bits: torch.Tensor | None = None
    overflow: torch.Tensor | None = None

    def spec_pattern(self) -> dict[str, Any]:
        """Return the pattern of the spec."""
        return {"kind": "block_lists", "block": {"q": self.block[0], "kv": self.block[1]}, "mask": self.mask}

    def index_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return counts and lists, and the bits if there are any."""
        lists = (self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices)
        return lists if self.mask_bits is None else (*lists, self.mask_bits)
