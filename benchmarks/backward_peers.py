"""Other libraries' backward of attention, called on the inputs of benchmarks/attention_backward.py.

A peer takes a problem and returns its call, which returns dq, dk and dv as (batch, heads, length, head_dim). A peer
that cannot compute the problem raises. docs/notebook/measuring.md describes their installation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import Fields, reason
from records import DETERMINISTIC

from codegen.spec import AttentionSpec
from runtime.tools.bench.measurement import flex_mask
from runtime.tools.bench.timing import Call


@dataclass(frozen=True)
class Problem:
    """Inputs of a row.

    Attributes:
        spec: the forward's.
        q: (batch, heads, length, head_dim); k, v, dout and out alike.
        lse: float32 (batch, heads, length), the forward's.
        lists: those of the pattern, one for each head.
    """

    spec: AttentionSpec
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    lists: tuple[torch.Tensor, ...]


def leaves(problem: Problem, convert: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Copies of q, k and v that require gradients."""
    return [convert(t).detach().clone().requires_grad_() for t in (problem.q, problem.k, problem.v)]


def sdpa(problem: Problem, backend: str) -> Call:
    """torch's attention, by one of its backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs, causal = leaves(problem, lambda t: t), problem.spec.pattern.kind == "causal"
    with sdpa_kernel(getattr(SDPBackend, backend)):
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)
    return lambda: torch.autograd.grad(out, inputs, problem.dout, retain_graph=True)


def find_fa4() -> Any:
    """Import FlashAttention 4's function."""
    from flash_attn.cute import flash_attn_func

    return flash_attn_func


def find_cudnn_bsa() -> Any:
    """Import cuDNN's block-sparse attention; its functions import the kernels when they are called."""
    torch.backends.cudnn.version()  # loads the library that the package needs
    import cutlass  # noqa: F401 - what those import
    from cudnn import BSA

    return BSA


def fa4_lists(problem: Problem) -> Fields:
    """FlashAttention 4's lists of key blocks and of query blocks."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    block = problem.spec.pattern.fixed_block
    assert block is not None
    (lists,) = problem.lists
    listed = torch.zeros((*lists.shape[:3], problem.k.shape[2] // block.kv), dtype=torch.bool, device=lists.device)
    by_keys = listed.scatter_(3, lists.long(), True).transpose(2, 3)
    counts = by_keys.sum(-1, dtype=torch.int32)
    transposed = by_keys.int().sort(dim=-1, descending=True, stable=True).indices[..., : int(counts.max())]

    def full(number: torch.Tensor, indices: torch.Tensor) -> Any:
        none = torch.zeros_like(number)
        return BlockSparseTensorsTorch(
            mask_block_cnt=none,
            mask_block_idx=none[..., None].contiguous(),
            full_block_cnt=number,
            full_block_idx=indices,
            block_size=(block.q, block.kv),
        )

    number = torch.full(lists.shape[:3], lists.shape[3], dtype=torch.int32, device=lists.device)
    return {
        "block_sparse_tensors": full(number, lists),
        "block_sparse_tensors_bwd": full(counts.contiguous(), transposed.int().contiguous()),
    }


def fa4(problem: Problem, *, deterministic: bool = False) -> Call:
    """FlashAttention 4, which takes (batch, length, heads, head_dim)."""
    flash_attn_func = find_fa4()
    inputs = leaves(problem, lambda t: t.transpose(1, 2).contiguous())
    dout = problem.dout.transpose(1, 2).contiguous()
    pattern = problem.spec.pattern
    options: Fields = {"causal": True} if pattern.kind == "causal" else {}
    if pattern.kind == "sliding_window":
        options = {"window_size": (pattern.left, pattern.right)}
    elif pattern.fixed_block is not None:
        options = fa4_lists(problem)
    result = flash_attn_func(*inputs, deterministic=deterministic, **options)
    out = result[0] if isinstance(result, tuple) else result

    def call() -> tuple[torch.Tensor, ...]:
        return tuple(g.transpose(1, 2) for g in torch.autograd.grad(out, inputs, dout, retain_graph=True))

    return call


def fa4_deterministic(problem: Problem) -> Call:
    """The same with its deterministic option. With lists it needs an order that the caller computes on the host."""
    if problem.spec.pattern.fixed_block is not None:
        raise ValueError("needs a write order made on the host")
    return fa4(problem, deterministic=True)


def cudnn_bsa(problem: Problem) -> Call:
    """cuDNN's block-sparse attention."""
    bsa = find_cudnn_bsa()
    block, (lists,) = problem.spec.pattern.fixed_block, problem.lists
    assert block is not None
    options: Fields = {"sparse_block_size": block.q, "layout": "bhsd"}
    made = bsa.block_sparse_attention_forward(problem.q, problem.k, problem.v, lists, **options)

    def call() -> tuple[torch.Tensor, ...]:
        found = bsa.block_sparse_attention_backward(
            *(problem.dout, problem.q, problem.k, problem.v, made["o_tensor"], made["lse_tensor"], lists), **options
        )
        return tuple(found[name] for name in ("dq_tensor", "dk_tensor", "dv_tensor"))

    return call


def flex(problem: Problem) -> Call:
    """FlexAttention, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    inputs = leaves(problem, lambda t: t)
    mask = flex_mask(problem.spec, problem.q.shape[2], problem.lists)
    out = torch.compile(flex_attention, dynamic=False)(*inputs, block_mask=mask)
    return lambda: torch.autograd.grad(out, inputs, problem.dout, retain_graph=True)


@dataclass(frozen=True)
class Peer:
    """A library's backward.

    Attributes:
        label: what tables call it.
        make: takes a problem, returns the call; raises where it cannot compute the problem.
        kinds: kinds of patterns that it is tried with; None for all.
        find: imports its packages other than torch.
    """

    label: str
    make: Callable[[Problem], Call]
    kinds: tuple[str, ...] | None = None
    find: Callable[[], Any] | None = None


PEERS = (
    Peer("SDPA flash", partial(sdpa, backend="FLASH_ATTENTION"), ("dense", "causal")),
    Peer("SDPA cuDNN", partial(sdpa, backend="CUDNN_ATTENTION"), ("dense", "causal")),
    Peer("FA4", fa4, find=find_fa4),
    Peer(DETERMINISTIC, fa4_deterministic, find=find_fa4),
    Peer("cuDNN BSA", cudnn_bsa, ("topk",), find_cudnn_bsa),
    Peer("FlexAttention", flex),
)


def not_importable() -> dict[str, str]:
    """The peers whose packages cannot be imported, and why: a package is missing, or a package that it needs."""
    found: dict[str, str] = {}
    for peer in PEERS:
        if peer.find is not None:
            try:
                peer.find()
            except Exception as error:
                found[peer.label] = reason(error)
    return found


def calls_of(problem: Problem) -> tuple[dict[str, Call], dict[str, str]]:
    """The calls of the peers that compute a problem by label, and why the other requested peers do not."""
    calls: dict[str, Call] = {}
    failed: dict[str, str] = {}
    for peer in PEERS:
        if peer.kinds is None or problem.spec.pattern.kind in peer.kinds:
            try:
                calls[peer.label] = peer.make(problem)
            except Exception as error:
                failed[peer.label] = reason(error)
    return calls, failed
