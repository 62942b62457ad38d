"""FlexAttention's BlockMask: a count and a list of key blocks per query block, full and partial blocks apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from codegen.patterns.base import NO_VALUES, Block, IndexTensor, PatternBase

WORD = 32  # keys that a word of mask_bits is about


class BlockLists(PatternBase):
    """Each query block sees the first ``kv_num_blocks`` entries of its list, and those of an optional second list.

    Blocks of the first list are partial: ``mask`` says which of their pairs are visible. Blocks of the second list
    (``full_*``) are full: every pair is visible, whatever ``mask`` is.

    With ``mask: bits`` a tensor of the caller has a bit for each pair of the partial blocks, in the order in which they
    are listed: bit c % 32, from the lowest on, of word r * (block.kv / 32) + c // 32 of the i-th one is 1 if query r of
    the query block sees key c of the key block.
    """

    lists: ClassVar[int] = 2
    queries: ClassVar[str | None] = "listed"
    kind: Literal["block_lists"]
    block: Block = Field(description="shape of a block")
    mask: Literal["none", "causal", "bits"] = Field(
        default="none",
        description="mask of the partial blocks: none, causal (key <= query + kv_len - q_len), or bits (mask_bits has "
        "a bit for each pair; block.kv is 32 or more)",
    )

    @field_validator("mask")
    @classmethod
    def _has_whole_words(cls, mask: str, info: ValidationInfo) -> str:
        block = info.data.get("block")  # missing where it is wrong itself
        if mask == "bits" and block is not None and block.kv % WORD:
            raise ValueError(f"a word has the bits of {WORD} keys, and block.kv is {block.kv}: allowed are 32, 64, 128")
        return mask

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
        return self.mask != "bits"

    @property
    def masks_by_bits(self) -> bool:
        """Whether ``mask_bits`` is the mask."""
        return self.mask == "bits"

    @property
    def index_tensors(self) -> tuple[IndexTensor, ...]:
        """The two counts and the two lists; then the bits, if they are the mask."""
        count = ("batch", "heads", "query_blocks")
        lists: tuple[str | int, ...] = (*count, "any")
        words = self.block.q * self.block.kv // WORD
        bits = IndexTensor(
            "mask_bits", (*lists, words), "bits of the partial blocks, as listed", upper="", of_entries="kv_indices"
        )
        return (
            IndexTensor("kv_num_blocks", count, "number of partial key blocks", upper="kv_indices"),
            IndexTensor("kv_indices", lists, "partial key blocks", upper="key_blocks"),
            IndexTensor(
                "full_kv_num_blocks", count, "number of full key blocks", upper="full_kv_indices", optional=True
            ),
            IndexTensor("full_kv_indices", lists, "full key blocks", upper="key_blocks", optional=True),
            *((bits,) if self.masks_by_bits else ()),
        )

    @property
    def load_imbalanced(self) -> bool:
        """Rows differ in length."""
        return True

    def visible(self, q: Any, k: Any, q_len: int, kv_len: int, values: Mapping[str, Any] = NO_VALUES) -> Any:
        """Return whether query ``q`` sees key ``k`` of a partial block, if ``mask_bits`` does not hide it."""
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
