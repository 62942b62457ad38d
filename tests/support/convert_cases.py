"""Small inputs of every converter, beside the pairs that they must let see each other, worked out pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from runtime import convert

Q_LEN, KV_LEN = 136, 200
BATCH, HEADS = 2, 2
THIRDS = torch.tensor([0.0, 0.5, 1.0]).repeat_interleave(KV_LEN // 3 + 1)[:KV_LEN]
"""Shares of visible keys: none of the first ones, all of the last ones."""


@dataclass(frozen=True)
class Case:
    """One converter with one set of inputs.

    Attributes:
        name: unique; also the seed.
        inputs: makes the tensors, on the CPU.
        pattern: what makes a pattern of them, on any device.
        sees: whether a query sees a key: of the tensors, batch, head of K and V, query and key.
        heads: query heads.
        kv_heads: heads of K and V: the query heads of each see the same.
        lengths: queries and keys of a head.
    """

    name: str
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    pattern: Callable[..., Any]
    sees: Callable[..., bool]
    heads: int = HEADS
    kv_heads: int = HEADS
    lengths: tuple[int, int] = (Q_LEN, KV_LEN)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the inputs."""
        torch.manual_seed(sum(map(ord, self.name)))
        return self.inputs()

    def expected(self) -> torch.Tensor:
        """Return the pairs: bool (batch, heads, q_len, kv_len)."""
        tensors = [tensor.tolist() for tensor in self.tensors()]
        q_len, kv_len = self.lengths
        return torch.tensor(
            [
                [
                    [[bool(self.sees(*tensors, b, h, q, k)) for k in range(kv_len)] for q in range(q_len)]
                    for h in range(self.kv_heads)
                ]
                for b in range(BATCH)
            ]
        ).repeat_interleave(self.heads // self.kv_heads, 1)


def lists(*shape: int, blocks: int) -> torch.Tensor:
    """Return lists of different blocks in random order: the last dimension of a shape is their length."""
    return torch.rand(*shape[:-1], blocks).argsort(-1)[..., : shape[-1]].int()


def same_document(documents: torch.Tensor) -> Callable[..., Any]:
    """Return FlexAttention's mask of queries that see the keys of their document up to their position."""
    return lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (k <= q + (KV_LEN - Q_LEN))


def flex(documents: torch.Tensor, *, block: Any, **more: Any) -> Any:
    """Return what becomes of a BlockMask of documents."""
    device = documents.device
    mask = create_block_mask(same_document(documents), BATCH, 1, Q_LEN, KV_LEN, device=device, BLOCK_SIZE=block)
    return convert.from_block_mask(mask, **more)


def flex_lists(counts: torch.Tensor, indices: torch.Tensor) -> Any:
    """Return what becomes of a BlockMask without a mask_mod."""
    return convert.from_block_mask(
        BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(64, 192), seq_lengths=(Q_LEN, KV_LEN))
    )


def in_list(counts: Any, indices: Any, b: int, h: int, q: int, k: int, block: tuple[int, int]) -> bool:
    row = q // block[0]
    return k // block[1] in indices[b][h][row][: counts[b][h][row]]


def random_documents() -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 4, (BATCH, KV_LEN)).sort(1).values,)


def q2k_inputs(*sizes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return lists(BATCH, HEADS, 3, 3, blocks=4), torch.randint(0, 4, (BATCH, HEADS, 3)).int(), *sizes


def token_inputs(heads: int) -> tuple[torch.Tensor, ...]:
    indices = lists(heads, Q_LEN, 3, blocks=4)
    return (torch.where(torch.rand(heads, Q_LEN, 3) < 0.2, -1, indices),)


def csr_inputs() -> tuple[torch.Tensor, ...]:
    counts = torch.tensor([2, 0, 4])
    rows = [lists(int(count), blocks=4) for count in counts]
    return torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).int(), torch.cat(rows)


def document_of(boundaries: list[int], token: int) -> int:
    """Return the number of a token's document; -1 and the last number are outside of all."""
    return sum(boundary <= token for boundary in boundaries) - 1


def in_document(boundaries: list[int], b: int, h: int, q: int, k: int, causal: bool) -> bool:
    of_query, of_key = document_of(boundaries, q), document_of(boundaries, k)
    return of_query == of_key and 0 <= of_query < len(boundaries) - 1 and (k <= q or not causal)


def ascending_lists(*shape: int, blocks: int) -> torch.Tensor:
    """Return ascending lists of different blocks, some of them shorter, with -1 at their ends."""
    indices = lists(*shape, blocks=blocks)
    left_out = torch.rand(indices.shape) < 0.3
    ordered = torch.where(left_out, blocks, indices).sort(-1).values
    return torch.where(ordered == blocks, -1, ordered).int()


def causal_case(name: str, block: tuple[int, int], width: int) -> Case:
    rows, columns = -(-Q_LEN // block[0]), -(-KV_LEN // block[1])
    return Case(
        name,
        lambda: (ascending_lists(BATCH, HEADS, rows, width, blocks=columns),),
        partial(convert.from_causal_lists, q_len=Q_LEN, kv_len=KV_LEN, block=block),
        lambda indices, b, h, q, k: k // block[1] in indices[b][h][q // block[0]] and k <= q + KV_LEN - Q_LEN,
    )


def boundaries() -> tuple[torch.Tensor, ...]:
    return (torch.tensor([3, 40, 40, 128, 180], dtype=torch.int32),)


def token_case(name: str, block: tuple[int, int], heads: int, kv_heads: int, causal: bool, **more: Any) -> Case:
    def sees(indices: Any, b: int, h: int, q: int, k: int) -> bool:
        return k // 64 in indices[h][q] and (not causal or k <= q + (KV_LEN - Q_LEN))

    return Case(
        name,
        lambda: token_inputs(kv_heads),
        partial(convert.from_token_lists, block=block, heads=heads, causal=causal, kv_len=KV_LEN, **more),
        sees,
        heads=heads,
        kv_heads=kv_heads,
    )


CASES = (
    Case(
        "flex_causal_documents",
        random_documents,
        partial(flex, block=128),
        lambda d, b, h, q, k: d[b][q] == d[b][k] and k <= q + KV_LEN - Q_LEN,
    ),
    Case(
        "flex_cut_and_merged",
        random_documents,
        partial(flex, block=(256, 50), max_partial_blocks=2),
        lambda d, b, h, q, k: d[b][q] == d[b][k] and k <= q + KV_LEN - Q_LEN,
    ),
    Case(
        "flex_target",
        random_documents,
        partial(flex, block=(32, 32), target=(128, 64)),
        lambda d, b, h, q, k: d[b][q] == d[b][k] and k <= q + KV_LEN - Q_LEN,
    ),
    Case(
        "flex_lists",
        lambda: (torch.randint(0, 3, (BATCH, HEADS, 3)).int(), lists(BATCH, HEADS, 3, 2, blocks=2)),
        flex_lists,
        partial(in_list, block=(64, 192)),
    ),
    Case(
        "q2k",
        q2k_inputs,
        lambda index, nums: convert.from_q2k(index, nums, block=(64, 64)),
        lambda index, nums, b, h, q, k: in_list(nums, index, b, h, q, k, (64, 64)),
    ),
    Case(
        "q2k_block_sizes",
        lambda: q2k_inputs(torch.tensor([[64, 0, 33, 8], [1, 64, 64, 8]])),
        lambda index, nums, sizes: convert.from_q2k(index, nums, sizes, block=(64, 64)),
        lambda index, nums, sizes, b, h, q, k: (
            in_list(nums, index, b, h, q, k, (64, 64)) and k % 64 < sizes[b][k // 64]
        ),
    ),
    token_case("token_lists_packed", (1, 64), heads=32, kv_heads=2, causal=False),
    token_case("token_lists_packed_causal", (1, 64), heads=16, kv_heads=1, causal=True),
    token_case("token_lists_merged", (32, 64), heads=4, kv_heads=2, causal=False),
    token_case("token_lists_merged_causal", (64, 64), heads=3, kv_heads=1, causal=True, max_partial_blocks=5),
    causal_case("causal_lists", (64, 64), 4),
    causal_case("causal_lists_of_short_blocks", (128, 32), 5),
    causal_case("causal_lists_of_long_blocks", (16, 128), 2),
    Case(
        "csr",
        csr_inputs,
        lambda indptr, indices: convert.from_csr(indptr, indices, block=(64, 64), kv_len=KV_LEN),
        lambda indptr, indices, b, h, q, k: k // 64 in indices[indptr[q // 64] : indptr[q // 64 + 1]],
    ),
    Case(
        "bool_blocks",
        lambda: (torch.rand(1, HEADS, 2, 4) < 0.5,),
        lambda mask: convert.from_bool_blocks(mask, block=(128, 64), q_len=Q_LEN, kv_len=KV_LEN),
        lambda mask, b, h, q, k: mask[0][h][q // 128][k // 64],
    ),
    Case(
        "bool_blocks_merged",
        lambda: (torch.rand(BATCH, 1, 17, 20) < 0.5,),
        lambda mask: convert.from_bool_blocks(mask, block=(8, 10), q_len=Q_LEN, kv_len=KV_LEN),
        lambda mask, b, h, q, k: mask[b][0][q // 8][k // 10],
    ),
    Case(
        "token_mask",
        lambda: (torch.rand(BATCH, 1, Q_LEN, KV_LEN) < THIRDS,),
        partial(convert.from_token_mask, block=(64, 64)),
        lambda mask, b, h, q, k: mask[b][0][q][k],
    ),
    Case(
        "key_mask",
        lambda: (torch.rand(BATCH, KV_LEN) < THIRDS,),
        lambda mask: convert.from_key_mask(mask, q_len=Q_LEN, block=(64, 64)),
        lambda mask, b, h, q, k: mask[b][k],
    ),
    Case(
        "key_ranges",
        lambda: (torch.randint(-9, KV_LEN, (BATCH, 1, Q_LEN)), torch.randint(0, KV_LEN + 9, (BATCH, 1, Q_LEN))),
        lambda starts, stops: convert.from_key_ranges(starts, stops, kv_len=KV_LEN),
        lambda starts, stops, b, h, q, k: starts[b][0][q] <= k < stops[b][0][q],
    ),
    *(
        Case(
            f"documents_{'causal' if causal else 'whole'}",
            boundaries,
            partial(convert.from_cu_seqlens, total=KV_LEN, causal=causal, block=(64, 64)),
            partial(in_document, causal=causal),
            kv_heads=1,
            lengths=(KV_LEN, KV_LEN),
        )
        for causal in (False, True)
    ),
)
