"""Functions for models of SGLang that select keys, without SGLang: results by the definition, and what is refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import paged_oracle  # noqa: E402
import sglang_selections as cases  # noqa: E402
from scripts import imported  # noqa: E402

import sparse_kernel_codegen.integrations.sglang as public  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.integrations.sglang import selections  # noqa: E402
from runtime.ops import paged  # noqa: E402

E4M3 = torch.float8_e4m3fn
OF_BLOCKS = ("flash_decode_with_gqa_share_sparse", "flash_prefill_with_gqa_share_sparse")
OF_TOKENS = {
    "prompts": selections.sparse_gqa_fwd_interface_triton,
    "packed": selections.sparse_gqa_fwd_interface_triton_ck,
    "pool": selections.sparse_gqa_paged_prefill_triton,
}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of ``paged_attention``, which are computed by the definition."""
    torch.manual_seed(0)
    found: list[dict[str, Any]] = []

    def attend(q: Any, k_cache: Any, v_cache: Any, pattern: Any, **given: Any) -> Any:
        found.append({"q": q, "k_cache": k_cache, "pattern": pattern, **given})
        return paged_oracle.attend(q, k_cache, v_cache, pattern, **given)

    monkeypatch.setattr(selections, "paged_attention", attend)
    monkeypatch.delitem(sys.modules, selections.SETTINGS, raising=False)
    return found


def close(out: Any, case: cases.Case) -> None:
    assert out.dtype == case.given["q"].dtype
    torch.testing.assert_close(out.float(), case.right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("page", "block"), [(1, 128), (16, 64), (128, 128)])
def test_rows_see_their_blocks(calls: Any, page: int, block: int) -> None:
    case = cases.decode_case("cpu", page, block)
    close(selections.flash_decode_with_gqa_share_sparse(**case.given), case)
    assert calls[0]["k_cache"].shape[1] == page and calls[0]["pattern"].keys == block
    assert calls[0]["block_table"].shape == (4, 1024 // page) and calls[0]["cu_seqlens_q"] is None


def test_factors_are_those_of_an_e4m3_cache() -> None:
    case = cases.decode_case("cpu", 128, dtype=E4M3, q_scale=0.5, k_scale=0.75, v_scale=2.0)
    close(selections.flash_decode_with_gqa_share_sparse(**case.given), case)


@pytest.mark.parametrize("block_q", [1, 16, 64])
@pytest.mark.parametrize("given", [False, True])
def test_chunks_see_the_blocks_of_their_query_blocks(block_q: int, given: bool) -> None:
    case = cases.prefill_case("cpu", block_q)
    more = {}
    if given:  # SGLang computes them once for all layers
        counts = (case.given["cu_seqlens"].diff() + block_q - 1) // block_q
        more = {"cu_seqblocks_q": torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()}
    close(selections.flash_prefill_with_gqa_share_sparse(**case.given, **more), case)


def test_pages_are_those_of_the_server(calls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for size, page in ((128, 128), (None, 1)):
        context = SimpleNamespace(get_schedule=lambda size=size: SimpleNamespace(page_size=size))
        monkeypatch.setitem(sys.modules, selections.SETTINGS, context)
        case = cases.prefill_case("cpu", 16, page=page)
        close(selections.flash_prefill_with_gqa_share_sparse(**case.given), case)
        decode = cases.decode_case("cpu", page)
        close(selections.flash_decode_with_gqa_share_sparse(**{**decode.given, "page_size": 0}), decode)
        assert [call["k_cache"].shape[1] for call in calls[-2:]] == [page, page]


@pytest.mark.parametrize("kind", OF_TOKENS)
@pytest.mark.parametrize("by_head", [False, True])
def test_queries_see_their_tokens(kind: str, by_head: bool) -> None:
    case = cases.token_case("cpu", kind)
    if by_head and kind != "pool":
        case.given["indices"] = case.given["indices"][:, None].repeat(1, cases.KV_HEADS, 1)
    close(OF_TOKENS[kind](**case.given), case)


def test_a_pool_may_be_e4m3_and_lists_longer_than_queries() -> None:
    case = cases.token_case("cpu", "pool", E4M3)
    case.given["indices"] = torch.nn.functional.pad(case.given["indices"], (0, 0, 0, 5), value=-1)
    close(selections.sparse_gqa_paged_prefill_triton(**case.given), case)


def test_calls_reach_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all checks of ``paged_attention``, and a driver that takes launches and runs none."""
    monkeypatch.setattr(selections, "paged_attention", paged.paged_attention)
    with imported("pretended") as module, module.pretended():
        for dtype in (torch.bfloat16, E4M3):
            selections.flash_decode_with_gqa_share_sparse(**cases.decode_case("cpu", 128, dtype=dtype).given)
            selections.sparse_gqa_paged_prefill_triton(**cases.token_case("cpu", "pool", dtype).given)
        selections.flash_prefill_with_gqa_share_sparse(**cases.prefill_case("cpu", 16).given)
        for kind in ("prompts", "packed"):
            OF_TOKENS[kind](**cases.token_case("cpu", kind).given)


def test_no_queries_are_no_call(calls: Any) -> None:
    for kind, function in OF_TOKENS.items():
        case = cases.token_case("cpu", kind)
        given = {**case.given, "q": case.given["q"][:0], "indices": case.given["indices"][:0]}
        assert function(**given).shape == (0, cases.HEADS, cases.D)
    assert not calls


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sink": torch.zeros(8, 128)}, "sink: is given, which is not supported: import SGLang's own function"),
        ({"hisparse_slots": torch.zeros(1)}, "hisparse_slots: is given"),
        ({"page_size": 24}, "page_size: is 24, expected a power of two"),
        ({"block_size": 48}, "block: is 48"),
        ({"k_cache": torch.zeros(4, 2, 16, 64)}, r"k_cache: has shape .*expected \(slots, kv_heads, head_dim\)"),
    ],
)
def test_what_is_not_served_is_refused(calls: Any, changes: dict[str, Any], message: str) -> None:
    case = cases.decode_case("cpu", 16)
    with pytest.raises(ArgumentError, match=message):
        selections.flash_decode_with_gqa_share_sparse(**{**case.given, **changes})
    chunk = cases.prefill_case("cpu", 1)
    with pytest.raises(ArgumentError, match="loc_mapping: is given"):
        selections.flash_prefill_with_gqa_share_sparse(**chunk.given, loc_mapping=torch.zeros(1))
    assert not calls


def test_the_functions_are_public() -> None:
    assert set(public.__all__) == {*(each.__name__ for each in OF_TOKENS.values()), *OF_BLOCKS, "register_sglang"}
