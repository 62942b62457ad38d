"""The same number of key blocks for each query block, chosen by the caller at run time."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from codegen.patterns.base import Block, IndexTensor, PatternBase
from codegen.patterns.block_lists import BlockLists


class TopK(PatternBase):
    """Each query block sees the key blocks in its list, with k or any number of entries; repeated entries all count."""

    lists: ClassVar[int] = 1
    supports_stream_k: ClassVar[bool] = True
    supports_kv_splits: ClassVar[bool] = True
    serpentine: ClassVar[bool] = True
    queries: ClassVar[str | None] = "listed"
    kind: Literal["topk"]
    k: int | None = Field(
        default=None,
        ge=1,
        le=1 << 16,
        description="key blocks per query block; if omitted, the width of the lists in the call",
    )
    block: Block = Field(description="shape of a block")

    @property
    def wider(self) -> PatternBase | None:
        """Equivalent block lists without a mask; None for lists of a fixed length."""
        return None if self.k is not None else BlockLists(kind="block_lists", block=self.block)

    @property
    def fixed_block(self) -> Block:
        """Block shape of the lists."""
        return self.block

    @property
    def list_length(self) -> int | None:
        """Entries per list; None if the call decides."""
        return self.k

    @property
    def index_tensors(self) -> tuple[IndexTensor, ...]:
        """The list of key blocks."""
        return (
            IndexTensor(
                "kv_indices",
                ("batch", "heads", "query_blocks", "any" if self.k is None else self.k),
                "key blocks of each query block, in any order",
                upper="key_blocks",
            ),
        )

    @property
    def never_empty(self) -> bool:
        """A list of fixed length has at least one entry."""
        return self.k is not None

    def stream_k_units(self, kv_len: int, rows: int, keys: int, listed: int = 0) -> int:
        """Number of listed blocks, or of steps if a step has several blocks."""
        del kv_len, rows
        return -(-(listed if self.k is None else self.k) // max(1, keys // self.block.kv))

    def constants(self) -> dict[str, tuple[int, str]]:
        """Length of the lists, if it is fixed."""
        return {} if self.k is None else {"kTopK": (self.k, "key blocks listed for each query block")}

    def describe(self) -> str:
        """Description of the pattern."""
        blocks = "the listed" if self.k is None else f"{self.k} listed"
        return f"each block of {self.block.q} queries sees {blocks} blocks of {self.block.kv} keys"

    def stem(self) -> str:
        """Short name of the pattern."""
        return f"topk{self.k or ''}_b{self.block.q}x{self.block.kv}"
