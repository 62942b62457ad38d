"""Block lists of masks, on a GPU: beside the mask of every pair, in graphs, without waiting, and in attention.

pytest -n 4 tests/gpu/test_block_mask.py
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attention_oracle  # noqa: E402
import known_functions  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from codegen.patterns.block_lists import expression_of  # noqa: E402
from runtime import block_sparse_attention, create_block_mask, load_kernel  # noqa: E402
from runtime.expressions.masks import mask_of  # noqa: E402
from runtime.patterns import (  # noqa: E402
    BlockLists,
    scored_of,
    split_tensors,
)
from runtime.verify import block_mask  # noqa: E402

DOCUMENTS = "doc[batch, q_idx] == doc[batch, kv_idx] and q_idx >= kv_idx"
BLOCKS = [(64, 64), (128, 128), (128, 64), (16, 32)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def made(pattern: BlockLists) -> tuple[Any, ...]:
    return (pattern.kv_num_blocks, pattern.kv_indices, pattern.full_kv_num_blocks, pattern.full_kv_indices)


def check(pattern: BlockLists, batch: int, heads: int, q_len: int, kv_len: int) -> None:
    """Compare lists with those of the mask of every pair."""
    spec = pattern.spec_pattern()
    sizes = {"batch": batch, "heads": heads, "q_len": q_len, "kv_len": kv_len}
    mask = expression_of(spec["mask"], spec.get("aux", {}))
    seen = block_mask.seen_pairs(mask, sizes, pattern.aux or {}, torch.device("cuda"))
    for found, right in zip(made(pattern), block_mask.lists_of(seen, pattern.block), strict=True):
        assert found.dtype == torch.int32
        assert torch.equal(found, right)


def documents(batch: int, length: int, number: int = 5) -> Any:
    return torch.randint(0, number, (batch, length), dtype=torch.int32, device="cuda").sort(-1).values


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", known_functions.MASKS)
def test_functions_as_users_write_them(name: str, block: tuple[int, int]) -> None:
    mask = mask_of(known_functions.MASKS[name], None)
    aux = {key: tensor.cuda() for key, tensor in mask.tensors.items()}
    n, sizes = known_functions.LENGTH, (known_functions.BATCH, known_functions.HEADS)
    check(create_block_mask(mask.text, *sizes, n, n, BLOCK_SIZE=block, aux=aux), *sizes, n, n)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1000, 1000), (77, 900), (900, 333), (1, 500), (2048, 1), (129, 4097)])
@pytest.mark.parametrize("sorted_documents", [True, False])
def test_lengths(q_len: int, kv_len: int, block: tuple[int, int], sorted_documents: bool) -> None:
    q_doc, kv_doc = (torch.randint(0, 3, (3, n), dtype=torch.int32, device="cuda") for n in (q_len, kv_len))
    if sorted_documents:
        q_doc, kv_doc = q_doc.sort(-1).values, kv_doc.sort(-1).values
    text = "q_doc[batch, q_idx] == kv_doc[batch, kv_idx] and q_idx >= kv_idx - 100"
    aux = {"q_doc": q_doc, "kv_doc": kv_doc}
    check(create_block_mask(text, 3, 2, q_len, kv_len, BLOCK_SIZE=block, aux=aux), 3, 2, q_len, kv_len)


@pytest.mark.parametrize("block", BLOCKS)
def test_heads_and_batches(block: tuple[int, int]) -> None:
    reach = torch.tensor([3, 100, 400, 700], device="cuda")
    text = "abs(q_idx - kv_idx) < reach[head] and kv_idx < lengths[batch]"
    lengths = torch.tensor([700, 1, 333], dtype=torch.int32, device="cuda")
    pattern = create_block_mask(text, 3, 4, 700, 700, BLOCK_SIZE=block, aux={"reach": reach, "lengths": lengths})
    assert pattern.kv_num_blocks.shape[:2] == (3, 4)
    check(pattern, 3, 4, 700, 700)


def test_floating_point_numbers_and_what_is_none() -> None:
    time = torch.rand(2, 900, device="cuda").cumsum(-1)
    time[0, 17] = torch.nan
    time[1, 300:] = torch.inf
    near = "abs(time[batch, q_idx] - time[batch, kv_idx]) * 0.5 < 10.0 and time[batch, q_idx] >= time[batch, kv_idx]"
    check(create_block_mask(near, 2, 1, 900, 900, BLOCK_SIZE=(64, 64), aux={"time": time}), 2, 1, 900, 900)


def test_integers_that_wrap() -> None:
    wide = torch.tensor([2**63 - 1, -(2**63), 0, 2**62], device="cuda").repeat(100)[:300]
    for text in ("wide[q_idx] + wide[kv_idx] > 0", "wide[q_idx] * 3 >= kv_idx", "abs(wide[q_idx]) - kv_idx >= 0"):
        check(create_block_mask(text, 1, 1, 300, 300, BLOCK_SIZE=(16, 16), aux={"wide": wide}), 1, 1, 300, 300)


def test_windows_of_an_image() -> None:
    """natten: 64 x 64 positions, 13 x 13 neighbors."""
    near = "abs(min(max({q}, 6), 57) - {k}) <= 6"
    axes = (("q_idx // 64", "kv_idx // 64"), ("q_idx % 64", "kv_idx % 64"))
    text = " and ".join(near.format(q=q, k=k) for q, k in axes)
    check(create_block_mask(text, 1, 1, 4096, 4096), 1, 1, 4096, 4096)


def test_a_mask_that_no_interval_tells() -> None:
    table = torch.rand(300, 1000, device="cuda") > 0.9999
    check(create_block_mask("table[q_idx, kv_idx]", 1, 1, 300, 1000, aux={"table": table}), 1, 1, 300, 1000)


def test_many_blocks() -> None:
    doc = documents(1, 40000, 12)
    pattern = create_block_mask(DOCUMENTS, 1, 1, 40000, 40000, BLOCK_SIZE=(16, 16), aux={"doc": doc})
    blocks = doc[0].view(-1, 16)
    first, last = blocks[:, 0], blocks[:, -1]
    rows, columns = torch.arange(2500, device="cuda")[:, None], torch.arange(2500, device="cuda")[None]
    every = (first[:, None] == last) & (last[:, None] == first) & (first == last) & (rows > columns)
    some = (first[:, None] <= last) & (first <= last[:, None]) & (rows >= columns)
    assert torch.equal(pattern.full_kv_num_blocks[0, 0], every.sum(-1, dtype=torch.int32))
    assert torch.equal(pattern.kv_num_blocks[0, 0], (some & ~every).sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("text", [DOCUMENTS, "q_idx >= kv_idx"])
def test_nothing_waits_for_the_gpu(text: str) -> None:
    aux = {"doc": documents(2, 2000)} if "doc" in text else None
    create_block_mask(text, 2, 2, 2000, 2000, aux=aux)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pattern = create_block_mask(text, 2, 2, 2000, 2000, aux=aux)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(pattern, 2, 2, 2000, 2000)


def test_graphs_read_the_tensors_of_each_replay() -> None:
    doc = documents(2, 2000)
    create_block_mask(DOCUMENTS, 2, 2, 2000, 2000, aux={"doc": doc})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pattern = create_block_mask(DOCUMENTS, 2, 2, 2000, 2000, aux={"doc": doc})
    for number in (1, 3, 40):
        doc.copy_(documents(2, 2000, number))
        graph.replay()
        check(pattern, 2, 2, 2000, 2000)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_attention_with_the_lists(head_dim: int) -> None:
    doc = documents(2, 1000)
    q, k, v = (torch.randn(2, 4, 1000, head_dim, device="cuda").to(torch.bfloat16) for _ in range(3))
    pattern = create_block_mask(lambda b, h, i, j: (doc[b, i] == doc[b, j]) & (i >= j), 2, 4, 1000, 1000)
    own, aux = split_tensors(scored_of(pattern), pattern.index_tensors())
    seen = attention_oracle.times_seen(pattern.spec_json, own, (2, 4, 1000, 1000), None, aux)
    right, _ = attention_oracle.attention(q, k, v, seen)
    torch.testing.assert_close(block_sparse_attention(q, k, v, pattern).float(), right, atol=1.6e-2, rtol=0)


def test_the_kernel_of_sm_89_through_ptx() -> None:
    fields = {"op": "block_mask", "arch": "sm_89", "pattern": find_spec("h100_block_mask").spec.pattern.model_dump()}
    kernel: Any = load_kernel(find_spec(fields), forward_compatible=True)
    for case in block_mask.CASES:
        outcome = block_mask.run_case(kernel, case, torch.device("cuda", torch.cuda.current_device()))
        assert outcome.passed, outcome


def test_a_compiled_function_makes_lists() -> None:
    doc = documents(2, 1000)
    pattern = create_block_mask(DOCUMENTS, 2, 1, 1000, 1000, aux={"doc": doc})
    text = pattern.spec_json

    @torch.compile(fullgraph=True)
    def lists(q: Any, kv: Any) -> Any:
        return torch.ops.sparse_kernel_codegen.create_block_mask(
            [kv, q], pattern=text, batch=2, heads=1, q_len=1000, kv_len=1000, device=torch.device("cuda", 0)
        )

    for found, right in zip(lists(doc, doc), made(pattern), strict=True):
        assert torch.equal(found, right)
