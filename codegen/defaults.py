"""Fill in the fields that a spec leaves out.

A partial spec is valid field by field; what it leaves out is None. The combination of instructions comes first, then
the tile and the stages: of BSR products and copies from ``TABLES``, of attention from the limits of a thread block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from codegen.arch import ARCHS, KIB, Combination
from codegen.errors import SpecError

if TYPE_CHECKING:
    from codegen.spec import AttentionSpec, BsrSddmmSpec, BsrSpgemmSpec, BsrSpmmSpec, Spec, TileCopySpec

Fields = dict[str, Any]
Choice = tuple[str, str, str]  # mma, copy, schedule

COMBINED = ("mma", "copy", "schedule")
GATHERED_ROWS = 384  # of a tile of many small block rows
SAMPLED_STAGING = 4 * KIB  # bytes of C on their way from a tile of a sampled product with small blocks, at least
NARROW_64 = ("accumulate", "transpose_a")
"""What keeps tiles of 64 rows from being wide, unless a spec says so: what is added needs the room of a stage, and the
transposed kernel has no such tiles. Nor has the one for B stored by columns."""


@dataclass(frozen=True)
class Row:
    """One row of a table of defaults.

    Attributes:
        where: values of features of the spec that the row is for; several values of one in a tuple.
        tile: the sizes; a name is the feature that has the size.
        stages: the stages.
        fitting: whether there are fewer, two at least, where shared memory has no room for so many.
    """

    where: Mapping[str, object]
    tile: tuple[int | str, ...]
    stages: int
    fitting: bool = False

    def fits(self, features: Mapping[str, Any]) -> bool:
        """Return whether the row is for a spec with these features."""
        return all(
            features[name] in (value if isinstance(value, tuple) else (value,)) for name, value in self.where.items()
        )


WGMMA: Fields = {"mma": "wgmma"}
SMALL: Fields = WGMMA | {"rows": (16, 32)}
# The first row that fits is taken.
TABLES: dict[str, tuple[Row, ...]] = {
    "bsr_spmm": (
        Row({"mma": "mma", "copy": "tma", "depth": 16}, (GATHERED_ROWS, 128, "depth"), 4),
        Row({"mma": "mma", "copy": "tma"}, (GATHERED_ROWS, 128, "depth"), 3),  # the rest is for rows of B
        Row({"copy": "ld_global"}, ("rows", 128, "depth"), 1),
        Row({"mma": "wmma"}, ("rows", 128, "depth"), 3),
        # As many stages as leave room for two thread blocks on an SM.
        Row({"mma": "mma", "rows": 128}, ("rows", 128, "depth"), 3),
        Row({"mma": "mma", "depth": 16}, ("rows", 256, "depth"), 3),
        Row({"mma": "mma"}, ("rows", 256, "depth"), 2),
        Row(SMALL | {"one_block_row": False}, ("rows", 128, "cols"), 3),
        # Small blocks are bound by loads: a wide tile, many stages. Thread blocks share the registers of an SM: handing
        # out takes some of them; what is added takes memory beside large blocks of A.
        *(
            Row({**SMALL, "accumulate": accumulate, **where}, ("rows", n, "cols"), stages, fitting=True)
            for accumulate, stages in ((True, 5), (False, 6))
            for where, n in (
                ({"rows": 16, "ctas_per_sm": 3, "scheduler": "dynamic"}, 256),
                *([({"rows": 16, "ctas_per_sm": 3, "cols": 32}, 256)] if accumulate else []),
                ({"rows": 32, "ctas_per_sm": 3, "scheduler": "dynamic"}, 128),
                ({"rows": 32, "ctas_per_sm": (2, 3)}, 256),
                ({}, 512),
            )
        ),
        Row({"may_be_wide": True, "sizes_given": False}, ("rows", 512, 32), 5),  # bound by loads
        Row({"may_be_wide": True}, ("rows", 512, 32), 3),
        Row({"transpose_a": True}, ("cols", 256, 64), 3),
        Row({}, ("rows", 256, 64), 3),
    ),
    "bsr_sddmm": (
        # Bound by loads: thread blocks that wait at different times, or wide tiles of larger copies.
        Row(SMALL | {"rows": 32, "ctas_per_sm": 3}, ("rows", 128, 64), 3, fitting=True),
        Row(SMALL | {"ctas_per_sm": (2, 3)}, ("rows", 256, 64), 3, fitting=True),
        Row(SMALL | {"cols": 32}, ("rows", 512, 64), 3),
        Row(SMALL, ("rows", 256, 64), 3),
        Row(WGMMA, ("rows", 256, 64), 4),
        # Two thread blocks and more share an SM.
        Row({"mma": "mma", "rows": 128}, ("rows", 128, 32), 3),
        *(
            Row({"mma": "mma", **where, **rows}, tile, stages)
            for where, stages in (({"arch": "sm_90a"}, 3), ({}, 2))
            for rows, tile in (
                ({"rows": 16}, ("rows", 128, 64)),
                ({"rows": (32, 64)}, ("rows", 256, 32)),
                ({}, ("rows", 128, 32)),
            )
        ),
        Row({"rows": 16}, ("rows", 128, 64), 2),
        Row({}, ("rows", 128, 32), 2),
    ),
    "bsr_spgemm": (  # as many stages as let several thread blocks share an SM
        Row(WGMMA | {"rows": 64}, ("rows", "rows", 64), 4),
        Row(WGMMA, ("rows", "rows", 64), 3),
        Row({"mma": "mma", "rows": 16, "arch": "sm_90a"}, ("rows", "rows", 16), 2),
        Row({"mma": "mma", "rows": 16}, ("rows", "rows", 16), 3),
        Row({"mma": "mma", "rows": 32}, ("rows", "rows", 32), 2),
        Row({"mma": "mma"}, ("rows", "rows", 32), 3),
        Row({"rows": 16}, ("rows", "rows", 16), 2),
        Row({}, ("rows", "rows", 32), 2),
    ),
    "tile_copy": (Row({"copy": "ld_global"}, (64, 128), 1), Row({}, (64, 128), 3)),
}


def _combination(given: Spec, preferred: Choice | None) -> Combination:
    """Return the preferred combination, or else the first legal one, that agrees with what was given."""
    legal = ARCHS[given.arch].of(given.op)
    if not legal:
        written = ", ".join(arch.name for arch in ARCHS.values() if arch.of(given.op))
        raise SpecError("arch", f"is {given.arch}; {given.op} is written for {written}")
    said = (given.mma, given.copy_, given.schedule)

    def agrees(choice: Combination) -> bool:
        pairs = zip(said, (choice.mma, choice.copy, choice.schedule), strict=True)
        return all(one in (None, other) for one, other in pairs)

    first = () if preferred is None else (Combination(given.op, *preferred),)
    return next(filter(agrees, (*first, *legal)), legal[0])  # one that no kernel has is refused later


def _size(given: Spec, name: str, default: int) -> int:
    """Return a size of the tile, or the default where it was left out."""
    size: int | None = getattr(given.tile, name)
    return default if size is None else size


def _from_table(given: Spec, choice: Combination, **more: object) -> Fields:
    """Return the tile and the stages of the first row that fits the fields of a spec, and more features."""
    features: Fields = {**dict(given), "mma": choice.mma, "copy": choice.copy, **more}
    row = next(row for row in TABLES[given.op] if row.fits(features))
    sizes = [features[size] if isinstance(size, str) else size for size in row.tile]
    tile = dict(zip(type(given.tile).model_fields, sizes, strict=True))
    whole = {name: _size(given, name, size) for name, size in tile.items()}
    return {"tile": tile, "stages": _fitting_stages(features, whole, row.stages) if row.fitting else row.stages}


def _fitting_stages(features: Fields, tile: Mapping[str, int], most: int) -> int:
    """Return how many stages of a tile with small blocks fit the share of a thread block in an SM: two at least."""
    hopper = ARCHS["sm_90a"]
    room = min(hopper.shared_memory_per_block, hopper.shared_memory_per_sm // features["ctas_per_sm"] - KIB)
    staged = SAMPLED_STAGING  # bytes of C that are on their way out
    if features["op"] == "bsr_spmm":
        staged = 2 * features["rows"] * (tile["n"] if features["accumulate"] else min(tile["n"], 256))
    room -= staged + KIB  # and barriers, and what they guard
    stage = 2 * tile["k"] * (tile["m"] + tile["n"])
    return max(2, min(most, room // stage)) if stage > 0 else most  # a tile without a size is refused later


def _bsr_spmm(given: BsrSpmmSpec) -> Fields:
    rows, cols = given.block.rows, given.block.cols
    gathers = given.arch == "sm_90a" and rows == 16 and given.tile.m == GATHERED_ROWS
    choice = _combination(given, ("mma", "tma", "cooperative") if gathers else None)
    by_rows = given.b_layout == "row_major" and not any(getattr(given, option) for option in NARROW_64)
    return _filled(
        choice,
        _from_table(
            given,
            choice,
            rows=rows,
            cols=cols,
            depth=16 if cols % 32 else 32,
            one_block_row=_size(given, "m", rows) == rows,
            may_be_wide=rows == 64 and by_rows and (_size(given, "n", 512), _size(given, "k", 32)) == (512, 32),
            sizes_given=bool({"n", "k"} & given.tile.model_fields_set),
        ),
    )


def _bsr_sddmm(given: BsrSddmmSpec) -> Fields:
    choice, block = _combination(given, None), given.block
    filled = _from_table(given, choice, rows=block.rows, cols=block.cols)
    shares = choice.mma == "wgmma" and block.rows in (16, 32) and block.cols != 32
    if shares and not {"tile", "stages", "ctas_per_sm"} & given.model_fields_set:
        filled["ctas_per_sm"] = 2
    return _filled(choice, filled)


def _bsr_spgemm(given: BsrSpgemmSpec) -> Fields:
    # Blocks of fewer rows than the 64 of a wgmma.
    small = given.arch == "sm_90a" and given.block.rows in (16, 32)
    choice = _combination(given, ("mma", "cp_async", "multistage") if small else None)
    return _filled(choice, _from_table(given, choice, rows=given.block.rows))


def _tile_copy(given: TileCopySpec) -> Fields:
    choice = _combination(given, None)
    return _filled(choice, _from_table(given, choice))


def _attention(given: AttentionSpec) -> Fields:
    alone = given.share_kv_loads or given.kv_splits > 1 or given.tile.m == 64  # without ping_pong
    on_hopper = given.arch == "sm_90a"
    choice = _combination(given, ("wgmma", "tma", "cooperative") if on_hopper and alone else None)
    if on_hopper:
        tile, stages = _hopper_parts(given) if given.kv_splits > 1 else _hopper_tile(given)
        filled = {"tile": tile, "stages": stages, "stream_k_tail": given.can_split}
    elif choice.mma == "wmma":  # two thread blocks fit 100 KB
        rows = _block(given, "q", 64)
        tile = {"m": rows if rows in (16, 32) else 64, "n": 64 if given.head_dim == 64 else 32}
        filled = {"tile": tile, "stages": 3}
    else:
        tile = _ada_tile(given)
        # O of 32 rows of a wider head would not fit a thread's registers.
        high = (64, 128, 256) if _copies_few_rows(given) else (128, 256)
        tall = _size(given, "m", tile["m"]) in high and given.head_dim in (64, 96, 128)
        filled = {"tile": tile, "stages": 2, "warp_rows": 32 if tall else 16}
    return _filled(choice, filled)


def _block(given: AttentionSpec, side: str, default: int) -> int:
    """Return a side of the blocks of the pattern's lists, or the default where it has none."""
    block = given.pattern.fixed_block
    return default if block is None else int(getattr(block, side))


def _hopper_tile(given: AttentionSpec) -> tuple[dict[str, int], int]:
    """Return the tile and the stages on sm_90a."""
    # Steps of 128 keys of the widest heads would not fit beside their output, neither registers nor shared memory.
    tile = {"m": 128, "n": 64 if given.head_dim in (192, 256) else _block(given, "kv", 128)}
    if given.share_kv_loads:  # two query blocks, the fewest, take two stages
        return tile, 2 if _block(given, "kv", 0) == 128 and given.head_dim != 64 else 4
    return tile, 1 if _fills_memory(given, tile) else 2


def _fills_memory(given: AttentionSpec, tile: Mapping[str, int]) -> bool:
    """Return whether rings of two stages do not fit: each query block of a tile has rings of its own."""
    m, n = (_size(given, name, size) for name, size in tile.items())
    sub_tiles = m // max(_block(given, "q", m) * given.pack_gqa, 64)
    elements = (m + 2 * 2 * sub_tiles * n) * -(-given.head_dim // 64) * 64  # Q, then two stages of K and V for each
    return sub_tiles > 1 and 2 * elements > ARCHS["sm_90a"].shared_memory_per_block


def _hopper_parts(given: AttentionSpec) -> tuple[dict[str, int], int]:
    """Return the tile and the stages of a spec with ``kv_splits``: there are rings for each part."""
    n = _block(given, "kv", 64)
    step = _size(given, "n", n) * -(-given.head_dim // 64) * 64  # elements of K in shared memory
    high = step <= 64 * 64 and given.pattern.kind == "dense"
    return {"m": 128 if high else 64, "n": n}, 4 if step <= 64 * 64 else 2 if step <= 64 * 128 else 1


def _load_part(given: AttentionSpec) -> int:
    """Return the largest power of two that divides the keys of a load on sm_89, a block or a step: 16 at least."""
    keys = _size(given, "n", 32)
    keys = min(keys, _block(given, "kv", keys))
    return max(16, keys & -keys)


def _copies_few_rows(given: AttentionSpec) -> bool:
    """Return whether more than two warps would copy more rows at a time than a load has: rows of 192 bytes."""
    return given.head_dim == 96 and _load_part(given) == 16


def _ada_tile(given: AttentionSpec) -> dict[str, int]:
    """Return the tile for mma.sync: two thread blocks fit 100 KB."""
    head_dim, wide = given.head_dim, given.head_dim in (192, 256)
    warp_rows = given.warp_rows if "warp_rows" in given.model_fields_set else None
    largest = 64 if wide else 128
    if _copies_few_rows(given):
        largest = 64 if given.pack_gqa == 64 else 32  # the heads of a query stay together
    elif warp_rows == 16 and not wide:  # a warp copies 8 rows of 192 bytes at a time, or 4, and all no more than a load
        largest = min(largest, 16 * _load_part(given) // (8 if head_dim == 96 else 4))
    m = _size(given, "m", min(_block(given, "q", largest) * given.pack_gqa, largest))
    # Warps of 32 rows have no registers for more scores beside O of 128 elements, where pairs are hidden or a step has
    # several loads.
    several = _block(given, "kv", 64) in (16, 32) or given.pattern.masks_pairs
    if warp_rows == 32 and head_dim == 128 and several:
        return {"m": m, "n": 32}
    return {"m": m, "n": 64 if head_dim == 64 or (m < 128 and not wide) else 32}


def _filled(choice: Combination, others: Fields) -> Fields:
    return {**{key: getattr(choice, key) for key in COMBINED}, **others}


_BY_OP: dict[str, Callable[[Any], Fields]] = {
    "attention": _attention,
    "bsr_spmm": _bsr_spmm,
    "bsr_sddmm": _bsr_sddmm,
    "bsr_spgemm": _bsr_spgemm,
    "tile_copy": _tile_copy,
}


def with_defaults(given: Spec) -> Fields:
    """Return the fields of a partial spec with those that were left out.

    Raises:
        SpecError: names ``arch``, where no kernel of this operator is written for it.
    """
    filled, fields = _BY_OP[given.op](given), given.model_dump(by_alias=True, exclude_unset=True)
    return {**filled, **fields, "tile": {**filled["tile"], **fields.get("tile", {})}}
