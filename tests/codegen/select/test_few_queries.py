"""Which calls of attention with few queries take the kernel for decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from codegen.scored_pattern import pattern_of
from codegen.select.few_queries import LEAST_KEYS, LEAST_OF_SEVERAL, MOST_ROWS, FewQueriesCall, may_decode


def pattern(kind: str, **numbers: Any) -> Any:
    return pattern_of({"kind": kind, **numbers})


CALL = FewQueriesCall("sm_90a", 16, 32, 8, 1, 8192, pattern("causal", align="bottom_right"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"q_len": 8, "batch": 4}, ""),
        ({"pattern": pattern("dense"), "kv_lengths": True}, ""),
        ({"kv_lengths": True}, ""),
        ({"pattern": pattern("dense"), "q_len": 3, "batch": 4, "kv_lengths": True}, ""),
        ({"pattern": pattern("sliding_window", left=LEAST_KEYS - 1, right=0)}, ""),
        ({"pattern": pattern("sink_window", sink=4, left=LEAST_KEYS - 5, right=0)}, ""),
        ({"kv_len": LEAST_KEYS}, ""),
        ({"q_len": 16, "batch": 1}, ""),
        ({"kv_len": 0}, "a tensor is empty"),
        ({"batch": 0}, "a tensor is empty"),
        ({"pattern": pattern("causal", align="top_left")}, "its pattern is causal"),
        ({"pattern": pattern("strided", stride=3, local=1, block=64)}, "its pattern is strided3"),
        ({"score": True}, "it has a score"),
        ({"q_len": 17, "batch": 1}, "it has 68 queries and query heads of a KV head, more than 64"),
        ({"kv_len": LEAST_KEYS - 1}, "a query sees at most 127 keys, fewer than 128"),
        ({"kv_len": LEAST_OF_SEVERAL, "q_len": 8, "batch": 4}, ""),
        ({"kv_len": LEAST_OF_SEVERAL - 1, "q_len": 8, "batch": 4}, "a query sees at most 511 keys, fewer than 512"),
        ({"kv_heads": 32, "q_len": 32, "batch": 1}, ""),
        ({"kv_heads": 32, "q_len": 33, "batch": 1}, "it has 1056 rows, more than 1024"),
        (
            {"pattern": pattern("sliding_window", left=100, right=20)},
            "a query sees at most 121 keys, fewer than 128",
        ),
        ({"q_len": 2, "batch": 4, "kv_lengths": True}, "kv_lengths do not move its diagonal"),
        ({"pattern": pattern("sliding_window", left=900, right=0), "kv_lengths": True}, "kv_lengths do not move"),
        ({"q_len": 2, "batch": 5}, "its tiles fill the GPU"),
    ],
)
def test_the_reason_for_tiles(changes: dict[str, Any], reason: str) -> None:
    found = replace(CALL, **changes).tiles_reason()
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_the_test_that_takes_little_time_leaves_out_no_call() -> None:
    for q_len in (1, 8, 16, 17):
        for kv_len in (LEAST_KEYS - 1, LEAST_KEYS):
            for batch in (1, 4):
                call = replace(CALL, q_len=q_len, kv_len=kv_len, batch=batch)
                assert call.tiles_reason() or may_decode(call.pattern, 32, 8, q_len, kv_len)
    assert not may_decode(CALL.pattern, MOST_ROWS + 1, 1, 1, 8192)
