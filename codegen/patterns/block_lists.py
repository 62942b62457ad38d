"""FlexAttention's BlockMask: a count and a list of key blocks per query block, full and partial blocks apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from codegen.patterns.base import NO_VALUES, Block, IndexTensor, PatternBase


class BlockLists(PatternBase):
    """Each query block sees the first ``kv_num_blocks`` entries of its list, and those of an optional second list.

    Blocks of the first list are partial: ``mask`` says which of their pairs are visible. Blocks of the second list
    (``full_*``) are full: every pair is visible, whatever ``mask`` is.
    """

    lists: ClassVar[int] = 2
    kind: Literal["block_lists"]
    block: Block = Field(description="shape of a block")
    mask: Literal["none", "causal"] = Field(
        default="none",
        description="mask of the partial blocks: none, or causal (key <= query + kv_len - q_len)",
    )

    @property
    def fixed_block(self) -> Block:
        """Block shape of the lists."""
        return self.block

    @property
    def masks_pairs(self) -> bool:
        """Partial blocks are masked unless the predicate is trivial."""
        return self.mask != "none"

    @property
    def shift_invariant(self) -> bool:
        """Whether a pair is hidden depends on the distance of key and query."""
        return True

    @property
    def index_tensors(self) -> tuple[IndexTensor, ...]:
        """The two counts and the two lists."""
        count = ("batch", "heads", "query_blocks")
        lists = (*count, "any")
        return (
            IndexTensor("kv_num_blocks", count, "number of partial key blocks", upper="kv_indices"),
            IndexTensor("kv_indices", lists, "partial key blocks", upper="key_blocks"),
            IndexTensor(
                "full_kv_num_blocks", count, "number of full key blocks", upper="full_kv_indices", optional=True
            ),
            IndexTensor("full_kv_indices", lists, "full key blocks", upper="key_blocks", optional=True),
        )

    @property
    def load_imbalanced(self) -> bool:
        """Rows differ in length."""
        return True

    def visible(self, q: Any, k: Any, q_len: int, kv_len: int, values: Mapping[str, Any] = NO_VALUES) -> Any:
        """Return whether query ``q`` sees key ``k`` of a partial block."""
        inside = super().visible(q, k, q_len, kv_len, values)
        return inside & (k <= q + (kv_len - q_len)) if self.mask == "causal" else inside

    def describe(self) -> str:
        """Return the pattern in words."""
        return (
            f"each block of {self.block.q} queries sees the blocks of {self.block.kv} keys in its two lists; "
            f"predicate of the partial ones: {self.mask}"
        )

    def stem(self) -> str:
        """Return a short name."""
        return f"lists_b{self.block.q}x{self.block.kv}" + ("" if self.mask == "none" else f"_{self.mask}")
