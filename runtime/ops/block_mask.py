"""Block lists of a mask, made on the GPU: the kernel is compiled at the first use and remembered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from codegen.expressions.ranges import list_sizes
from codegen.patterns.block_lists import BlockLists as BlockListsSpec
from codegen.scored_pattern import scored_pattern
from runtime.checks import refuse_capture
from runtime.errors import ArgumentError
from runtime.expressions.graphs import constant, json_text
from runtime.expressions.masks import mask_of
from runtime.kernel import load_kernel
from runtime.kernels.block_mask import BlockMaskKernel, checked_shape, device_of
from runtime.ops.attention_choice import arch_of
from runtime.ops.operators import NAMESPACE
from runtime.patterns import BlockLists, check_aux, check_block
from runtime.receipts.mode import kept_by_mode

KERNELS_KEPT = 64  # of masks


def create_block_mask(
    mask: str | Callable[..., Any],
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    *,
    block: tuple[int, int] = (128, 128),
    aux: Mapping[str, torch.Tensor] | None = None,
    device: torch.device | str | int | None = None,
) -> BlockLists:
    """Make the block lists of a mask on the GPU: FlexAttention's ``create_block_mask``, for ``block_sparse_attention``.

    The lists are exact: a key block is in one if a pair is seen, among the full ones if all are. Nothing waits for the
    GPU, and memory follows from the sizes: a CUDA graph makes the lists anew from what the tensors hold then. Intervals
    of what the mask asks of each query and each key tell most blocks; the pairs of the others are looked at.

    Args:
        mask: an expression over ``q_idx``, ``kv_idx``, ``batch``, ``head``, ``q_len``, ``kv_len`` and the tensors of
            ``aux`` (docs/reference/expressions.md), or a function ``mask_mod(b, h, q_idx, kv_idx)``, which has its own.
            Regions that torch.compile traces take an expression: one graph serves all lengths.
        batch: batches of the attention.
        heads: its query heads.
        q_len: queries of a head.
        kv_len: keys of a head.
        block: (queries, keys) of a block, as in specs: 1 to 128 and 16 to 128, powers of two.
        aux: the tensors of the mask, by name, on the GPU: int32 (batch, q_len), say, as :class:`BlockLists` takes them.
        device: a CUDA device; by default that of the tensors, without tensors torch's current one.

    Returns:
        The pattern, with ``mask`` and its tensors. The lists have one batch, or head, for all where the mask does not
        ask which it is; their entries are ascending, then -1, and as many as there are key blocks.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
        SpecError: for a block that no kernel has.
        DeviceError: for a GPU that there are no kernels for.
    """
    checked_shape(batch, heads, q_len, kv_len)
    check_block(block)
    if not isinstance(mask, str) and not callable(mask):
        raise ArgumentError("mask", f"is {type(mask).__name__}, expected an expression or a function")
    check_aux(aux)
    found = mask_of(mask, aux)
    pattern: dict[str, Any] = {"kind": "block_lists", "block": {"q": constant(block[0]), "kv": constant(block[1])}}
    tensors = list(found.tensors.values())
    if any(map(torch._C._functorch.is_batchedtensor, tensors)):
        reason = "has tensors that are mapped by torch.vmap: pass the batch as a dimension, or call outside of it"
        raise ArgumentError("aux", reason)
    where = device_of(device, tuple(tensors))
    lists = torch.ops.sparse_kernel_codegen.create_block_mask(
        tensors,
        pattern=json_text({**pattern, "mask": found.text, **({"aux": found.declared} if found.declared else {})}),
        batch=batch,
        heads=heads,
        q_len=q_len,
        kv_len=kv_len,
        device=where,
    )
    return BlockLists(*lists, block=block, mask=found.text, aux=found.tensors or None)


@kept_by_mode(KERNELS_KEPT)
def _kernel(index: int, pattern: str) -> BlockMaskKernel:
    device = torch.device("cuda", index)
    refuse_capture("mask", device)
    fields = {"op": "block_mask", "arch": arch_of(device), "pattern": scored_pattern(pattern).pattern_fields}
    kernel = load_kernel(fields, device=device)
    assert isinstance(kernel, BlockMaskKernel)
    return kernel


def _run(
    aux: list[torch.Tensor], *, pattern: str, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Compute the operator: the tensors are those of the pattern, in the order of their names."""
    kernel = _kernel(device.index, pattern)
    names = (tensor.name for tensor in kernel.spec.aux_tensors)
    return tuple(kernel(batch, heads, q_len, kv_len, aux=dict(zip(names, aux, strict=True)), device=device))


def _fake(
    aux: list[torch.Tensor], *, pattern: str, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Tensors like the result, without values."""
    del aux
    lists = scored_pattern(pattern).pattern
    assert isinstance(lists, BlockListsSpec) and lists.expression is not None
    counts = (*list_sizes(lists.expression, batch, heads), -(-q_len // lists.block.q))
    shapes = (counts, (*counts, -(-kv_len // lists.block.kv))) * 2
    return tuple(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(
    "create_block_mask(Tensor[] aux, *, str pattern, SymInt batch, SymInt heads, SymInt q_len, SymInt kv_len, "
    "Device device)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("create_block_mask", _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::create_block_mask", _fake, lib=_library)
