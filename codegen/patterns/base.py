"""The interface of a sparsity pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

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
    """An int32 tensor that the caller passes besides q, k and v.

    Attributes:
        name: name of the argument and of the kernel parameter.
        dims: symbolic sizes: (batch, heads, query_blocks) for counts, followed by the entries per list for lists, and
            by the words per mask for masks of a list's entries; (batch) for a tensor with one value per batch.
            ``batch`` and ``heads`` may be 1 (broadcast); ``query_blocks`` and an integer are exact; ``any`` is free
            (read from the tensor); ``bounds`` is the number of sequences in a packed batch plus one.
        doc: one line for the generated source and for error messages.
        upper: exclusive upper bound of legal values, ``key_blocks`` or ``query_blocks``; or inclusive upper bound of
            counts, ``kv_len`` or the name of the index tensor whose last dimension is the bound. Empty if every value
            is legal.
        optional: whether the caller may leave it out, together with the tensor that it belongs to.
        alone: whether the caller may leave it out on its own: counts, without which all entries count.
        of_entries: name of the list for whose entries it has masks; empty for other tensors.
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
        """Whether the tensor has one value per batch, rather than lists."""
        return self.dims == ("batch",)


MOST_KEYS = 1 << 24
"""Largest number of keys in a field of a pattern."""


@dataclass(frozen=True)
class PatternNumber:
    """A number of keys that a spec may leave out; the call then sets it.

    Attributes:
        field: name of the field of the pattern.
        argument: name of the argument of a call.
        constant: name of the constant in the source, if the spec has the number.
        param: name of the kernel parameter, if the call sets the number.
        doc: comment of the constant or the parameter.
        example: value in a kernel's reference workload and picture.
    """

    field: str
    argument: str
    constant: str
    param: str
    doc: str
    example: int


NO_VALUES: Mapping[str, Any] = MappingProxyType({})
"""Argument of ``visible`` for patterns without per-batch values."""


class Band(NamedTuple):
    """Keys that a query sees around its own position, which is aligned at the last key, besides the first keys.

    Attributes:
        left: keys before its position; None: all.
        right: keys after it; None: all.
        sink: keys at the beginning, which later queries see too.
    """

    left: int | None
    right: int | None
    sink: int = 0

    def sees_all(self, q_len: int) -> bool:
        """Whether each of so many queries sees all keys."""
        return self.left is None and (self.right is None or self.right >= q_len - 1)

    def most_keys(self, kv_len: int) -> int:
        """Keys that a query sees at most, of so many."""
        if self.left is None or self.right is None:
            return kv_len
        return min(kv_len, self.left + 1 + self.right + self.sink)


class PatternBase(SpecModel):
    """Base of the patterns. A subclass sets ``kind`` and overrides what differs from a dense matrix.

    The template of a pattern, ``templates/attention/patterns/<kind>.cuh.j2``, defines ``struct KvBlockIterator``: the
    number of key blocks that a query block attends to, and the index of the i-th one.
    """

    kind: str
    lists: ClassVar[int] = 0
    """Lists of key blocks per query block: 0, 1, or 2 (partial and full blocks)."""
    supports_stream_k: ClassVar[bool] = False
    """Whether thread blocks can split a tile; ``KvBlockIterator`` then has ``restrict_to``."""
    supports_kv_splits: ClassVar[bool] = False
    """Whether warpgroups can split the keys of a tile; ``KvBlockIterator`` then has ``restrict_to``."""
    serpentine: ClassVar[bool] = False
    """Whether every other tile reads its lists backwards on sm_90a; ``KvBlockIterator`` then has ``backwards``."""

    has_last_key: ClassVar[bool] = False
    """Whether the template always defines ``last_key_of``, and a query sees all keys up to that one."""
    packs_sequences: ClassVar[bool] = False
    """Whether kernels of packed sequences (layout varlen) are written for the pattern."""
    queries: ClassVar[str | None] = None
    """Piece of templates/attention_backward/queries that iterates over the queries of some keys, or None."""
    unordered_dq: ClassVar[bool] = False
    """Whether nondeterministic dQ was measured to be faster, with the smallest head size (docs/guide/training.md)."""
    call_numbers: ClassVar[tuple[PatternNumber, ...]] = ()
    """Fields that a spec may leave out, all or none; fields of one argument of a call are in its order."""
    dq_order: ClassVar[str | None] = None
    """Piece of templates/attention_backward/dq_order: order in which key tiles add to dQ; None if there is none."""

    @property
    def wider(self) -> PatternBase | None:
        """An equivalent pattern of a more general kind; None if there is none."""
        return None

    @property
    def band(self) -> Band | None:
        """The keys of a query, if they are a band and some first keys, and the numbers are known; else None."""
        return None

    @property
    def fixed_block(self) -> Block | None:
        """Block shape of the index lists; None if the tile decides."""
        return None

    @property
    def list_length(self) -> int | None:
        """Entries per list, if the pattern fixes their number; else None."""
        return None

    @property
    def window(self) -> int | None:
        """Keys of a sliding window; None if there is none."""
        return None

    @property
    def is_general(self) -> bool:
        """Whether the numbers of ``call_numbers`` are left out, so that they are arguments of a call."""
        return any(getattr(self, number.field) is None for number in self.call_numbers)

    def general(self) -> Self:
        """The pattern without the numbers that a call may set."""
        return self.model_copy(update={number.field: None for number in self.call_numbers})

    def numbers(self) -> dict[str, Any]:
        """The numbers that a call may set, by argument: an integer, or a tuple if an argument has several."""
        found: dict[str, list[int]] = {}
        for number in self.call_numbers:
            found.setdefault(number.argument, []).append(getattr(self, number.field))
        return {name: tuple(each) if len(each) > 1 else each[0] for name, each in found.items()}

    def with_numbers(self, arguments: Mapping[str, int | Sequence[int]]) -> Self:
        """The pattern with these numbers, by argument of a call."""
        found = {name: iter([given] if isinstance(given, int) else given) for name, given in arguments.items()}
        return self.model_copy(update={n.field: next(found[n.argument]) for n in self.call_numbers})

    def with_params(self, values: Mapping[str, int]) -> Self:
        """The pattern with these numbers, by kernel parameter; the pattern itself if it is not general."""
        if not self.is_general:
            return self
        return self.model_copy(update={number.field: values[number.param] for number in self.call_numbers})

    def example(self) -> Self:
        """The pattern with example numbers if it is general; else the pattern itself."""
        return self.with_params({number.param: number.example for number in self.call_numbers})

    @property
    def number_params(self) -> dict[str, str]:
        """Kernel parameters of the numbers that a call sets: name -> comment."""
        return {number.param: number.doc for number in self.call_numbers} if self.is_general else {}

    def name_of(self, field: str) -> str:
        """Name of a number in ``pair_mask``: a constant of the source or a kernel parameter."""
        number = next(number for number in self.call_numbers if number.field == field)
        return number.param if self.is_general else number.constant

    @property
    def index_tensors(self) -> tuple[IndexTensor, ...]:
        """Tensors that the caller passes besides q, k and v, in call order; lists if ``fixed_block`` is set."""
        return ()

    @property
    def block_keys(self) -> int | None:
        """Keys per block of the pattern; a step is one block, an equal part of one, or two. None: any step is legal."""
        return None if self.fixed_block is None else self.fixed_block.kv

    @property
    def masks_pairs(self) -> bool:
        """Whether some visible blocks have hidden pairs (besides the tail of the sequence)."""
        return False

    @property
    def masks_by_bits(self) -> bool:
        """Whether the caller passes bits for the visible pairs of masked blocks, which ``visible`` does not know.

        The pattern's template then defines ``mask_bits_of`` instead of ``visible``.
        """
        return False

    @property
    def expression(self) -> Node | None:
        """Mask of the pairs of masked blocks, if it is an expression of the spec; else None."""
        return None

    @property
    def pair_mask(self) -> str:
        """``visible`` for keys within the sequence, as the text of an expression for kernels; "" if there is none.

        It may use names of ``constants`` and ``number_params``, and ``name[batch]`` for index tensors with one value
        per batch. The template defines ``load_<name>`` for these.
        """
        return ""

    @property
    def pair_expression(self) -> Node | None:
        """The tree of ``pair_mask``."""
        return _pair_expression(self) if self.pair_mask else None

    @property
    def aux_tensors(self) -> tuple[Aux, ...]:
        """Tensors of the expression, which the caller passes besides the index tensors."""
        return ()

    @property
    def shift_invariant(self) -> bool:
        """Whether visibility of a pair in a masked block depends only on the distance between key and query."""
        return False

    @property
    def load_imbalanced(self) -> bool:
        """Whether query blocks see different numbers of key blocks."""
        return False

    @property
    def banded(self) -> bool:
        """Whether each query sees one contiguous range of keys, and no range moves backwards from query to query.

        The pattern's template then iterates from the last key block to the first, and defines the first and the last
        key of a query.
        """
        return False

    @property
    def never_empty(self) -> bool:
        """Whether every query has a key block, for any lengths and lists."""
        return False

    @property
    def left_bounded(self) -> bool:
        """Whether late queries no longer see the first keys, for a ``banded`` pattern."""
        return False

    @property
    def surplus_first(self) -> bool:
        """Whether surplus rows of a head's tiles lie before query 0, where rows see the fewest keys."""
        return False

    @property
    def ramps_up(self) -> bool:
        """Whether the first queries see fewer keys than later ones, although the scheduler treats tiles as equal."""
        return False

    def stream_k_units(self, kv_len: int, rows: int, keys: int, listed: int = 0) -> int:
        """Most work units of a tile: steps or listed blocks.

        Args:
            kv_len: keys per head.
            rows: queries per sub-tile.
            keys: keys per step.
            listed: entries per list of the caller, if the pattern does not fix their number.
        """
        raise NotImplementedError

    def seen_keys(self, kv_len: int, queries: int) -> tuple[float, float]:
        """Keys that a tile of ``queries`` sees, ignoring lists: mean over tiles, and for the last tile."""
        del queries
        return float(kv_len), float(kv_len)

    def visible(self, q: Any, k: Any, q_len: int, kv_len: int, values: Mapping[str, Any] = NO_VALUES) -> Any:
        """Whether query ``q`` sees key ``k`` inside a listed block.

        This is the definition that kernels are tested against. It uses operators only, so that it works for integers
        and for broadcast tensors.

        Args:
            q: index of the query.
            k: index of the key.
            q_len: queries per head.
            kv_len: keys per head.
            values: the batch's values of index tensors with one value per batch, by name.
        """
        del q, q_len, values
        return (k >= 0) & (k < kv_len)

    def values_of(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """Index tensors with one value per batch, by name, from all index tensors in call order."""
        given = zip(self.index_tensors, tensors, strict=False)
        return {which.name: tensor for which, tensor in given if which.per_batch}

    def constants(self) -> dict[str, tuple[int, str]]:
        """Constants of the pattern in the source: name -> (value, comment)."""
        if self.is_general:
            return {}
        return {number.constant: (getattr(self, number.field), number.doc) for number in self.call_numbers}

    @model_validator(mode="after")
    def _has_all_numbers(self) -> Self:
        """Reject an incomplete set of numbers."""
        missing = [number.field for number in self.call_numbers if getattr(self, number.field) is None]
        if missing and len(missing) < len(self.call_numbers):
            fields = ", ".join(number.field for number in self.call_numbers)
            raise ValueError(f"{missing[0]} is missing; give {fields}, or omit all of them and pass them in the call")
        return self

    def describe(self) -> str:
        """Description of the pattern, for ``codegen explain`` and the source."""
        raise NotImplementedError

    def stem(self) -> str:
        """Short name, for file names of unnamed specs."""
        raise NotImplementedError


@lru_cache(maxsize=256)
def _pair_expression(pattern: PatternBase) -> Node:
    constants = {name: value for name, (value, _) in pattern.constants().items()}
    loaded = {each.name: Aux(each.name, "int32", ("batch",)) for each in pattern.index_tensors if each.per_batch}
    return parse_expression(
        pattern.pair_mask, loaded, score=False, constants=constants, parameters=pattern.number_params
    )
