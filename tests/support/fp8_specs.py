"""Specs of FP8 attention: all head sizes, patterns, options and promotion intervals, by wgmma and by mma.sync."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from codegen.attention_cases import Case, fitted
from codegen.spec import AttentionSpec

WINDOWS = (((0, 0), 1), ((99, 0), 0), ((37, 20), 64), ((9000, 9000), 9000))
"""Windows, and keys at the beginning, of kernels that leave them to the call."""
LISTS = {"kind": "topk", "k": 5, "block": {"q": 128, "kv": 128}}
SMALL_LISTS = {"kind": "topk", "k": 5, "block": {"q": 64, "kv": 64}}
KERNELS: dict[str, dict[str, Any]] = {
    "dense": {"pattern": {"kind": "dense"}},
    "dense, steps of 128": {"pattern": {"kind": "dense"}, "tile": {"m": 128, "n": 128}},
    "lists": {"pattern": LISTS},
    "lists of 64": {"pattern": SMALL_LISTS, "scale_rows": {"q": 64, "k": 64}},
    "causal": {"pattern": {"kind": "causal"}},
    "any window": {"pattern": {"kind": "sliding_window"}},
    "any sink window": {"pattern": {"kind": "sink_window"}},
    "two lists": {"pattern": {"kind": "block_lists", "block": {"q": 128, "kv": 128}, "mask": "causal"}},
    "e5m2": {"pattern": {"kind": "dense"}, "dtype": "e5m2", "output": "fp16"},
    "packed heads, a softcap, a sink": {"pattern": {"kind": "dense"}, "pack_gqa": 2, "softcap": 15.0, "sink": True},
    "lengths of batches": {"pattern": {"kind": "dense"}, "kv_lengths": True},
    "d 64": {"pattern": {"kind": "dense"}, "head_dim": 64},
    "d 96": {"pattern": {"kind": "dense"}, "head_dim": 96},
    "d 192": {"pattern": {"kind": "dense"}, "head_dim": 192},
    "d 256": {"pattern": LISTS, "head_dim": 256},
    "never promoted": {"pattern": {"kind": "dense"}, "accumulate_every": 0},
    "never promoted, d 256": {"pattern": {"kind": "dense"}, "accumulate_every": 0, "head_dim": 256},
    "promoted every 3 steps": {"pattern": LISTS, "accumulate_every": 3, "tile": {"m": 128, "n": 128}},
    "one warpgroup": {"pattern": {"kind": "dense"}, "tile": {"m": 64, "n": 256}},
}
TINY_LISTS = {"kind": "topk", "k": 5, "block": {"q": 16, "kv": 16}}
BITS = {"kind": "block_lists", "block": {"q": 64, "kv": 64}, "mask": "bits"}
EXPRESSION = {
    "kind": "block_lists",
    "block": {"q": 64, "kv": 64},
    "mask": "doc[batch, q_idx] < doc[batch, kv_idx] or kv_idx % 3 == head",
    "aux": {"doc": "int32[1, kv_len]"},
}
MMA_SYNC_KERNELS: dict[str, dict[str, Any]] = {
    "dense": {"pattern": {"kind": "dense"}},
    "dense, steps of 128": {"pattern": {"kind": "dense"}, "tile": {"m": 64, "n": 128}, "scale_rows": {"k": 64}},
    "dense, steps of 32": {"pattern": {"kind": "dense"}, "tile": {"m": 64, "n": 32}},
    "lists": {"pattern": LISTS},
    "lists of 64": {"pattern": SMALL_LISTS, "scale_rows": {"q": 64, "k": 64}},
    "lists of 16": {"pattern": TINY_LISTS},
    "causal": {"pattern": {"kind": "causal"}},
    "a window": {"pattern": {"kind": "sliding_window", "left": 99, "right": 0}},
    "any window": {"pattern": {"kind": "sliding_window"}},
    "any sink window": {"pattern": {"kind": "sink_window"}},
    "two lists": {"pattern": {"kind": "block_lists", "block": {"q": 128, "kv": 128}, "mask": "causal"}},
    "bits": {"pattern": BITS, "kv_lengths": True},
    "e5m2": {"pattern": {"kind": "dense"}, "dtype": "e5m2", "output": "fp16"},
    "packed heads, a softcap, a sink": {"pattern": {"kind": "dense"}, "pack_gqa": 2, "softcap": 15.0, "sink": True},
    "a score": {"pattern": {"kind": "causal"}, "score": {"value": "score - abs(q_idx - kv_idx) / 9"}},
    "lengths of batches": {"pattern": {"kind": "dense"}, "kv_lengths": True},
    "d 64": {"pattern": {"kind": "dense"}, "head_dim": 64},
    "d 96": {"pattern": {"kind": "dense"}, "head_dim": 96},
    "d 192": {"pattern": {"kind": "causal"}, "head_dim": 192},
    "d 256": {"pattern": LISTS, "head_dim": 256},
    "d 192, an expression": {"pattern": EXPRESSION, "head_dim": 192},
    "d 256, lists of 16": {"pattern": TINY_LISTS, "head_dim": 256},
    "d 256, Q in shared memory": {
        "pattern": {"kind": "causal"},
        "head_dim": 256,
        "tile": {"m": 64, "n": 64},
        "accumulate_every": 0,
    },
    "never promoted": {"pattern": {"kind": "dense"}, "accumulate_every": 0},
    "more rows": {"pattern": {"kind": "dense"}, "tile": {"m": 128, "n": 64}, "stages": 6},
}


def cases_for(case: Case, spec: AttentionSpec) -> tuple[Case, ...]:
    """Return a case with heads that the kernel packs: of each of WINDOWS where the kernel leaves them to the call."""
    if not spec.pattern.is_general:
        return (fitted(case, spec),)
    return tuple(fitted(replace(case, window=window, sink_keys=sinks), spec) for window, sinks in WINDOWS)
