"""Lists of blocks in packed sequences, with kernels that compute by the definition."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import packed_kernel  # noqa: E402

from runtime import explain_varlen_attention, varlen_attention  # noqa: E402
from runtime.convert import from_sequence_lists, packed_list_rows, to_key_lists  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.ops import varlen_gradients  # noqa: E402
from runtime.patterns import BlockLists, TopK  # noqa: E402

LENGTHS = (300, 0, 1, 129)
BOUNDS = (0, *itertools.accumulate(LENGTHS))
ROWS = BOUNDS[-1] // 128 + len(LENGTHS)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> packed_kernel.Loaded:
    return packed_kernel.install(monkeypatch)


def operands(heads: int = 4, kv_heads: int = 2) -> dict[str, Any]:
    torch.manual_seed(0)
    q = torch.randn(BOUNDS[-1], heads, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, BOUNDS[-1], kv_heads, 64, dtype=torch.bfloat16)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": torch.tensor(BOUNDS, dtype=torch.int32)}


def causal_lists(heads: int) -> BlockLists:
    """All key blocks up to a query block's own."""
    _, block = packed_list_rows(torch.tensor(BOUNDS, dtype=torch.int32), BOUNDS[-1])
    counts = (block + 1).expand(1, heads, -1).contiguous()
    indices = torch.arange(3, dtype=torch.int32).expand(1, heads, ROWS, -1).contiguous()
    return BlockLists(counts, indices, mask="causal")


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_lists_of_all_blocks_are_causal_attention(heads: int) -> None:
    given = operands()
    q, k, v = (given[name].requires_grad_() for name in ("q", "k", "v"))
    out = varlen_attention(**given, pattern=causal_lists(heads), validate=True)
    out.float().square().sum().backward()
    found = [t.grad.clone() for t in (q, k, v)]
    for t in (q, k, v):
        t.grad = None
    expected = torch.zeros_like(out)
    for begin, end in itertools.pairwise(BOUNDS):
        if end > begin:
            part = [t[begin:end].transpose(0, 1)[None] for t in (q, k, v)]
            of_one = torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)
            expected[begin:end] = of_one[0].transpose(0, 1)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    expected.float().square().sum().backward()
    for name, one, t in zip("qkv", found, (q, k, v), strict=True):
        torch.testing.assert_close(one, t.grad, atol=5e-2, rtol=5e-2, msg=lambda text, name=name: f"{name}: {text}")


def test_topk_ends_with_minus_one() -> None:
    given = operands()
    indices = torch.full((1, 1, ROWS, 2), -1, dtype=torch.int32)
    indices[0, 0, :, 0] = 0
    out = varlen_attention(**given, pattern=TopK(indices), validate=True)
    for begin, end in itertools.pairwise(BOUNDS):
        if end > begin:
            keys = slice(begin, min(end, begin + 128))
            part = [
                given[name][rows].transpose(0, 1)[None]
                for name, rows in (("q", slice(begin, end)), ("k", keys), ("v", keys))
            ]
            alone = torch.nn.functional.scaled_dot_product_attention(*part, enable_gqa=True)
            torch.testing.assert_close(out[begin:end].transpose(0, 1)[None], alone, atol=2e-2, rtol=2e-2)


def test_operators_take_lists() -> None:
    given, pattern = operands(), causal_lists(1)

    def attend(q: Any, k: Any, v: Any, bounds: Any, lists: Any) -> Any:
        return varlen_attention(q, k, v, lists, cu_seqlens_q=bounds)

    arguments = (given["q"], given["k"], given["v"], given["cu_seqlens_q"], pattern)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), attend(*arguments))
    q = given["q"].requires_grad_()
    of_compiled = torch.autograd.grad(compiled(*arguments).float().sum(), q)[0]
    torch.testing.assert_close(of_compiled, torch.autograd.grad(attend(*arguments).float().sum(), q)[0])


def test_rows_of_lists() -> None:
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    sequence, block = packed_list_rows(bounds, BOUNDS[-1])
    assert sequence.tolist() == [0, 0, 0, -1, 2, 3, 3] and block.tolist() == [0, 1, 2, -1, 0, 0, 1]
    assert sequence.shape == (ROWS,)
    shifted, _ = packed_list_rows(bounds + 200, BOUNDS[-1] + 200)
    assert [number for number in shifted.tolist() if number >= 0] == [0, 0, 0, 2, 3, 3]


def test_lists_of_sequences_are_packed() -> None:
    def alone(length: int) -> BlockLists:
        rows = -(-length // 128)
        counts = torch.arange(1, rows + 1, dtype=torch.int32).view(1, 1, rows)
        return BlockLists(counts, torch.arange(rows, dtype=torch.int32).expand(1, 1, rows, rows), mask="causal")

    given, packed = operands(), from_sequence_lists([alone(length) for length in LENGTHS], LENGTHS)
    assert packed.kv_indices.shape == (1, 1, ROWS, 3)
    found = varlen_attention(**given, pattern=packed, validate=True)
    assert torch.equal(found, varlen_attention(**given, pattern=causal_lists(1)))
    chosen = [TopK(torch.full((1, 1, -(-length // 128), 1), 0, dtype=torch.int32)) for length in LENGTHS]
    assert from_sequence_lists(chosen, LENGTHS).kv_num_blocks.tolist() == [[[1, 1, 1, 0, 1, 1, 1]]]
    with pytest.raises(ArgumentError, match="lists"):
        from_sequence_lists(chosen[1:], LENGTHS)


def wrong(**fields: Any) -> tuple[str, dict[str, Any]]:
    pattern = causal_lists(1)
    count, indices = pattern.kv_num_blocks, pattern.kv_indices
    return {
        "rows": ("kv_num_blocks", {"pattern": BlockLists(count[:, :, 1:], indices)}),
        "heads": ("kv_num_blocks", {"pattern": BlockLists(count.expand(1, 3, -1), indices)}),
        "type": ("kv_indices", {"pattern": BlockLists(count, indices.long())}),
        "block": ("block", {"pattern": BlockLists(count, indices, block=(128, 32))}),
        "mask": ("mask", {"pattern": BlockLists(count, indices, mask="q_idx >= kv_idx")}),
        "value": ("kv_indices", {"pattern": BlockLists(count, indices + 1), "validate": True}),
        "count": ("kv_num_blocks", {"pattern": BlockLists(count + 9, indices), "validate": True}),
    }[fields["what"]]


@pytest.mark.parametrize("what", ["rows", "heads", "type", "block", "mask", "value", "count"])
def test_wrong_lists_are_refused_by_name(what: str) -> None:
    name, changed = wrong(what=what)
    with pytest.raises(ArgumentError, match=name):
        varlen_attention(**operands(), **changed)


@pytest.mark.parametrize("heads", [2, 3])
def test_lists_of_other_heads_are_refused_after_a_call_of_the_kind(heads: int) -> None:
    """A route that is known makes no other lists of wrong ones."""
    given = operands(heads=4, kv_heads=1)
    for lists in (1, heads):
        pattern = TopK(torch.zeros(1, lists, ROWS, 1, dtype=torch.int32))
        if lists != 1:
            with pytest.raises(ArgumentError, match="kv_indices"):
                varlen_attention(**given, pattern=pattern)
        else:
            varlen_attention(**given, pattern=pattern)


def test_gradients_of_lists_have_two_kernels_for_long_sequences_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_gradients, "LEAST_OF_ONE_KERNEL", 0)
    test_lists_of_all_blocks_are_causal_attention(2)


def test_explain_names_the_kernels() -> None:
    found = explain_varlen_attention(**operands(), pattern=causal_lists(1), arch="sm_90a", gradients=True)
    assert {what: named.stem for what, named in found.kernels.items()} == {
        "O": "h100_varlen_lists128_causal_d64_bf16",
        "dQ alone": "h100_varlen_lists128_causal_d64_dq_bf16",
        "dK and dV alone": "h100_varlen_lists128_causal_d64_dkdv_bf16",
    }


@pytest.mark.parametrize("full_heads", [1, 2])
@pytest.mark.parametrize("shift", [0, 200])
@pytest.mark.parametrize("block", [(64, 128), (128, 64)])
def test_each_query_gets_the_list_of_its_block(block: tuple[int, int], shift: int, full_heads: int) -> None:
    torch.manual_seed(1)
    bounds, tokens = torch.tensor(BOUNDS, dtype=torch.int32) + shift, BOUNDS[-1] + shift
    sequence, number = packed_list_rows(bounds, tokens, block[0])
    rows = sequence.shape[0]
    counts, full = torch.randint(0, 4, (2, 1, 2, rows), dtype=torch.int32)
    entries, full_entries = torch.randint(-2, 7, (2, 1, 2, rows, 3), dtype=torch.int32)
    given = full[:, :full_heads], full_entries[:, :full_heads]
    pattern = BlockLists(counts, entries, *given, block=block, mask="causal")
    full, full_entries = (each.expand(1, 2, *each.shape[2:]) for each in given)
    found = to_key_lists(pattern, cu_seqlens_q=bounds, tokens=tokens)
    assert (found.keys, found.counts, found.indices.shape) == (block[1], None, (2, tokens, 6))
    for row, (which, of_sequence) in enumerate(zip(sequence.tolist(), number.tolist(), strict=True)):
        begin = BOUNDS[which] + shift + of_sequence * block[0]
        for token in range(begin, min(begin + block[0], BOUNDS[which + 1] + shift)) if which >= 0 else ():
            for head in range(2):
                listed = [
                    each
                    for number_of, lists in ((counts, entries), (full, full_entries))
                    for each in lists[0, head, row, : number_of[0, head, row]].tolist()
                ]
                kept = [entry for entry in found.indices[head, token].tolist() if entry >= 0]
                assert kept == [entry for entry in listed if entry >= 0]


def test_what_has_no_list_for_each_query_is_refused() -> None:
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    whole = causal_lists(1)
    counts, entries = whole.kv_num_blocks, whole.kv_indices
    for pattern, message in (
        (TopK(entries), "is TopK, expected BlockLists with mask 'causal'"),
        (BlockLists(counts, entries), "is BlockLists with mask 'none'"),
        (
            BlockLists(counts.expand(2, -1, -1), entries.expand(2, -1, -1, -1), mask="causal"),
            rf"shape \(2, 1, {ROWS}, 3\)",
        ),
        (
            BlockLists(counts[:, :, 1:], entries[:, :, 1:], mask="causal"),
            rf"expected \(1, 1 or 1, {ROWS}, entries\)",
        ),
    ):
        with pytest.raises(ArgumentError, match=message):
            to_key_lists(pattern, cu_seqlens_q=bounds, tokens=BOUNDS[-1])
