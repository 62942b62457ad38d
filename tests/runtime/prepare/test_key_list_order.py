"""The order of the chunks of transposed lists of key blocks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from codegen.key_list_cases import CASES, KeyListCase  # noqa: E402
from codegen.plans.backward.key_lists import chunks_of, tiles_of_head  # noqa: E402
from runtime.prepare.key_list_order import order_of_chunks  # noqa: E402
from runtime.prepare.key_lists import transposed_key_lists  # noqa: E402
from runtime.verify import key_lists as verified  # noqa: E402

KEYS, CHUNK = 64, 16


def transposed(inputs: verified.Inputs) -> Any:
    key_tokens, kv_heads, _ = inputs.k.shape
    tiles = tiles_of_head(key_tokens, len(inputs.cu_seqlens_q) - 1, KEYS)
    chunks = chunks_of(kv_heads * inputs.lists[0].numel(), kv_heads * tiles, CHUNK)
    sizes = {"kv_heads": kv_heads, "key_tokens": key_tokens, "tiles": tiles, "chunks": chunks}
    given = inputs.lists, inputs.counts, inputs.cu_seqlens_q, inputs.cu_seqlens_k
    return transposed_key_lists(*given, keys=KEYS, chunk=CHUNK, **sizes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_late_queries_of_a_head_come_first(case: KeyListCase) -> None:
    sizes = {"group": 1, "head_dim": 1, "keys": KEYS}
    inputs = verified.inputs_of(case, **sizes, dtype=torch.float32, device=torch.device("cpu"))
    lists = transposed(inputs)
    order = order_of_chunks(lists, kv_heads=case.kv_heads, chunk=CHUNK)
    assert order.dtype == torch.int32 and order.sort().values.tolist() == list(range(len(lists.chunk_tiles)))
    there = int(lists.chunk_begins[-1])
    places = []
    for number in order[:there].tolist():
        tile = int(lists.chunk_tiles[number])
        first = int(lists.offsets[tile]) + (number - int(lists.chunk_begins[tile])) * CHUNK
        places.append((tile // lists.places.shape[0], -int(lists.entries[first])))
    assert all(one <= other for one, other in pairwise(places))
    assert bool((order[there:] >= there).all())
