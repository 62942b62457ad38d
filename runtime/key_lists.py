"""Lists of keys of single queries, for attention over pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from codegen.wording import shown
from runtime.checks import check_dense
from runtime.errors import ArgumentError
from runtime.kernels.paged_attention import ENTRY_KEYS

_RANK = 3


@dataclass(frozen=True, eq=False)
class KeyLists:
    """Each query sees the keys of its own list, up to its own position.

    Entry e stands for keys e * keys to (e + 1) * keys - 1 of its request: logical positions, wherever their pages lie.
    Negative entries and those behind the last key count as absent, wherever they are in a list. A repeated entry counts
    as often as it is there.

    Attributes:
        indices: int32 (kv_heads, tokens, entries), or (1, tokens, entries) for all KV heads; entries are contiguous.
        counts: int32 (kv_heads or 1, tokens), as indices: entries of each list that count, from the first one on; None
            if all of them do.
        keys: keys of an entry: a power of two up to 256. 64 or 128 are blocks (MiniMax M3's, MoBA's), 1 is a token, 4
            a group of tokens.
    """

    indices: torch.Tensor
    counts: torch.Tensor | None = None
    keys: int = 1

    def __post_init__(self) -> None:
        check_dense("indices", self.indices)
        if self.indices.dtype != torch.int32:
            raise ArgumentError(
                "indices", f"is {self.indices.dtype}, expected torch.int32: pass indices.to(torch.int32)"
            )
        if self.indices.dim() != _RANK:
            shape = f"has shape {tuple(self.indices.shape)}"
            raise ArgumentError("indices", f"{shape}, expected (kv_heads or 1, tokens, entries)")
        if self.counts is not None:
            check_dense("counts", self.counts)
            if self.counts.dtype != torch.int32 or self.counts.shape != self.indices.shape[:2]:
                found = f"is {self.counts.dtype} {tuple(self.counts.shape)}"
                raise ArgumentError("counts", f"{found}, expected torch.int32 {tuple(self.indices.shape[:2])}")
        if isinstance(self.keys, bool) or not isinstance(self.keys, int) or self.keys not in ENTRY_KEYS:
            raise ArgumentError("keys", f"is {shown(self.keys)}, expected one of {', '.join(map(str, ENTRY_KEYS))}")
