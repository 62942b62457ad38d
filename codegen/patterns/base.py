"""The interface of a sparsity pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from codegen.expressions.nodes import Aux, Node
from codegen.expressions.parse import parse_expression


def _only_int(value: object) -> object:
    if isinstance(value, float | bool):
        raise ValueError("expected an integer")
    return value


StrictInt = BeforeValidator(_only_int)
"""Makes a Literal of integers refuse 64.0, which equals 64, and true, which equals 1."""
QueryBlockSize = Annotated[Literal[1, 2, 4, 8, 16, 32, 64, 128], StrictInt]
KeyBlockSize = Annotated[Literal[16, 32, 64, 128], StrictInt]


class SpecModel(BaseModel):
    """Base of every spec model: immutable, strict, no unknown fields."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Block(SpecModel):
    """Shape of one block of the attention matrix, in rows (queries) and columns (keys)."""

    q: QueryBlockSize = Field(description="query rows per block")
    kv: KeyBlockSize = Field(description="keys per block")


@dataclass(frozen=True)
class IndexTensor:
    """An int32 tensor that the caller passes beside q, k and v.

    Attributes:
        name: the argument's name, also the kernel parameter's.
        dims: symbolic sizes: of lists and their counts (batch, heads, query_blocks) and the entries of a list, of a
            tensor with one value for each batch (batch), of the masks of a list's entries those of the list and the
            words of a mask. ``batch`` and ``heads`` may be 1 (broadcast); ``query_blocks`` and an integer are exact;
            ``any`` is free (read from the tensor); ``bounds`` are one more than the sequences of a packed batch.
        doc: one line for the generated source and for error messages.
        upper: what a legal value is less than, ``key_blocks`` or ``query_blocks``, or what it counts and may be equal
            to: ``kv_len`` or the name of the index tensor whose last dimension that is. Empty: every value is legal.
        optional: whether the caller may leave it out (then its pair must be left out too).
        alone: whether the caller may leave it out whatever else is given: counts, without which all entries count.
        of_entries: name of the list whose entries it has masks of; empty if it is none of those.
    """

    name: str
    dims: tuple[str | int, ...]
    doc: str
    upper: str
    optional: bool = False
    alone: bool = False
    of_entries: str = ""

    @property
    def strided_axes(self) -> tuple[str, ...]:
        """Names of the dimensions whose strides are free: entries of a list and words of a mask are contiguous."""
        if self.dims == ("bounds",):
            return ()
        contiguous = len(self.dims) >= 4
        return ("batch", "head", "row", "entry")[: len(self.dims) - contiguous]

    @property
    def per_batch(self) -> bool:
        """Whether there is one value for each batch, and no list."""
        return self.dims == ("batch",)


MOST_KEYS = 1 << 24
"""The largest number of keys that a pattern names."""


@dataclass(frozen=True)
class PatternNumber:
    """A number of keys that a spec may leave out: the call decides it then.

    Attributes:
        field: the field of the pattern.
        argument: the argument of a call that has it.
        constant: the source's constant where the spec has the number.
        param: the kernel's parameter where it has not.
        doc: the comment of either.
        example: the number of a kernel's reference workload and of its picture.
    """

    field: str
    argument: str
    constant: str
    param: str
    doc: str
    example: int


NO_VALUES: Mapping[str, Any] = MappingProxyType({})
"""What ``visible`` is given for patterns whose index tensors are all lists."""


class PatternBase(SpecModel):
    """Base of the patterns. A subclass sets ``kind`` and overrides what differs from a dense matrix.

    The template of a pattern, ``templates/attention/patterns/<kind>.cuh.j2``, defines ``struct KvBlockIterator``: how
    many key blocks a query block attends to, and the number of the i-th one.
    """

    kind: str
    lists: ClassVar[int] = 0
    """Lists of key blocks that a query block has: none, one, or two, of partial and of full blocks."""
    supports_stream_k: ClassVar[bool] = False
    """Whether a tile can be divided between thread blocks: then ``KvBlockIterator`` has ``restrict_to``."""
    supports_kv_splits: ClassVar[bool] = False
    """Whether the keys of a tile can be divided between warpgroups: then ``KvBlockIterator`` has ``restrict_to``."""
    serpentine: ClassVar[bool] = False
    """Whether every other tile walks its lists from the end, on sm_90a: ``KvBlockIterator`` then has ``backwards``."""

    has_last_key: ClassVar[bool] = False
    """Whether the template always has ``last_key_of``, and a query sees all keys up to that one."""
    packs_sequences: ClassVar[bool] = False
    """Whether kernels of packed sequences (layout varlen) are written for the pattern."""
    queries: ClassVar[str | None] = None
    """Piece of templates/attention_backward/queries that walks over the queries that see some keys; None: none does."""
    unordered_dq: ClassVar[bool] = False
    """Whether tiles add to dQ faster in any order, in heads of the least size, as measured (docs/guide/training.md)."""
    call_numbers: ClassVar[tuple[PatternNumber, ...]] = ()
    """Fields that a spec may leave out, all of them or none; those of one argument of a call in its order."""
    dq_order: ClassVar[str | None] = None
    """Piece of templates/attention_backward/dq_order: the order in which tiles of keys add to dQ; None: none does."""

    @property
    def wider(self) -> PatternBase | None:
        """A pattern of another kind that has this one as a case; None without one."""
        return None

    @property
    def fixed_block(self) -> Block | None:
        """Block shape of the index lists; None where the tile decides."""
        return None

    @property
    def list_length(self) -> int | None:
        """Entries of a list, where the pattern fixes their number."""
        return None

    @property
    def window(self) -> int | None:
        """Keys of a sliding window; None without one."""
        return None

    @property
    def is_general(self) -> bool:
        """Whether its numbers are left out: they are arguments of a call."""
        return any(getattr(self, number.field) is None for number in self.call_numbers)

    def general(self) -> Self:
        """The pattern without the numbers that a call may decide."""
        return self.model_copy(update={number.field: None for number in self.call_numbers})

    def numbers(self) -> dict[str, Any]:
        """Those numbers by argument of a call: an integer, or a tuple where an argument has several."""
        found: dict[str, list[int]] = {}
        for number in self.call_numbers:
            found.setdefault(number.argument, []).append(getattr(self, number.field))
        return {name: tuple(each) if len(each) > 1 else each[0] for name, each in found.items()}

    def with_numbers(self, arguments: Mapping[str, int | Sequence[int]]) -> Self:
        """The pattern with these numbers, by argument of a call."""
        found = {name: iter([given] if isinstance(given, int) else given) for name, given in arguments.items()}
        return self.model_copy(update={n.field: next(found[n.argument]) for n in self.call_numbers})

    def with_params(self, values: Mapping[str, int]) -> Self:
        """The pattern with these numbers, by kernel parameter; itself if it has its own."""
        if not self.is_general:
            return self
        return self.model_copy(update={number.field: values[number.param] for number in self.call_numbers})

    def example(self) -> Self:
        """The pattern with the numbers of an example, where a call decides; else itself."""
        return self.with_params({number.param: number.example for number in self.call_numbers})

    @property
    def number_params(self) -> dict[str, str]:
        """Kernel parameters of the numbers that a call decides: name -> comment."""
        return {number.param: number.doc for number in self.call_numbers} if self.is_general else {}

    def name_of(self, field: str) -> str:
        """The name of a number in ``pair_mask``: of the source's constant, or of the kernel's parameter."""
        number = next(number for number in self.call_numbers if number.field == field)
        return number.param if self.is_general else number.constant

    @property
    def index_tensors(self) -> tuple[IndexTensor, ...]:
        """Tensors the caller passes beside q, k, v, in call order: lists if ``fixed_block`` says of which blocks."""
        return ()

    @property
    def block_keys(self) -> int | None:
        """Keys of a block of the pattern: a step is one, an equal part of one, or two. None where any step will do."""
        return None if self.fixed_block is None else self.fixed_block.kv

    @property
    def masks_pairs(self) -> bool:
        """Whether some visible blocks hide some of their pairs (beyond the tail of the sequence)."""
        return False

    @property
    def masks_by_bits(self) -> bool:
        """Whether bits that the caller passes say which pairs of a masked block are visible, and ``visible`` does not.

        The pattern's template then has ``mask_bits_of`` in place of ``visible``.
        """
        return False

    @property
    def expression(self) -> Node | None:
        """What says which pairs of a masked block are visible, where that is an expression of the spec."""
        return None

    @property
    def pair_mask(self) -> str:
        """``visible`` for keys that exist, as the text of an expression that kernels print; "" where they print none.

        It may have the names of ``constants`` and of ``number_params``, and ``name[batch]`` of index tensors with one
        value for each batch. The template defines ``load_<name>`` of these.
        """
        return ""

    @property
    def pair_expression(self) -> Node | None:
        """The tree of ``pair_mask``."""
        return _pair_expression(self) if self.pair_mask else None

    @property
    def aux_tensors(self) -> tuple[Aux, ...]:
        """Tensors of the expression, which the caller passes beside the index tensors."""
        return ()

    @property
    def shift_invariant(self) -> bool:
        """Whether a key's place relative to the query decides alone which pairs of a masked block are hidden."""
        return False

    @property
    def load_imbalanced(self) -> bool:
        """Whether query blocks differ in how many key blocks they see."""
        return False

    @property
    def banded(self) -> bool:
        """Whether a query sees one run of keys, no earlier and no later than those of the queries before it.

        The pattern's template then walks from the last key block to the first, and says which key a query sees first
        and which one last.
        """
        return False

    @property
    def never_empty(self) -> bool:
        """Whether every query has a key block, whatever the lengths and the lists are."""
        return False

    @property
    def left_bounded(self) -> bool:
        """Whether late queries no longer see the first keys, where ``banded`` holds."""
        return False

    @property
    def surplus_first(self) -> bool:
        """Whether surplus rows of a head's tiles lie before query 0, where rows see fewest keys."""
        return False

    @property
    def ramps_up(self) -> bool:
        """Whether the first queries see fewer keys than later ones, though tiles are scheduled as equally long."""
        return False

    def stream_k_units(self, kv_len: int, rows: int, keys: int, listed: int = 0) -> int:
        """Return the work units of a tile: steps or listed blocks, the most that any tile has.

        Args:
            kv_len: keys of a head.
            rows: queries of a sub-tile.
            keys: keys of a step.
            listed: entries of the caller's lists, where a pattern does not fix their number.
        """
        raise NotImplementedError

    def seen_keys(self, kv_len: int, queries: int) -> tuple[float, float]:
        """The number of keys that a tile of ``queries`` sees, lists aside: the mean tile, and the last one."""
        del queries
        return float(kv_len), float(kv_len)

    def visible(self, q: Any, k: Any, q_len: int, kv_len: int, values: Mapping[str, Any] = NO_VALUES) -> Any:
        """Whether query ``q`` sees key ``k`` inside a listed block.

        Written with operators only, so that it works on integers and on broadcast tensors alike: it is the
        definition that the kernels are checked against.

        Args:
            q: number of the query.
            k: number of the key.
            q_len: queries of a head.
            kv_len: keys of a head.
            values: the batch's values of the index tensors that have one for each batch, by name.
        """
        del q, q_len, values
        return (k >= 0) & (k < kv_len)

    def values_of(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """Return those of the index tensors, given in call order, that have one value for each batch, by name."""
        given = zip(self.index_tensors, tensors, strict=False)
        return {which.name: tensor for which, tensor in given if which.per_batch}

    def constants(self) -> dict[str, tuple[int, str]]:
        """Named values of the pattern for the top of the source: name -> (value, comment)."""
        if self.is_general:
            return {}
        return {number.constant: (getattr(self, number.field), number.doc) for number in self.call_numbers}

    @model_validator(mode="after")
    def _has_all_numbers(self) -> Self:
        """Refuse some of the numbers without the others."""
        missing = [number.field for number in self.call_numbers if getattr(self, number.field) is None]
        if missing and len(missing) < len(self.call_numbers):
            fields = ", ".join(number.field for number in self.call_numbers)
            raise ValueError(f"{missing[0]} is missing; give {fields}, or omit all of them and pass them in the call")
        return self

    def describe(self) -> str:
        """Return the pattern in words, for ``codegen explain``."""
        raise NotImplementedError

    def stem(self) -> str:
        """Return a short name for file names of specs that have none."""
        raise NotImplementedError


def _pair_expression(pattern: PatternBase) -> Node:
    constants = {name: value for name, (value, _) in pattern.constants().items()}
    loaded = {each.name: Aux(each.name, "int32", ("batch",)) for each in pattern.index_tensors if each.per_batch}
    return parse_expression(
        pattern.pair_mask, loaded, score=False, constants=constants, parameters=pattern.number_params
    )
