"""Block lists of a mask. The first call compiles the kernel of a mask and caches it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from codegen.block_sizes import KEYS, QUERIES
from codegen.errors import SpecError
from codegen.expressions.ranges import list_sizes
from codegen.patterns.block_lists import BlockLists as BlockListsSpec
from codegen.scored_pattern import scored_pattern
from codegen.wording import alternatives, shown
from runtime.block_maps import any_in_blocks, lists_of
from runtime.checks import named_device, refuse_capture
from runtime.errors import ArgumentError
from runtime.expressions.evaluate import evaluate
from runtime.expressions.graphs import constant, constant_in_graphs, json_text
from runtime.expressions.masks import Expression, mask_of
from runtime.kernel import load_kernel
from runtime.kernels.block_mask import BlockMaskKernel, checked_shape, device_of
from runtime.ops.attention_choice import arch_of
from runtime.ops.operators import NAMESPACE
from runtime.patterns import BlockLists, check_aux
from runtime.receipts.mode import kept_by_mode

KERNELS_KEPT = 64  # of masks

PAIRS_AT_ONCE = 1 << 22
"""Pairs of a mask that torch evaluates at a time on a CPU: 32 MiB per 64-bit tensor."""
_RENAMED = {"mask": "mask_mod", "batch": "B", "heads": "H", "q_len": "Q_LEN", "kv_len": "KV_LEN", "block": "BLOCK_SIZE"}
"""New names of the renamed arguments of ``create_block_mask``."""


def create_block_mask(  # noqa: PLR0917 - torch's signature
    mask_mod: str | Callable[..., Any] | None = None,
    B: int | None = None,
    H: int | None = None,
    Q_LEN: int | None = None,
    KV_LEN: int | None = None,
    device: torch.device | str | int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
    *,
    aux: Mapping[str, torch.Tensor] | None = None,
    **renamed: Any,
) -> BlockLists:
    """Make the block lists of a mask, with the arguments of FlexAttention's ``create_block_mask``.

    The result is a pattern for ``block_sparse_attention`` and ``compat.flex_attention``, not a torch ``BlockMask``;
    ``runtime.convert.to_block_mask`` converts it. On a GPU, a generated kernel makes the lists without synchronizing.
    Replaying a CUDA graph makes them again from the current values of the tensors. On a CPU, torch makes them.

    The lists are exact: a key block is listed if any of its pairs is visible, and as a full block if all of them are.
    Interval arithmetic classifies most blocks; the kernel evaluates the pairs of the others.

    Args:
        mask_mod: a function ``mask_mod(b, h, q_idx, kv_idx)``, or an expression over ``q_idx``, ``kv_idx``, ``batch``,
            ``head``, ``q_len``, ``kv_len`` and the tensors of ``aux`` (docs/reference/expressions.md). Under
            ``torch.compile`` it is an expression: one graph serves all lengths.
        B: batch size of the attention. None: the mask is the same for all batches and must not depend on b.
        H: number of query heads. None: the mask is the same for all heads and must not depend on h.
        Q_LEN: queries per head.
        KV_LEN: keys per head.
        device: device of the lists. Default: the device of the mask's tensors, else torch's current CUDA device, else
            the CPU if torch finds no GPU.
        BLOCK_SIZE: block size, one number or (queries, keys): powers of two, 1 to 128 queries and 16 to 128 keys.
        _compile: no effect; a compiled kernel always makes the lists.
        separate_full_blocks: must be True; full blocks always have their own lists.
        compute_dq_write_order: must be False; gradient kernels have a fixed order without it.
        dq_kv_order: must be True, for the same reason.
        aux: the tensors of an expression, by name, as for :class:`BlockLists`; for example int32 (batch, q_len).
        renamed: deprecated names of arguments: ``mask``, ``batch``, ``heads``, ``q_len``, ``kv_len`` and ``block``.
            They give a ``DeprecationWarning``.

    Returns:
        The pattern, with the mask as its expression. If the mask does not depend on the batch (or head), the lists have
        one batch (or head) that all share. A list has one entry per key block, ascending and padded with -1.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
        SpecError: if no kernel supports the mask.
        DeviceError: for a GPU without kernels.
    """
    if renamed:
        given: dict[str, Any] = {
            "mask_mod": mask_mod,
            "B": B,
            "H": H,
            "Q_LEN": Q_LEN,
            "KV_LEN": KV_LEN,
            "BLOCK_SIZE": BLOCK_SIZE,
        }
        given = _with_new_names(given, renamed)
        return create_block_mask(**given, device=device, aux=aux)
    for name, value, only in (
        ("separate_full_blocks", separate_full_blocks, True),
        ("compute_dq_write_order", compute_dq_write_order, False),
        ("dq_kv_order", dq_kv_order, True),
    ):
        if value is not only:
            raise ArgumentError(name, f"is {shown(value)}, expected {only}: it has no counterpart")
    if not isinstance(mask_mod, str) and not callable(mask_mod):
        raise ArgumentError("mask_mod", f"is {type(mask_mod).__name__}, expected a function or an expression")
    batch, heads = (1 if size is None else size for size in (B, H))
    _check_sizes(batch, heads, Q_LEN, KV_LEN)
    block = _block_of(BLOCK_SIZE)
    check_aux(aux)
    sizes: dict[str, Any] = {}
    if not torch.compiler.is_compiling():  # lists of one batch or head are for any number
        sizes = {name: size for name, size in (("batch", batch), ("heads", heads)) if size > 1}
        sizes |= {"q_len": Q_LEN, "kv_len": KV_LEN}
    found = _mask_of(mask_mod, aux, sizes)
    pattern: dict[str, Any] = {"kind": "block_lists", "block": {"q": constant(block[0]), "kv": constant(block[1])}}
    tensors = list(found.tensors.values())
    if any(map(torch._C._functorch.is_batchedtensor, tensors)):
        reason = "has tensors that are mapped by torch.vmap: pass the batch as a dimension, or call outside of it"
        raise ArgumentError("aux", reason)
    text = json_text({**pattern, "mask": found.text, **({"aux": found.declared} if found.declared else {})})
    if B is None or H is None:
        _check_shared(text, B is None, H is None)
    lists = torch.ops.sparse_kernel_codegen.create_block_mask(
        tensors,
        pattern=text,
        batch=batch,
        heads=heads,
        q_len=Q_LEN,
        kv_len=KV_LEN,
        device=_device_of(device, tensors),
    )
    return BlockLists(*lists, block=block, mask=found.text, aux=found.tensors or None)


def _with_new_names(given: dict[str, Any], renamed: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with deprecated names replaced.

    Raises:
        ArgumentError: for an unknown name, and for an argument passed by both names.
    """
    for name in renamed:
        if name not in _RENAMED:
            raise ArgumentError(name, f"is not an argument; {alternatives(name, (*given, 'device', 'aux'))}")
        if given[_RENAMED[name]] not in (None, 128):
            raise ArgumentError(name, f"was passed together with {_RENAMED[name]}, its new name")
    names = ", ".join(f"{name} is now {_RENAMED[name]}" for name in renamed)
    if not torch.compiler.is_dynamo_compiling():
        warnings.warn(f"create_block_mask takes torch's argument names: {names}", DeprecationWarning, stacklevel=3)
    return given | {_RENAMED[name]: value for name, value in renamed.items()}


def _check_sizes(*sizes: Any) -> None:
    """Check batches, heads, queries and keys.

    Raises:
        ArgumentError: naming the first wrong one, by torch's name.
    """
    try:
        checked_shape(*sizes)
    except ArgumentError as error:
        raise ArgumentError(_RENAMED[error.argument], error.reason) from None


def _mask_of(mask_mod: Any, aux: Mapping[str, torch.Tensor] | None, sizes: Mapping[str, int]) -> Expression:
    """The mask as an expression, for these sizes.

    Raises:
        ArgumentError: naming ``mask_mod`` or ``aux``.
    """
    try:
        return mask_of(mask_mod, aux, sizes)
    except ArgumentError as error:
        raise ArgumentError(_RENAMED.get(error.argument, error.argument), error.reason) from None


def _block_of(size: Any) -> tuple[int, int]:
    """Queries and keys of a block.

    Raises:
        ArgumentError: naming ``BLOCK_SIZE``, with the allowed sizes.
    """
    block = (size, size) if isinstance(size, int) else size
    if torch.compiler.is_compiling():
        return block[0], block[1]
    whole = isinstance(block, tuple | list) and len(block) == 2 and all(type(each) is int for each in block)
    if not whole or block[0] not in QUERIES or block[1] not in KEYS["mma"]:
        allowed = f"of {', '.join(map(str, QUERIES))} queries and {', '.join(map(str, KEYS['mma']))} keys"
        raise ArgumentError("BLOCK_SIZE", f"is {shown(size)}, expected a number or (queries, keys), {allowed}")
    return block[0], block[1]


def _check_shared(text: str, all_batches: bool, all_heads: bool) -> None:
    """Check that a mask shared by all batches (or heads) does not depend on the batch (or head).

    Raises:
        ArgumentError: naming ``B`` or ``H``.
    """
    asked = _asked(text).split()
    for name, variable, shared in (("B", "batch", all_batches), ("H", "head", all_heads)):
        if shared and variable in asked:
            reason = f"is None, but the mask depends on the {variable}: pass their number"
            raise ArgumentError(name, reason)


@constant_in_graphs
def _asked(text: str) -> str:
    """The variables among batch and head that a mask depends on: "batch head"."""
    try:
        expression = scored_pattern(text).pattern.expression
    except SpecError:  # the operator reports it
        return ""
    assert expression is not None
    sizes = zip(("batch", "head"), list_sizes(expression, 2, 2), strict=True)
    return " ".join(name for name, size in sizes if size > 1)


def _device_of(device: Any, tensors: list[torch.Tensor]) -> torch.device:
    """The device of the lists: a CUDA device with its number, or the CPU.

    Raises:
        ArgumentError: for any other device.
    """
    if device is None and not tensors and not torch.cuda.is_available():
        return torch.device("cpu")
    given = device if device is not None or not tensors else tensors[0].device
    if given is not None and named_device("device", given).type == "cpu":
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ArgumentError("device", f"is cpu, but a tensor of the mask is on {tensor.device}")
        return torch.device("cpu")
    return device_of(device, tuple(tensors))


class _OnCpu:
    """The CPU's counterpart of a kernel: torch makes the lists.

    Attributes:
        spec: a spec whose ``aux_tensors`` are the tensors of the mask.
    """

    def __init__(self, pattern: str) -> None:
        lists = scored_pattern(pattern).pattern
        assert isinstance(lists, BlockListsSpec) and lists.expression is not None
        self.spec, self._block, self._mask = lists, lists.block, lists.expression

    def __call__(
        self, batch: int, heads: int, q_len: int, kv_len: int, *, aux: Mapping[str, torch.Tensor], device: Any
    ) -> tuple[torch.Tensor, ...]:
        """The four tensors of the lists."""
        batch, heads = list_sizes(self._mask, batch, heads)
        sizes = {"batch": batch, "head": heads, "q_idx": q_len, "kv_idx": kv_len}
        at_once = max(1, PAIRS_AT_ONCE // (batch * heads * kv_len * self._block.q)) * self._block.q
        some, full = [], []
        for first in range(0, q_len, at_once):
            rows = min(at_once, q_len - first)
            values: dict[str, Any] = {"q_len": q_len, "kv_len": kv_len}
            for axis, (name, size) in enumerate(sizes.items()):
                start, count = (first, rows) if name == "q_idx" else (0, size)
                numbers = torch.arange(start, start + count, device=device)
                values[name] = numbers.view([-1 if place == axis else 1 for place in range(4)])
            pairs = evaluate(self._mask, values, aux).expand(batch, heads, rows, kv_len)
            some.append(any_in_blocks(any_in_blocks(pairs, -1, self._block.kv), -2, self._block.q))
            full.append(~any_in_blocks(any_in_blocks(~pairs, -1, self._block.kv), -2, self._block.q))
        seen, whole = torch.cat(some, 2), torch.cat(full, 2)
        partial_lists, full_lists = lists_of(seen & ~whole, None), lists_of(whole, None)
        return partial_lists.counts, partial_lists.indices, full_lists.counts, full_lists.indices


@kept_by_mode(KERNELS_KEPT)
def _kernel(index: int | None, pattern: str) -> BlockMaskKernel | _OnCpu:
    if index is None:
        return _OnCpu(pattern)
    device = torch.device("cuda", index)
    refuse_capture("mask_mod", device)
    fields = {"op": "block_mask", "arch": arch_of(device), "pattern": scored_pattern(pattern).pattern_fields}
    kernel = load_kernel(fields, device=device)
    assert isinstance(kernel, BlockMaskKernel)
    return kernel


def _run(
    aux: list[torch.Tensor], *, pattern: str, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Compute the operator. ``aux`` holds the pattern's tensors in the order of their names."""
    kernel = _kernel(device.index, pattern)
    names = (tensor.name for tensor in kernel.spec.aux_tensors)
    return tuple(kernel(batch, heads, q_len, kv_len, aux=dict(zip(names, aux, strict=True)), device=device))


def _fake(
    aux: list[torch.Tensor], *, pattern: str, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Tensors with the result's shapes and dtypes, without values."""
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
