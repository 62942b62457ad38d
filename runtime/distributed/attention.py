"""Attention over ranks. Each rank has a part of the sequence and makes the same call."""

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
from runtime.ops.attention_checks import check_operands, refuse_transformed
from runtime.ops.attention_extras import TENSORS, Extras
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
    """Compute ``block_sparse_attention`` over a sequence that is sharded over ranks.

    All ranks call it, with tensors of the same shapes. Keys and values are exchanged for some heads at a time,
    overlapped with the computation on heads that have arrived. Each row is one softmax over the keys it sees
    (docs/guide/scale-out.md). q, k, v and ``sink`` have gradients. The gradient of ``sink`` covers this rank's queries
    only, as for any parameter in data parallelism. Ranks agree on the host on the first call of a kind, and on each
    call with ``validate``.

    A call that one rank refuses does not count: that rank may correct the call and repeat it, while the others wait. If
    the kernels of one rank fail in a call that ranks agree on, all ranks raise an error and may continue with the next
    call. After any other error during a call, a rank refuses all further calls in that group, because data of two calls
    could mix.

    Args:
        q: (batch, heads, q_len, head_dim), this rank's queries, as for ``block_sparse_attention``. Or a ``DTensor``
            sharded on the sequence or on heads; k and v must then be DTensors with the same placement.
        k: (batch, kv_heads, kv_len, head_dim), this rank's keys.
        v: as k.
        pattern: the pattern of the whole sequence. Lists are for this rank's queries, in its order, with key block
            indices of the whole sequence. Positions in an expression, and its tensors, refer to the whole sequence.
        mesh_or_group: a ``ProcessGroup``, or a ``DeviceMesh`` of one dimension. Not needed with DTensors.
        layout: assignment of rows to ranks: ``"contiguous"``, ``"zigzag"`` or a ``Layout``. Default: zigzag for
            ``Causal`` and ``PrefixLM``, which balances their work, and contiguous for other patterns and for DTensors.
        send: a plan from ``plan_sends``, for lists with few blocks of other ranks. Default: all keys and values are
            sent.
        heads_at_once: heads of k that are sent together. Default: as few as fill a GPU, then increasingly more.
        symmetric: read keys and values from the memory of peers with copy engines, on one host. Default: NCCL sends
            them. It takes memory for the keys and values of the whole sequence. The result is the same.
        scale: softmax scale. Default: 1 / sqrt(head_dim).
        softcap: cap of the logits.
        sink: float32 (heads,), one logit per head that is added to the softmax denominator. If heads are sharded
            DTensors, the sinks of all heads or of this rank's heads.
        kv_lengths: int32 (batch or 1,), number of valid keys of the whole sequence (``seqused_k``); not with ``send``.
        return_lse: also return the log-sum-exp.
        validate: also agree with the other ranks, and check the values of lists and lengths. Synchronizes.
        deterministic: compute bitwise-reproducible dq. The result, dk and dv always are.
        timeout: seconds that ranks wait for each other to agree. Data transfers use the group's own timeout.

    Returns:
        The result of this rank's queries, in q's dtype; with ``return_lse`` an ``AttentionResult`` (out, lse), lse
        float32 (batch, heads, q_len). For DTensors, DTensors with the placement of q.

    Raises:
        ArgumentError: naming the argument; raised on all ranks if they agree on the call.
        CollectiveError: naming the rank that is late or has failed.
        DeviceError, SpecError, ToolchainError, CompileError, CacheError: as ``block_sparse_attention``.
    """
    extras = Extras(sink, kv_lengths, scale, softcap)
    options: dict[str, Any] = {"return_lse": return_lse, "validate": validate, "deterministic": deterministic}
    of_ranks = {"layout": layout, "send": send, "heads_at_once": heads_at_once, "timeout": timeout}
    of_ranks["symmetric"] = symmetric
    call = partial(_call, operators.CONTEXT)
    return _placed(call, (q, k, v), pattern, mesh_or_group, extras=extras, options=options, of_ranks=of_ranks)


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
    """Compute ``block_sparse_attention`` over a sequence that is sharded over ranks, with some of the heads on each
    rank.

    Like ``context_parallel_attention``, but by all-to-all (Ulysses): a rank receives the whole sequence of its heads,
    computes them, and sends the results back to the ranks that own the queries. It requires at least as many heads of k
    as ranks.

    Args:
        q: (batch, heads, q_len, head_dim), this rank's queries, of all heads; or a ``DTensor``.
        k: (batch, kv_heads, kv_len, head_dim), this rank's keys; kv_heads is a multiple of the number of ranks.
        v: as k.
        pattern: the pattern of the whole sequence, as for ``block_sparse_attention``. Lists are for all queries, in the
            order of the sequence, and for this rank's heads (the r-th part of all) or shared by all heads.
        mesh_or_group: a ``ProcessGroup``, or a ``DeviceMesh`` of one dimension. Not needed with DTensors.
        layout: assignment of rows to ranks. Default: contiguous; every layout has the same work.
        heads_at_once: heads of k of each rank that are sent together. Default: as few as fill a GPU, then more.
        symmetric: read heads and results from the memory of peers with copy engines, on one host. Default: NCCL sends
            them. It takes as much memory as is sent. The result is the same.
        scale: softmax scale. Default: 1 / sqrt(head_dim).
        softcap: cap of the logits.
        sink: float32 (heads,), for all heads. Its gradient is nonzero only for this rank's heads.
        kv_lengths: int32 (batch or 1,), number of valid keys of the whole sequence (``seqused_k``).
        return_lse: also return the log-sum-exp.
        validate: also agree with the other ranks, and check the values of lists and lengths. Synchronizes.
        deterministic: compute bitwise-reproducible dq.
        timeout: seconds that ranks wait for each other to agree. Data transfers use the group's own timeout.

    Returns:
        As ``context_parallel_attention``.

    Raises:
        ArgumentError: naming the argument; raised on all ranks if they agree on the call.
        CollectiveError: naming the rank that is late or has failed.
        DeviceError, SpecError, ToolchainError, CompileError, CacheError: as ``block_sparse_attention``.
    """
    extras = Extras(sink, kv_lengths, scale, softcap)
    options: dict[str, Any] = {"return_lse": return_lse, "validate": validate, "deterministic": deterministic}
    of_ranks = {"layout": layout or "contiguous", "send": None, "heads_at_once": heads_at_once, "timeout": timeout}
    of_ranks["symmetric"] = symmetric
    call = partial(_call, operators.HEADS)
    return _placed(call, (q, k, v), pattern, mesh_or_group, extras=extras, options=options, of_ranks=of_ranks)


def _placed(
    call: Any,
    qkv: tuple[Any, Any, Any],
    pattern: Any,
    mesh_or_group: Any,
    *,
    extras: Extras,
    options: Any,
    of_ranks: Any,
) -> torch.Tensor | AttentionResult:
    """Make a call with the local tensors of DTensors, or with plain tensors.

    Raises:
        ArgumentError: as the call, and for unsupported placements.
    """
    where = placed(*qkv, mesh_or_group)
    if where is None:
        found: torch.Tensor | AttentionResult = call(qkv, pattern, mesh_or_group, extras=extras, **options, **of_ranks)
        return found
    extras = extras._replace(sink=where.sink(extras.sink))
    if where.sharded == SEQUENCE:
        of_ranks = {**of_ranks, "layout": of_ranks["layout"] or "contiguous"}
        return where.wrapped(call(where.local, pattern, where.group, extras=extras, **options, **of_ranks))
    found = block_sparse_attention(*where.local, pattern, **{**options, **extras._asdict()})
    return where.wrapped(found)


def _call(
    name: str,
    qkv: tuple[Any, Any, Any],
    pattern: Any,
    mesh_or_group: Any,
    *,
    extras: Extras,
    layout: Layout | str | None,
    send: SendPlan | None,
    heads_at_once: int,
    symmetric: bool,
    timeout: float,
    return_lse: bool,
    **options: Any,
) -> torch.Tensor | AttentionResult:
    """Call an operator, and report an error of this rank to the ranks that wait for it.

    Raises:
        ArgumentError, CollectiveError: as the functions above.
    """
    group = group_from(mesh_or_group)
    try:
        refuse_transformed((*qkv, *extras[:TENSORS]))
        q, k, v = autocast(*qkv)
        ranks, rank = group.size(), group.rank()
        layout = layout_of(default_layout(pattern) if layout is None else layout, ranks)
        if not torch.compiler.is_dynamo_compiling():  # sizes may be unknown during tracing
            check_operands(q, k, v)
        if name == operators.CONTEXT:
            pattern = as_pattern(pattern, layout, rank, q, k)
        elif not isinstance(pattern, Pattern):
            whole = [t.new_empty((*t.shape[:2], t.shape[2] * ranks, 0)) for t in (q, k)]
            pattern = pattern_of(pattern, *whole)
        _check_choices(send, heads_at_once, timeout)
        if extras.kv_lengths is not None and name == operators.CONTEXT:
            _check_order(send, pattern, layout)
        if not torch.compiler.is_dynamo_compiling():
            extras.check(q)
            (check_pattern if name == operators.CONTEXT else check_heads)(pattern, layout, q, k)
        how = _caps(send, pattern), heads_at_once, bool(symmetric), timeout
        plan = plan_text(group.group_name, layout.chunks, operator_text(pattern), *how)
    except Exception as error:
        report(group, error)
        raise
    gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, extras.sink))
    inputs = q, k, v, pattern.index_tensors(), *extras[:TENSORS], plan
    options |= {**extras.numbers(), "gradients": gradients}
    out, lse, *_ = getattr(torch.ops.sparse_kernel_codegen, name)(*inputs, **options)
    return AttentionResult(out, lse) if return_lse else out


def _check_order(send: SendPlan | None, pattern: Pattern, layout: Layout) -> None:
    """Refuse ``kv_lengths`` if keys do not arrive in the order of the sequence.

    Raises:
        ArgumentError: for a plan that sends single blocks, and for lists with a layout of many chunks.
    """
    if send is not None and send.caps is not None:
        raise ArgumentError(
            "kv_lengths", "are given with send, whose buffers hold keys in another order: pass only one of them"
        )
    if isinstance(pattern, TopK | BlockLists) and packs_blocks(layout):
        raise ArgumentError("kv_lengths", "are given with lists in a layout of many chunks: use zigzag or contiguous")


def _check_choices(send: Any, heads_at_once: Any, timeout: Any) -> None:
    """Check ``send``, ``heads_at_once`` and ``timeout``.

    Raises:
        ArgumentError: for the first wrong argument.
    """
    if send is not None and not isinstance(send, SendPlan):
        raise ArgumentError("send", f"is {type(send).__name__}, expected a SendPlan from plan_sends")
    if isinstance(heads_at_once, bool) or not isinstance(heads_at_once, int) or heads_at_once < 0:
        raise ArgumentError("heads_at_once", f"is {shown(heads_at_once)}, expected a number of heads, or 0")
    check_timeout(timeout)


def _caps(send: SendPlan | None, pattern: Pattern) -> Caps | None:
    """Upper bounds of the blocks that ranks send each other.

    Raises:
        ArgumentError: for a plan without lists, or with another block size.
    """
    if send is None:
        return None
    if not isinstance(pattern, TopK | BlockLists) or pattern.block[1] != send.block:
        has = f"blocks of {pattern.block[1]} keys" if isinstance(pattern, TopK | BlockLists) else "no lists"
        raise ArgumentError("send", f"was made for lists with blocks of {send.block} keys, the pattern has {has}")
    return send.caps
