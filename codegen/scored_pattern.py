"""The pattern and the score of an attention call as one value, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from codegen.errors import CodegenError, SpecError
from codegen.patterns import PATTERNS, Block, IndexTensor, PatternBase, pattern_union
from codegen.plain import json_value
from codegen.score import Score
from codegen.validation import first_error
from codegen.wording import alternatives, shown

_ANY_PATTERN: Any = Annotated[pattern_union(), Field(discriminator="kind")]
_PATTERN_ADAPTER: TypeAdapter[PatternBase] = TypeAdapter(_ANY_PATTERN)
_LEGAL_BLOCK = {"q": 128, "kv": 128}
KEPT = 1024


@dataclass(frozen=True, eq=False)
class ScoredPattern:
    """The pattern and the score of a call; values with the same text are equal.

    Attributes:
        pattern: the pattern, whose list blocks may have any size.
        score: the score, or None.
        score_names: names of the score's tensors, sorted.
        aux_names: names of the mask's tensors, sorted, followed by those that only the score has.
        text: JSON of the pattern, whose field ``score`` is the score; ``scored_pattern`` parses it.
    """

    pattern: PatternBase
    score: Score | None = None
    score_names: tuple[str, ...] = field(init=False)
    aux_names: tuple[str, ...] = field(init=False)
    text: str = field(init=False)

    def __post_init__(self) -> None:
        mask_names = tuple(tensor.name for tensor in self.pattern.aux_tensors)
        score_names = () if self.score is None else tuple(sorted(self.score.aux))
        fields = self.pattern_fields | ({} if self.score is None else {"score": self.score_fields})
        object.__setattr__(self, "score_names", score_names)
        object.__setattr__(self, "aux_names", mask_names + tuple(n for n in score_names if n not in mask_names))
        object.__setattr__(self, "text", json.dumps(fields))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScoredPattern) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def block(self) -> Block | None:
        """Block shape of the lists; None for a pattern without lists."""
        return self.pattern.fixed_block

    @property
    def index_tensors(self) -> tuple[IndexTensor, ...]:
        """Index tensors of the pattern, in call order."""
        return self.pattern.index_tensors

    def with_pattern(self, **fields: Any) -> ScoredPattern:
        """Copy with changed fields of the pattern, or, with ``kind``, with another pattern.

        Raises:
            SpecError: for an invalid field, like ``pattern_of``.
        """
        kept = self.pattern_fields if "kind" not in fields else {}
        return ScoredPattern(pattern_of({**kept, **fields}), self.score)

    @property
    def pattern_fields(self) -> dict[str, Any]:
        """The pattern as plain data, without fields that are None."""
        return self.pattern.model_dump(mode="json", exclude_none=True, warnings=False)  # other block sizes warn

    @property
    def score_fields(self) -> dict[str, Any] | None:
        """The score as plain data, or None."""
        return None if self.score is None else self.score.model_dump(mode="json")


def pattern_of(fields: Mapping[str, Any]) -> PatternBase:
    """Validated pattern, whose list blocks may have any size.

    Args:
        fields: plain data.

    Raises:
        SpecError: names the first invalid field, its value and what is allowed.
    """
    model = PATTERNS.get(str(fields.get("kind")))
    if model is None or model.model_fields.get("block") is None or model.model_fields["block"].annotation is not Block:
        return _validated(fields)
    return _validated({**fields, "block": _LEGAL_BLOCK}).model_copy(update={"block": _block_of(fields.get("block"))})


def _validated(fields: Mapping[str, Any]) -> PatternBase:
    try:
        return _PATTERN_ADAPTER.validate_python(dict(fields))
    except ValidationError as error:
        name, reason = first_error(error, PATTERNS, "a pattern")
        raise SpecError(f"pattern.{name}".rstrip("."), reason) from None


def _block_of(sizes: Any) -> Block:
    """A block of any size."""
    whole = isinstance(sizes, Mapping) and set(sizes) == {"q", "kv"} and all(type(n) is int for n in sizes.values())
    if not whole or min(sizes.values()) < 1:
        raise SpecError(
            "pattern.block", f"is {shown(sizes)}; expected q and kv, the queries and keys per block, 1 or more"
        )
    return Block.model_construct(q=sizes["q"], kv=sizes["kv"])


@lru_cache(maxsize=KEPT)
def scored_pattern(text: str) -> ScoredPattern:
    """Parsed JSON of a pattern, whose field ``score`` is the score; values are cached by text.

    Raises:
        SpecError: for a text that is not JSON, or for an invalid field of the pattern or the score.
    """
    fields = _mapping("pattern", text)
    score = fields.pop("score", None)
    pattern = pattern_of(fields)
    if pattern.is_general:
        name = pattern.call_numbers[0].field
        raise SpecError(f"pattern.{name}", "is missing; the pattern of a call must have it")
    return ScoredPattern(pattern, None if score is None else _score_of(score))


@lru_cache(maxsize=KEPT)
def pattern_with_score(pattern: str, score: str) -> ScoredPattern:
    """Parsed JSON of a pattern and of a score; values are cached by text.

    Raises:
        SpecError: like ``scored_pattern``.
    """
    return ScoredPattern(scored_pattern(pattern).pattern, parse_score(score))


@lru_cache(maxsize=KEPT)
def parse_score(text: str) -> Score:
    """Parsed JSON of a score; values are cached by text.

    Raises:
        SpecError: for a text that is not JSON, or for an invalid field.
    """
    return _score_of(_mapping("score", text))


def _mapping(name: str, text: str) -> dict[str, Any]:
    try:
        fields = json_value(text)
    except CodegenError as error:
        raise SpecError(name, str(error)) from None
    if not isinstance(fields, dict):
        raise SpecError(name, f"is {shown(fields)}; a mapping of fields is expected")
    return fields


def _score_of(fields: Any) -> Score:
    known = tuple(Score.model_fields)
    for name in fields if isinstance(fields, dict) else ():
        if name not in known:
            raise SpecError(f"score.{name}", f"is not a field of a score; {alternatives(name, known)}")
    try:
        return Score.model_validate(fields)
    except ValidationError as error:
        name, reason = first_error(error, {}, "a score")
        raise SpecError(f"score.{name}".rstrip("."), reason) from None
