"""Kernel specs: the complete, frozen description of one kernel.

Fields that are left out are filled in while the spec is read, so a spec object always shows every decision. What a
spec may combine is in :mod:`codegen.arch`; whether it fits its architecture is found out by :mod:`codegen.plans`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from codegen.arch import ARCHS, KIB, Combination
from codegen.errors import SpecError
from codegen.patterns import PATTERNS, IndexTensor, PatternBase, pattern_union
from codegen.patterns.base import Frozen, Integral

if TYPE_CHECKING:
    AnyPattern = PatternBase
else:
    AnyPattern = Annotated[pattern_union(), Field(discriminator="kind")]

ArchName = Literal["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"]
DTypeName = Literal["fp16", "bf16"]


class AttentionTile(Frozen):
    """What a thread block of an attention kernel works on at a time."""

    m: int = Field(description="query rows")
    n: int = Field(description="keys of one step")


class GemmTile(Frozen):
    """What a thread block of a GEMM kernel works on at a time."""

    m: int = Field(description="rows of C")
    n: int = Field(description="columns of C")
    k: int = Field(description="depth of one step")


class CopyTile(Frozen):
    """What a thread block of a copy moves at a time."""

    m: int = Field(description="rows")
    n: int = Field(description="columns")


class BlockShape(Frozen):
    """Shape of one stored block of a BSR matrix."""

    rows: int = Field(description="rows of a block")
    cols: int = Field(description="columns of a block")


class Epilogue(Frozen):
    """What becomes of an element of a product before it is stored: activation(x + bias), in fp32."""

    bias: bool = Field(default=False, description="whether a bias is added, one element for each row of C")
    activation: Literal["none", "relu", "gelu", "silu"] = Field(default="none", description="function applied last")

    @model_validator(mode="after")
    def _does_something(self) -> Epilogue:
        if not self.bias and self.activation == "none":
            raise ValueError("does nothing: without bias and activation, leave the epilogue out")
        return self


class SpecBase(Frozen):
    """Fields that every kernel has."""

    arch: ArchName = Field(description="architecture the kernel is written for")
    dtype: DTypeName = Field(default="fp16", description="type of the inputs and outputs; accumulation is fp32")
    mma: Literal["wmma", "mma", "wgmma", "none"] = Field(description="matrix instruction")
    copy_: Literal["ld_global", "cp_async", "tma"] = Field(alias="copy", description="how tiles reach shared memory")
    schedule: Literal["multistage", "cooperative", "ping_pong"] = Field(description="who loads and who computes, when")
    stages: int = Field(ge=1, le=8, description="depth of the shared-memory ring")

    options: ClassVar[tuple[str, ...]] = ()
    """Fields that are left out of the canonical JSON where they are off, as by default: kernels that do not use an
    option keep their hash when it is added."""

    def canonical_json(self) -> str:
        """Return the spec with every field but unused options, in one spelling: what the hash is taken over."""
        fields = self.model_dump(mode="json", by_alias=True, exclude=self._unused())
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    def _unused(self) -> set[str]:
        """Return the options that are off, and would be if they were left out."""
        return {name for name in self.options if getattr(self, name) == type(self).model_fields[name].default}

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()


COMBINED = ("mma", "copy", "schedule")
GATHERED_ROWS = 384  # of a tile of many small block rows
SAMPLED_STAGING = 4 * KIB  # bytes of C on their way from a tile of a sampled product with small blocks, at least


def _combination(data: Mapping[str, Any], op: str) -> Combination | None:
    """Return the first legal combination that agrees with what was given, or else the first; None without an arch."""
    name = data.get("arch")
    if not isinstance(name, str) or name not in ARCHS:
        return None
    legal = ARCHS[name].of(op)
    if not legal:
        written = ", ".join(arch.name for arch in ARCHS.values() if arch.of(op))
        raise SpecError("arch", f"is {name}; {op} is written for {written}")
    fits = [c for c in legal if all(data.get(key, getattr(c, key)) == getattr(c, key) for key in COMBINED)]
    return (fits or legal)[0]


def _fill(data: dict[str, Any], op: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the first legal combination that agrees with what was given, then the other defaults."""
    choice = _combination(data, op)
    combined = {} if choice is None else {key: getattr(choice, key) for key in COMBINED}
    filled = {**combined, **defaults, **data}
    if isinstance(filled["tile"], Mapping):
        filled["tile"] = {**defaults["tile"], **filled["tile"]}
    return filled


def _given_tile(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sizes of the tile that were given."""
    tile = data.get("tile")
    return tile if isinstance(tile, Mapping) else {}


def _agreeing(data: Mapping[str, Any], choice: Mapping[str, str]) -> dict[str, Any]:
    """Fill in a choice if nothing that was given contradicts it."""
    agrees = all(data.get(key, value) == value for key, value in choice.items())
    return {**choice, **data} if agrees else dict(data)


def _by_mma_if_small(data: Mapping[str, Any]) -> dict[str, Any]:
    """Name mma.sync where nothing is said and blocks of a product are too small for a wgmma, which has 64 rows."""
    block = data.get("block")
    small = isinstance(block, Mapping) and block.get("rows") in (16, 32)
    unsaid = data.get("arch") == "sm_90a" and not any(key in data for key in COMBINED)
    return {**data, "mma": "mma"} if small and unsaid else dict(data)


QUERY_ORDER = IndexTensor(
    "query_order", ("batch", "heads", "query_blocks"), "query blocks, those of a tile together", upper="query_blocks"
)


class AttentionSpec(SpecBase):
    """softmax(scale * Q K^T) V over the key blocks that ``pattern`` selects."""

    op: Literal["attention"] = Field(description="operator")
    head_dim: Annotated[Literal[64, 96, 128, 192, 256], Integral] = Field(
        description="elements of a head; each architecture supports some of these"
    )
    pattern: AnyPattern = Field(description="which keys a query sees")
    tile: AttentionTile = Field(description="tile of one thread block")
    lse: bool = Field(default=True, description="whether the natural log-sum-exp of each row is returned too")
    softcap: float | None = Field(
        default=None,
        ge=0.001,
        le=1000,
        description="logits become softcap * tanh(scale * q.k / softcap), before anything is hidden; beyond 1000 fp32 "
        "would lose digits that the softmax needs",
    )
    split_tail: bool = Field(
        default=False,
        description="whether tiles that would not fill a last round of thread blocks are divided between them by their "
        "key blocks; by default where the kernel can",
    )
    sink: bool = Field(
        default=False,
        description="whether the caller passes a sink, a logit of each head that joins the sum in each of its rows",
    )
    key_parts: Annotated[Literal[1, 2], Integral] = Field(
        default=1,
        description="parts that the keys of a tile are divided into, each with warpgroups of its own, which pays where "
        "there are few tiles for the SMs",
    )
    packed_heads: Annotated[Literal[1, 2, 4, 8, 16, 32, 64], Integral] = Field(
        default=1,
        description="query heads of a K/V head that share keys and the rows of a tile: those of one query together",
    )
    warp_rows: Annotated[Literal[16, 32], Integral] = Field(
        default=16,
        description="query rows of a warp where it multiplies by mma.sync; with 32 it reads K and V from shared memory "
        "half as often",
    )
    share_kv: bool = Field(
        default=False,
        description="whether a key block that several of the two or three query blocks of a tile list is loaded only "
        "once, which pays most where lists of neighbouring query blocks overlap",
    )
    query_order: bool = Field(
        default=False,
        description="whether the caller says which query blocks form a tile, so that those whose lists overlap share "
        "what is loaded; with share_kv only",
    )
    order_queries: bool = Field(
        default=False,
        description="whether each call first finds out which query blocks form a tile, so that those whose lists "
        "overlap share what is loaded; with share_kv only",
    )
    paced: bool = Field(
        default=False,
        description="whether thread blocks that are ahead wait for the others, so that all ask for keys near one "
        "another, which pays where the L2 does not hold K and V of a head and lists are sorted; topk on sm_90a only",
    )
    options: ClassVar[tuple[str, ...]] = (
        "softcap",
        "sink",
        "packed_heads",
        "split_tail",
        "key_parts",
        "warp_rows",
        "share_kv",
        "query_order",
        "order_queries",
        "paced",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        pattern = data.get("pattern")
        block = pattern.get("block") if isinstance(pattern, Mapping) else None
        block = block if isinstance(block, Mapping) else {}
        hopper = data.get("arch") == "sm_90a"
        tile = _hopper_tile(data.get("head_dim"), block) if hopper else _ada_tile(data, block)
        parts = hopper and data.get("key_parts", 1) != 1
        if hopper and (data.get("share_kv") is True or parts or _given_tile(data).get("m") == 64):  # without ping_pong
            data = _agreeing(data, {"mma": "wgmma", "copy": "tma", "schedule": "cooperative"})
        kind = pattern.get("kind") if isinstance(pattern, Mapping) else None
        splits = hopper and isinstance(kind, str) and kind in PATTERNS and PATTERNS[kind].splits
        shares = data.get("share_kv") is True
        if shares:  # two query blocks, the fewest, take two stages
            stages = 2 if block.get("kv") == 128 and data.get("head_dim") != 64 else 4
        else:
            stages = 1 if hopper and _fills_memory(data, block, tile) else 2
        defaults = {"tile": tile, "stages": stages, "split_tail": splits and not shares and not parts}
        if parts:
            defaults["tile"], defaults["stages"] = _parts_tile(data, block)
        choice = _combination(data, "attention")
        if choice is not None and choice.mma == "wmma":
            defaults |= {"tile": _wmma_tile(data.get("head_dim"), block), "stages": 3}
        elif not hopper:
            rows = _given_tile(data).get("m", tile["m"])
            # O of 32 rows of a wider head would not fit a thread's registers.
            high = (64, 128, 256) if _copies_few_rows(data, block) else (128, 256)
            defaults["warp_rows"] = 32 if rows in high and data.get("head_dim") in (64, 96, 128) else 16
        return _fill(dict(data), "attention", defaults)

    @property
    def can_split(self) -> bool:
        """Whether there is a kernel with ``split_tail``: it then has that unless the spec says no."""
        return self.arch == "sm_90a" and self.pattern.splits and not self.share_kv and self.key_parts == 1

    @property
    def index_tensors(self) -> tuple[IndexTensor, ...]:
        """The int32 tensors that a call takes beside q, k and v."""
        return (*self.pattern.index_tensors, *((QUERY_ORDER,) if self.query_order else ()))

    def _unused(self) -> set[str]:
        # Of these the default is not the field's: it depends on other fields.
        used = ({"split_tail"} if self.can_split else set()) | ({"warp_rows"} if self.arch != "sm_90a" else set())
        return super()._unused() - used


def _hopper_tile(head_dim: object, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tile of a spec for sm_90a that has none."""
    # Steps of 128 keys of the widest heads would not fit beside their output, neither registers nor shared memory.
    return {"m": 128, "n": 64 if head_dim in (192, 256) else block.get("kv", 128)}


def _fills_memory(data: Mapping[str, Any], block: Mapping[str, Any], tile: Mapping[str, Any]) -> bool:
    """Return whether rings of two stages do not fit: each query block of a tile has rings of its own."""
    sizes = {**tile, **_given_tile(data)}
    given = sizes.get("m"), sizes.get("n"), data.get("head_dim"), block.get("q"), data.get("packed_heads", 1)
    numbers = [number for number in given if isinstance(number, int)]
    if len(numbers) < len(given):
        return False  # what is wrong or missing is told elsewhere
    m, n, width, queries, heads = numbers
    streams = m // max(queries * heads, 64)
    elements = (m + 2 * 2 * streams * n) * -(-width // 64) * 64  # Q, then two stages of K and V for each
    return streams > 1 and 2 * elements > ARCHS["sm_90a"].shared_memory_per_block


def _parts_tile(data: Mapping[str, Any], block: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the tile and the stages of a spec with ``key_parts`` that has none: there are rings for each part."""
    head_dim, pattern = data.get("head_dim"), data.get("pattern")
    width = head_dim if isinstance(head_dim, int) else 128
    given = _given_tile(data).get("n", block.get("kv"))
    n = given if isinstance(given, int) else 64
    step = n * -(-width // 64) * 64  # elements of K in shared memory
    high = step <= 64 * 64 and isinstance(pattern, Mapping) and pattern.get("kind") == "dense"
    return {"m": 128 if high else 64, "n": n}, 4 if step <= 64 * 64 else 2 if step <= 64 * 128 else 1


def _load_part(data: Mapping[str, Any], block: Mapping[str, Any]) -> int:
    """Return the largest power of two that divides the keys of a load on sm_89, a block or a step: 16 at least."""
    given = [size for size in (_given_tile(data).get("n", 32), block.get("kv")) if isinstance(size, int)]
    keys = min(given, default=32)
    return max(16, keys & -keys)


def _copies_few_rows(data: Mapping[str, Any], block: Mapping[str, Any]) -> bool:
    """Return whether more than two warps would copy more rows at a time than a load has: rows of 192 bytes."""
    return data.get("head_dim") == 96 and _load_part(data, block) == 16


def _hides_pairs(pattern: object) -> bool:
    """Return whether a pattern hides some pairs of a block, as its ``masks_pairs`` says once it is read."""
    kind, mask = (pattern.get("kind"), pattern.get("mask")) if isinstance(pattern, Mapping) else (None, None)
    return mask == "causal" if kind == "block_lists" else kind not in ("dense", "topk")


def _ada_tile(data: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tile of a spec for another architecture that has none: two thread blocks fit 100 KB."""
    head_dim, heads, warp_rows = data.get("head_dim"), data.get("packed_heads", 1), data.get("warp_rows")
    wide = head_dim in (192, 256)
    largest = 64 if wide else 128
    if _copies_few_rows(data, block):
        largest = 64 if heads == 64 else 32  # the heads of a query stay together
    elif warp_rows == 16 and not wide:  # a warp copies 8 rows of 192 bytes at a time, or 4, and all no more than a load
        largest = min(largest, 16 * _load_part(data, block) // (8 if head_dim == 96 else 4))
    queries = block.get("q")
    rows = queries * heads if isinstance(queries, int) and isinstance(heads, int) else largest
    given = _given_tile(data).get("m")
    m = given if isinstance(given, int) else min(rows, largest)
    n = 64 if head_dim == 64 or (m < 128 and not wide) else 32
    # Warps of 32 rows have no registers for more scores beside O of 128 elements, where pairs are hidden or a step has
    # several loads.
    several = block.get("kv") in (16, 32) or _hides_pairs(data.get("pattern"))
    return {"m": m, "n": 32 if warp_rows == 32 and head_dim == 128 and several else n}


def _wmma_tile(head_dim: object, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tile of a spec for WMMA that has none: two thread blocks fit 100 KB."""
    rows = block.get("q")
    return {"m": rows if rows in (16, 32) else 64, "n": 64 if head_dim == 64 else 32}


NARROW_64 = ("accumulate", "transpose_a")
"""What keeps tiles of 64 rows from being wide, unless a spec says so: what is added needs the room of a stage, and the
transposed kernel has no such tiles. Nor has the one for B stored by columns."""


def _may_be_wide(data: Mapping[str, Any]) -> bool:
    """Return whether the tile of a spec for blocks of 64 rows is 512 columns wide where it has none."""
    plain = data.get("cluster", 1) == 1 and data.get("b_layout", "row_major") == "row_major"
    return plain and not any(data.get(option) for option in NARROW_64)


def _resident(data: Mapping[str, Any]) -> int:
    """Return the thread blocks that are to share an SM."""
    given = data.get("blocks_per_sm", 1)
    return given if isinstance(given, int) and given in (2, 3) else 1


def _fitting_stages(data: Mapping[str, Any], tile: Mapping[str, Any], most: int, staged: int) -> int:
    """Return how many stages of a tile with small blocks there are where none are given: two at least.

    Args:
        data: the spec.
        tile: its tile.
        most: stages that suffice.
        staged: bytes of C that are on their way out.
    """
    sizes = [tile["m"], tile["n"], tile["k"]]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return most  # what is wrong is told elsewhere
    m, n, k = map(int, sizes)
    hopper = ARCHS["sm_90a"]
    room = min(hopper.shared_memory_per_block, hopper.shared_memory_per_sm // _resident(data) - KIB)
    room -= staged + KIB  # and barriers, and what they guard
    return max(2, min(most, room // (2 * k * (m + n))))


class BsrSpmmSpec(SpecBase):
    """C = A @ B with A in block-sparse rows (BSR) and B dense."""

    op: Literal["bsr_spmm"] = Field(description="operator")
    block: BlockShape = Field(description="shape of a stored block of A")
    tile: GemmTile = Field(description="tile of C of one thread block, and the depth of one step")
    epilogue: Epilogue | None = Field(
        default=None, description="what is done to C before it is stored; with wgmma only"
    )
    accumulate: bool = Field(
        default=False, description="whether the caller passes c and beta, and C = A B + beta c; with wgmma only"
    )
    balanced: bool = Field(
        default=False,
        description="whether tiles are handed out as thread blocks ask for them, long rows first or (small blocks) "
        "divided between thread blocks, which pays where rows are of very different lengths; with wgmma only",
    )
    cluster: Annotated[Literal[1, 2], Integral] = Field(
        default=1,
        description="thread blocks with neighbouring tiles of the same block rows, which load A once for all of them; "
        "with wgmma and blocks of 64 and 128 rows; always 2 where tiles gather block rows",
    )
    transpose_a: bool = Field(
        default=False, description="whether C = A^T B; with wgmma only, and blocks of 64 and 128 rows and columns"
    )
    b_layout: Literal["row_major", "column_major"] = Field(
        default="row_major",
        description="whether the rows of B are contiguous, or its columns",
    )
    blocks_per_sm: Annotated[Literal[1, 2, 3], Integral] = Field(
        default=1,
        description="thread blocks that share an SM, each with a ring of its own; with wgmma only, and blocks of 16 "
        "and 32 rows",
    )
    options: ClassVar[tuple[str, ...]] = (
        "epilogue",
        "accumulate",
        "balanced",
        "cluster",
        "transpose_a",
        "b_layout",
        "blocks_per_sm",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        block = data.get("block")
        block = block if isinstance(block, Mapping) else {}
        rows, cols = block.get("rows", 128), block.get("cols")
        depth = 16 if isinstance(cols, int) and cols % 32 else 32
        given = _given_tile(data)
        tile_rows = given.get("m", rows)
        gathered = rows in (16, 32) and tile_rows != rows
        if rows == 16 and tile_rows == GATHERED_ROWS and data.get("arch") == "sm_90a":
            data = _agreeing(data, {"mma": "mma", "copy": "tma", "schedule": "cooperative"})
        choice = _combination(data, "bsr_spmm")
        stages = 1 if data.get("copy") == "ld_global" else 3
        if choice is not None and choice.mma == "wmma":
            tile = {"m": rows, "n": 128, "k": depth}
        elif choice is not None and (choice.mma, choice.copy) == ("mma", "tma"):  # gathered: the rest is for rows of B
            tile, stages = {"m": GATHERED_ROWS, "n": 128, "k": depth}, 4 if depth == 16 else 3
            data = {"cluster": 2, **data}
        elif choice is not None and choice.mma == "mma":  # as many stages as leave room for two thread blocks on an SM
            tile = {"m": rows, "n": 128 if rows == 128 else 256, "k": depth}
            stages = 3 if rows == 128 or depth == 16 else 2
        elif rows in (16, 32):  # bound by loads: a wide tile, and many stages on their way
            tile, stages = {"m": rows, "n": 512, "k": block.get("cols", rows)}, 5 if data.get("accumulate") else 6
            if gathered:
                tile["n"], stages, data = 128, 3, {"cluster": 2, **data}
            else:
                if _resident(data) > 1:
                    tile["n"] = 8192 // rows  # they share the registers of an SM
                    # Those of a scheduler are missing then, or the memory of what is added.
                    added = data.get("accumulate") is True and (rows, block.get("cols")) == (16, 32)
                    if _resident(data) == 3 and (data.get("balanced") is True or added):
                        tile["n"] //= 2
                whole = {**tile, **given}
                width = whole["n"] if isinstance(whole["n"], int) else 0
                staged = 2 * rows * (width if data.get("accumulate") is True else min(width, 256))
                stages = _fitting_stages(data, whole, stages, staged)
        elif rows == 64 and _may_be_wide(data) and (given.get("n", 512), given.get("k", 32)) == (512, 32):
            # Bound by loads too.
            tile, stages = {"m": rows, "n": 512, "k": 32}, stages if {"n", "k"} & set(given) else 5
        else:
            tile = {"m": block.get("cols", 128) if data.get("transpose_a") else rows, "n": 256, "k": 64}
        return _fill(dict(data), "bsr_spmm", {"tile": tile, "stages": stages})

    def _unused(self) -> set[str]:
        # Where a tile gathers block rows, the default is not the field's.
        gathered = self.mma == "wgmma" and self.block.rows in (16, 32) and self.tile.m != self.block.rows
        return super()._unused() - ({"cluster"} if gathered or (self.mma, self.copy_) == ("mma", "tma") else set())


class BsrSddmmSpec(SpecBase):
    """The blocks of A @ B^T that a BSR pattern lists, A and B dense, row-major."""

    op: Literal["bsr_sddmm"] = Field(description="operator")
    block: BlockShape = Field(description="shape of a stored block of C")
    tile: GemmTile = Field(description="stored blocks of C side by side that a thread block computes, depth of a step")
    blocks_per_sm: Annotated[Literal[1, 2, 3], Integral] = Field(
        default=1,
        description="thread blocks that share an SM, each with a ring of its own; with wgmma only, and blocks of 16 "
        "and 32 rows",
    )
    options: ClassVar[tuple[str, ...]] = ("blocks_per_sm",)

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        block = data.get("block")
        rows = block.get("rows", 128) if isinstance(block, Mapping) else 128
        choice = _combination(data, "bsr_sddmm")
        tile, stages = {"m": rows, "n": 256, "k": 64}, 4
        if choice is not None and choice.mma == "wgmma" and rows in (16, 32):
            # Bound by loads: two thread blocks, which wait at different times, or wide tiles of larger copies.
            assert isinstance(block, Mapping)
            cols, stages = block.get("cols", rows), 3
            if _resident(data) > 1:
                tile["n"] = 128 if rows == 32 and _resident(data) == 3 else 256
                stages = _fitting_stages(data, {**tile, **_given_tile(data)}, stages, SAMPLED_STAGING)
            elif cols == 32:
                tile["n"] = 512
            elif not {"tile", "stages", "blocks_per_sm"} & set(data):
                data = {**data, "blocks_per_sm": 2}
        elif choice is not None and choice.mma != "wgmma":  # two thread blocks and more share an SM
            wide = choice.mma == "mma" and rows in (32, 64)
            tile = {"m": rows, "n": 256 if wide else 128, "k": 64 if rows == 16 else 32}
            stages = 3 if choice.mma == "mma" and (rows == 128 or data.get("arch") == "sm_90a") else 2
        return _fill(dict(data), "bsr_sddmm", {"tile": tile, "stages": stages})


class BsrSpgemmSpec(SpecBase):
    """C = A @ B with A and B in block-sparse rows (BSR) of the same square blocks, C dense, row-major, or in BSR."""

    op: Literal["bsr_spgemm"] = Field(description="operator")
    block: BlockShape = Field(description="shape of a stored block of A and of B")
    tile: GemmTile = Field(description="tile of C of one thread block, and the depth of one step")
    output: Literal["dense", "bsr"] = Field(
        default="dense", description="what C is: dense, or the blocks that a BSR pattern lists, which the caller passes"
    )
    balanced: bool = Field(
        default=False,
        description="whether tiles are handed out as thread blocks ask for them, which pays where more blocks meet in "
        "some tiles than in others; with output dense only",
    )
    options: ClassVar[tuple[str, ...]] = ("output", "balanced")

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        data = _by_mma_if_small(data)
        block = data.get("block")
        rows = block.get("rows", 128) if isinstance(block, Mapping) else 128
        choice = _combination(data, "bsr_spgemm")
        # As many stages as let several thread blocks share an SM.
        k, stages = 64, 4 if rows == 64 else 3
        if choice is not None and choice.mma != "wgmma":
            k = 16 if rows == 16 else 32
            few = rows == 32 or (rows == 16 and data.get("arch") == "sm_90a")
            stages = 3 if choice.mma == "mma" and not few else 2
        return _fill(data, "bsr_spgemm", {"tile": {"m": rows, "n": rows, "k": k}, "stages": stages})


class TileCopySpec(SpecBase):
    """out = in, tile by tile through shared memory: measures one way of loading tiles."""

    op: Literal["tile_copy"] = Field(description="operator")
    tile: CopyTile = Field(description="what is copied at a time")

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        choice = _combination(data, "tile_copy")
        stages = 1 if choice is not None and choice.copy == "ld_global" else 3
        return _fill(dict(data), "tile_copy", {"tile": {"m": 64, "n": 128}, "stages": stages})


MODELS = (AttentionSpec, BsrSpmmSpec, BsrSddmmSpec, BsrSpgemmSpec, TileCopySpec)
OPS = ("attention", "bsr_spmm", "bsr_sddmm", "bsr_spgemm", "tile_copy")
Spec = AttentionSpec | BsrSpmmSpec | BsrSddmmSpec | BsrSpgemmSpec | TileCopySpec
SPEC_ADAPTER: TypeAdapter[Spec] = TypeAdapter(Annotated[Spec, Field(discriminator="op")])


def parse_spec(data: object) -> Spec:
    """Build a spec from plain data.

    Raises:
        SpecError: names the first offending field (dotted), its value and what is allowed.
    """
    if not isinstance(data, Mapping | SpecBase):
        raise SpecError("", f"a spec is a mapping of fields, this is {type(data).__name__}")
    # A model is read anew: a copy of one with other fields (``model_copy``) was never checked.
    fields = data.model_dump(mode="json", by_alias=True) if isinstance(data, SpecBase) else dict(data)
    try:
        spec = SPEC_ADAPTER.validate_python(fields)
    except ValidationError as error:
        raise _first_error(error) from None
    _check_combination(spec, data if isinstance(data, Mapping) else COMBINED)
    if isinstance(spec, AttentionSpec) and spec.arch == "sm_90a" and spec.warp_rows != 16:
        raise SpecError("warp_rows", f"is {spec.warp_rows}; sm_90a multiplies 64 rows at a time: leave it out")
    if isinstance(spec, AttentionSpec) and spec.share_kv and (spec.arch, spec.pattern.kind) != ("sm_90a", "topk"):
        raise SpecError("share_kv", f"is true; {spec.pattern.kind} on {spec.arch} has no kernel with it: leave it out")
    if isinstance(spec, AttentionSpec) and spec.key_parts > 1:
        that = f"{spec.pattern.kind} on {spec.arch}{' with share_kv' if spec.share_kv else ''}"
        if spec.arch != "sm_90a" or not spec.pattern.divides or spec.share_kv:
            raise SpecError("key_parts", f"is {spec.key_parts}; {that} has no kernel with parts: leave it out")
    if isinstance(spec, AttentionSpec) and spec.query_order and not spec.share_kv:
        raise SpecError("query_order", "is true; only tiles that share what is loaded have an order: set share_kv")
    if isinstance(spec, AttentionSpec) and spec.order_queries and not spec.share_kv:
        raise SpecError("order_queries", "is true; only tiles that share what is loaded have an order: set share_kv")
    if isinstance(spec, AttentionSpec) and spec.order_queries and spec.query_order:
        raise SpecError("order_queries", "is true; with query_order the caller says which query blocks form a tile")
    if isinstance(spec, AttentionSpec) and spec.order_queries and spec.paced:
        raise SpecError("order_queries", "is true; with paced there is no kernel that finds an order: leave one out")
    if isinstance(spec, AttentionSpec) and spec.paced and (spec.arch, spec.pattern.kind) != ("sm_90a", "topk"):
        raise SpecError("paced", f"is true; {spec.pattern.kind} on {spec.arch} has no kernel with it: leave it out")
    if isinstance(spec, AttentionSpec) and spec.split_tail and not spec.can_split:
        more = " with share_kv" if spec.share_kv else f" with key_parts {spec.key_parts}" if spec.key_parts > 1 else ""
        that = f"{spec.pattern.kind} on {spec.arch}{more}"
        raise SpecError("split_tail", f"is true; {that} has no kernel with it: leave it out")
    return spec


def _check_combination(spec: Spec, given: Container[str]) -> None:
    """Refuse the first of the given fields that no kernel has together with those before it."""
    legal = ARCHS[spec.arch].of(spec.op)
    values = {"mma": spec.mma, "copy": spec.copy_, "schedule": spec.schedule}
    left, before = legal, ""
    for field in filter(given.__contains__, COMBINED):
        left = tuple(c for c in left if getattr(c, field) == values[field])
        if not left:
            choices = "; ".join(f"mma: {c.mma}, copy: {c.copy}, schedule: {c.schedule}" for c in legal)
            where = f"with {before}" if before else "here"
            reason = f"{values[field]} is not possible {where}; {spec.op} on {spec.arch} has: {choices}"
            raise SpecError(field, reason)
        before += f"{', ' if before else ''}{field}: {values[field]}"


def _fields_of(location: tuple[int | str, ...]) -> list[str]:
    """Return the fields that there are beside the last one of a location, as a spec file has them."""
    model: Any = next(m for op, m in zip(OPS, MODELS, strict=True) if op == location[0])
    for part in location[1:-1]:
        if part in PATTERNS:  # the pattern's kind, which pydantic puts behind its field
            model = PATTERNS[str(part)]
        elif part in model.model_fields:
            annotation = model.model_fields[str(part)].annotation
            found = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
            model = next((kind for kind in found if issubclass(kind, BaseModel)), model)
    return [field.alias or name for name, field in model.model_fields.items()]


def _first_error(error: ValidationError) -> SpecError:
    errors = error.errors(include_url=False)
    # A misspelt field is one too many, and often one that is missing.
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    # Pydantic puts the discriminator's values into the location; they are not fields.
    parts = [str(p) for i, p in enumerate(first["loc"]) if not (i == 0 and p in OPS)]
    parts = [part if part.isprintable() else repr(part)[1:-1] for part in parts]
    if len(parts) > 1 and parts[0] == "pattern":
        parts = [parts[0], *parts[2:]]
    field = ".".join(parts)
    message = first["msg"].removeprefix("Value error, ")
    kind, context = first["type"], first.get("ctx", {})
    if kind == "extra_forbidden":
        names = _fields_of(first["loc"])
        near = difflib.get_close_matches(parts[-1], names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
        message = f"is not a field of this spec; {hint}"
    elif kind == "missing":
        message = "is missing"
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        name = str(context.get("discriminator", "")).strip("'")
        field = ".".join([*parts, name])
        given = f"is {context['tag']!r}" if "tag" in context else "is missing"
        allowed = ", ".join(repr(tag) for tag in (PATTERNS if parts else OPS))
        message = f"{given}; allowed: {allowed}"
    elif kind == "literal_error":
        message = f"is {first['input']!r}; allowed: {context['expected']}"
    elif kind in ("model_type", "model_attributes_type"):
        message = f"is {first['input']!r}; a mapping of fields is expected"
    else:
        message = f"is {first['input']!r}; {message[0].lower()}{message[1:]}"
    return SpecError(field, message)


FILLED_IN = ("mma", "copy", "schedule", "stages", "tile")
"""Fields a spec file may leave out although the model always has them."""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a spec file, for editors."""
    schema = SPEC_ADAPTER.json_schema(by_alias=True)
    for model in MODELS:
        definition = schema["$defs"][model.__name__]
        definition["required"] = [name for name in definition["required"] if name not in FILLED_IN]
    for tile in (AttentionTile, GemmTile, CopyTile):
        schema["$defs"][tile.__name__].pop("required")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Kernel spec", **schema}


__all__ = [
    "MODELS",
    "SPEC_ADAPTER",
    "AttentionSpec",
    "AttentionTile",
    "BlockShape",
    "BsrSddmmSpec",
    "BsrSpgemmSpec",
    "BsrSpmmSpec",
    "CopyTile",
    "Epilogue",
    "GemmTile",
    "Spec",
    "SpecBase",
    "TileCopySpec",
    "json_schema",
    "parse_spec",
]
