"""Functions for models of SGLang that select keys, on a GPU beside the definition."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sglang_selections as cases  # noqa: E402

from runtime.integrations.sglang import selections  # noqa: E402

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
OF_TOKENS = {
    "prompts": selections.sparse_gqa_fwd_interface_triton,
    "packed": selections.sparse_gqa_fwd_interface_triton_ck,
    "pool": selections.sparse_gqa_paged_prefill_triton,
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def close(out: Any, case: cases.Case) -> None:
    torch.testing.assert_close(out.float(), case.right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(("page", "block"), [(1, 128), (16, 64), (128, 128)])
def test_rows_see_their_blocks(page: int, block: int, dtype: Any) -> None:
    scales = {"k_scale": 0.75, "v_scale": 2.0} if dtype is E4M3 else {}
    case = cases.decode_case("cuda", page, block, dtype, **scales)
    close(selections.flash_decode_with_gqa_share_sparse(**case.given), case)


@pytest.mark.parametrize("block_q", [1, 16, 64])
def test_chunks_see_the_blocks_of_their_query_blocks(block_q: int) -> None:
    case = cases.prefill_case("cuda", block_q)
    close(selections.flash_prefill_with_gqa_share_sparse(**case.given), case)


@pytest.mark.parametrize("kind", OF_TOKENS)
def test_queries_see_their_tokens(kind: str) -> None:
    case = cases.token_case("cuda", kind)
    close(OF_TOKENS[kind](**case.given), case)


def test_a_graph_serves_other_lists() -> None:
    """The table of pages is computed in the graph, from SGLang's own tensors."""
    case, other = (cases.decode_case("cuda", 128) for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        selections.flash_decode_with_gqa_share_sparse(**case.given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = selections.flash_decode_with_gqa_share_sparse(**case.given)
    for each in (case, other):
        for name in ("q", "k_cache", "v_cache", "req_to_token", "seq_lens", "slot_ids", "topk_idx"):
            case.given[name].copy_(each.given[name])
        graph.replay()
        close(out, each)
