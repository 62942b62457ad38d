"""Other attention kernels, called on the inputs of benchmarks/attention.py.

A peer takes a problem and returns calls by label; each call returns (batch, heads, length, head_dim). What is not
installed or cannot compute the problem raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from codegen.spec import AttentionSpec
from runtime.measurement import Call, flex_call, flex_mask, median_milliseconds, sdpa_calls

Fields = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """Inputs of a row: q (batch, heads, length, head_dim), k and v alike, and the lists of the pattern."""

    spec: AttentionSpec
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lists: tuple[torch.Tensor, ...]


def sdpa(problem: Problem) -> dict[str, Call]:
    return sdpa_calls(problem.spec, problem.q, problem.k, problem.v)


def flex(problem: Problem) -> dict[str, Call]:
    """FlexAttention with its own options."""
    mask = flex_mask(problem.spec, problem.q.shape[2], problem.lists)
    return {"FlexAttention": flex_call(problem.q, problem.k, problem.v, mask)}


def flex_tuned(problem: Problem) -> dict[str, Call]:
    """FlexAttention with the best of a short list of options."""
    mask = flex_mask(problem.spec, problem.q.shape[2], problem.lists)
    block_q, block_kv = mask.BLOCK_SIZE
    calls = {}
    for columns, warps, stages in ((64, 4, 3), (64, 4, 2), (64, 8, 3), (block_kv, 8, 2)):
        options = {"BLOCK_M": block_q, "BLOCK_N": columns, "num_warps": warps, "num_stages": stages}
        call = flex_call(problem.q, problem.k, problem.v, mask, options)
        try:
            call()
        except Exception as error:  # too much shared memory, for one
            refused = error
            continue
        calls[f"FlexAttention {block_q}x{columns} {warps} warps {stages} stages"] = call
    if not calls:
        raise refused
    times = median_milliseconds(calls, repeats=3, warm_up=1)
    best = min(times, key=lambda label: times[label])
    return {best: calls[best]}


def fa4(problem: Problem) -> dict[str, Call]:
    """FlashAttention 4, which takes (batch, length, heads, head_dim)."""
    from flash_attn.cute import flash_attn_func

    q, k, v = (t.transpose(1, 2).contiguous() for t in (problem.q, problem.k, problem.v))
    pattern = problem.spec.pattern
    options: Fields = {"causal": pattern.kind == "causal"}
    if pattern.kind == "sliding_window":
        options = {"window_size": (pattern.left, pattern.right)}
    elif pattern.kind == "topk":
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

        full = problem.lists[0]
        partial = torch.zeros(full.shape[:3], dtype=torch.int32, device="cuda")
        sparse = BlockSparseTensorsTorch(
            mask_block_cnt=partial,
            mask_block_idx=partial[..., None].contiguous(),
            full_block_cnt=torch.full_like(partial, full.shape[3]),
            full_block_idx=full,
            block_size=(pattern.block.q, pattern.block.kv),
        )
        options = {"block_sparse_tensors": sparse}

    def call() -> torch.Tensor:
        out = flash_attn_func(q, k, v, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return {"FA4": call}


def cudnn_bsa(problem: Problem) -> dict[str, Call]:
    """cuDNN's block-sparse attention; long sequences also with the key range split, its remedy for a full L2."""
    torch.backends.cudnn.version()  # loads the library that the package needs
    from cudnn import BSA

    def split(parts: int) -> Call:
        def call() -> torch.Tensor:
            results = BSA.block_sparse_attention_forward(
                problem.q,
                problem.k,
                problem.v,
                problem.lists[0],
                sparse_block_size=problem.spec.pattern.block.q,
                layout="bhsd",
                kv_splits=parts,
            )
            return results["o_tensor"]

        return call

    splits = (2, 4) if problem.q.shape[2] > 65536 else ()
    return {"cuDNN BSA": split(1), **{f"cuDNN BSA {parts} splits": split(parts) for parts in splits}}


PEERS: dict[str, tuple[Callable[[Problem], dict[str, Call]], ...]] = {
    "sdpa": (sdpa,),
    "flex": (flex, flex_tuned),
    "fa4": (fa4,),
    "cudnn_bsa": (cudnn_bsa,),
}
