"""Transposed lists of key blocks: gradients by plain torch over them are those of the definition."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from key_list_walk import walked  # noqa: E402

from codegen.key_list_cases import CASES, SMALL_BLOCKS, KeyListCase, random_cases  # noqa: E402
from codegen.plans.backward.key_lists import chunks_of, tiles_of_head  # noqa: E402
from runtime.prepare import key_lists as prepared  # noqa: E402
from runtime.prepare.key_lists import transposed_key_lists  # noqa: E402
from runtime.verify import key_lists as verified  # noqa: E402

CPU = torch.device("cpu")


def transposed(inputs: verified.Inputs, *, keys: int, chunk: int, pieces: int = 1) -> Any:
    kv_heads, key_tokens = inputs.k.shape[1], inputs.k.shape[0]
    tiles = tiles_of_head(key_tokens, len(inputs.cu_seqlens_q) - 1, keys * pieces)
    chunks = chunks_of(kv_heads * inputs.lists[0].numel(), kv_heads * tiles, chunk)
    sizes = {"kv_heads": kv_heads, "key_tokens": key_tokens, "tiles": tiles, "chunks": chunks, "pieces": pieces}
    given = inputs.lists, inputs.counts, inputs.cu_seqlens_q, inputs.cu_seqlens_k
    return transposed_key_lists(*given, keys=keys, chunk=chunk, **sizes)


@pytest.mark.parametrize("case", [*CASES, *random_cases()[:12]], ids=lambda case: case.name)
def test_gradients_over_them_are_those_of_the_definition(case: KeyListCase) -> None:
    keys, chunk = 64, 48
    inputs = verified.inputs_of(case, group=2, head_dim=16, keys=keys, dtype=torch.float64, device=CPU)
    right = verified.oracle(case, inputs, keys)
    found = walked(inputs, right, transposed(inputs, keys=keys, chunk=chunk), chunk=chunk, scale=case.scale)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, right.gradients[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keys", [16, 32])
@pytest.mark.parametrize("case", [*CASES, *SMALL_BLOCKS, *random_cases()[:12]], ids=lambda case: case.name)
def test_so_are_those_of_tiles_of_several_blocks(case: KeyListCase, keys: int) -> None:
    chunk = 48
    inputs = verified.inputs_of(case, group=2, head_dim=16, keys=keys, dtype=torch.float64, device=CPU)
    right = verified.oracle(case, inputs, keys)
    lists = transposed(inputs, keys=keys, chunk=chunk, pieces=64 // keys)
    found = walked(inputs, right, lists, chunk=chunk, scale=case.scale, piece_keys=keys)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, right.gradients[name], atol=1e-5, rtol=1e-5)


def test_lists_of_tiles_have_each_block_as_often_as_it_is_listed() -> None:
    absent = prepared.ABSENT
    lists = torch.tensor([[9, 1, 0, absent, 1, 4, 1, 2, 0], [absent] * 9, [3] * 9], dtype=torch.int32)
    tiles, pieces = prepared.tiles_of_lists(lists, 4)
    found = [sorted(zip(*(of.tolist() for of in row), strict=True)) for row in zip(tiles, pieces, strict=True)]
    there = [[entry for entry in row if entry[1]] for row in found]
    assert there == [[(0, 0b0010), (0, 0b0011), (0, 0b0111), (1, 0b0001), (2, 0b0010)], [], [(0, 0b1000)] * 9]


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_lists_of_tiles_hold_random_lists(pieces: int) -> None:
    lists = torch.randint(0, 40, (3, 50, 30), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    lists = torch.where(lists > 30, prepared.ABSENT, lists)
    tiles, of_tiles = prepared.tiles_of_lists(lists.transpose(0, 1).contiguous().transpose(0, 1), pieces)
    bits = (of_tiles[..., None] >> torch.arange(pieces)) & 1
    blocks = tiles[..., None].long() * pieces + torch.arange(pieces)
    counts, right = torch.zeros(2, 3, 50, 64).long()
    counts.scatter_add_(2, torch.where(bits > 0, blocks, 0).flatten(2), bits.flatten(2).long())
    right.scatter_add_(2, torch.where(lists < 31, lists, 0).long(), (lists < 31).long())
    assert torch.equal(counts, right)
    assert bool((of_tiles.count_nonzero(2) <= (lists < 31).sum(2)).all())


def test_the_oracle_has_the_gradients_of_autograd() -> None:
    case, keys = KeyListCase("small", (9, 0, 30), (9, 5, 44), entries=3, counted=True, lse_gradient=True), 8
    inputs = verified.inputs_of(case, group=2, head_dim=8, keys=keys, dtype=torch.float64, device=CPU)
    q, k, v = (t.clone().requires_grad_() for t in inputs[:3])
    right = verified.oracle(case, inputs, keys)
    q_at = k_at = 0
    assert inputs.dlse is not None
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        rows, columns = slice(q_at, q_at + q_len), slice(k_at, k_at + kv_len)
        q_at, k_at = rows.stop, columns.stop
        if not q_len:
            continue
        weight = verified.counts_of(inputs, rows, kv_len, keys)[:, None]
        logits = q[rows].unflatten(1, (2, 2)).permute(1, 2, 0, 3) @ k[columns].transpose(0, 1)[:, None].mT / 8**0.5
        sees = weight.sum(-1) > 0
        logits = torch.where(sees[..., None], logits + weight.log(), 0.0)
        out = sees[..., None] * logits.softmax(-1) @ v[columns].transpose(0, 1)[:, None]
        lse = torch.where(sees, logits.logsumexp(-1), 0.0).flatten(0, 1)
        loss = (out.permute(2, 0, 1, 3).flatten(1, 2) * inputs.dout[rows]).sum() + (lse * inputs.dlse[:, rows]).sum()
        loss.backward()
    for name, operand in {"dq": q, "dk": k, "dv": v}.items():
        torch.testing.assert_close(right.gradients[name], operand.grad, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("pieces", [1, 4])
def test_bounds_may_hold_anything(pieces: int) -> None:
    case, keys = CASES[1], 64
    entry_keys = keys // pieces
    inputs = verified.inputs_of(case, group=2, head_dim=16, keys=entry_keys, dtype=torch.float64, device=CPU)
    tokens, key_tokens = inputs.q.shape[0], inputs.k.shape[0]
    for bounds in ([-5, 3, 2, 900, 7], [2**31 - 1, -(2**31), 5, 5, 5], [0, 0, 0, 0, 1000], [9, 8, 7, 6, 5]):
        odd = torch.tensor(bounds, dtype=torch.int32)
        for changes in ({"cu_seqlens_k": odd}, {"cu_seqlens_q": odd}, {"cu_seqlens_q": odd, "cu_seqlens_k": odd}):
            found = transposed(inputs._replace(**changes), keys=entry_keys, chunk=16, pieces=pieces)
            first, _, number, _ = found.places.unbind(1)
            assert bool((number >= 0).all()) and bool((number <= keys).all())
            assert bool(((first >= 0) & (first + number <= key_tokens))[number > 0].all())
            seen = found.entries[: int(found.offsets[-1])]
            assert bool(((seen >= 0) & (seen < tokens)).all())
            assert bool((found.offsets[1:] >= found.offsets[:-1]).all())
            used = found.places[:, 2].repeat(2)[(found.offsets[1:] > found.offsets[:-1])]
            assert bool((used > 0).all())


def test_many_tiles_are_sorted_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = verified.inputs_of(CASES[1], group=2, head_dim=16, keys=64, dtype=torch.float64, device=CPU)
    few = transposed(inputs, keys=64, chunk=16)
    monkeypatch.setattr(prepared, "MOST_SHORT", 0)
    assert few.pieces is None and all(map(torch.equal, few[:-1], transposed(inputs, keys=64, chunk=16)[:-1]))
