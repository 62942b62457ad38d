"""Problems: the computation of a kernel and its sizes.

A field that is None is unknown. The operator, type, pattern, block and options of a problem go into the spec; its sizes
decide which kernel is fast.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from codegen.dtypes import FP8
from codegen.errors import CodegenError, SpecError
from codegen.patterns import PATTERNS, Block
from codegen.patterns.base import SpecModel, StrictInt
from codegen.plain import PlainCopy, json_value
from codegen.problem import Layout
from codegen.score import Score
from codegen.select.default_tables import GATHERED_ROWS
from codegen.spec import (
    AnyPattern,
    ArchName,
    BlockShape,
    BsrSpmmSpec,
    DTypeName,
    Epilogue,
    Spec,
)
from codegen.validation import first_error
from codegen.wording import shown

Fields = dict[str, Any]
Size = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
EVENNESS = {"even": 1.0, "uneven": 8.0}
"""Ratio of longest to mean row for each word of a problem; "uneven" lies between the measured power laws."""
OVERLAP_WEIGHT = 4.0
"""Distance between the shares 0 and 1, in factors of two of other sizes."""
TUNING_FIELDS = frozenset(
    {
        "mma",
        "copy",
        "schedule",
        "stages",
        "tile",
        "warp_rows",
        "stream_k_tail",
        "kv_splits",
        "split_kv",
        "share_kv_loads",
        "query_grouping",
        "l2_lockstep",
        "ctas_per_sm",
        "scheduler",
    }
)
"""Tuning fields of specs. ``query_grouping: given`` is not tuning, as the caller passes the order."""


class _Problem(SpecModel):
    model_config = ConfigDict(allow_inf_nan=False)

    arch: ArchName = Field(default="sm_90a", description="architecture of the device")
    dtype: DTypeName = Field(default="fp16", description="type of inputs and outputs")

    said: ClassVar[tuple[str, ...]] = ()
    """Fields that the kernel's spec has too, besides ``op``, ``arch`` and ``dtype``."""

    @property
    def is_fp8(self) -> bool:
        """Whether inputs are FP8."""
        return self.dtype in FP8

    def fields(self) -> Fields:
        """Fields of the kernel's spec that the problem sets, as plain data, without options that are off."""
        every = self.model_dump(mode="json", include={"op"}) | self.model_dump(mode="json", exclude_defaults=True)
        return {
            "op": every["op"],
            "arch": self.arch,
            "dtype": self.dtype,
            **{name: every[name] for name in self.said if name in every},
        }

    def text(self) -> str:
        """Problem in the syntax of ``codegen explain --problem`` and ``codegen tune``; see ``problem_fields``."""
        every = self.model_dump(mode="json", include={"op"}) | self.model_dump(mode="json", exclude_defaults=True)
        return ",".join(f"{name}={_plain(value)}" for name, value in _flat(every))


class AttentionProblem(_Problem):
    """An attention problem."""

    op: Literal["attention"] = "attention"
    head_dim: Annotated[Literal[64, 80, 96, 128, 192, 256], StrictInt] = Field(description="elements per head")
    pattern: AnyPattern = Field(description="pattern of the keys that each query sees")
    lse: bool = Field(default=True, description="log-sum-exp of each row, returned in addition to O")
    softcap: float | None = Field(default=None, description="cap of the logits")
    score: Score | None = Field(default=None, description="transform of the logits: an expression")
    sink: bool = Field(
        default=False, description="attention sink: a logit per head, added to the softmax sums of its rows"
    )
    kv_lengths: bool = Field(default=False, description="number of keys of each batch, from the caller")
    layout: Layout = Field(default="padded", description="arrangement of sequences: padded or packed (varlen)")
    cache: Literal["same", "e4m3"] = Field(default="same", description="type of K and V in pages: that of Q, or e4m3")
    pad_heads: bool = Field(default=False, description="heads smaller than head_dim; not for sm_90a")
    pack_gqa: Annotated[Literal[1, 2, 4, 8, 16, 32, 64], StrictInt] = Field(
        default=1, description="query heads that share their lists"
    )
    query_grouping: Literal["none", "given"] = Field(default="none", description="given: the caller passes query_order")
    batch: Size | None = Field(default=None, description="batches")
    heads: Size | None = Field(default=None, description="query heads")
    kv_heads: Size | None = Field(default=None, description="heads of K and V")
    q_len: Size | None = Field(default=None, description="queries per head")
    kv_len: Size | None = Field(default=None, description="keys per head")
    list_length: Size | None = Field(
        default=None, description="entries per list, if the pattern does not fix their number"
    )
    overlap: Share | None = Field(
        default=None, description="share of entries that a list has in common with the previous one; 0 for random lists"
    )

    said: ClassVar[tuple[str, ...]] = (
        *("head_dim", "pattern", "lse", "softcap", "score", "sink", "kv_lengths", "layout", "cache", "pad_heads"),
        *("pack_gqa", "query_grouping"),
    )

    def key(self) -> tuple[object, ...]:
        """Key that two problems must share for a measurement of one to apply to the other."""
        return (
            *(self.op, self.arch, self.head_dim, self.pattern.kind, self.pattern.fixed_block),
            *(self.pack_gqa > 1, self.query_grouping, self.layout, self.cache),
        )

    def options(self) -> tuple[object, ...]:
        """Optional features of low cost; a measured problem with the same features wins ties."""
        return (self.lse, self.softcap is not None, self.score is not None, self.sink, self.kv_lengths, self.pad_heads)

    def places(self) -> dict[str, float | None]:
        """Coordinate of the problem on each axis, in factors of two; None if unknown. Sizes are those of a class."""
        pattern = self.pattern
        listed = pattern.list_length or self.list_length
        return {
            "batch x heads": _log(_class(self.batch), self.heads),
            "q_len": _log(_class(self.q_len)),
            "kv_len": _log(_class(self.kv_len)),
            "heads / kv_heads": None if None in (self.heads, self.kv_heads) else _log(self.heads) - _log(self.kv_heads),  # type: ignore[operator]
            "list": _log(_class(listed)),
            "window": _log(pattern.window),
            "pack_gqa": _log(self.pack_gqa),
            "overlap": None if self.overlap is None else OVERLAP_WEIGHT * self.overlap,
        }

    def __str__(self) -> str:
        """Problem in words."""
        sizes = [
            f"{name} {value}"
            for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "list_length", "overlap")
            if (value := getattr(self, name)) is not None
        ]
        options = [name for name in ("softcap", "sink", "kv_lengths", "pad_heads") if getattr(self, name)]
        options += ["varlen"] if self.layout == "varlen" else []
        return ", ".join([f"{self.pattern.stem()}, d {self.head_dim}, {self.dtype}", *options, *sizes])


class BsrProblem(_Problem):
    """A product with matrices in block-sparse rows.

    ``bsr_spmm``: C (M, N) = A (M, K) @ B, A sparse. ``bsr_sddmm``: the stored blocks of C (M, N) = A (M, K) @ B^T.
    ``bsr_spgemm``: C = A @ B, both sparse.
    """

    op: Literal["bsr_spmm", "bsr_sddmm", "bsr_spgemm"]
    block: BlockShape = Field(description="shape of a stored block")
    a_layout: Literal["row_major", "column_major"] = Field(
        default="row_major", description="memory layout of A of bsr_sddmm"
    )
    b_layout: Literal["row_major", "column_major", "strided"] = Field(
        default="row_major", description="memory layout of B; strided: of B and C, any strides"
    )
    epilogue: Epilogue | None = Field(default=None, description="epilogue of C")
    accumulate: bool = Field(default=False, description="C = A B + beta c")
    transpose_a: bool = Field(default=False, description="C = A^T B")
    output: Literal["dense", "bsr"] = Field(default="dense", description="form of C of bsr_spgemm")
    m: Size | None = Field(default=None, description="rows of C")
    n: Size | None = Field(default=None, description="columns of C")
    k: Size | None = Field(default=None, description="depth of the product")
    density: Share | None = Field(default=None, description="share of blocks that are stored")
    evenness: Literal["even", "uneven"] | Annotated[float, Field(ge=1)] | None = Field(
        default=None, description="ratio of stored blocks in the longest and the mean block row"
    )
    overlap: Share | None = Field(
        default=None,
        description="share of columns that a block row has in common with the previous one; 0 for random rows",
    )
    prepared: Literal["none", "rows", "packed"] | None = Field(
        default=None,
        description="preparation of A, once before many calls: rows: kernel.prepare(a); packed: with pack=True",
    )

    said: ClassVar[tuple[str, ...]] = (
        "block",
        "a_layout",
        "b_layout",
        "epilogue",
        "accumulate",
        "transpose_a",
        "output",
    )

    @classmethod
    def of_lengths(cls, row_lengths: Sequence[int], **fields: Any) -> BsrProblem:
        """Problem with the density and evenness of given block rows.

        Args:
            row_lengths: stored blocks of each block row of the sparse matrix (A, or C of a sampled product).
            fields: the other fields, including the number of columns of that matrix (``k``; ``n`` of a sampled
                product).

        Returns:
            The problem, with the number of rows of that matrix, in elements.

        Raises:
            SpecError: without rows, without that number of columns, or for an unknown field.
        """
        if not len(row_lengths):
            raise SpecError("row_lengths", "is empty: a matrix has at least one block row")
        known = parse_problem(fields)
        if not isinstance(known, cls):
            raise SpecError("problem.op", f"is {shown(known.op)}; only products with BSR matrices have block rows")
        down, across = ("k", "m") if known.transpose_a else ("m", "n" if known.op == "bsr_sddmm" else "k")
        columns = getattr(known, across)
        if columns is None:
            raise SpecError(across, "is missing; density needs the length of a block row")
        total, mean = sum(row_lengths), sum(row_lengths) / len(row_lengths)
        found = parse_problem(
            {
                **fields,
                down: len(row_lengths) * known.block.rows,
                "density": min(1.0, total / (len(row_lengths) * max(1, columns // known.block.cols))),
                "evenness": max(row_lengths) / mean if total else 1.0,
            }
        )
        assert isinstance(found, BsrProblem)
        return found

    @property
    def longest_row(self) -> float | None:
        """Ratio of the longest to the mean row."""
        return EVENNESS[self.evenness] if isinstance(self.evenness, str) else self.evenness

    def key(self) -> tuple[object, ...]:
        """Key that two problems must share for a measurement of one to apply to the other."""
        layouts = self.a_layout, self.b_layout
        return (self.op, self.arch, self.block, *layouts, self.transpose_a, self.output)

    def options(self) -> tuple[object, ...]:
        """Optional features of low cost; a measured problem with the same features wins ties."""
        return (self.epilogue is not None, self.accumulate)

    def places(self) -> dict[str, float | None]:
        """Coordinate of the problem on each axis, in factors of two; None if unknown."""
        return {
            "m": _log(self.m),
            "n": _log(_class(self.n)),
            "k": _log(self.k),
            "density": _log(self.density or None),
            "evenness": _log(self.longest_row),
            "overlap": None if self.overlap is None else OVERLAP_WEIGHT * self.overlap,
        }

    def __str__(self) -> str:
        """Problem in words."""
        sizes = [f"{name} {value}" for name in ("m", "n", "k") if (value := getattr(self, name)) is not None]
        sizes += [f"density {self.density:.3g}"] if self.density is not None else []
        sizes += [f"longest row {self.longest_row:.3g} x mean"] if self.longest_row is not None else []
        sizes += [f"{name} {value}" for name in ("overlap", "prepared") if (value := getattr(self, name)) is not None]
        off = {"b_layout": "row_major", "epilogue": None, "accumulate": False, "transpose_a": False, "output": "dense"}
        options = [name for name, value in off.items() if getattr(self, name) != value]
        blocks = f"{self.op}, blocks {self.block.rows} x {self.block.cols}, {self.dtype}"
        return ", ".join([blocks, *options, *sizes])


Problem = AttentionProblem | BsrProblem
_BY_OP: Mapping[str, type[_Problem]] = {
    op: model for model in (AttentionProblem, BsrProblem) for op in get_args(model.model_fields["op"].annotation)
}
PROBLEM_ADAPTER: TypeAdapter[Problem] = TypeAdapter(Annotated[Problem, Field(discriminator="op")])


def rounded(size: int) -> int:
    """Least of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is not below ``size``: calls up to it share a kernel."""
    power = 1 << max(0, size - 1).bit_length()
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power


def _class(size: int | None) -> int | None:
    """Size that stands for those of calls that share a kernel; None if unknown."""
    return None if size is None else rounded(size)


def _log(*factors: float | None) -> float | None:
    """Binary logarithm of a product; None if a factor is unknown."""
    known = [factor for factor in factors if factor is not None]
    return math.log2(math.prod(known)) if len(known) == len(factors) else None


def parse_problem(data: Mapping[str, Any]) -> Problem:
    """Validated problem from plain data.

    Args:
        data: fields of ``AttentionProblem`` or ``BsrProblem`` by name, including ``op``; sizes in elements.

    Returns:
        The problem, with its defaults filled in.

    Raises:
        SpecError: names the first offending field, its value and what is allowed.
    """
    plain = plain_fields(data)
    try:
        return PROBLEM_ADAPTER.validate_python(plain)
    except ValidationError as error:
        field, reason = first_error(error, _BY_OP, "a problem")
        raise SpecError(f"problem.{field}".rstrip("."), reason) from None


def plain_fields(data: Mapping[str, Any]) -> Fields:
    """Fields of a problem as plain data, within bounds.

    Raises:
        SpecError: if it is not a mapping, or a field is not plain data.
    """
    if not isinstance(data, Mapping):
        raise SpecError("problem", f"must be a mapping of fields, this is {type(data).__name__}")
    try:
        plain: Fields = PlainCopy().of(data)
    except SpecError as error:
        raise SpecError(f"problem.{error.field}".rstrip("."), error.reason) from None
    return plain


def problem_fields(text: str) -> Fields:
    """Fields from FIELD=VALUE,... of a command line: numbers and booleans as in JSON, nested fields with dots.

    ``block=64`` is a square block, and ``pattern=causal`` a kind of pattern; a field ``head_dim`` implies the operator.

    Raises:
        SpecError: for a part that is not FIELD=VALUE, or a repeated field.
    """
    fields: Fields = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, equals, value = part.partition("=")
        if not (name and equals and value):
            raise SpecError("problem", f"has {shown(part)}; expected FIELD=VALUE,..., separated by commas")
        *outer, last = name.split(".")
        inner = fields
        for each in outer:
            inner = inner.setdefault(each, {})
            if not isinstance(inner, dict):
                raise SpecError(f"problem.{name}", "is given twice")
        if last in inner:
            raise SpecError(f"problem.{name}", "is given twice")
        inner[last] = _spelt(name, value)
    if "head_dim" in fields:
        fields.setdefault("op", "attention")
    if isinstance(pattern := fields.get("pattern"), dict):
        _square_block(pattern)
    return fields


def _flat(fields: Fields, outer: str = "") -> Iterator[tuple[str, Any]]:
    """Yield plain fields by name, nested fields with dots."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{outer}{name}.")
        else:
            yield f"{outer}{name}", value


def _plain(value: Any) -> str:
    """Value in the syntax of ``_spelt``."""
    return value if isinstance(value, str) else json.dumps(value)


def _spelt(name: str, value: str) -> Any:
    """Value of a command line as plain data."""
    try:
        plain = json_value(value)
    except CodegenError:
        plain = value
    if name == "pattern":
        return {"kind": plain}
    return dict.fromkeys(("rows", "cols"), plain) if name == "block" and isinstance(plain, int) else plain


def _square_block(pattern: Fields) -> None:
    """Expand a pattern's block from one number to a shape, if the pattern's blocks have two sizes."""
    model, block = PATTERNS.get(str(pattern.get("kind"))), pattern.get("block")
    known = None if model is None else model.model_fields.get("block")
    if known is not None and known.annotation is Block and isinstance(block, int):
        pattern["block"] = {"q": block, "kv": block}


def has_problem(spec: Spec) -> bool:
    """Whether the operator has problems; other kernels follow from the arguments of a call."""
    return spec.op in _BY_OP


def said_by(spec: Spec) -> Fields:
    """Fields of the problem that a spec sets.

    Raises:
        SpecError: for an operator without problems.
    """
    if not has_problem(spec):
        raise SpecError("op", f"is {spec.op}; only attention and the bsr_ operators have problems")
    fields: Fields = json.loads(spec.canonical_json())
    if fields.get("query_grouping") == "search":
        fields.pop("query_grouping")
    said = ("op", "arch", "dtype", *_BY_OP[spec.op].said)
    return {name: value for name, value in fields.items() if name in said}


def is_chosen(spec: Spec) -> bool:
    """Whether kernels like this one are chosen by problem; the table has no BSR products in FP8 yet."""
    return has_problem(spec) and not (spec.is_fp8 and _BY_OP[spec.op] is BsrProblem)


def problem_of(spec: Spec, sizes: Mapping[str, Any] | None = None) -> Problem:
    """Problem of a spec, with some sizes."""
    return parse_problem({**said_by(spec), **(sizes or {})})


def tuning_of(spec: Spec) -> Fields:
    """Tuning fields of a spec, without options that are off."""
    fields: Fields = json.loads(spec.canonical_json())
    given = fields.get("query_grouping") == "given"
    return {name: v for name, v in fields.items() if name in TUNING_FIELDS and not (given and name == "query_grouping")}


def preparation_of(spec: Spec, packed: bool = False) -> Literal["rows", "packed"] | None:
    """Preparation of A, once before many calls, that a kernel uses, or None."""
    if not isinstance(spec, BsrSpmmSpec):
        return None
    gathers = spec.tile.m == GATHERED_ROWS
    if packed and gathers:
        return "packed"
    return "rows" if gathers or spec.is_dynamic or spec.transpose_a else None
