"""Attention over ranks: one call on each, which has a part of the sequence."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from codegen.wording import shown
from runtime.distributed import operators
from runtime.distributed.agreement import TIMEOUT, check_timeout, report
from runtime.distributed.arguments import as_pattern, check_heads, check_pattern, default_layout, group_from
from runtime.distributed.layout import Layout, layout_of
from runtime.distributed.placements import SEQUENCE, placed
from runtime.distributed.plan import Caps, packs_blocks, plan_text
from runtime.distributed.sends import SendPlan
from runtime.errors import ArgumentError
from runtime.kernels.attention import AttentionResult
from runtime.ops.attention import block_sparse_attention, pattern_of
from runtime.ops.attention_checks import check_operands, check_options, refuse_transformed
from runtime.ops.modes import autocast
from runtime.patterns import BlockLists, Pattern, TopK, operator_text


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Any,
    mesh_or_group: Any = None,
    *,
    layout: Layout | str | None = None,
    send: SendPlan | None = None,
    heads_at_once: int = 0,
    symmetric: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    return_lse: bool = False,
    validate: bool = False,
    deterministic: bool = True,
    timeout: float = TIMEOUT,
) -> torch.Tensor | AttentionResult:
    """Compute ``block_sparse_attention`` over a sequence of which each rank has a part.

    All ranks call it, with tensors of the same shapes. Keys and values go from rank to rank for some heads at a time,
    while those that have arrived are computed with; each row is one softmax over the keys it sees
    (docs/guide/scale-out.md). q, k, v and ``sink`` have gradients; that of ``sink`` is of this rank's queries, as that
    of any parameter. The first call of a kind, and each one with ``validate``, is agreed on with the other ranks, on
    the host.

    What one rank refuses is as if it had not called: it may mend its call and make it again, while the others wait. An
    error of a rank's kernels in a call that ranks agree on is raised on all ranks, and the next call is right. After
    another error in the middle of a call a rank refuses all calls of that group, as data of two calls would be mixed.

    Args:
        q: (batch, heads, q_len, head_dim), this rank's queries; as ``block_sparse_attention`` has them. Or a
            ``DTensor``, as k and v then are too, sharded on the sequence or on heads, with one placement.
        k: (batch, kv_heads, kv_len, head_dim), this rank's keys.
        v: as k.
        pattern: as there, of the whole sequence; lists are those of this rank's queries, in its order, and name key
            blocks of the whole sequence. Positions in an expression, and its tensors, are of the whole sequence.
        mesh_or_group: a ``ProcessGroup``, or a ``DeviceMesh`` of one dimension. Of DTensors it is not needed.
        layout: which rows are this rank's: ``"contiguous"``, ``"zigzag"`` or a ``Layout``. By default zigzag for
            ``Causal`` and ``PrefixLM``, whose later rows see more, and contiguous for other patterns and for DTensors.
        send: of ``plan_sends``, for lists that name few blocks of other ranks; by default everything is sent.
        heads_at_once: heads of k that are sent together; by default as few as fill a GPU, then more and more.
        symmetric: read keys and values that everything is sent of from the memory of peers, by copy engines, on one
            host; by default NCCL sends them. It takes memory for those of the whole sequence. The result is the same.
        scale: softmax scale; by default 1 / sqrt(head_dim).
        softcap: cap of the logits.
        sink: float32 (heads,), a logit that joins the sum of each row of its head. Beside DTensors whose heads are
            sharded, of all heads, or of this rank's.
        kv_lengths: int32 (batch or 1,), keys of the whole sequence that exist; not with ``send``.
        return_lse: whether to return the log-sum-exp too.
        validate: also agree with the other ranks, and check the values of lists and lengths. Synchronizes.
        deterministic: whether dq has the same bits in every call; the result, dk and dv have them either way.
        timeout: seconds that ranks wait for each other when they agree. What is sent has the group's own.

    Returns:
        The result of this rank's queries, in q's type; with ``return_lse`` an ``AttentionResult`` (out, lse), lse
        float32 (batch, heads, q_len). Of DTensors DTensors with the placement of q.

    Raises:
        ArgumentError: naming the argument; on all ranks, where they agree on the call.
        CollectiveError: for a rank that is late or has failed, by its number.
        DeviceError, SpecError, ToolchainError, CompileError, CacheError: as ``block_sparse_attention``.
    """
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sink": sink, "kv_lengths": kv_lengths}
    options |= {"return_lse": return_lse, "validate": validate, "deterministic": deterministic}
    of_ranks = {"layout": layout, "send": send, "heads_at_once": heads_at_once, "timeout": timeout}
    of_ranks["symmetric"] = symmetric
    call = partial(_call, operators.CONTEXT)
    return _placed(call, (q, k, v), pattern, mesh_or_group, options=options, of_ranks=of_ranks)


def head_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pattern: Any,
    mesh_or_group: Any = None,
    *,
    layout: Layout | str | None = None,
    heads_at_once: int = 0,
    symmetric: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sink: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    return_lse: bool = False,
    validate: bool = False,
    deterministic: bool = True,
    timeout: float = TIMEOUT,
) -> torch.Tensor | AttentionResult:
    """Compute ``block_sparse_attention`` over a sequence of which each rank has a part, each rank some of the heads.

    As ``context_parallel_attention``, by all-to-all: a rank is sent the whole sequence of its heads, computes them, and
    sends the results back to where their queries are (Ulysses). It is for as many heads of k as ranks, or more.

    Args:
        q: (batch, heads, q_len, head_dim), this rank's queries, of all heads; or a ``DTensor``.
        k: (batch, kv_heads, kv_len, head_dim), this rank's keys; the ranks divide kv_heads.
        v: as k.
        pattern: of the whole sequence, as in ``block_sparse_attention``. Lists are of all its queries, in the order of
            the sequence, and of this rank's heads, the r-th part of all, or of all heads at once.
        mesh_or_group: a ``ProcessGroup``, or a ``DeviceMesh`` of one dimension. Of DTensors it is not needed.
        layout: which rows are this rank's, by default contiguous: the work is the same for every layout.
        heads_at_once: heads of k of each rank that are sent together; by default as few as fill a GPU, then more.
        symmetric: read heads and results from the memory of peers, by copy engines, on one host; by default NCCL sends
            them. It takes memory for as much as is sent. The result is the same.
        scale: softmax scale; by default 1 / sqrt(head_dim).
        softcap: cap of the logits.
        sink: float32 (heads,), of all heads; its gradient is of this rank's heads, and 0 for others.
        kv_lengths: int32 (batch or 1,), keys of the whole sequence that exist.
        return_lse: whether to return the log-sum-exp too.
        validate: also agree with the other ranks, and check the values of lists and lengths. Synchronizes.
        deterministic: whether dq has the same bits in every call.
        timeout: seconds that ranks wait for each other when they agree. What is sent has the group's own.

    Returns:
        As ``context_parallel_attention``.

    Raises:
        ArgumentError: naming the argument; on all ranks, where they agree on the call.
        CollectiveError: for a rank that is late or has failed, by its number.
        DeviceError, SpecError, ToolchainError, CompileError, CacheError: as ``block_sparse_attention``.
    """
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sink": sink, "kv_lengths": kv_lengths}
    options |= {"return_lse": return_lse, "validate": validate, "deterministic": deterministic}
    of_ranks = {"layout": layout or "contiguous", "send": None, "heads_at_once": heads_at_once, "timeout": timeout}
    of_ranks["symmetric"] = symmetric
    call = partial(_call, operators.HEADS)
    return _placed(call, (q, k, v), pattern, mesh_or_group, options=options, of_ranks=of_ranks)


def _placed(
    call: Any, qkv: tuple[Any, Any, Any], pattern: Any, mesh_or_group: Any, *, options: Any, of_ranks: Any
) -> torch.Tensor | AttentionResult:
    """Make a call with what DTensors are on this rank, or with tensors as they are.

    Raises:
        ArgumentError: as the call, and for placements that it cannot keep.
    """
    where = placed(*qkv, mesh_or_group)
    if where is None:
        found: torch.Tensor | AttentionResult = call(qkv, pattern, mesh_or_group, **options, **of_ranks)
        return found
    options = {**options, "sink": where.sink(options["sink"])}
    if where.sharded == SEQUENCE:
        of_ranks = {**of_ranks, "layout": of_ranks["layout"] or "contiguous"}
        return where.wrapped(call(where.local, pattern, where.group, **options, **of_ranks))
    found = block_sparse_attention(*where.local, pattern, **options)
    return where.wrapped(found)


def _call(
    name: str,
    qkv: tuple[Any, Any, Any],
    pattern: Any,
    mesh_or_group: Any,
    *,
    layout: Layout | str | None,
    send: SendPlan | None,
    heads_at_once: int,
    symmetric: bool,
    timeout: float,
    sink: torch.Tensor | None,
    kv_lengths: torch.Tensor | None,
    return_lse: bool,
    **options: Any,
) -> torch.Tensor | AttentionResult:
    """Call an operator; report an error of this rank to those that wait for it.

    Raises:
        ArgumentError, CollectiveError: as the functions above.
    """
    group = group_from(mesh_or_group)
    try:
        refuse_transformed((*qkv, sink, kv_lengths))
        q, k, v = autocast(*qkv)
        ranks, rank = group.size(), group.rank()
        layout = layout_of(default_layout(pattern) if layout is None else layout, ranks)
        if not torch.compiler.is_dynamo_compiling():  # while a graph is made, sizes may not be known
            check_operands(q, k, v)
        if name == operators.CONTEXT:
            pattern = as_pattern(pattern, layout, rank, q, k)
        elif not isinstance(pattern, Pattern):
            whole = [t.new_empty((*t.shape[:2], t.shape[2] * ranks, 0)) for t in (q, k)]
            pattern = pattern_of(pattern, *whole)
        _check_choices(send, heads_at_once, timeout)
        if kv_lengths is not None and name == operators.CONTEXT:
            _check_order(send, pattern, layout)
        if not torch.compiler.is_dynamo_compiling():
            check_options(q, options["softcap"], options["scale"], sink, kv_lengths)
            (check_pattern if name == operators.CONTEXT else check_heads)(pattern, layout, q, k)
        how = _caps(send, pattern), heads_at_once, bool(symmetric), timeout
        plan = plan_text(group.group_name, layout.chunks, operator_text(pattern), *how)
    except Exception as error:
        report(group, error)
        raise
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, sink))
    inputs = q, k, v, pattern.index_tensors(), sink, kv_lengths, plan
    out, lse, *_ = getattr(torch.ops.sparse_kernel_codegen, name)(*inputs, **options, gradients=gradients)
    return AttentionResult(out, lse) if return_lse else out


def _check_order(send: SendPlan | None, pattern: Pattern, layout: Layout) -> None:
    """Refuse lengths where keys arrive in another order than that of the sequence.

    Raises:
        ArgumentError: for a plan that sends single blocks, and lists with a layout of many chunks.
    """
    if send is not None and send.caps is not None:
        raise ArgumentError(
            "kv_lengths", "are given with send, whose buffers have keys in another order: leave out one"
        )
    if isinstance(pattern, TopK | BlockLists) and packs_blocks(layout):
        raise ArgumentError("kv_lengths", "are given with lists in a layout of many chunks: take zigzag or contiguous")


def _check_choices(send: Any, heads_at_once: Any, timeout: Any) -> None:
    """Check what is about ranks.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    if send is not None and not isinstance(send, SendPlan):
        raise ArgumentError("send", f"is {type(send).__name__}, expected what plan_sends returns")
    if isinstance(heads_at_once, bool) or not isinstance(heads_at_once, int) or heads_at_once < 0:
        raise ArgumentError("heads_at_once", f"is {shown(heads_at_once)}, expected a number of heads, or 0")
    check_timeout(timeout)


def _caps(send: SendPlan | None, pattern: Pattern) -> Caps | None:
    """Number of blocks that are sent.

    Raises:
        ArgumentError: for a plan without lists, or of other blocks.
    """
    if send is None:
        return None
    if not isinstance(pattern, TopK | BlockLists) or pattern.block[1] != send.block:
        has = f"blocks of {pattern.block[1]} keys" if isinstance(pattern, TopK | BlockLists) else "no lists"
        raise ArgumentError("send", f"is of lists with blocks of {send.block} keys, the pattern has {has}")
    return send.caps
