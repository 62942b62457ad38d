"""FlexAttention's BlockMask: a count and a list of key blocks per query block, full and partial blocks apart."""

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

WORD = 32  # keys that a word of mask_bits is about
NAMED_MASKS = ("none", "causal", "bits")
"""Masks of partial blocks that are no expressions."""


def expression_of(mask: str, aux: Mapping[str, str]) -> Node:
    """Return the tree of a mask that has been accepted as an expression, whatever the size of blocks."""
    return _parsed(mask, tuple(aux.items()))[0]


@lru_cache(maxsize=256)
def _parsed(mask: str, declared: tuple[tuple[str, str], ...]) -> tuple[Node, tuple[Aux, ...]]:
    """Return an expression that has been accepted, and the tensors in it."""
    aux = parse_aux(dict(declared))
    return parse_expression(mask, aux, score=False), tuple(aux.values())


class BlockLists(PatternBase):
    """Each query block sees the first ``kv_num_blocks`` entries of its list, and those of an optional second list.

    Blocks of the first list are partial: ``mask`` says which of their pairs are visible. Blocks of the second list
    (``full_*``) are full: every pair is visible, whatever ``mask`` is.

    With ``mask: bits`` a tensor of the caller has a bit for each pair of the partial blocks, in the order in which they
    are listed: bit c % 32, from the lowest on, of word r * (block.kv / 32) + c // 32 of the i-th one is 1 if query r of
    the query block sees key c of the key block.

    Any other ``mask`` is an expression over ``q_idx``, ``kv_idx``, ``batch``, ``head``, ``q_len``, ``kv_len`` and the
    tensors that ``aux`` declares (docs/reference/expressions.md).
    """

    lists: ClassVar[int] = 2
    queries: ClassVar[str | None] = "listed"
    kind: Literal["block_lists"]
    block: Block = Field(description="shape of a block")
    aux: dict[str, str] = Field(
        default={}, description="tensors of an expression, by name: int32[batch, q_len], fp32[heads], ..."
    )
    mask: str = Field(
        default="none",
        validate_default=True,  # there are no aux tensors without an expression
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
        block, aux = info.data.get("block"), info.data.get("aux")  # missing where they are wrong themselves
        if mask == "bits" and block is not None and block.kv % WORD:
            raise ValueError(
                f"a word of mask_bits holds {WORD} keys; allowed with block.kv 32, 64, 128, not {block.kv}"
            )
        if aux is None:
            return mask
        if mask in NAMED_MASKS:
            if aux:
                raise ValueError("this mask takes no aux tensors: leave them out")
            return mask
        return _expression(mask, tuple(aux.items()))

    @model_serializer(mode="wrap")
    def _without_unused(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave ``aux`` out where there is none, as specs did before there were expressions."""
        found: dict[str, Any] = serialize(self)
        if not self.aux:
            found.pop("aux", None)
        return found

    @property
    def expression(self) -> Node | None:
        """The mask as a tree; None where it is a named one."""
        if self.mask in NAMED_MASKS:
            return None
        return expression_of(self.mask, self.aux)

    @property
    def pair_mask(self) -> str:
        """The condition of a visible pair of a partial block, as an expression's text; "" for masks without a name."""
        return "kv_idx <= q_idx + kv_len - q_len" if self.mask == "causal" else ""

    @property
    def aux_tensors(self) -> tuple[Aux, ...]:
        """Tensors of the expression, in the order of their names."""
        return () if self.mask in NAMED_MASKS else _parsed(self.mask, tuple(self.aux.items()))[1]

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
        return self.mask in ("none", "causal")

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
        """Rows differ in length."""
        return True

    def visible(self, q: Any, k: Any, q_len: int, kv_len: int, values: Mapping[str, Any] = NO_VALUES) -> Any:
        """Whether query ``q`` sees key ``k`` of a partial block, if bits or an expression do not hide it."""
        inside = super().visible(q, k, q_len, kv_len, values)
        return inside & (k <= q + (kv_len - q_len)) if self.mask == "causal" else inside

    def describe(self) -> str:
        """Return the pattern in words."""
        return (
            f"each block of {self.block.q} queries sees the blocks of {self.block.kv} keys in its two lists; "
            f"mask of the partial blocks: {self.mask}"
        )

    def stem(self) -> str:
        """Return a short name."""
        named = "" if self.mask == "none" else f"_{self.mask}"
        return f"lists_b{self.block.q}x{self.block.kv}" + (named if self.expression is None else f"_{_digest(self)}")


def _digest(pattern: BlockLists) -> str:
    """A word that tells an expression from others in a name."""
    return "mask" + hashlib.sha256(f"{pattern.mask} {pattern.aux}".encode()).hexdigest()[:6]


@lru_cache(maxsize=256)
def _expression(mask: str, aux: tuple[tuple[str, str], ...]) -> str:
    """Return an expression in one spelling.

    Raises:
        ValueError: for what is none, hides everything, or leaves a tensor unused.
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
