"""Specs of all operators, architectures, patterns and options, as drawn by tests: many fields are accepted.

The draws go through one function, so that Hypothesis can make them, and shrink them, or a seeded generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from codegen.errors import SpecError
from codegen.library import NamedSpec, unnamed_stem
from codegen.parse import parse_spec
from codegen.planning import plan_for

Choose = Callable[[Sequence[Any]], Any]
"""Returns one of the values that it is given."""

# More often what has most options, and what is refused most.
OPS = (
    *["attention"] * 12,
    *["attention_backward"] * 6,
    *["bsr_spmm"] * 6,
    *["bsr_sddmm"] * 3,
    *["bsr_spgemm"] * 2,
    "paged_attention",
    "quantize",
    "select_topk",
    "tile_copy",
)
ARCHS = (*["sm_90a"] * 6, "sm_89", "sm_89", "sm_80", "sm_86", "sm_120")
SIDES = (16, 32, 64, 128)
FP8 = ("e4m3", "e5m2")
RARELY = (True, False, False, False, False)
OFTEN = (True, False)


def likely_fields(choose: Choose) -> dict[str, Any]:
    """Draw the fields of a spec."""
    op = choose(OPS)
    fields = {"op": op, "arch": choose(ARCHS), **_ATTENTION_OR_PRODUCT[op](choose)}
    options: dict[str, Sequence[Any]] = {
        "dtype": ("fp16", "bf16"),
        "stages": range(1, 9),
        "mma": ("mma", "wmma", "wgmma"),
        "copy": ("tma", "cp_async", "ld_global"),
        "schedule": ("cooperative", "ping_pong", "multistage"),
    }
    return {**fields, **{name: choose(values) for name, values in options.items() if choose(RARELY)}}


def fp8_fields(choose: Choose) -> dict[str, Any]:
    """Draw the fields of a spec of attention or of a product in FP8."""
    op = choose(("attention", "attention", "bsr_spmm", "bsr_sddmm"))
    return {"op": op, **{"attention": _fp8_attention, "bsr_spmm": _fp8_spmm, "bsr_sddmm": _fp8_sddmm}[op](choose)}


def accepted_specs(
    count: int, seed: int, archs: Sequence[str] = ARCHS, draw: Callable[[Choose], dict[str, Any]] = likely_fields
) -> list[NamedSpec]:
    """Draw so many different specs of some architectures that give a plan: the same as long as plans accept the same.

    Args:
        count: of specs.
        seed: of the draws.
        archs: whose specs are taken; the others are drawn, and passed over.
        draw: their fields.
    """
    generator = random.Random(seed)
    found: dict[str, NamedSpec] = {}
    while len(found) < count:
        try:
            spec = parse_spec(draw(generator.choice))
            named = NamedSpec(unnamed_stem(spec), spec)
            if spec.arch not in archs:
                continue
            plan_for(named)
        except SpecError:
            continue
        found.setdefault(spec.hash, named)
    return list(found.values())


def _attention(choose: Choose) -> dict[str, Any]:
    if choose(RARELY):
        return choose((_sharing_attention, _fp8_attention, _fp8_attention))(choose)
    fields: dict[str, Any] = {"head_dim": choose((64, 96, 128, 192, 256)), "pattern": _pattern(choose)}
    if choose(OFTEN):
        tile = {"m": choose((16, 32, 64, 64, 128, 128, 192, 192, 256)), "n": choose((*range(32, 257, 16), 64, 80, 128))}
        fields["tile"] = {name: tile[name] for name in choose((("m", "n"), ("m",), ("n",)))}
    options: dict[str, Sequence[Any]] = {
        "lse": (False,),
        "softcap": (20.0,),
        "sink": (True,),
        "kv_lengths": (True,),
        "pad_heads": (True,),
        "pack_gqa": (2, 4, 8, 16, 32, 64),
        "stream_k_tail": (False,),
        "kv_splits": (2,),
        "l2_lockstep": (True,),
        "warp_rows": (16, 32),
    }
    return {**fields, **{name: choose(values) for name, values in options.items() if choose(RARELY)}}


def _fp8_attention(choose: Choose) -> dict[str, Any]:
    block = {"q": choose((64, 128)), "kv": choose((64, 128))}
    pattern = choose((_pattern(choose), {"kind": "topk", "k": choose((1, 9, 64)), "block": block}))
    options: dict[str, Sequence[Any]] = {
        "lse": (False,),
        "softcap": (20.0,),
        "sink": (True,),
        "kv_lengths": (True,),
        "pack_gqa": (2, 8, 64),
        "stages": (2, 3, 4),
        "scale_rows": ({"q": 64, "k": 64}, {"q": 128, "k": 64}),
        "accumulate_every": (0, 1, 2, 4),
    }
    fields = _fp8(choose, ("fp16", "bf16"))
    # Wider heads by mma.sync may spill some bytes (docs/reference/guarantees.md, "Not promised").
    widest = 256 if fields["arch"] == "sm_90a" else 128
    return {
        **fields,
        "head_dim": choose((64, 96, 128, 128, widest)),
        "pattern": pattern,
        **{name: choose(values) for name, values in options.items() if choose(RARELY)},
    }


def _fp8(choose: Choose, outputs: Sequence[str]) -> dict[str, Any]:
    return {"arch": choose(("sm_90a", "sm_90a", "sm_89", "sm_120")), "dtype": choose(FP8), "output": choose(outputs)}


def _sharing_attention(choose: Choose) -> dict[str, Any]:
    block = {"q": choose((64, 64, 64, 128)), "kv": choose((64, 128))}
    return {
        "arch": "sm_90a",
        "head_dim": choose((64, 96, 128)),
        "pattern": {"kind": "topk", "k": choose((1, 8, 9, 32, 64, 128)), "block": block},
        "tile": {"m": choose((128, 192))},
        "share_kv_loads": choose((True, True, False)),
        **choose(({}, {"query_grouping": "given"}, {"query_grouping": "search"})),
        **choose(({}, {"l2_lockstep": True})),
        **choose(({}, {"softcap": 20.0}, {"sink": True})),
        **choose(({}, {}, {"kv_lengths": True})),
    }


def _attention_backward(choose: Choose) -> dict[str, Any]:
    pattern = _pattern(choose)
    if "mask" in pattern or pattern["kind"] == "topk":  # blocks of the sizes that gradients have, most of the time
        pattern["block"] = {side: choose((64, 64, 64, 128, 128, 128, 32)) for side in ("q", "kv")}
    which = choose(("dq", "dkdv", "dq_dkdv"))
    fields: dict[str, Any] = {
        "gradients": which,
        "dtype": choose(("fp16", "bf16")),
        "head_dim": choose((64, 64, 64, 128, 128, 128, 96, 192, 256)),
        "pattern": pattern,
    }
    if choose(OFTEN):
        # What a tile keeps, and what a step adds: queries and keys, or the other way round.
        kept, step = choose((64, 64, 128, 128, 128, 192)), choose((*range(16, 177, 16), 32, 64, 64, 64, 128, 128))
        tile = {"m": kept, "n": step} if which == "dq" else {"m": step, "n": kept}
        fields["tile"] = {name: tile[name] for name in choose((("m", "n"), ("m",), ("n",)))}
    if choose(OFTEN):
        fields["stages"] = choose((1, 1, 2, 3, 4, 5, 6))
    if which == "dq_dkdv":
        fields["deterministic"] = choose((True, False))
    options: dict[str, Sequence[Any]] = {"softcap": (20.0,), "kv_lengths": (True,)}
    return {**fields, **{name: choose(values) for name, values in options.items() if choose(RARELY)}}


def _pattern(choose: Choose) -> dict[str, Any]:
    kind = choose(("dense", "causal", "prefix_lm", "sliding_window", "sink_window", "strided", "topk", "block_lists"))
    block = {"q": choose((1, 4, 16, 32, 64, 64, 128, 128)), "kv": choose((16, 32, 64, 64, 128, 128))}
    window = {"left": choose((5, 200, 1023)), "right": choose((0, 9, 300))}
    fields: dict[str, dict[str, Any]] = {
        "dense": {},
        "causal": {"align": choose(("bottom_right", "top_left"))},
        "prefix_lm": {},
        "sliding_window": window,
        "sink_window": {"sink": choose((4, 100)), **window},
        "strided": {
            "stride": choose((2, 5, 8)),
            "local": choose((0, 2, 15)),
            "block": choose((64, 128)),
            "causal": choose(OFTEN),
        },
        "topk": {"k": choose((1, 8, 9, 32, 64, 300, None)), "block": block},
        "block_lists": {"block": block, "mask": choose(("none", "causal", "bits"))},
    }
    return {"kind": kind, **fields[kind]}


def _product(choose: Choose) -> dict[str, Any]:
    rows = choose(SIDES)
    fields: dict[str, Any] = {"block": {"rows": rows, "cols": choose((rows, rows, *SIDES))}}
    if choose(OFTEN):
        fields["tile"] = {
            "m": choose((rows, rows, rows, 128, 384)),
            "n": choose((64, 128, 256, 512, 1024)),
            "k": choose((16, 32, 64, 128)),
        }
    return fields


EPILOGUES = (
    {"bias": True},
    {"bias": True, "activation": "gelu"},
    {"activation": "silu"},
    {"bias": True, "activation": "relu"},
)


def _bsr_spmm(choose: Choose) -> dict[str, Any]:
    if choose(RARELY):
        return choose((_small_blocks, _fp8_spmm))(choose)
    options: dict[str, Sequence[Any]] = {
        "accumulate": (True,),
        "scheduler": ("dynamic",),
        "transpose_a": (True,),
        "b_layout": ("column_major",),
        "ctas_per_sm": (2, 3),
        "epilogue": EPILOGUES,
    }
    return {**_product(choose), **{name: choose(values) for name, values in options.items() if choose(RARELY)}}


def _small_blocks(choose: Choose) -> dict[str, Any]:
    rows, cols = choose((16, 32)), choose((16, 32))
    tile = {"m": rows, "n": choose((256, 512, 1024)), "k": choose((cols, 2 * cols, 4 * cols))}
    return {
        "arch": "sm_90a",
        "block": {"rows": rows, "cols": cols},
        "ctas_per_sm": choose((1, 2, 3)),
        "scheduler": choose(("static", "static", "static", "dynamic")),
        "accumulate": choose(OFTEN),
        **choose(({}, {"tile": tile})),
        **choose(({}, {"epilogue": choose(EPILOGUES)})),
    }


def _fp8_product(choose: Choose) -> dict[str, Any]:
    rows = choose(SIDES[1:])
    fields = {**_fp8(choose, ("fp16", "bf16", "fp32")), "block": {"rows": rows, "cols": choose((rows, *SIDES[1:]))}}
    options: dict[str, Sequence[Any]] = {"accumulate_every": (0, 1, 2, 4), "stages": (2, 3, 4, 5)}
    if choose(RARELY):
        fields["tile"] = {"m": rows, "n": choose((128, 256, 512)), "k": choose((32, 64, 128))}
    return {**fields, **{name: choose(values) for name, values in options.items() if choose(RARELY)}}


def _fp8_spmm(choose: Choose) -> dict[str, Any]:
    return {**_fp8_product(choose), "b_layout": "column_major", **choose(({}, {"scales": "block"}))}


def _fp8_sddmm(choose: Choose) -> dict[str, Any]:
    return {**_fp8_product(choose), **choose(({}, {"scales": "row"}))}


def _bsr_sddmm(choose: Choose) -> dict[str, Any]:
    if choose(RARELY):
        return _fp8_sddmm(choose)
    layouts = {name: "column_major" for name in ("a_layout", "b_layout") if choose(RARELY)}
    return {**_product(choose), **layouts, **({"ctas_per_sm": choose((2, 3))} if choose(RARELY) else {})}


def _bsr_spgemm(choose: Choose) -> dict[str, Any]:
    option = choose(({}, {"output": "bsr"}, {"scheduler": "dynamic"}))
    fields = _product(choose)
    rows = fields["block"]["rows"]
    return {**fields, "block": {"rows": rows, "cols": rows}, **option}


def _paged_attention(choose: Choose) -> dict[str, Any]:
    fields: dict[str, Any] = {"head_dim": choose((64, 128, 192, 256))}
    if choose(OFTEN):
        fields["cache"] = "e4m3"
    if choose(OFTEN):
        fields["tile"] = {"m": choose((16, 16, 32)), "n": choose((16, 32, 64, 128))}
    return fields | ({"stages": choose((2, 3, 4))} if choose(RARELY) else {})


def _quantize(choose: Choose) -> dict[str, Any]:
    scales = choose(("row", "row_block", "row_block", "channel", "given"))
    fields = {"head_dim": choose((64, 96, 128, 192, 256)), "scales": scales, "codes": choose(("e4m3", "e5m2"))}
    if scales != "channel":
        fields |= {"mean": choose(("none", "subtract", "product")), "hadamard": choose(OFTEN)}
        fields |= {"tile": {"m": choose((64, 128))}} if choose(OFTEN) else {}
        # Both rotations at once and products: sm_89 spills 40 bytes.
        both = fields["hadamard"] and fields["mean"] == "product"
        fields |= {"rotary": choose(("half", "interleaved"))} if choose(RARELY) and not both else {}
    return fields


def _select_topk(choose: Choose) -> dict[str, Any]:
    return {"tile": {"m": 32, "n": choose((32, 64, 128))}} if choose(OFTEN) else {}


def _tile_copy(choose: Choose) -> dict[str, Any]:
    return {"tile": {"m": choose((32, 64, 128)), "n": choose((64, 128, 256))}} if choose(OFTEN) else {}


_ATTENTION_OR_PRODUCT: dict[str, Callable[[Choose], dict[str, Any]]] = {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "bsr_spmm": _bsr_spmm,
    "bsr_sddmm": _bsr_sddmm,
    "bsr_spgemm": _bsr_spgemm,
    "paged_attention": _paged_attention,
    "quantize": _quantize,
    "select_topk": _select_topk,
    "tile_copy": _tile_copy,
}
