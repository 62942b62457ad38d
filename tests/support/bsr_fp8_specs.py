"""Specs of FP8 products of BSR matrices by mma.sync: blocks, types, steps and sums."""

from __future__ import annotations

from typing import Any

SPMM = {"op": "bsr_spmm", "arch": "sm_89", "dtype": "e4m3", "b_layout": "column_major"}
SDDMM = {"op": "bsr_sddmm", "arch": "sm_89", "dtype": "e4m3"}
PRODUCTS: dict[str, dict[str, Any]] = {
    "128 x 128": SPMM | {"block": {"rows": 128, "cols": 128}},
    "64 x 64, fp16": SPMM | {"block": {"rows": 64, "cols": 64}, "output": "fp16"},
    "64 x 64, fp32, steps of 64": SPMM | {"block": {"rows": 64, "cols": 64}, "output": "fp32", "tile": {"k": 64}},
    "32 x 32, fp32": SPMM | {"block": {"rows": 32, "cols": 32}, "output": "fp32"},
    "32 x 128, e5m2": SPMM | {"block": {"rows": 32, "cols": 128}, "dtype": "e5m2", "tile": {"n": 128, "k": 128}},
    "128 x 128, scales of blocks": SPMM | {"block": {"rows": 128, "cols": 128}, "scales": "block"},
    "32 x 128, scales of blocks, steps of 128": SPMM
    | {"block": {"rows": 32, "cols": 128}, "scales": "block", "tile": {"k": 128}, "output": "fp32", "stages": 2},
    "never promoted": SPMM | {"block": {"rows": 64, "cols": 64}, "accumulate_every": 0, "output": "fp32"},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "128": SDDMM | {"block": {"rows": 128, "cols": 128}},
    "64, fp32, e5m2": SDDMM | {"block": {"rows": 64, "cols": 64}, "output": "fp32", "dtype": "e5m2"},
    "32, fp16, steps of 128": SDDMM | {"block": {"rows": 32, "cols": 32}, "output": "fp16", "tile": {"k": 128}},
    "128, scales of rows": SDDMM | {"block": {"rows": 128, "cols": 128}, "scales": "row"},
    "32, scales of rows, steps of 128, e5m2": SDDMM
    | {
        "block": {"rows": 32, "cols": 32},
        "scales": "row",
        "tile": {"k": 128},
        "dtype": "e5m2",
        "output": "fp32",
        "stages": 2,
    },
    "never promoted": SDDMM | {"block": {"rows": 64, "cols": 64}, "accumulate_every": 0},
}
