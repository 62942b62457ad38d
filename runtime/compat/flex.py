"""FlexAttention's call: ``torch.nn.attention.flex_attention.flex_attention``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from codegen.expressions.ranges import list_sizes
from codegen.wording import shown
from runtime.checks import check_flag, is_same
from runtime.compat.front import TORCH_NAMES, attend, check_gqa, refuse
from runtime.convert import from_block_mask
from runtime.errors import ArgumentError
from runtime.ops.block_sizes import mask_block
from runtime.patterns import BlockLists, Dense, Pattern, Score, mask_for, score_for, scored_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

_NAMES = {**TORCH_NAMES, "pattern": "block_mask", "score": "score_mod"}
_LISTS_SPLIT = 64
"""Blocks of multiples of so many queries and keys are cut into those of a kernel, whatever the architecture."""


@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | Score | None = ...,
    block_mask: BlockMask | Pattern | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: Mapping[str, Any] | None = ...,
    *,
    return_aux: None = ...,
) -> torch.Tensor: ...


@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | Score | None = ...,
    block_mask: BlockMask | Pattern | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    return_lse: Literal[True],
    kernel_options: Mapping[str, Any] | None = ...,
    return_aux: None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | Score | None = ...,
    block_mask: BlockMask | Pattern | None = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    return_lse: Literal[False] = ...,
    kernel_options: Mapping[str, Any] | None = ...,
    *,
    return_aux: AuxRequest,
) -> tuple[torch.Tensor, AuxOutput]: ...


def flex_attention(  # noqa: PLR0917 - torch's signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | Score | None = None,
    block_mask: BlockMask | Pattern | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, AuxOutput]:
    """Compute FlexAttention's attention, with its arguments.

    ``score_mod`` and the ``mask_mod`` of a torch ``BlockMask`` become expressions of the kernel
    (docs/reference/expressions.md). They are traced in each call; ``compat.create_block_mask`` and ``patterns.Score``
    trace once, and code under ``torch.compile`` needs them made outside. The backward pass computes gradients of query,
    key and value and of the floating-point tensors that ``score_mod`` captures.

    Args:
        query: (batch, heads, q_len, head_dim), float16 or bfloat16.
        key: (batch, kv_heads, kv_len, head_dim).
        value: as key; head_dim is that of key.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, or a ``patterns.Score``.
        block_mask: a torch ``BlockMask`` for q_len and kv_len, or a pattern of :mod:`runtime.patterns`.
        scale: factor of the logits; by default 1 / sqrt(head_dim).
        enable_gqa: allow fewer kv_heads than heads; heads is then a multiple of kv_heads.
        return_lse: whether to return the log-sum-exp too.
        kernel_options: options of Triton kernels; None or empty.
        return_aux: ``AuxRequest(lse=True)`` returns the log-sum-exp as an ``AuxOutput``; ``max_scores`` is refused.

    Returns:
        The result, in query's type: (batch, heads, q_len, head_dim). With ``return_lse`` the pair (out, lse), with
        ``return_aux`` the pair (out, ``AuxOutput``). lse is float32 (batch, heads, q_len), the natural logarithm as in
        torch, -inf for a query that sees no key.

    Raises:
        ArgumentError: naming an argument that has no counterpart, or is wrong.
        SpecError: for an option that no kernel has.
    """
    if kernel_options is not None and (not isinstance(kernel_options, Mapping) or kernel_options):
        refuse("kernel_options", kernel_options, "they are options of Triton kernels; leave them out")
    check_flag("return_lse", return_lse)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput, AuxRequest  # noqa: PLC0415 - torch 2.9 has none

        if not isinstance(return_aux, AuxRequest):
            raise ArgumentError("return_aux", f"is {type(return_aux).__name__}, expected torch's AuxRequest")
        if return_lse:
            raise ArgumentError("return_lse", "is True, and return_aux is given: pass return_aux=AuxRequest(lse=True)")
        if return_aux.max_scores:
            refuse("return_aux", return_aux, "kernels do not return the largest score of a row; pass max_scores=False")
    check_gqa(query, key, enable_gqa)
    pattern = _pattern_of(block_mask, query, key)
    score = _score_of(score_mod, pattern, query, key)
    out, lse = attend(query, key, value, pattern, _NAMES, scale=scale, score=score)
    if return_aux is not None:
        return out, AuxOutput(lse=lse if return_aux.lse else None)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def _pattern_of(block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> Pattern:
    """The pattern of a mask.

    Raises:
        ArgumentError: naming ``block_mask``.
    """
    if block_mask is None:
        return Dense()
    if isinstance(block_mask, Pattern):
        return block_mask
    from torch.nn.attention.flex_attention import BlockMask, noop_mask  # noqa: PLC0415 - takes long

    if not isinstance(block_mask, BlockMask):
        what = "a torch BlockMask or an object of sparse_kernel_codegen.patterns"
        raise ArgumentError("block_mask", f"is {type(block_mask).__name__}, expected {what}")
    for name, tensor in (("query", query), ("key", key)):
        if tensor.dim() != 4:
            raise ArgumentError(name, f"has {tensor.dim()} dimensions {tuple(tensor.shape)}, expected 4")
    q_len, kv_len = query.shape[2], key.shape[2]
    if tuple(block_mask.seq_lengths) != (q_len, kv_len):
        lengths = "{} queries and {} keys".format(*block_mask.seq_lengths)
        raise ArgumentError("block_mask", f"is for {lengths}, query has {q_len} and key has {kv_len}: make a new one")
    mask_mod = block_mask.mask_mod
    if mask_mod is None or mask_mod is noop_mask:
        return from_block_mask(block_mask, target=mask_block(block_mask.BLOCK_SIZE))
    if getattr(mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise ArgumentError("block_mask", "is a slice, which has no mask_mod: make a mask of the batches and heads")
    if torch.compiler.is_dynamo_compiling():
        hint = "make the mask by compat.create_block_mask, outside of the compiled code"
        raise ArgumentError("block_mask", f"is a torch BlockMask, whose mask_mod compiled code cannot trace: {hint}")
    lists = _traced_lists(block_mask, mask_mod, query, key)
    if not any(size % _LISTS_SPLIT for size in block_mask.BLOCK_SIZE):
        return lists
    # Blocks that are merged have bits, for each batch and head that the mask distinguishes.
    expression = scored_of(lists).pattern.expression
    assert expression is not None
    sizes = list_sizes(expression, query.shape[0], query.shape[1])
    batch, heads = (max(size, there) for size, there in zip(sizes, lists.kv_indices.shape, strict=False))
    return from_block_mask(block_mask, batch=batch, heads=heads, target=mask_block(block_mask.BLOCK_SIZE))


def _traced_lists(block_mask: BlockMask, mask_mod: Any, query: torch.Tensor, key: torch.Tensor) -> BlockLists:
    """The lists of a torch mask with its ``mask_mod`` as an expression, for a call with these operands.

    Raises:
        ArgumentError: naming ``block_mask``, for a function that has no expression.
    """
    full_counts, full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    block = (int(block_mask.BLOCK_SIZE[0]), int(block_mask.BLOCK_SIZE[1]))
    try:
        found = mask_for(mask_mod, query, key)
        return BlockLists(
            _whole(block_mask.kv_num_blocks, 3),
            _whole(block_mask.kv_indices, 4),
            None if full_counts is None else _whole(full_counts, 3),
            None if full is None else _whole(full, 4),
            block=block,
            mask=found.text,
            aux=found.tensors or None,
        )
    except ArgumentError as error:
        hint = "runtime.convert.from_block_mask(block_mask) makes bits of any mask_mod; pass its result"
        raise ArgumentError("block_mask", f"its mask_mod {error.reason}; {hint}") from None


def _whole(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    """Counts or lists with all their dimensions; slices of masks may have fewer."""
    return tensor.to(torch.int32)[(None,) * (dims - tensor.dim())]


def _score_of(score_mod: Any, pattern: Pattern, query: torch.Tensor, key: torch.Tensor) -> Score | None:
    """The score of a call; None for a function that returns its score.

    Raises:
        ArgumentError: naming ``score_mod``.
    """
    if score_mod is None:
        return None
    if not isinstance(score_mod, Score):
        if not callable(score_mod):
            raise ArgumentError("score_mod", f"is {shown(score_mod)}, expected a function or a patterns.Score")
        if torch.compiler.is_dynamo_compiling():
            reason = "is a function, in compiled code: make a runtime.patterns.Score of it outside"
            raise ArgumentError("score_mod", reason)
        try:
            score_mod = score_for(score_mod, query, key)
        except ArgumentError as error:
            raise ArgumentError("score_mod", error.reason) from None
    if score_mod.value == "score":
        return None
    return _with_names_of_its_own(score_mod, getattr(pattern, "aux", None) or {})


def _with_names_of_its_own(score: Score, of_mask: Mapping[str, torch.Tensor]) -> Score:
    """A score whose tensors have other names than different tensors of the mask."""
    aux = dict(score.aux or {})
    taken = [name for name, tensor in aux.items() if name in of_mask and not is_same(of_mask[name], tensor)]
    text = str(score.value)
    for name in taken:
        free = next(each for i in range(1000) if (each := f"{name}_of_score{i or ''}") not in {*aux, *of_mask})
        text = re.sub(rf"\b{name}\b", free, text)
        aux[free] = aux.pop(name)
    return Score(text, aux=aux) if taken else score
