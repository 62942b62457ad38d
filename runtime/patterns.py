"""Sparsity patterns of ``block_sparse_attention``: those of the specs, with the tensors that a call passes.

A pattern says which keys a query sees. Shipped kernels take the numbers of windows as arguments; other numbers are
compiled in. Tensors (lists of blocks, lengths) are read on the GPU at each call and may change freely between calls.

Positions are aligned at the end: query i has the position of key i + kv_len - q_len.

Patterns are pytrees whose leaves are their tensors, so that ``torch.export`` and ``torch.utils._pytree`` take them
apart; they are compared by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch.utils import _pytree as pytree

from codegen.errors import SpecError
from codegen.patterns.block_lists import NAMED_MASKS
from codegen.scored_pattern import KEPT, ScoredPattern, parse_score, pattern_of, pattern_with_score, scored_pattern
from codegen.wording import shown
from runtime.checks import is_same
from runtime.errors import ArgumentError
from runtime.expressions.graphs import constant, json_text
from runtime.expressions.masks import Expression, mask_of, score_of
from runtime.pattern_blocks import (
    DEFAULT_BLOCK,
    blocks_of,
    described,
    has_values,
    is_empty,
    sparsity_of,
    summary_of,
)
from runtime.pattern_sets import LISTS, combined

__all__ = [
    "BlockLists",
    "Causal",
    "Dense",
    "Pattern",
    "PrefixLM",
    "Score",
    "SinkWindow",
    "SlidingWindow",
    "Strided",
    "TopK",
]

Indices = tuple[torch.Tensor | None, ...]
"""Index tensors in the order in which a kernel takes them."""


class Pattern:
    """Base of the patterns.

    Attributes:
        spec_json: the pattern of the kernel's spec as JSON: all of it that the kernel depends on.
    """

    kind: ClassVar[str]
    tensors: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that are pytree leaves."""
    _names: ClassVar[list[str]]
    """Names of the other fields."""
    spec_json: str

    def spec_pattern(self) -> dict[str, Any]:
        """Return the pattern of the kernel's spec, as plain data."""
        return scored_of(self).pattern_fields

    def index_tensors(self) -> Indices:
        """Return the tensors that a call passes beside q, k and v, in the kernel's order."""
        return ()

    def sparsity(
        self, q_len: int | None = None, kv_len: int | None = None, *, block: tuple[int, int] | None = None
    ) -> float:
        """Percent of the blocks of the attention matrix that the pattern hides, as torch's ``BlockMask.sparsity``.

        A block counts as visible if one of its pairs is, or if lists name it. The value needs the tensors: it waits for
        the GPU.

        Args:
            q_len: queries of a head; of lists by default as many as they are for.
            kv_len: keys of a head; of lists by default as many key blocks as they are wide or name.
            block: (queries, keys) of a block: (128, 128) by default; of lists their own.

        Returns:
            0 to 100, over all batches and heads.

        Raises:
            ArgumentError: naming the argument; for lengths that a pattern without lists needs.
        """
        return sparsity_of(blocks_of(self, q_len, kv_len, block))

    def picture(
        self,
        q_len: int | None = None,
        kv_len: int | None = None,
        *,
        block: tuple[int, int] | None = None,
        batch: int = 0,
        head: int = 0,
    ) -> str:
        """The blocks of a head as text, as torch's ``BlockMask`` prints them: full, partial (light) and hidden ones.

        Args:
            q_len, kv_len, block: as for ``sparsity``.
            batch, head: which lists; 0 if all share them.

        Returns:
            The pattern, its number of blocks, their sparsity, and a picture of 32 x 32 cells at most, which stand for
            several blocks each if there are more.

        Raises:
            ArgumentError: naming the argument.
        """
        size = getattr(self, "block", None) if self.kind in LISTS else block
        blocks = blocks_of(self, q_len, kv_len, block)
        return summary_of(self, blocks, size or DEFAULT_BLOCK, batch, head)

    def __repr__(self) -> str:
        given = ((each.name, getattr(self, each.name)) for each in fields(self) if each.init)  # type: ignore[arg-type]
        shown_ones = (
            f"{name}={described(value)}" for name, value in given if value is not None and not is_empty(value)
        )
        return f"{type(self).__name__}({', '.join(shown_ones)})"

    def __str__(self) -> str:
        """The pattern in one line; of lists whose tensors have values, their blocks too."""
        if self.kind in LISTS and has_values(*self.index_tensors()):
            return self.picture()
        return repr(self)

    def __and__(self, other: Pattern) -> Pattern:
        """The pattern of the pairs that both show.

        Raises:
            ArgumentError: naming ``pattern``, if no pattern says that, with what does.
        """
        found: Pattern = combined(self, other, "&", _CLASSES)
        return found

    def __or__(self, other: Pattern) -> Pattern:
        """The pattern of the pairs that any of them shows.

        Raises:
            ArgumentError: naming ``pattern``, if no pattern says that, with what does.
        """
        found: Pattern = combined(self, other, "|", _CLASSES)
        return found

    def _set_spec(self, text: str) -> None:
        object.__setattr__(self, "spec_json", text)


_CLASSES: dict[str, type[Pattern]] = {}
"""The patterns by kind."""


PatternType = TypeVar("PatternType", bound=type[Any])


def _pattern(*tensors: str) -> Callable[[PatternType], PatternType]:
    """A decorator that makes a pattern class a pytree whose leaves are the fields ``tensors``."""

    def registered(cls: PatternType) -> PatternType:
        if issubclass(cls, Pattern):
            _CLASSES[cls.kind] = cls
        cls.tensors = tensors
        names = cls._names = [field.name for field in fields(cls) if field.init and field.name not in tensors]

        def flatten(pattern: Any) -> tuple[list[Any], tuple[Any, ...]]:
            return [getattr(pattern, name) for name in tensors], tuple(getattr(pattern, name) for name in names)

        def flatten_with_keys(pattern: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
            leaves, context = flatten(pattern)
            return list(zip(map(pytree.GetAttrKey, tensors), leaves, strict=True)), context

        def unflatten(leaves: Any, context: Any) -> Any:
            return cls(**dict(zip(names, context, strict=True)), **dict(zip(tensors, leaves, strict=True)))

        def from_json(context: Any) -> tuple[Any, ...]:
            return tuple(tuple(value) if isinstance(value, list) else value for value in context)

        pytree.register_pytree_node(
            cls,
            flatten,
            unflatten,
            serialized_type_name=f"{cls.__module__}.{cls.__name__}",
            to_dumpable_context=list,
            from_dumpable_context=from_json,
            flatten_with_keys_fn=flatten_with_keys,
        )
        torch.serialization.add_safe_globals([cls])  # exported programs have examples of their inputs
        return cls

    return registered


_WORDS = frozenset({int, bool, str})
"""Types of legal fields beside tensors."""


def _check_numbers(pattern: Any) -> None:
    """Check the fields of a pattern that has numbers only.

    Raises:
        ArgumentError: naming the field.
    """
    if torch.compiler.is_compiling():  # validation is not traced; the operator validates the text
        return
    values = [getattr(pattern, name) for name in pattern._names]
    check: Any = _check_values if _WORDS.issuperset(map(type, values)) else _check_values.__wrapped__
    try:
        check(type(pattern), *values)
    except SpecError as error:
        raise ArgumentError(error.field.rpartition(".")[2], error.reason) from None


@lru_cache(maxsize=KEPT, typed=True)
def _check_values(cls: Any, *values: Any) -> None:
    """Check the values of a pattern's fields; legal ones are looked up from then on.

    Raises:
        SpecError: naming the field.
    """
    pattern_of({"kind": cls.kind, **dict(zip(cls._names, values, strict=True))})


def _block_text(block: tuple[int, int]) -> str:
    """A block's shape as JSON."""
    q, kv = constant(block[0]), constant(block[1])
    return f'"block": {{"q": {q}, "kv": {kv}}}'


def check_block(block: Any) -> None:
    """Check the shape of a block: two whole numbers.

    Raises:
        ArgumentError: naming ``block``.
    """
    if torch.compiler.is_compiling():
        return
    whole = isinstance(block, tuple | list) and len(block) == 2 and all(type(size) is int for size in block)
    if not whole or min(block) < 1:
        raise ArgumentError("block", f"is {shown(block)}, expected (queries, keys) of a block, such as (128, 128)")


def check_aux(aux: Any) -> None:
    """Check that tensors of an expression are given by their names.

    Raises:
        ArgumentError: naming ``aux``.
    """
    if aux is None:
        return
    if not isinstance(aux, Mapping):
        raise ArgumentError("aux", f"is {type(aux).__name__}, expected a mapping from names to tensors")
    for name, tensor in aux.items():
        if not isinstance(name, str):
            raise ArgumentError("aux", f"has the key {shown(name)}, expected names")
        if isinstance(tensor, torch.Tensor) and (tensor.is_nested or tensor.layout != torch.strided):
            raise ArgumentError(f"aux[{name!r}]", "is a nested or sparse tensor, expected a dense one")


@_pattern()
@dataclass(frozen=True, eq=False, repr=False)
class Dense(Pattern):
    """Every query sees every key."""

    kind: ClassVar[str] = "dense"

    def __post_init__(self) -> None:
        self._set_spec('{"kind": "dense"}')


@_pattern()
@dataclass(frozen=True, eq=False, repr=False)
class Causal(Pattern):
    """Query i sees the keys up to its own position.

    Attributes:
        align: where the diagonal ends: ``bottom_right`` as in FlashAttention (the last query sees every key) or
            ``top_left`` as in torch's ``is_causal`` (query i sees the keys 0 to i).
    """

    kind: ClassVar[str] = "causal"
    align: Literal["bottom_right", "top_left"] = "bottom_right"

    def __post_init__(self) -> None:
        _check_numbers(self)
        self._set_spec(f'{{"kind": "causal", "align": "{self.align}"}}')


@_pattern()
@dataclass(frozen=True, eq=False, repr=False)
class SlidingWindow(Pattern):
    """Query i sees the keys from i - left to i + right: FlashAttention's ``window_size=(left, right)``.

    Attributes:
        left: keys before its own position.
        right: keys after it; 0 is causal.
    """

    kind: ClassVar[str] = "sliding_window"
    left: int
    right: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self)
        self._set_spec(f'{{"kind": "sliding_window", "left": {constant(self.left)}, "right": {constant(self.right)}}}')


@_pattern()
@dataclass(frozen=True, eq=False, repr=False)
class SinkWindow(Pattern):
    """Query i sees the first ``sink`` keys and those from i - left to i + right; none after i + right.

    Attributes:
        sink: keys at the beginning (StreamingLLM's attention sinks; not the ``sink`` logits of a call).
        left: keys before its own position.
        right: keys after it; 0 is causal.
    """

    kind: ClassVar[str] = "sink_window"
    sink: int
    left: int
    right: int = 0

    def __post_init__(self) -> None:
        _check_numbers(self)
        sink, left, right = constant(self.sink), constant(self.left), constant(self.right)
        numbers = f'"sink": {sink}, "left": {left}, "right": {right}'
        self._set_spec(f'{{"kind": "sink_window", {numbers}}}')


@_pattern()
@dataclass(frozen=True, eq=False, repr=False)
class Strided(Pattern):
    """Query i sees its own block of keys, ``local`` blocks next to it, and one block in ``stride`` from the first on.

    Attributes:
        stride: blocks from one stripe, which all queries see, to the next.
        local: blocks before a query's own one that it sees; if not causal, after it too.
        block: keys of a block: 64 or 128.
        causal: whether keys after the query's own position are hidden.
    """

    kind: ClassVar[str] = "strided"
    stride: int
    local: int
    block: int = 128
    causal: bool = True

    def __post_init__(self) -> None:
        _check_numbers(self)
        causal = "true" if self.causal else "false"
        stride, local, block = constant(self.stride), constant(self.local), constant(self.block)
        numbers = f'"stride": {stride}, "local": {local}, "block": {block}, "causal": {causal}'
        self._set_spec(f'{{"kind": "strided", {numbers}}}')


@_pattern("prefix_len")
@dataclass(frozen=True, eq=False, repr=False)
class PrefixLM(Pattern):
    """Query i of batch b sees the first ``prefix_len[b]`` keys and those up to its own position.

    Attributes:
        prefix_len: int32 (batch or 1,); a value out of range counts as the nearest that is not.
    """

    kind: ClassVar[str] = "prefix_lm"
    prefix_len: torch.Tensor

    def __post_init__(self) -> None:
        self._set_spec('{"kind": "prefix_lm"}')

    def index_tensors(self) -> Indices:
        """Return ``prefix_len``."""
        return (self.prefix_len,)


@_pattern("kv_indices")
@dataclass(frozen=True, eq=False, repr=False)
class TopK(Pattern):
    """Each query block sees the key blocks of its list, all of them whole.

    Attributes:
        kv_indices: int32 (batch or 1, list heads, ceil(q_len / block[0]), k), any k; -1 fills a list up at its end.
            List heads are the heads of q, or 1 for all, or those of k: then query heads that share a K/V head share
            lists.
        block: (queries, keys) of a block.
    """

    kind: ClassVar[str] = "topk"
    kv_indices: torch.Tensor
    _: KW_ONLY
    block: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        check_block(self.block)
        self._set_spec(f'{{"kind": "topk", {_block_text(self.block)}}}')

    def index_tensors(self) -> Indices:
        """Return ``kv_indices``."""
        return (self.kv_indices,)


@_pattern("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "mask_bits", "overflow", "aux")
@dataclass(frozen=True, eq=False, repr=False)
class BlockLists(Pattern):
    """Each query block sees the first blocks of two lists, partial and full ones: FlexAttention's layout.

    Of partial blocks ``mask`` says which of their pairs are visible; of full ones all are. With ``mask="causal"`` one
    list suffices: kernels mask only those of its blocks that have masked pairs.

    Attributes:
        kv_num_blocks: int32 (batch or 1, list heads, ceil(q_len / block[0])), how many entries of ``kv_indices`` count.
            List heads are the heads of q, or 1 for all, or those of k, as for :class:`TopK`.
        kv_indices: int32 (..., entries), partial key blocks.
        full_kv_num_blocks: as ``kv_num_blocks``, of full blocks; None with ``full_kv_indices``.
        full_kv_indices: as ``kv_indices``, full key blocks.
        block: (queries, keys) of a block.
        mask: of partial blocks: ``none`` (all pairs are visible), ``causal``, ``bits``, an expression over ``q_idx``,
            ``kv_idx``, ``batch``, ``head``, ``q_len``, ``kv_len`` and the tensors of ``aux``
            (docs/reference/expressions.md), or a function ``mask_mod(b, h, q_idx, kv_idx)`` that becomes one.
        mask_bits: int32 (batch or 1, list heads, query blocks, entries, block[0] * block[1] / 32), with
            ``mask="bits"``: bit c % 32 of word r * (block[1] / 32) + c // 32 of the i-th entry says whether query r of
            the query block sees key c of the i-th partial block in its list.
        overflow: int32 (1,), not 0 if the lists were made with too few entries; ``validate=True`` checks it.
        aux: tensors that an expression looks values up in, by name: int32, int64, float32, float16, bfloat16 or bool,
            (batch, q_len) say, of up to 4 dimensions. One that ``q_idx``, ``kv_idx``, ``batch`` or ``head`` alone
            indexes has the size of that, or 1; others keep the size that they have here.
    """

    kind: ClassVar[str] = "block_lists"
    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor | None = None
    full_kv_indices: torch.Tensor | None = None
    _: KW_ONLY
    block: tuple[int, int] = (128, 128)
    mask: str | Callable[..., Any] = "none"
    mask_bits: torch.Tensor | None = None
    overflow: torch.Tensor | None = None
    aux: Mapping[str, torch.Tensor] | None = None

    def __post_init__(self) -> None:
        check_block(self.block)
        check_aux(self.aux)
        if not isinstance(self.mask, str) and not callable(self.mask):
            expected = "'none', 'causal', 'bits', an expression or a function"
            raise ArgumentError("mask", f"is {type(self.mask).__name__}, expected {expected}")
        if self.mask not in NAMED_MASKS:
            self._set_expression()
        elif self.aux:
            raise ArgumentError("aux", f"is given, and mask is {self.mask!r}: it goes with an expression")
        if (self.mask == "bits") != (self.mask_bits is not None):
            has = "is missing" if self.mask_bits is None else "is given"
            raise ArgumentError(
                "mask_bits", f"{has}, and mask is {self.mask!r}: it goes with mask='bits', and only there"
            )
        if (self.full_kv_num_blocks is None) != (self.full_kv_indices is None):
            raise ArgumentError("full_kv_num_blocks and full_kv_indices", "belong together: pass both or neither")
        if self.mask in NAMED_MASKS:
            self._set_spec(f'{{"kind": "block_lists", {_block_text(self.block)}, "mask": "{self.mask}"}}')

    def _set_expression(self) -> None:
        """Take the mask over as a spec has it: one spelling, its tensors in order."""
        found = mask_of(self.mask, self.aux)
        object.__setattr__(self, "mask", found.text)
        object.__setattr__(self, "aux", found.tensors)
        expression = {"mask": found.text, **({"aux": found.declared} if found.declared else {})}
        self._set_spec(f'{{"kind": "block_lists", {_block_text(self.block)}, {json_text(expression)[1:]}')
        if not torch.compiler.is_compiling():
            try:
                scored_of(self)
            except SpecError as error:
                raise ArgumentError(error.field.rpartition(".")[2], error.reason) from None

    def index_tensors(self) -> Indices:
        """Return the two counts and lists, then the bits, or the tensors of the expression, if there are any."""
        lists = (self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices)
        if self.mask_bits is not None:
            return (*lists, self.mask_bits)
        listed = lists if self.full_kv_indices is not None else lists[:2]
        return (*listed, *self.aux.values()) if self.aux else listed


@_pattern("aux")
@dataclass(frozen=True, eq=False, repr=False)
class Score:
    """What becomes of the logits before the softmax, of every pair that is seen: FlexAttention's ``score_mod``.

    Attributes:
        value: an expression over ``score`` (scale * q k^T, in float32), ``q_idx``, ``kv_idx``, ``batch``, ``head``,
            ``q_len``, ``kv_len`` and the tensors of ``aux`` (docs/reference/expressions.md), or a function
            ``score_mod(score, b, h, q_idx, kv_idx)`` that becomes one.
        aux: tensors that an expression looks values up in, by name, as those of :class:`BlockLists`. A name that the
            mask of the pattern has too is the same tensor.
        spec_json: the score of the kernel's spec as JSON.
    """

    value: str | Callable[..., Any]
    _: KW_ONLY
    aux: Mapping[str, torch.Tensor] | None = None
    spec_json: str = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.value, str) and not callable(self.value):
            raise ArgumentError("score", f"is {type(self.value).__name__}, expected an expression or a function")
        check_aux(self.aux)
        found = score_of(self.value, self.aux)
        object.__setattr__(self, "value", found.text)
        object.__setattr__(self, "aux", found.tensors)
        fields_of_spec = {"value": found.text, **({"aux": found.declared} if found.declared else {})}
        object.__setattr__(self, "spec_json", json_text(fields_of_spec))
        if torch.compiler.is_compiling():  # the operator parses the text
            return
        try:
            parse_score(self.spec_json)
        except SpecError as error:
            raise ArgumentError("score" if error.field == "score.value" else "aux", error.reason) from None

    def __repr__(self) -> str:
        aux = f", aux={described(self.aux)}" if self.aux else ""
        return f"Score({self.value!r}{aux})"


def scored_of(pattern: Pattern, score: Score | None = None) -> ScoredPattern:
    """The value of a pattern, and of a score: all of them but their tensors."""
    if score is None:
        return scored_pattern(pattern.spec_json)
    return pattern_with_score(pattern.spec_json, score.spec_json)


def operator_text(pattern: Pattern, score: Score | None = None) -> str:
    """The text of a pattern, and of a score, that torch's operators take; ``scored_pattern`` parses it."""
    return pattern.spec_json if score is None else f'{pattern.spec_json[:-1]}, "score": {score.spec_json}}}'


def with_score(pattern: Pattern, tensors: Indices, score: Any, q: Any, k: Any) -> tuple[Score, Indices]:
    """A score, and the tensors of a pattern followed by those of the score.

    Args:
        pattern: the pattern.
        tensors: its tensors, in order.
        score: a ``Score``, a text or a function.
        q, k: operands of the call. Tensors of a function may be longer than their sizes.

    Raises:
        ArgumentError: for any other score, and for two tensors of one name.
    """
    made = score if isinstance(score, Score) else score_for(score, q, k)
    aux = made.aux or {}
    of_mask = getattr(pattern, "aux", None) or {}
    for name, tensor in aux.items():
        if name in of_mask and not is_same(of_mask[name], tensor):
            reason = f"has a tensor {name}, and so has the mask of the pattern: a name is one tensor, give it another"
            raise ArgumentError("score", reason)
    return made, (*tensors, *(tensor for name, tensor in aux.items() if name not in of_mask))


def mask_for(mask_mod: Callable[..., Any], q: Any, k: Any) -> Expression:
    """The mask of a function, for a call with these operands: its tensors may be longer than their sizes.

    Raises:
        ArgumentError: naming ``mask_mod``.
    """
    return mask_of(mask_mod, None, _call_sizes(q, k))


def _call_sizes(q: Any, k: Any) -> dict[str, int]:
    """Sizes of a call by their names in expressions; none of operands without four dimensions."""
    shapes = tuple(getattr(q, "shape", ())), tuple(getattr(k, "shape", ()))
    if [len(shape) for shape in shapes] != [4, 4]:
        return {}
    return {"batch": shapes[0][0], "heads": shapes[0][1], "q_len": shapes[0][2], "kv_len": shapes[1][2]}


def score_for(score: Any, q: Any, k: Any) -> Score:
    """The score of a text or a function, for a call with these operands.

    Raises:
        ArgumentError: naming ``score``.
    """
    if torch.compiler.is_dynamo_compiling():
        what = "a text" if isinstance(score, str) else "a function"
        raise ArgumentError(
            "score", f"is {what}, in compiled code: make a sparse_kernel_codegen.patterns.Score of it before"
        )
    if isinstance(score, str) or not callable(score):
        return Score(score)
    found = score_of(score, None, _call_sizes(q, k))
    return Score(found.text, aux=found.tensors)


def split_tensors(scored: ScoredPattern, tensors: Indices) -> tuple[Indices, dict[str, torch.Tensor]]:
    """Index tensors of a call, and its aux tensors by name.

    Raises:
        ArgumentError: if a call has fewer tensors than the pattern has aux tensors.
    """
    names = scored.aux_names
    if not names:
        return tensors, {}
    if len(tensors) < len(names):
        raise ArgumentError("tensors", f"are {len(tensors)}, and the expressions have {', '.join(names)}")
    aux: dict[str, Any] = dict(zip(names, tensors[-len(names) :], strict=True))
    return tensors[: -len(names)], aux
