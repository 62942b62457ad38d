"""FlexAttention's BlockMask: per query block, a count and a list of partial key blocks, and one of full key blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationInfo, field_validator, model_serializer

from codegen.expressions.bounds import constant_of, divides_by_zero
from codegen.expressions.nodes import Aux, ExpressionError, Node, Type
from codegen.expressions.parse import check_used, parse_aux, parse_expression
from codegen.expressions.text import text_of
from codegen.patterns.base import NO_VALUES, Block, IndexTensor, PatternBase

WORD = 32  # keys per word of mask_bits
NAMED_MASKS = ("none", "causal", "bits")
"""Masks of partial blocks that are not expressions."""


def expression_of(mask: str, aux: Mapping[str, str]) -> Node:
    """Tree of a valid mask expression."""
    return _parsed(mask, tuple(aux.items()))[0]


@lru_cache(maxsize=256)
def _parsed(mask: str, declared: tuple[tuple[str, str], ...]) -> tuple[Node, tuple[Aux, ...]]:
    """Tree and tensors of a valid expression."""
    aux = parse_aux(dict(declared))
    return parse_expression(mask, aux, score=False), tuple(aux.values())


class BlockLists(PatternBase):
    """Each query block sees the first ``kv_num_blocks`` entries of its list, and those of an optional second list.

    Blocks of the first list are partial: ``mask`` decides which of their pairs are visible. Blocks of the second list
    (``full_*``) are full: all of their pairs are visible, for any ``mask``.

    With ``mask: bits``, the caller passes a tensor with one bit per pair of the partial blocks, in list order. For the
    i-th entry, bit c % 32 (0 is the lowest) of word r * (block.kv / 32) + c // 32 is 1 if query r of the query block
    sees key c of the key block.

    Any other ``mask`` is an expression over ``q_idx``, ``kv_idx``, ``batch``, ``head``, ``q_len``, ``kv_len`` and the
    tensors that ``aux`` declares (docs/reference/expressions.md).
    """

    lists: ClassVar[int] = 2
    packs_sequences: ClassVar[bool] = True
    queries: ClassVar[str | None] = "listed"
    kind: Literal["block_lists"]
    block: Block = Field(description="shape of a block")
    aux: dict[str, str] = Field(
        default={}, description="tensors of an expression, by name: int32[batch, q_len], fp32[heads], ..."
    )
    mask: str = Field(
        default="none",
        validate_default=True,  # only expressions have aux tensors
        description="mask of the partial blocks: none, causal (key <= query + kv_len - q_len), bits (mask_bits has "
        "a bit for each pair; block.kv is 32 or more), or an expression",
    )

    def __hash__(self) -> int:
        return hash((self.kind, self.block, self.mask, *self.aux.items()))

    @field_validator("aux")
    @classmethod
    def _in_one_spelling(cls, aux: dict[str, str]) -> dict[str, str]:
        try:
            return {name: str(tensor) for name, tensor in sorted(parse_aux(aux).items())}
        except ExpressionError as error:
            raise ValueError(str(error)) from None

    @field_validator("mask")
    @classmethod
    def _is_known(cls, mask: str, info: ValidationInfo) -> str:
        block, aux = info.data.get("block"), info.data.get("aux")  # missing if they are invalid themselves
        if mask == "bits" and block is not None and block.kv % WORD:
            reason = f"a multiple of the {WORD} keys per word, but block.kv is {block.kv}"
            raise ValueError(f"it needs block.kv of 32, 64 or 128, {reason}")
        if aux is None:
            return mask
        if mask in NAMED_MASKS:
            if aux:
                raise ValueError("this mask takes no aux tensors: leave them out")
            return mask
        return _expression(mask, tuple(aux.items()))

    @model_serializer(mode="wrap")
    def _without_unused(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit an empty ``aux``, to keep the format of older specs without expressions."""
        found: dict[str, Any] = serialize(self)
        if not self.aux:
            found.pop("aux", None)
        return found

    @property
    def expression(self) -> Node | None:
        """The mask as a tree; None for a named mask."""
        if self.mask in NAMED_MASKS:
            return None
        return expression_of(self.mask, self.aux)

    @property
    def pair_mask(self) -> str:
        """Condition of a visible pair of a partial block, as an expression's text; "" unless ``mask`` is causal."""
        return "kv_idx <= q_idx + kv_len - q_len" if self.mask == "causal" else ""

    @property
    def aux_tensors(self) -> tuple[Aux, ...]:
        """Tensors of the expression, sorted by name."""
        return () if self.mask in NAMED_MASKS else _parsed(self.mask, tuple(self.aux.items()))[1]

    @property
    def fixed_block(self) -> Block:
        """Block shape of the lists."""
        return self.block

    @property
    def masks_pairs(self) -> bool:
        """Partial blocks are masked unless ``mask`` is none."""
        return self.mask != "none"

    @property
    def shift_invariant(self) -> bool:
        """Visibility of a pair depends only on the distance between key and query."""
        return self.mask in ("none", "causal")

    @property
    def masks_by_bits(self) -> bool:
        """Whether ``mask_bits`` is the mask."""
        return self.mask == "bits"

    @property
    def index_tensors(self) -> tuple[IndexTensor, ...]:
        """Two counts and two lists, followed by the bits if they are the mask."""
        count = ("batch", "heads", "query_blocks")
        lists: tuple[str | int, ...] = (*count, "any")
        words = self.block.q * self.block.kv // WORD
        bits = IndexTensor(
            "mask_bits", (*lists, words), "bits of the partial blocks, as listed", upper="", of_entries="kv_indices"
        )
        return (
            IndexTensor(
                "kv_num_blocks", count, "number of partial key blocks", upper="kv_indices", alone=not self.masks_pairs
            ),
            IndexTensor("kv_indices", lists, "partial key blocks", upper="key_blocks"),
            IndexTensor(
                "full_kv_num_blocks", count, "number of full key blocks", upper="full_kv_indices", optional=True
            ),
            IndexTensor("full_kv_indices", lists, "full key blocks", upper="key_blocks", optional=True),
            *((bits,) if self.masks_by_bits else ()),
        )

    @property
    def load_imbalanced(self) -> bool:
        """Rows have different lengths."""
        return True

    def visible(self, q: Any, k: Any, q_len: int, kv_len: int, values: Mapping[str, Any] = NO_VALUES) -> Any:
        """Whether query ``q`` sees key ``k`` of a partial block, unless bits or an expression hide it."""
        inside = super().visible(q, k, q_len, kv_len, values)
        return inside & (k <= q + (kv_len - q_len)) if self.mask == "causal" else inside

    def describe(self) -> str:
        """Description of the pattern."""
        return (
            f"each block of {self.block.q} queries sees the blocks of {self.block.kv} keys in its two lists; "
            f"mask of the partial blocks: {self.mask}"
        )

    def stem(self) -> str:
        """Short name of the pattern."""
        named = "" if self.mask == "none" else f"_{self.mask}"
        return f"lists_b{self.block.q}x{self.block.kv}" + (named if self.expression is None else f"_{_digest(self)}")


def _digest(pattern: BlockLists) -> str:
    """Short hash of an expression for names."""
    return "mask" + hashlib.sha256(f"{pattern.mask} {pattern.aux}".encode()).hexdigest()[:6]


@lru_cache(maxsize=256)
def _expression(mask: str, aux: tuple[tuple[str, str], ...]) -> str:
    """Canonical text of an expression.

    Raises:
        ValueError: for an invalid expression, one that hides everything, or an unused tensor.
    """
    try:
        declared = parse_aux(dict(aux))
        node = parse_expression(mask, declared, score=False)
        check_used(declared, node)
    except ExpressionError as error:
        raise ValueError(f"{error}; allowed: {', '.join(NAMED_MASKS)}, or an expression") from None
    if node.type is not Type.BOOL:
        raise ValueError(f"its type is {node.type}; expected a Boolean expression, such as a comparison")
    if constant_of(node) is False:
        raise ValueError("it hides every pair")
    if (divisor := divides_by_zero(node)) is not None:
        raise ValueError(f"{text_of(divisor)} may divide by zero; divide by max(divisor, 1)")
    return text_of(node)
