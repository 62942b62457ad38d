"""Every shipped spec compiles with NVRTC, without spills, into the instructions its spec names.

Needs no GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from codegen.library import NamedSpec, find_spec, shipped_specs
from codegen.render import render
from codegen.spec import parse_spec
from runtime.compiler import Compiled, compile_spec, run_nvrtc
from runtime.errors import CompileError
from runtime.inspection import mnemonics, usage

MMA_OPCODE = {"wgmma": {"HGMMA"}, "mma": {"HMMA"}, "wmma": {"HMMA"}, "none": set()}
COPY_OPCODE = {"tma": "UTMALDG", "cp_async": "LDGSTS"}

DENSE = {"kind": "dense"}
# Combinations that no shipped spec has: other types, head sizes, predicates, schedules.
OTHERS = [
    *(  # the fastest tiles on an H200: all registers, and not one too many
        {
            "op": "attention",
            "arch": "sm_89",
            "head_dim": 128,
            "tile": {"m": side, "n": 64},
            "warp_rows": 32,
            "stages": 2,
            "pattern": {"kind": "topk", "k": 32, "block": {"q": side, "kv": side}},
        }
        for side in (64, 128)
    ),
    {"op": "attention", "arch": "sm_90a", "head_dim": 64, "dtype": "bf16", "pattern": {"kind": "dense"}},
    {"op": "attention", "arch": "sm_90a", "head_dim": 128, "pattern": {"kind": "causal", "align": "top_left"}},
    {"op": "attention", "arch": "sm_90a", "head_dim": 128, "lse": False, "pattern": {"kind": "dense"}},
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 192,
        "softcap": 50.0,
        "sink": True,
        "pattern": {"kind": "causal"},
    },
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 64,
        "schedule": "cooperative",
        "pattern": {"kind": "block_lists", "block": {"q": 64, "kv": 64}},
    },
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 128,
        "pattern": {"kind": "topk", "k": 100, "block": {"q": 128, "kv": 64}},
    },
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 128,
        "pattern": {"kind": "strided", "stride": 5, "local": 2, "block": 64, "causal": False},
    },
    {"op": "attention", "arch": "sm_90a", "head_dim": 192, "stages": 1, "tile": {"m": 128, "n": 128}, "pattern": DENSE},
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 256,
        "dtype": "bf16",
        "schedule": "cooperative",
        "stages": 1,
        "pattern": {"kind": "block_lists", "block": {"q": 64, "kv": 128}, "mask": "causal"},
    },
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 64,
        "packed_heads": 4,
        "sink": True,
        "softcap": 30,
        "pattern": {"kind": "block_lists", "block": {"q": 4, "kv": 128}, "mask": "causal"},
        "tile": {"m": 128, "n": 64},
    },
    {"op": "attention", "arch": "sm_90a", "head_dim": 192, "packed_heads": 64, "pattern": {"kind": "causal"}},
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 64,
        "pattern": {"kind": "topk", "k": 9, "block": {"q": 16, "kv": 64}},
    },
    # Tiles of one warpgroup, alone on an SM or with another thread block.
    *json.loads((Path(__file__).parents[1] / "unshipped_attention.json").read_text(encoding="utf-8")),
    # Tiles whose warpgroups leave out steps.
    *(
        {"op": "attention", "arch": "sm_90a", "schedule": "cooperative", "tile": {"m": m, "n": n}, **more}
        for m, n, more in (
            (192, 80, {"head_dim": 128, "pattern": {"kind": "sliding_window", "left": 300, "right": 40}}),
            (256, 64, {"head_dim": 64, "dtype": "bf16", "pattern": {"kind": "causal", "align": "top_left"}}),
            (128, 64, {"head_dim": 256, "stages": 1, "pattern": {"kind": "causal"}}),
        )
    ),
    # K and V shared by the two query blocks of a tile: longer lists, other heads, steps of 128 keys, all options.
    *(
        {
            "op": "attention",
            "arch": "sm_90a",
            "schedule": "cooperative",
            "share_kv": True,
            "pattern": {"kind": "topk", "k": k, "block": {"q": 64, "kv": keys}},
            "tile": {"m": m, "n": keys},
            **more,
        }
        for m, k, keys, more in (
            (128, 128, 64, {"head_dim": 128, "dtype": "bf16", "lse": False}),
            (128, 1, 64, {"head_dim": 96, "sink": True}),
            (128, 40, 128, {"head_dim": 64, "softcap": 20}),
            (128, 16, 64, {"head_dim": 64, "stages": 3}),
            (128, 32, 128, {"head_dim": 128, "stages": 2}),
            (128, 32, 64, {"head_dim": 128, "stages": 6}),
            (192, 128, 64, {"head_dim": 128, "dtype": "bf16", "lse": False}),
            (192, 1, 64, {"head_dim": 96, "sink": True}),
            (192, 40, 64, {"head_dim": 64, "softcap": 20}),
            (192, 16, 64, {"head_dim": 128, "stages": 5, "sink": True}),
        )
    ),
    # Three and four warpgroups, with masks, streams, packed rows; pairs of blocks; steps of odd lengths.
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 128,
        "dtype": "bf16",
        "schedule": "cooperative",
        "pattern": {"kind": "sliding_window", "left": 1000, "right": 7},
        "tile": {"m": 192, "n": 80},
    },
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 64,
        "packed_heads": 2,
        "sink": True,
        "pattern": {"kind": "block_lists", "block": {"q": 32, "kv": 64}, "mask": "causal"},
        "tile": {"m": 256, "n": 64},
    },
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 64,
        "pattern": {"kind": "topk", "k": 33, "block": {"q": 64, "kv": 64}},
        "tile": {"m": 192, "n": 128},
    },
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 128,
        "pattern": {"kind": "block_lists", "block": {"q": 128, "kv": 64}, "mask": "causal"},
        "tile": {"m": 128, "n": 128},
    },
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 96,
        "softcap": 20,
        "pattern": {"kind": "causal"},
        "tile": {"m": 128, "n": 144},
    },
    {"op": "attention", "arch": "sm_90a", "head_dim": 128, "split_tail": False, "pattern": DENSE},
    # The most that the registers of two and of three warpgroups are said to hold.
    {"op": "attention", "arch": "sm_90a", "head_dim": 128, "tile": {"m": 128, "n": 160}, "stages": 1, "pattern": DENSE},
    {"op": "attention", "arch": "sm_90a", "head_dim": 96, "tile": {"m": 192, "n": 112}, "stages": 1, "pattern": DENSE},
    {"op": "attention", "arch": "sm_89", "head_dim": 64, "dtype": "bf16", "pattern": {"kind": "dense"}},
    {
        "op": "attention",
        "arch": "sm_89",
        "head_dim": 128,
        "pattern": {"kind": "sink_window", "sink": 4, "left": 1023, "right": 0},
    },
    {
        "op": "attention",
        "arch": "sm_89",
        "head_dim": 128,
        "pattern": {"kind": "strided", "stride": 8, "local": 15, "block": 64},
    },
    {
        "op": "attention",
        "arch": "sm_89",
        "head_dim": 96,
        "sink": True,
        "pattern": {"kind": "block_lists", "block": {"q": 128, "kv": 32}, "mask": "causal"},
    },
    {
        "op": "attention",
        "arch": "sm_89",
        "head_dim": 64,
        "lse": False,
        "pattern": {"kind": "topk", "k": 9, "block": {"q": 16, "kv": 16}},
    },
    {
        "op": "attention",
        "arch": "sm_89",
        "head_dim": 192,
        "dtype": "bf16",
        "softcap": 30.0,
        "pattern": {"kind": "sliding_window", "left": 500, "right": 3},
    },
    {
        "op": "attention",
        "arch": "sm_89",
        "head_dim": 256,
        "pattern": {"kind": "block_lists", "block": {"q": 32, "kv": 128}, "mask": "causal"},
    },
    {
        "op": "attention",
        "arch": "sm_89",
        "head_dim": 128,
        "pattern": {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "causal"},
    },
    {
        "op": "attention",
        "arch": "sm_89",
        "head_dim": 64,
        "packed_heads": 4,
        "sink": True,
        "softcap": 30,
        "pattern": {"kind": "block_lists", "block": {"q": 4, "kv": 128}, "mask": "causal"},
    },
    {
        "op": "attention",
        "arch": "sm_89",
        "head_dim": 128,
        "dtype": "bf16",
        "packed_heads": 2,
        "pattern": {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "causal"},
        "tile": {"m": 64, "n": 64},
        "stages": 3,
    },
    {
        "op": "attention",
        "arch": "sm_89",
        "head_dim": 192,
        "packed_heads": 64,
        "lse": False,
        "pattern": {"kind": "causal"},
    },
    # WMMA: several blocks a step, parts of one, the most that registers hold.
    {
        "op": "attention",
        "arch": "sm_89",
        "mma": "wmma",
        "head_dim": 128,
        "dtype": "bf16",
        "pattern": {"kind": "block_lists", "block": {"q": 128, "kv": 32}, "mask": "causal"},
        "tile": {"m": 64, "n": 64},
        "stages": 2,
    },
    {
        "op": "attention",
        "arch": "sm_89",
        "mma": "wmma",
        "head_dim": 64,
        "lse": False,
        "pattern": {"kind": "topk", "k": 9, "block": {"q": 16, "kv": 128}},
    },
    {
        "op": "attention",
        "arch": "sm_89",
        "mma": "wmma",
        "head_dim": 128,
        "pattern": {"kind": "causal"},
        "tile": {"m": 128, "n": 64},
    },
    {"op": "bsr_spmm", "arch": "sm_90a", "dtype": "bf16", "block": {"rows": 128, "cols": 128}},
    {"op": "bsr_spmm", "arch": "sm_90a", "dtype": "bf16", "block": {"rows": 32, "cols": 16}},
    {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 16, "cols": 32}, "tile": {"m": 16, "n": 128, "k": 32}},
    # Steps of two and four small blocks, thread blocks that share an SM, the widest tiles.
    *(
        {
            "op": "bsr_spmm",
            "arch": "sm_90a",
            "dtype": dtype,
            "block": {"rows": rows, "cols": cols},
            "tile": {"m": rows, "n": n, "k": k},
            "stages": stages,
            **more,
        }
        for dtype, rows, cols, n, k, stages, more in (
            ("fp16", 16, 16, 512, 32, 6, {"balanced": True}),
            ("bf16", 16, 32, 512, 64, 3, {"accumulate": True}),
            ("fp16", 32, 32, 512, 64, 3, {"epilogue": {"bias": True, "activation": "gelu"}}),
            ("fp16", 16, 16, 512, 64, 3, {}),
            ("fp16", 16, 16, 256, 32, 3, {"blocks_per_sm": 3}),
            ("bf16", 32, 16, 512, 16, 5, {"blocks_per_sm": 2}),
            ("fp16", 32, 32, 1024, 32, 3, {}),
        )
    ),
    {"op": "bsr_sddmm", "arch": "sm_90a", "dtype": "bf16", "block": {"rows": 128, "cols": 64}},
    # Sampled small blocks by WGMMA: thread blocks that share an SM, the widest tiles.
    *(
        {
            "op": "bsr_sddmm",
            "arch": "sm_90a",
            "dtype": dtype,
            "block": {"rows": rows, "cols": cols},
            "tile": {"m": rows, "n": n, "k": 64},
            "stages": stages,
            "blocks_per_sm": resident,
        }
        for dtype, rows, cols, n, stages, resident in (
            ("fp16", 32, 32, 256, 6, 1),
            ("bf16", 32, 32, 256, 3, 2),
            ("fp16", 32, 16, 512, 3, 1),
            ("bf16", 16, 32, 128, 3, 3),
        )
    ),
    *(
        {"op": op, "arch": "sm_90a", "mma": "mma", "dtype": dtype, "block": {"rows": size, "cols": size}}
        for op, size, dtype in (
            ("bsr_sddmm", 32, "fp16"),
            ("bsr_sddmm", 16, "bf16"),
            ("bsr_spgemm", 32, "bf16"),
            ("bsr_spgemm", 16, "fp16"),
        )
    ),
    {
        "op": "bsr_sddmm",
        "arch": "sm_90a",
        "block": {"rows": 64, "cols": 128},
        "tile": {"m": 64, "n": 128, "k": 64},
    },
    {"op": "bsr_spgemm", "arch": "sm_90a", "dtype": "bf16", "block": {"rows": 128, "cols": 128}, "stages": 6},
    {"op": "bsr_spgemm", "arch": "sm_90a", "dtype": "bf16", "block": {"rows": 64, "cols": 64}, "stages": 2},
    {"op": "bsr_spgemm", "arch": "sm_90a", "dtype": "bf16", "block": {"rows": 64, "cols": 64}, "output": "bsr"},
    {"op": "bsr_spgemm", "arch": "sm_90a", "dtype": "bf16", "block": {"rows": 64, "cols": 64}, "balanced": True},
    *(
        {"op": op, "arch": "sm_89", "mma": mma, "dtype": dtype, "block": {"rows": size, "cols": size}}
        for op, mma, dtype, size in (
            ("bsr_sddmm", "mma", "bf16", 128),
            ("bsr_sddmm", "mma", "bf16", 32),
            ("bsr_sddmm", "mma", "fp16", 16),
            ("bsr_sddmm", "wmma", "bf16", 128),
            ("bsr_sddmm", "wmma", "bf16", 32),
            ("bsr_sddmm", "wmma", "bf16", 16),
            ("bsr_spgemm", "mma", "bf16", 128),
            ("bsr_spgemm", "mma", "fp16", 32),
            ("bsr_spgemm", "mma", "bf16", 16),
            ("bsr_spgemm", "wmma", "bf16", 128),
            ("bsr_spgemm", "wmma", "bf16", 32),
            ("bsr_spgemm", "wmma", "bf16", 16),
        )
    ),
    # The largest steps.
    {"op": "bsr_sddmm", "arch": "sm_89", "block": {"rows": 64, "cols": 64}, "tile": {"m": 64, "n": 256, "k": 64}},
    {"op": "bsr_spgemm", "arch": "sm_89", "block": {"rows": 64, "cols": 64}, "tile": {"m": 64, "n": 64, "k": 64}},
    *(
        {
            "op": "bsr_spmm",
            "arch": "sm_90a",
            "dtype": dtype,
            "block": {"rows": size, "cols": size},
            "epilogue": epilogue,
        }
        for dtype, size, epilogue in (
            ("bf16", 128, {"bias": True, "activation": "relu"}),
            ("fp16", 64, {"activation": "silu"}),
            ("bf16", 32, {"bias": True, "activation": "gelu"}),
            ("fp16", 16, {"bias": True}),
        )
    ),
    *(
        {
            "op": "bsr_spmm",
            "arch": "sm_90a",
            "dtype": "bf16",
            "block": {"rows": size, "cols": size},
            "accumulate": True,
            "epilogue": {"bias": True, "activation": "gelu"},
        }
        for size in (64, 16)
    ),
    {
        "op": "bsr_spmm",
        "arch": "sm_90a",
        "dtype": "bf16",
        "block": {"rows": 128, "cols": 64},
        "transpose_a": True,
        "epilogue": {"bias": True},
    },
    # B stored by columns.
    *(
        {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": size, "cols": 128}, "b_layout": "column_major", **more}
        for size, more in ((128, {}), (64, {"dtype": "bf16", "balanced": True}), (128, {"cluster": 2}))
    ),
    *(
        {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": rows, "cols": cols}, "b_layout": "column_major", **more}
        for rows, cols, more in (
            (32, 32, {"balanced": True}),
            (16, 16, {"tile": {"m": 16, "n": 256, "k": 32}, "dtype": "bf16"}),
            (64, 128, {"transpose_a": True, "dtype": "bf16", "epilogue": {"bias": True}}),
            (64, 128, {"tile": {"m": 128, "n": 128, "k": 64}, "dtype": "bf16"}),
            (128, 128, {"mma": "mma", "tile": {"m": 128, "n": 256, "k": 32}}),
            (256, 112, {"mma": "wmma", "copy": "tma", "tile": {"m": 256, "n": 128, "k": 112}, "stages": 2}),
        )
    ),
    *(
        {
            "op": "bsr_spmm",
            "arch": "sm_89",
            "block": {"rows": rows, "cols": 64},
            "tile": {"m": rows, "n": n, "k": k},
            "b_layout": "column_major",
            **more,
        }
        for rows, n, k, more in (
            (128, 256, 16, {"mma": "mma"}),
            (64, 128, 32, {"mma": "mma", "dtype": "bf16"}),
            (32, 512, 16, {"mma": "mma"}),
            (16, 256, 64, {"mma": "mma", "stages": 2, "dtype": "bf16"}),
            (128, 128, 64, {"mma": "wmma", "dtype": "bf16", "stages": 2}),
            (16, 64, 64, {"mma": "wmma", "copy": "ld_global"}),
        )
    ),
    {
        "op": "bsr_spmm",
        "arch": "sm_90a",
        "dtype": "bf16",
        "block": {"rows": 64, "cols": 64},
        "tile": {"m": 64, "n": 512, "k": 32},
        "stages": 5,
        "balanced": True,
        "epilogue": {"bias": True, "activation": "silu"},
    },
    {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": 128, "cols": 128}, "tile": {"m": 128, "n": 256, "k": 32}},
    {
        "op": "bsr_spmm",
        "arch": "sm_90a",
        "block": {"rows": 64, "cols": 64},
        "tile": {"m": 64, "n": 128, "k": 32},
        "accumulate": True,
    },
    {
        "op": "bsr_spmm",
        "arch": "sm_90a",
        "block": {"rows": 64, "cols": 64},
        "cluster": 2,
        "accumulate": True,
        "epilogue": {"bias": True},
    },
    {
        "op": "bsr_spmm",
        "arch": "sm_90a",
        "dtype": "bf16",
        "block": {"rows": 64, "cols": 128},
        "tile": {"m": 128, "n": 128, "k": 64},
        "epilogue": {"bias": True, "activation": "gelu"},
    },
    *(
        {
            "op": "bsr_spmm",
            "arch": "sm_90a",
            "block": {"rows": size, "cols": size},
            "balanced": True,
            "accumulate": size == 32,
        }
        for size in (64, 32)
    ),
    {"op": "bsr_spmm", "arch": "sm_89", "dtype": "bf16", "block": {"rows": 64, "cols": 64}},
    # Steps of one slice, low tiles, narrow and wide; by WMMA where not all threads copy A.
    *(
        {
            "op": "bsr_spmm",
            "arch": "sm_89",
            "mma": mma,
            "copy": copy,
            "dtype": dtype,
            "block": {"rows": rows, "cols": cols},
            "tile": {"m": rows, "n": n, "k": k},
        }
        for mma, copy, dtype, rows, cols, n, k in (
            ("mma", "cp_async", "bf16", 16, 16, 128, 16),
            ("mma", "cp_async", "fp16", 16, 32, 512, 32),
            ("mma", "cp_async", "fp16", 32, 16, 512, 16),
            ("mma", "cp_async", "fp16", 128, 16, 256, 16),
            ("wmma", "ld_global", "bf16", 16, 64, 64, 64),
            ("wmma", "cp_async", "fp16", 32, 32, 128, 32),
            ("wmma", "cp_async", "bf16", 64, 16, 128, 16),
        )
    ),
    {"op": "bsr_spmm", "arch": "sm_89", "mma": "wmma", "dtype": "bf16", "block": {"rows": 128, "cols": 128}},
    {
        "op": "bsr_spmm",
        "arch": "sm_90a",
        "mma": "wmma",
        "copy": "tma",
        "dtype": "bf16",
        "block": {"rows": 64, "cols": 64},
        "tile": {"m": 64, "n": 64, "k": 32},
    },
]


PRODUCER_STACK = 24  # bytes of a thread
# No shipped spec: packed lists of two kinds, or a list of an odd length, for a producer with 32 registers.
PRODUCERS_THAT_SPILL = ("df783388", "a737b474")


def consumers_code(compiled: Compiled) -> list[str]:
    """Return the code behind the setmaxnreg that takes registers (TRY_ALLOC), up to the one that gives them back."""
    code = mnemonics(compiled.code)
    begin, end = (
        next(i for i, mnemonic in enumerate(code) if mnemonic.startswith("USETMAXREG") and word in mnemonic)
        for word in ("TRY_ALLOC", "DEALLOC")
    )
    assert begin < end
    return code[begin:end]


def check(compiled: Compiled) -> None:
    spec, used = compiled.named.spec, usage(compiled)
    counts = used.instructions
    assert "warning" not in compiled.log and "serialized" not in compiled.log, compiled.log
    if spec.hash[:8] in PRODUCERS_THAT_SPILL:
        assert 0 < used.stack_bytes <= PRODUCER_STACK
        assert not [m for m in consumers_code(compiled) if m.startswith(("LDL", "STL"))]
    else:
        assert used.spill_bytes == 0 and used.stack_bytes == 0
        assert counts["LDL"] == 0 and counts["STL"] == 0
    assert {name for name in ("HGMMA", "HMMA") if counts[name]} == MMA_OPCODE[spec.mma]
    for copy, opcode in COPY_OPCODE.items():
        assert (counts[opcode] > 0) == (spec.copy_ == copy), (copy, counts)
    stores_by_map = {"o_map", "c_map"} & compiled.plan.tensor_maps.keys()
    assert (counts["UTMASTG"] > 0) == bool(stores_by_map)


@pytest.mark.parametrize("named", shipped_specs(), ids=lambda named: named.stem)
def test_shipped_spec_compiles_without_spills(named: NamedSpec) -> None:
    compiled = compile_spec(named)
    assert compiled.code[:4] == b"\x7fELF"
    check(compiled)


@pytest.mark.parametrize("fields", OTHERS, ids=lambda fields: parse_spec(fields).hash[:8])
def test_other_combinations_compile_without_spills(fields: dict[str, object]) -> None:
    check(compile_spec(find_spec(fields)))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_120"])
@pytest.mark.parametrize(
    "name",
    ["l4_topk32_d64", "l4_topk32_wmma", "l4_bsr_spmm_wmma_cp_async", "l4_bsr_sddmm_b64", "l4_bsr_spgemm_wmma"],
)
def test_ada_kernels_compile_for_architectures_they_have_not_run_on(name: str, arch: str) -> None:
    fields = json.loads(find_spec(name).spec.canonical_json())
    compiled = compile_spec(find_spec({**fields, "arch": arch}))
    assert compiled.code[:4] == b"\x7fELF" and compiled.options[0] == f"--gpu-architecture={arch}"
    assert "warning" not in compiled.log and "0 bytes spill stores" in compiled.log


@pytest.mark.parametrize("name", ["l4_topk32", "l4_topk32_wmma", "l4_bsr_spmm_wmma_cp_async"])
def test_ada_kernels_compile_to_ptx_for_newer_devices(name: str) -> None:
    compiled = compile_spec(find_spec(name), "ptx")
    assert ".target sm_89" in compiled.code.decode().rstrip("\0")


def test_a_compile_error_has_the_files_name_the_line_and_the_log() -> None:
    with pytest.raises(CompileError, match=r"generated/broken\.cu\(2\): error") as caught:
        run_nvrtc("// one\nint x = y;\n", "generated/broken.cu", "cubin", ("--gpu-architecture=sm_89",))
    assert "identifier" in caught.value.log


def test_a_compilation_does_not_change_later_ones() -> None:
    """A debug build changes the code of every later compilation of its process: each has one of its own."""
    source = render(find_spec("l4_topk32_d64"))
    options = ("--gpu-architecture=sm_89", "--std=c++17")
    before, _ = run_nvrtc(source, "a.cu", "cubin", options)
    run_nvrtc(source, "a.cu", "cubin", (*options, "--device-debug"))
    assert run_nvrtc(source, "b.cu", "cubin", options)[0] == before
