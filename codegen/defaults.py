"""Fill in the fields that a spec leaves out: choices that work, from the fields that it gives.

The input (``RawSpec``) is not validated yet: any field may be missing or wrong, which validation reports later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from codegen.arch import ARCHS, KIB, Combination
from codegen.errors import SpecError
from codegen.patterns import PATTERNS

RawSpec = Mapping[str, Any]

COMBINED = ("mma", "copy", "schedule")
GATHERED_ROWS = 384  # of a tile of many small block rows
SAMPLED_STAGING = 4 * KIB  # bytes of C on their way from a tile of a sampled product with small blocks, at least


def _combination(data: RawSpec, op: str) -> Combination | None:
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


def _fill(data: dict[str, Any], op: str, defaults: RawSpec) -> dict[str, Any]:
    """Fill in the first legal combination that agrees with what was given, then the other defaults."""
    choice = _combination(data, op)
    combined = {} if choice is None else {key: getattr(choice, key) for key in COMBINED}
    filled = {**combined, **defaults, **data}
    if isinstance(filled["tile"], Mapping):
        filled["tile"] = {**defaults["tile"], **filled["tile"]}
    return filled


def _given_tile(data: RawSpec) -> RawSpec:
    """Return the sizes of the tile that were given."""
    tile = data.get("tile")
    return tile if isinstance(tile, Mapping) else {}


def _agreeing(data: RawSpec, choice: Mapping[str, str]) -> dict[str, Any]:
    """Fill in a choice if nothing that was given contradicts it."""
    agrees = all(data.get(key, value) == value for key, value in choice.items())
    return {**choice, **data} if agrees else dict(data)


def _by_mma_if_small(data: RawSpec) -> dict[str, Any]:
    """Name mma.sync where nothing is said and blocks of a product are too small for a wgmma, which has 64 rows."""
    block = data.get("block")
    small = isinstance(block, Mapping) and block.get("rows") in (16, 32)
    unsaid = data.get("arch") == "sm_90a" and not any(key in data for key in COMBINED)
    return {**data, "mma": "mma"} if small and unsaid else dict(data)


def _mapping(value: object) -> RawSpec:
    """Return a field that is a mapping; an empty one where it is missing or wrong."""
    return value if isinstance(value, Mapping) else {}


def _attention(data: RawSpec) -> dict[str, Any]:
    if data.get("arch") == "sm_90a":
        return _hopper_attention(data)
    block = _mapping(_mapping(data.get("pattern")).get("block"))
    tile = _ada_tile(data, block)
    defaults: dict[str, Any] = {"tile": tile, "stages": 2, "stream_k_tail": False}
    choice = _combination(data, "attention")
    if choice is not None and choice.mma == "wmma":
        defaults |= {"tile": _wmma_tile(data.get("head_dim"), block), "stages": 3}
    else:
        rows = _given_tile(data).get("m", tile["m"])
        # O of 32 rows of a wider head would not fit a thread's registers.
        high = (64, 128, 256) if _copies_few_rows(data, block) else (128, 256)
        defaults["warp_rows"] = 32 if rows in high and data.get("head_dim") in (64, 96, 128) else 16
    return _fill(dict(data), "attention", defaults)


def _hopper_attention(data: RawSpec) -> dict[str, Any]:
    pattern, head_dim = _mapping(data.get("pattern")), data.get("head_dim")
    block, kind = _mapping(pattern.get("block")), pattern.get("kind")
    tile = _hopper_tile(head_dim, block)
    shares_loads, splits_kv = data.get("share_kv_loads") is True, data.get("kv_splits", 1) != 1
    if shares_loads or splits_kv or _given_tile(data).get("m") == 64:  # without ping_pong
        data = _agreeing(data, {"mma": "wgmma", "copy": "tma", "schedule": "cooperative"})
    stream_k = isinstance(kind, str) and kind in PATTERNS and PATTERNS[kind].supports_stream_k
    if shares_loads:  # two query blocks, the fewest, take two stages
        stages = 2 if block.get("kv") == 128 and head_dim != 64 else 4
    else:
        stages = 1 if _fills_memory(data, block, tile) else 2
    if splits_kv:
        tile, stages = _kv_splits_tile(data, block)
    defaults = {"tile": tile, "stages": stages, "stream_k_tail": stream_k and not shares_loads and not splits_kv}
    return _fill(dict(data), "attention", defaults)


def _hopper_tile(head_dim: object, block: RawSpec) -> dict[str, Any]:
    """Return the tile of a spec for sm_90a that has none."""
    # Steps of 128 keys of the widest heads would not fit beside their output, neither registers nor shared memory.
    return {"m": 128, "n": 64 if head_dim in (192, 256) else block.get("kv", 128)}


def _fills_memory(data: RawSpec, block: RawSpec, tile: RawSpec) -> bool:
    """Return whether rings of two stages do not fit: each query block of a tile has rings of its own."""
    sizes = {**tile, **_given_tile(data)}
    given = sizes.get("m"), sizes.get("n"), data.get("head_dim"), block.get("q"), data.get("pack_gqa", 1)
    numbers = [number for number in given if isinstance(number, int)]
    if len(numbers) < len(given):
        return False  # validation reports what is wrong or missing
    m, n, width, queries, heads = numbers
    sub_tiles = m // max(queries * heads, 64)
    elements = (m + 2 * 2 * sub_tiles * n) * -(-width // 64) * 64  # Q, then two stages of K and V for each
    return sub_tiles > 1 and 2 * elements > ARCHS["sm_90a"].shared_memory_per_block


def _kv_splits_tile(data: RawSpec, block: RawSpec) -> tuple[dict[str, Any], int]:
    """Return the tile and the stages of a spec with ``kv_splits`` that has none: each split has rings."""
    head_dim, pattern = data.get("head_dim"), data.get("pattern")
    width = head_dim if isinstance(head_dim, int) else 128
    given = _given_tile(data).get("n", block.get("kv"))
    n = given if isinstance(given, int) else 64
    step = n * -(-width // 64) * 64  # elements of K in shared memory
    high = step <= 64 * 64 and isinstance(pattern, Mapping) and pattern.get("kind") == "dense"
    return {"m": 128 if high else 64, "n": n}, 4 if step <= 64 * 64 else 2 if step <= 64 * 128 else 1


def _load_part(data: RawSpec, block: RawSpec) -> int:
    """Return the largest power of two that divides the keys of a load on sm_89, a block or a step: 16 at least."""
    given = [size for size in (_given_tile(data).get("n", 32), block.get("kv")) if isinstance(size, int)]
    keys = min(given, default=32)
    return max(16, keys & -keys)


def _copies_few_rows(data: RawSpec, block: RawSpec) -> bool:
    """Return whether more than two warps would copy more rows at a time than a load has: rows of 192 bytes."""
    return data.get("head_dim") == 96 and _load_part(data, block) == 16


def _hides_pairs(pattern: object) -> bool:
    """Return whether a pattern hides some pairs of a block, as its ``masks_pairs`` says once it is read."""
    kind, mask = (pattern.get("kind"), pattern.get("mask")) if isinstance(pattern, Mapping) else (None, None)
    return mask == "causal" if kind == "block_lists" else kind not in ("dense", "topk")


def _ada_tile(data: RawSpec, block: RawSpec) -> dict[str, Any]:
    """Return the tile of a spec for another architecture that has none: two thread blocks fit 100 KB."""
    head_dim, heads, warp_rows = data.get("head_dim"), data.get("pack_gqa", 1), data.get("warp_rows")
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


def _wmma_tile(head_dim: object, block: RawSpec) -> dict[str, Any]:
    """Return the tile of a spec for WMMA that has none: two thread blocks fit 100 KB."""
    rows = block.get("q")
    return {"m": rows if rows in (16, 32) else 64, "n": 64 if head_dim == 64 else 32}


NARROW_64 = ("accumulate", "transpose_a")
"""Options whose default tiles of 64 rows are not wide: ``accumulate`` takes the memory of a stage, and the transposed
kernel has no such tiles. Nor has the one for B stored by columns."""


def _may_be_wide(data: RawSpec) -> bool:
    """Return whether the tile of a spec for blocks of 64 rows is 512 columns wide where it has none."""
    by_rows = data.get("b_layout", "row_major") == "row_major"
    return by_rows and not any(data.get(option) for option in NARROW_64)


def _resident(data: RawSpec) -> int:
    """Return the thread blocks that are to share an SM."""
    given = data.get("ctas_per_sm", 1)
    return given if isinstance(given, int) and given in (2, 3) else 1


def _fitting_stages(data: RawSpec, tile: RawSpec, most: int, staged: int) -> int:
    """Return how many stages of a tile with small blocks there are where none are given: two at least.

    Args:
        data: the spec.
        tile: its tile.
        most: stages that suffice.
        staged: bytes of C that are on their way out.
    """
    sizes = [tile["m"], tile["n"], tile["k"]]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return most  # validation reports what is wrong
    m, n, k = map(int, sizes)
    hopper = ARCHS["sm_90a"]
    room = min(hopper.shared_memory_per_block, hopper.shared_memory_per_sm // _resident(data) - KIB)
    room -= staged + KIB  # and barriers, and what they guard
    return max(2, min(most, room // (2 * k * (m + n))))


def _bsr_spmm(data: RawSpec) -> dict[str, Any]:
    block = _mapping(data.get("block"))
    rows, cols = block.get("rows", 128), block.get("cols")
    depth = 16 if isinstance(cols, int) and cols % 32 else 32
    given = _given_tile(data)
    if rows == 16 and given.get("m", rows) == GATHERED_ROWS and data.get("arch") == "sm_90a":
        data = _agreeing(data, {"mma": "mma", "copy": "tma", "schedule": "cooperative"})
    choice = _combination(data, "bsr_spmm")
    stages = 1 if data.get("copy") == "ld_global" else 3
    if choice is not None and (choice.mma, choice.copy) == ("mma", "tma"):  # gathered: the rest is for rows of B
        tile, stages = {"m": GATHERED_ROWS, "n": 128, "k": depth}, 4 if depth == 16 else 3
    elif choice is not None and choice.mma != "wgmma":
        tile, stages = _warp_level(choice.mma, rows, depth, stages)
    elif rows in (16, 32) and given.get("m", rows) != rows:
        tile, stages = {"m": rows, "n": 128, "k": block.get("cols", rows)}, 3
    elif rows in (16, 32):
        tile, stages = _small_blocks(data, block)
    elif rows == 64 and _may_be_wide(data) and (given.get("n", 512), given.get("k", 32)) == (512, 32):
        # Bound by loads.
        tile, stages = {"m": rows, "n": 512, "k": 32}, stages if {"n", "k"} & set(given) else 5
    else:
        tile = {"m": block.get("cols", 128) if data.get("transpose_a") else rows, "n": 256, "k": 64}
    return _fill(dict(data), "bsr_spmm", {"tile": tile, "stages": stages})


def _warp_level(mma: str, rows: Any, depth: int, stages: int) -> tuple[dict[str, Any], int]:
    """Return the tile and the stages of a product by WMMA, or by mma.sync.

    Of mma.sync, as many stages as leave room for two thread blocks on an SM.
    """
    if mma == "wmma":
        return {"m": rows, "n": 128, "k": depth}, stages
    return {"m": rows, "n": 128 if rows == 128 else 256, "k": depth}, 3 if rows == 128 or depth == 16 else 2


def _small_blocks(data: RawSpec, block: RawSpec) -> tuple[dict[str, Any], int]:
    """Return the tile and the stages of a product by wgmma whose blocks have 16 or 32 rows.

    It is bound by loads: a wide tile, and many stages on their way.
    """
    rows, cols, accumulates = block["rows"], block.get("cols"), data.get("accumulate")
    tile = {"m": rows, "n": 512, "k": block.get("cols", rows)}
    if _resident(data) > 1:
        tile["n"] = 8192 // rows  # they share the registers of an SM
        # A dynamic scheduler takes some of them; accumulate takes memory beside large blocks of A.
        beside = accumulates is True and (rows, cols) == (16, 32)
        if _resident(data) == 3 and (data.get("scheduler") == "dynamic" or beside):
            tile["n"] //= 2
    whole = {**tile, **_given_tile(data)}
    width = whole["n"] if isinstance(whole["n"], int) else 0
    staged = 2 * rows * (width if accumulates is True else min(width, 256))
    return tile, _fitting_stages(data, whole, 5 if accumulates else 6, staged)


def _bsr_sddmm(data: RawSpec) -> dict[str, Any]:
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
        elif not {"tile", "stages", "ctas_per_sm"} & set(data):
            data = {**data, "ctas_per_sm": 2}
    elif choice is not None and choice.mma != "wgmma":  # two thread blocks and more share an SM
        wide = choice.mma == "mma" and rows in (32, 64)
        tile = {"m": rows, "n": 256 if wide else 128, "k": 64 if rows == 16 else 32}
        stages = 3 if choice.mma == "mma" and (rows == 128 or data.get("arch") == "sm_90a") else 2
    return _fill(dict(data), "bsr_sddmm", {"tile": tile, "stages": stages})


def _bsr_spgemm(data: RawSpec) -> dict[str, Any]:
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


def _tile_copy(data: RawSpec) -> dict[str, Any]:
    choice = _combination(data, "tile_copy")
    stages = 1 if choice is not None and choice.copy == "ld_global" else 3
    return _fill(dict(data), "tile_copy", {"tile": {"m": 64, "n": 128}, "stages": stages})


_BY_OP: dict[str, Callable[[RawSpec], dict[str, Any]]] = {
    "attention": _attention,
    "bsr_spmm": _bsr_spmm,
    "bsr_sddmm": _bsr_sddmm,
    "bsr_spgemm": _bsr_spgemm,
    "tile_copy": _tile_copy,
}


def with_defaults(op: str, data: RawSpec) -> dict[str, Any]:
    """Return the fields of a spec with those that were left out.

    Raises:
        SpecError: names ``arch``, where no kernel of this operator is written for it.
    """
    return _BY_OP[op](data)
