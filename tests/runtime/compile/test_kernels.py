"""Every shipped spec compiles with NVRTC, without spills, into the instructions its spec names.

Needs no GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from compiled_code import code_key
from each import check_each, every_spec

import codegen.render
from codegen.arch import ARCHS
from codegen.dtypes import FP8
from codegen.library import NamedSpec, find_spec, shipped_specs
from codegen.plan import Plan
from codegen.planning import plan_for
from codegen.prune import without_comments
from codegen.receipts import MissingReceipt, read_receipt, receipt_path, source_sha256
from codegen.render import generate, render
from runtime.compile import toolchain
from runtime.compile.compiler import Compiled, compile_spec, run_nvrtc
from runtime.compile.inspection import usage
from runtime.errors import CompileError, ToolchainError

pytestmark = pytest.mark.nvrtc

MMA_OPCODE = {"wgmma": {"HGMMA"}, "mma": {"HMMA"}, "wmma": {"HMMA"}, "none": set()}
FP8_OPCODE = {"wgmma": "QGMMA", "mma": "QMMA"}
COPY_OPCODE = {"tma": "UTMALDG", "cp_async": "LDGSTS"}

DENSE = {"kind": "dense"}
# Combinations that no shipped spec has: other types, head sizes, predicates, schedules.
BACKWARD = {"op": "attention_backward", "arch": "sm_90a"}
BITS_64 = {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "bits"}
OTHERS = [
    *(
        {**BACKWARD, "gradients": which, "head_dim": 64, "pattern": BITS_64, "softcap": 20.0, "kv_lengths": True}
        for which in ("dq", "dkdv")
    ),
    *(
        {**BACKWARD, "gradients": "dq", "head_dim": 128, "softcap": 20.0, "kv_lengths": True, "pattern": pattern}
        for pattern in (
            {"kind": "prefix_lm"},
            {"kind": "sink_window", "sink": 4, "left": 500, "right": 30},
            {"kind": "strided", "stride": 3, "local": 1, "block": 64, "causal": False},
        )
    ),
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
    *(  # no lane of a row has anything to do that the others have not
        {"op": "quantize", "arch": "sm_90a", "dtype": "bf16", "head_dim": 128, "scales": scales, **more}
        for scales, more in (
            ("row_block", {"mean": "subtract", "hadamard": True, "rotary": "half"}),
            ("given", {"rotary": "interleaved"}),
        )
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
        "pack_gqa": 4,
        "sink": True,
        "softcap": 30,
        "pattern": {"kind": "block_lists", "block": {"q": 4, "kv": 128}, "mask": "causal"},
        "tile": {"m": 128, "n": 64},
    },
    {"op": "attention", "arch": "sm_90a", "head_dim": 192, "pack_gqa": 64, "pattern": {"kind": "causal"}},
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 64,
        "pattern": {"kind": "topk", "k": 9, "block": {"q": 16, "kv": 64}},
    },
    # Tiles of one warpgroup, alone on an SM or with another thread block.
    *json.loads((Path(__file__).parents[2] / "unshipped_attention.json").read_text(encoding="utf-8")),
    *json.loads((Path(__file__).parents[2] / "unshipped_bsr.json").read_text(encoding="utf-8")),
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
            "share_kv_loads": True,
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
        "pack_gqa": 2,
        "sink": True,
        "pattern": {"kind": "block_lists", "block": {"q": 32, "kv": 64}, "mask": "causal"},
        "tile": {"m": 192, "n": 64},
    },
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 64,
        "pattern": {"kind": "topk", "k": 33, "block": {"q": 64, "kv": 64}},
        "tile": {"m": 256, "n": 64},
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
    {"op": "attention", "arch": "sm_90a", "head_dim": 128, "stream_k_tail": False, "pattern": DENSE},
    # The producer of three warpgroups walks through two kinds of lists.
    *(
        {
            "op": "attention",
            "arch": "sm_90a",
            "head_dim": head_dim,
            "pattern": {"kind": "block_lists", "block": {"q": q, "kv": kv}, **mask},
            "tile": {"m": 192, "n": 64},
            **more,
        }
        for head_dim, q, kv, mask, more in (
            (96, 64, 128, {"mask": "causal"}, {}),
            (128, 64, 128, {}, {}),
            (128, 4, 64, {"mask": "causal"}, {"pack_gqa": 16, "sink": True, "softcap": 20}),
        )
    ),
    # Masks of bits: parts of a block, pairs of blocks, packed heads, by mma.sync with 32 rows a warp, by WMMA.
    *(
        {"op": "attention", "arch": arch, "pattern": {"kind": "block_lists", "mask": "bits", "block": block}, **more}
        for arch, block, more in (
            ("sm_90a", {"q": 128, "kv": 128}, {"head_dim": 128, "tile": {"m": 128, "n": 64}, "softcap": 30}),
            ("sm_90a", {"q": 64, "kv": 64}, {"head_dim": 64, "tile": {"m": 128, "n": 128}, "pack_gqa": 8}),
            ("sm_89", {"q": 64, "kv": 32}, {"head_dim": 64, "tile": {"m": 64, "n": 64}, "warp_rows": 32}),
            ("sm_89", {"q": 64, "kv": 64}, {"head_dim": 64, "mma": "wmma"}),
        )
    ),
    # A cap beside all of Q in registers, with each kind of mask.
    *(
        {"op": "attention", "arch": "sm_90a", "head_dim": 128, "softcap": 30, "pattern": pattern}
        for pattern in (
            {"kind": "sink_window", "sink": 4, "left": 1023, "right": 0},
            {"kind": "strided", "stride": 8, "local": 15, "block": 64},
            {"kind": "block_lists", "block": {"q": 128, "kv": 128}, "mask": "causal"},
        )
    ),
    {
        "op": "attention",
        "arch": "sm_90a",
        "head_dim": 96,
        "l2_lockstep": True,
        "pattern": {"kind": "topk", "k": 8, "block": {"q": 128, "kv": 128}},
    },
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
        "pack_gqa": 4,
        "sink": True,
        "softcap": 30,
        "pattern": {"kind": "block_lists", "block": {"q": 4, "kv": 128}, "mask": "causal"},
    },
    {
        "op": "attention",
        "arch": "sm_89",
        "head_dim": 128,
        "dtype": "bf16",
        "pack_gqa": 2,
        "pattern": {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "causal"},
        "tile": {"m": 64, "n": 64},
        "stages": 3,
    },
    {
        "op": "attention",
        "arch": "sm_89",
        "head_dim": 192,
        "pack_gqa": 64,
        "lse": False,
        "pattern": {"kind": "causal"},
    },
    # A number of keys for each batch, with each way of masking; heads of fewer elements.
    *(
        {"op": "attention", "arch": "sm_90a", "head_dim": head_dim, "kv_lengths": True, "pattern": pattern, **more}
        for head_dim, pattern, more in (
            (128, DENSE, {"tile": {"m": 192, "n": 80}, "schedule": "cooperative"}),
            (256, {"kind": "sliding_window", "left": 200, "right": 3}, {}),
            (128, {"kind": "strided", "stride": 5, "local": 2, "block": 64, "causal": False}, {"sink": True}),
            (
                128,
                {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "causal"},
                {"tile": {"m": 192, "n": 64}},
            ),
            (64, {"kind": "topk", "k": 16, "block": {"q": 64, "kv": 64}}, {"share_kv_loads": True}),
        )
    ),
    *(
        {"op": "attention", "arch": "sm_89", "head_dim": head_dim, "pad_heads": True, "pattern": pattern, **more}
        for head_dim, pattern, more in (
            (96, {"kind": "sink_window", "sink": 4, "left": 200, "right": 0}, {"kv_lengths": True}),
            (128, {"kind": "topk", "k": 32, "block": {"q": 128, "kv": 128}}, {"kv_lengths": True}),
            (256, {"kind": "block_lists", "block": {"q": 64, "kv": 32}, "mask": "causal"}, {}),
            (128, {"kind": "causal"}, {"mma": "wmma", "kv_lengths": True}),
        )
    ),
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
            ("fp16", 16, 16, 512, 32, 6, {"scheduler": "dynamic"}),
            ("bf16", 16, 32, 512, 64, 3, {"accumulate": True}),
            ("fp16", 32, 32, 512, 64, 3, {"epilogue": {"bias": True, "activation": "gelu"}}),
            ("fp16", 16, 16, 512, 64, 3, {}),
            ("fp16", 16, 16, 256, 32, 3, {"ctas_per_sm": 3}),
            ("bf16", 32, 16, 512, 16, 5, {"ctas_per_sm": 2}),
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
            "ctas_per_sm": resident,
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
    {"op": "bsr_spgemm", "arch": "sm_90a", "dtype": "bf16", "block": {"rows": 64, "cols": 64}, "scheduler": "dynamic"},
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
        for size, more in ((128, {}), (64, {"dtype": "bf16", "scheduler": "dynamic"}))
    ),
    *(
        {"op": "bsr_spmm", "arch": "sm_90a", "block": {"rows": rows, "cols": cols}, "b_layout": "column_major", **more}
        for rows, cols, more in (
            (32, 32, {"scheduler": "dynamic"}),
            (16, 16, {"tile": {"m": 16, "n": 256, "k": 32}, "dtype": "bf16"}),
            (64, 128, {"transpose_a": True, "dtype": "bf16", "epilogue": {"bias": True}}),
            (64, 128, {"tile": {"m": 128, "n": 128, "k": 64}, "dtype": "bf16"}),
            (128, 128, {"mma": "mma", "tile": {"m": 128, "n": 256, "k": 32}}),
            (256, 112, {"mma": "wmma", "copy": "tma", "tile": {"m": 256, "n": 128, "k": 112}, "stages": 2}),
        )
    ),
    # B and C with any strides.
    *(
        {
            "op": "bsr_spmm",
            "arch": arch,
            "block": {"rows": rows, "cols": cols},
            "b_layout": "strided",
            "epilogue": {"activation": activation, "bias": True},
            **more,
        }
        for arch, rows, cols, activation, more in (
            ("sm_90a", 48, 16, "gelu", {"dtype": "bf16"}),
            ("sm_90a", 64, 64, "silu", {"accumulate": True, "tile": {"m": 32, "n": 8, "k": 64}, "stages": 2}),
            ("sm_89", 32, 96, "relu", {"accumulate": True, "tile": {"m": 32, "n": 8, "k": 32}, "stages": 6}),
            ("sm_80", 16, 64, "none", {}),
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
        "scheduler": "dynamic",
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
            "scheduler": "dynamic",
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
    *(  # gradients of tensors of a score: of queries, keys and distances; the widest heads have shorter steps
        {
            **BACKWARD,
            "gradients": "daux",
            "dtype": "bf16",
            "head_dim": head_dim,
            "pattern": {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": mask},
            "score": {
                "value": "8 * tanh(score * gain[head] / 8) + row[q_idx] * key[batch, kv_idx] "
                "+ bias[head, q_idx - kv_idx + 64]",
                "aux": {
                    "bias": "fp32[heads, 129]",
                    "gain": "fp32[heads]",
                    "key": "bf16[batch, kv_len]",
                    "row": "fp16[q_len]",
                },
            },
            "aux_gradients": ["bias", "gain", "key", "row"],
            **options,
        }
        for head_dim, mask, options in (
            (64, "causal", {"kv_lengths": True}),
            (128, "bits", {"dtype": "fp16"}),
            (
                256,
                "none",
                {
                    "score": {"value": "score + bias[q_idx - kv_idx]", "aux": {"bias": "fp32[99]"}},
                    "aux_gradients": ["bias"],
                },
            ),
            (64, "none", {"arch": "sm_89"}),
        )
    ),
]


# Those that shipped kernels of sm_89 are compiled for as well, where they have not run.
OF_OTHER_ARCHS = ("l4_topk32_d64", "l4_dense_wmma", "l4_bsr_spmm_wmma_b16", "l4_bsr_sddmm_b64", "l4_bsr_spgemm_wmma")
PROJECT = Path(__file__).resolve().parents[3]
KNOWN = PROJECT / "tests" / "records" / "kernels.json"
UNRECORDED = "compiled (no record of this source by this compiler)"
SAMPLE = 12  # of those with a record, compiled anew at each run, others each day
PARTS = 24  # of all kernels, for several processes

Record = dict[str, Any]


@cache
def kernels() -> list[NamedSpec]:
    """All kernels that are compiled."""
    plain = [json.loads(find_spec(name).spec.canonical_json()) for name in OF_OTHER_ARCHS]
    others = [{**fields, "arch": arch} for fields in plain for arch in ("sm_80", "sm_86", "sm_120")]
    return [*shipped_specs(), *map(find_spec, [*OTHERS, *others])]


def sha256(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()


def code_sha256(source: str) -> str:
    """SHA-256 of a source without its comments."""
    return sha256(without_comments(source).encode())


def record_of(compiled: Compiled) -> Record:
    """What kernels.json says of a kernel; what has the same key was compiled before, with this result."""
    used = dataclasses.asdict(usage(compiled))
    used["instructions"] = {name: count for name, count in used["instructions"].items() if count}
    return {
        "key": code_key(compiled.generated),
        "code": code_sha256(compiled.source),
        "compiler_package": toolchain.compiler_version()[1],
        "cubin": sha256(compiled.code),
        **used,
    }


def compiled_anew(named: NamedSpec, known: Record | None) -> Record:
    """Compile a kernel, look at what only a compilation shows, and return what there is to know of it."""
    compiled = compile_spec(named)
    assert not compiled.was_cached and compiled.code[:4] == b"\x7fELF"
    assert compiled.options[0] == f"--gpu-architecture={named.spec.arch}"
    assert "warning" not in compiled.log, compiled.log
    assert "serialized" not in compiled.log, compiled.log
    record = record_of(compiled)
    if known is not None and (known["key"], known["cubin"]) == (record["key"], record["cubin"]):
        assert known == record, f"{KNOWN.name} does not say what was compiled; remove it and use --record-kernels"
    return record


def check(named: NamedSpec, record: Record) -> None:
    spec, counts = named.spec, Counter(record["instructions"])
    spilled = {name: record[name] for name in ("spill_bytes", "stack_bytes") if record[name]}
    spilled |= {name: counts[name] for name in ("LDL", "STL") if counts[name]}
    assert not spilled or plan_for(named).registers.may_spill, f"{named.stem} spills: {spilled}"  # explain says so
    opcodes = {FP8_OPCODE[spec.mma]} if spec.dtype in FP8 else MMA_OPCODE[spec.mma]
    assert {name for name in ("HGMMA", "QGMMA", "HMMA", "QMMA") if counts[name]} == opcodes
    plan = plan_for(named)
    converted = getattr(spec, "cache", "same") == "e4m3" and spec.mma == "wgmma"  # codes are no copies of TMA
    for way, opcode in COPY_OPCODE.items():
        assert (counts[opcode] > 0) == (spec.copy_ == way or (converted and way == "cp_async")), (way, counts)
    stores_by_map = {"o_map", "c_map", "dq_map", "dk_map"} & plan.tensor_maps.keys()
    assert (counts["UTMASTG"] > 0) == bool(stores_by_map)


@cache
def known() -> dict[str, Record]:
    """Records of earlier compilations by the kernel's name; none without a file, and all kernels are compiled."""
    return json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.is_file() else {}


@cache
def sample(seed: int) -> frozenset[str]:
    """The kernels that are compiled although there is a record of them."""
    return frozenset(random.Random(seed).sample(sorted(kernel.stem for kernel in kernels()), SAMPLE))


def why_anew(named: NamedSpec, known: Record | None, options: Any) -> str:
    """Return why a kernel is to be compiled; "" if what is known of it is of this source and compiler."""
    if options.all_kernels:
        return "compiled (--all-kernels)"
    if known is None or known["key"] != code_key(generate(named)):
        return UNRECORDED
    return "compiled (sample)" if named.stem in sample(options.kernel_seed) else ""


def compiles_without_spills(named: NamedSpec, options: Any, record_property: Any) -> None:
    """Check a kernel, and tell pytest_terminal_summary what it showed if it passes."""
    try:
        toolchain.check_arch(ARCHS[named.spec.arch])
    except ToolchainError as error:
        pytest.skip(str(error))
    record = known().get(named.stem)
    if why := why_anew(named, record, options):
        record = compiled_anew(named, record)
    assert record is not None
    check(named, record)
    told = {"stem": named.stem, "record": record, "of": len(kernels()), "unrecorded": why == UNRECORDED}
    record_property("kernel", {**told, "how": why or "known from an earlier compilation"})


@pytest.mark.parametrize("part", range(PARTS))
def test_it_compiles_without_spills(part: int, request: pytest.FixtureRequest, record_property: Any) -> None:
    """Compiled now, or known from a compilation of the same source by the same compiler (``--all-kernels``: now)."""
    options = request.config.option
    check_each(
        {each.stem: partial(compiles_without_spills, each, options, record_property) for each in kernels()[part::PARTS]}
    )


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Changes what all templates render to."""
    rendered = codegen.render._rendered

    def change(pattern: str, replacement: str) -> None:
        def render_changed(plan: Plan, origin: str) -> Any:
            made = rendered(plan, origin)
            text, count = re.subn(pattern, replacement, made.source)
            assert count
            return dataclasses.replace(made, source=text)

        monkeypatch.setattr("codegen.render._rendered", render_changed)
        generate.cache_clear()

    yield change
    generate.cache_clear()


def test_what_is_rendered_in_another_way_is_compiled_anew_and_checked(
    changed: Callable[[str, str], None], request: pytest.FixtureRequest
) -> None:
    named, options = find_spec("l4_topk32_d64"), copy.copy(request.config.option)
    options.all_kernels, options.kernel_seed = False, 0
    first = compile_spec(named)
    before = record_of(first)
    assert why_anew(named, before, options) in ("", "compiled (sample)")
    assert why_anew(named, None, options) == UNRECORDED
    changed(r"\Z", "// A comment more.\n")
    assert why_anew(named, before, options) in ("", "compiled (sample)")
    assert run_nvrtc(render(named), "other.cu", "cubin", first.options)[0] == first.code  # which no comment reaches
    changed(r"\Z", "typedef int OneMore;\n")
    assert why_anew(named, before, options) == UNRECORDED
    after = compiled_anew(named, before)  # the same code of another source
    assert {name for name in before if after[name] != before[name]} == {"key", "code"}
    check(named, after)
    changed(r"__launch_bounds__\(kThreads, \d+\)", "__launch_bounds__(kThreads, 8)")  # few registers for each
    assert why_anew(named, before, options) == UNRECORDED
    with pytest.raises(AssertionError, match=r"l4_topk32_d64 spills: .*spill_bytes.*LDL.*STL"):
        check(named, compiled_anew(named, before))


def test_a_record_of_what_is_not_compiled_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = find_spec("l4_bsr_spmm_b16")
    record = compiled_anew(named, None)
    monkeypatch.setenv("CODEGEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(AssertionError, match=r"kernels\.json does not say what was compiled"):
        compiled_anew(named, {**record, "registers": 1})


@pytest.mark.parametrize("change", ["compiler", "options", "headers"])
def test_what_was_compiled_in_another_way_is_compiled_anew(
    change: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, options = find_spec("l4_dense_wmma"), copy.copy(request.config.option)
    options.all_kernels, options.kernel_seed = False, 0
    record = {"key": code_key(generate(named))}
    assert why_anew(named, record, options) in ("", "compiled (sample)")
    if change == "compiler":
        monkeypatch.setattr(toolchain, "compiler_version", lambda: ("NVRTC 13.0", "nvidia-cuda-nvrtc 13.0.48"))
    elif change == "options":
        monkeypatch.setattr(
            "runtime.compile.compiler.OPTIONS", ("--std=c++17", "--ptxas-options=-v", "--use_fast_math")
        )
    else:
        monkeypatch.setattr(toolchain, "headers_digest", lambda headers: "0" * 64)
    assert why_anew(named, record, options) == UNRECORDED


def test_the_sample_is_another_each_day_and_the_same_for_a_seed(request: pytest.FixtureRequest) -> None:
    options = copy.copy(request.config.option)
    options.all_kernels, options.kernel_seed = False, 20260101
    drawn = sample(20260101)
    assert len(drawn) == SAMPLE and drawn == sample.__wrapped__(20260101) != sample(20260102)
    for named in kernels()[:3] + [named for named in kernels() if named.stem in drawn]:
        why = why_anew(named, {"key": code_key(generate(named))}, options)
        assert why == ("compiled (sample)" if named.stem in drawn else "")


@every_spec
def test_receipts_say_the_same(named: NamedSpec) -> None:
    """The code itself may differ in the order of its instructions (CONTRIBUTING.md)."""
    record = known().get(named.stem)
    try:
        receipt = read_receipt(named, receipt_path(named))
    except MissingReceipt:
        pytest.skip("there is no receipt")
    source = render(named)
    if record is None or (record["code"], record["compiler_package"]) != (
        code_sha256(source),
        receipt.cubin.compiler_package,
    ):
        pytest.skip("receipt and record are of two sources or compilers")
    assert receipt.source.sha256 == source_sha256(source)
    cubin = receipt.cubin.model_dump()
    cubin["instructions"] = {name: count for name, count in cubin["instructions"].items() if count}
    same = cubin.keys() & record.keys()
    assert len(same) == 7
    assert {name: record[name] for name in same} == {name: cubin[name] for name in same}


@pytest.mark.parametrize("name", ["l4_topk32", "l4_dense_wmma", "l4_bsr_spmm_wmma_b16"])
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


COMPILE_BOTH = """
import hashlib, sys
from codegen.library import find_spec
from runtime.compile.compiler import compile_spec
for target in ("cubin", "ptx"):
    made = compile_spec(find_spec(sys.argv[1]), target)
    print(made.was_cached, hashlib.sha256(made.code).hexdigest())
"""


@pytest.mark.parametrize("name", ["h100_bsr_spmm_b128", "l4_topk32_d64"])
def test_two_processes_make_the_same_code_of_a_source(name: str, tmp_path: Path) -> None:
    """Each with a cache, a folder and hash values of its own; the PTX is that of newer devices."""
    told = set()
    for seed in ("1", "2"):
        (place := tmp_path / seed).mkdir()
        own = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(PROJECT), "CODEGEN_CACHE_DIR": str(place / "cache")}
        command = [sys.executable, "-c", COMPILE_BOTH, name]
        done = subprocess.run(
            command, cwd=place, env={**os.environ, **own}, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("False ") == 2, "each compiles"
        told.add(done.stdout)
    assert len(told) == 1
