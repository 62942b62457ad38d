"""Attention over pages on real tensors: checks, the kernel of a call, and the call."""

from __future__ import annotations

import functools
from typing import Any

import torch

from codegen.arch import ARCHS
from codegen.library import as_shipped, find_spec
from codegen.problem import PAGE_ROWS
from codegen.select.key_lists import KeyListsCall
from codegen.select.paged import PACKS, PREFILL_KERNELS_OF, PagedCall, decode_fields, packed_kinds, prefill_fields
from codegen.wording import shown
from runtime.checks import check_dense, refuse_capture
from runtime.errors import ArgumentError
from runtime.kernel import load_kernel
from runtime.kernels.arguments import MAX_EXTENT, TORCH_DTYPES
from runtime.kernels.attention import AttentionResult
from runtime.kernels.key_lists_paged import KeyListsPagedKernel
from runtime.kernels.launches import Launch, Launches
from runtime.kernels.paged_attention import (
    TENSORS,
    UNBOUNDED,
    Given,
    Options,
    PagedAttentionKernel,
    Window,
    WorkspaceBytes,
    given_of,
)
from runtime.kernels.paged_prefill import PagedPrefillKernel
from runtime.key_lists import KeyLists
from runtime.ops.attention_choice import DTYPES, arch_of
from runtime.ops.attention_extras import check_softcap
from runtime.patterns import Causal, Pattern, SinkWindow, SlidingWindow
from runtime.receipts.mode import KERNELS_KEPT, kept_by_mode, mode
from runtime.receipts.permit import is_verified

PATTERNS = ("dense", "causal", "sliding_window", "sink_window")
HEAD_DIMS = {"same": (64, 128, 192, 256), "e4m3": (64, 128, 256)}
"""Head sizes of the kernels, by the type of the cache."""
CACHE_AXES = {False: "(pages, page_size, kv_heads, head_dim)", True: "(pages, kv_heads, page_size, head_dim)"}
_CACHE_RANK = 4
TABLE_RANK = 2
_E4M3 = TORCH_DTYPES["e4m3"]
LISTS = TENSORS.index("lists")
SCALES = slice(TENSORS.index("k_scale"), TENSORS.index("v_scale") + 1)
LIST_FIELDS = {"lists": "pattern.indices", "counts": "pattern.counts"}
"""Fields of ``KeyLists`` by the arguments of kernels."""


def window_of(pattern: Pattern | KeyLists) -> Window:
    """Keys that a query sees, besides lists.

    Raises:
        ArgumentError: for a diagonal that does not end at the last key.
    """
    if isinstance(pattern, SlidingWindow):
        return Window(pattern.left, pattern.right)
    if isinstance(pattern, SinkWindow):
        return Window(pattern.left, pattern.right, pattern.sink)
    if isinstance(pattern, KeyLists):
        return Window()
    if isinstance(pattern, Causal):
        if pattern.align != "bottom_right":
            raise ArgumentError("pattern", f"has align {pattern.align}, expected bottom_right: queries are the latest")
        return Window()
    return Window(UNBOUNDED, UNBOUNDED)


@kept_by_mode(KERNELS_KEPT)
def _kernel(index: int, dtype: str, cache: str, head_dim: int) -> PagedAttentionKernel:
    """Kernel of calls of a kind."""
    device = torch.device("cuda", index)
    refuse_capture("q", device)
    kernel = load_kernel(decode_fields(arch_of(device), dtype, cache, head_dim), device=device)
    assert isinstance(kernel, PagedAttentionKernel)
    return kernel


def decode_kernel(index: int, dtype: str, cache: str, head_dim: int) -> PagedAttentionKernel:
    """The decode kernel of calls of a kind, loaded once.

    Args:
        index: number of the device.
        dtype: type of q.
        cache: type of K and V in specs.
        head_dim: elements per head.
    """
    return _kernel(index, dtype, cache, head_dim)


@kept_by_mode(KERNELS_KEPT)
def _prefill_kernel(
    index: int, dtype: str, head_dim: int, pack: int, *, cache: str, sink: bool, softcap: float | None
) -> PagedPrefillKernel:
    """Kernel of calls of a kind with many queries for each request."""
    device = torch.device("cuda", index)
    refuse_capture("q", device)
    fields = prefill_fields(arch_of(device), dtype, head_dim, pack, cache=cache, sink=sink, softcap=softcap)
    kernel = load_kernel(fields, device=device)
    assert isinstance(kernel, PagedPrefillKernel)
    return kernel


@functools.lru_cache(maxsize=KERNELS_KEPT)
def verified_packs(
    arch: str, dtype: str, head_dim: int, *, cache: str = "same", sink: bool, softcap: float | None
) -> frozenset[int]:
    """Packed query heads of the prefill kernels of a kind that have a receipt; 1: of those of one head."""

    def holds(pack: int) -> bool:
        if dtype not in PREFILL_KERNELS_OF[cache].get((head_dim, pack, sink, softcap), ()):
            return False
        fields = prefill_fields(arch, dtype, head_dim, pack, cache=cache, sink=sink, softcap=softcap)
        return is_verified(as_shipped(find_spec(fields)))

    return frozenset(pack for pack in (1, *PACKS) if ARCHS[arch].has_wgmma and holds(pack))


@functools.lru_cache(maxsize=KERNELS_KEPT)
def has_receipt(fields: tuple[tuple[str, Any], ...]) -> bool:
    """Whether a kernel has a receipt, in the package or in the user's folder."""
    return is_verified(as_shipped(find_spec(dict(fields))))


@kept_by_mode(KERNELS_KEPT)
def _list_kernel(index: int, fields: tuple[tuple[str, Any], ...]) -> KeyListsPagedKernel:
    """Kernel by key blocks of calls of a kind."""
    device = torch.device("cuda", index)
    refuse_capture("q", device)
    kernel = load_kernel(dict(fields), device=device)
    assert isinstance(kernel, KeyListsPagedKernel)
    return kernel


def by_key_blocks(given: Given, options: Options, call: PagedCall) -> tuple[tuple[str, Any], ...] | None:
    """Fields of the kernel by key blocks for a call with lists; None if the call takes another kernel.

    Args:
        given: the tensors of the call, in the order of ``TENSORS``.
        options: its other arguments.
        call: what the choice between other kernels depends on.
    """
    lists = given[LISTS]
    if lists is None or not call.kv_heads:
        return None
    odd_page = call.page_size is not None and call.page_size % PAGE_ROWS > 0
    options_of_decode = call.sink or call.softcap is not None or call.batch_invariant
    others = (
        options_of_decode or call.e4m3 or any(scale is not None for scale in given[SCALES]) or call.empty or odd_page
    )
    chosen = KeyListsCall(
        call.arch,
        call.dtype,
        call.head_dim,
        entry_keys=options.entry_keys,
        group=call.heads // call.kv_heads,
        queries=call.queries,
        keys=call.requests * call.max_keys,
        entries=lists.shape[2],
        options=others,
        layout="paged",
    )
    return chosen.kernel() if chosen.by_keys() and has_receipt(chosen.kernel()) else None


@kept_by_mode(KERNELS_KEPT)
def _dividing_kernels(index: int, head_dim: int) -> tuple[PagedPrefillKernel, ...]:
    """The prefill kernels of a head size that divide the keys of tiles and have a receipt, one for each pack."""
    arch = arch_of(torch.device("cuda", index))
    found = []
    for kind in packed_kinds(head_dim):
        dtype, pack = kind.pop("dtypes")[0], kind["pack"]
        if pack in verified_packs(arch, dtype, head_dim, **{name: kind[name] for name in ("cache", "sink", "softcap")}):
            found.append(_prefill_kernel(index, dtype, head_dim, **kind))
    return tuple(found)


def cache_of(q: torch.Tensor, k_cache: torch.Tensor) -> str:
    """Type of the cache in specs."""
    return "same" if k_cache.dtype == q.dtype else "e4m3"


def paged_call(given: Given, options: Options, arch: str) -> PagedCall:
    """What the choice of a kernel depends on, for a call with checked operands.

    Args:
        given: the tensors of the call, in the order of ``TENSORS``, with the tokens of a page before its heads.
        options: its other arguments.
        arch: architecture of the GPU.

    Raises:
        ArgumentError: for a table that is no dense tensor.
    """
    q, k_cache, _, table = given[:4]
    (requests, page_size), kv_heads = k_cache.shape[:2], k_cache.shape[2]
    pages, cache = 1, cache_of(q, k_cache)
    dtype, d, sink, softcap = DTYPES[q.dtype], q.shape[2], given[8] is not None, options.softcap
    if table is not None:
        check_dense("block_table", table)
        if table.dim() == TABLE_RANK:
            requests, pages = table.shape
    return PagedCall(
        arch,
        dtype,
        d,
        q.shape[1],
        kv_heads,
        q.shape[0],
        requests,
        None if table is None else page_size,
        pages * page_size,
        same_queries=given[5] is None or requests == 1,
        window_left=options.window.left,
        empty=k_cache.numel() == 0,
        e4m3=cache == "e4m3",
        lists=given[6] is not None,
        sink=sink,
        softcap=softcap,
        batch_invariant=options.batch_invariant,
        verified=verified_packs(arch, dtype, d, cache=cache, sink=sink, softcap=softcap),
    )


def check_operands(q: Any, k_cache: Any, v_cache: Any, *, heads_first: bool) -> str:
    """Check types and head sizes of q, K and V; return the type of the cache in specs.

    Raises:
        ArgumentError: for the first thing that is wrong.
    """
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_dense(name, tensor)
    if q.dtype not in DTYPES:
        raise ArgumentError("q", f"is {q.dtype}, expected torch.float16 or torch.bfloat16")
    if q.dim() != _CACHE_RANK - 1:
        raise ArgumentError("q", f"has shape {tuple(q.shape)}, expected (tokens, heads, head_dim)")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dim() != _CACHE_RANK:
            raise ArgumentError(name, f"has shape {tuple(tensor.shape)}, expected {CACHE_AXES[heads_first]}")
        if tensor.dtype not in (q.dtype, _E4M3):
            raise ArgumentError(name, f"is {tensor.dtype}, expected q's type, {q.dtype}, or {_E4M3}")
        if tensor.device != q.device:
            raise ArgumentError(name, f"is on {tensor.device}, q is on {q.device}")
    if v_cache.dtype != k_cache.dtype:
        raise ArgumentError("v_cache", f"is {v_cache.dtype}, k_cache is {k_cache.dtype}: pass one type")
    cache = cache_of(q, k_cache)
    if q.shape[2] not in HEAD_DIMS[cache]:
        allowed = ", ".join(map(str, HEAD_DIMS[cache]))
        raise ArgumentError("q", f"has head_dim {q.shape[2]}, expected {allowed} with a cache of {k_cache.dtype}")
    return cache


_launches = Launches()


def attend_paged(given: Given, options: Options, *, heads_first: bool, validate: bool) -> AttentionResult:
    """Compute attention over pages, as ``paged_attention`` describes it.

    Args:
        given: the tensors of the call, in the order of ``runtime.kernels.paged_attention.TENSORS``.
        options: its other arguments.
        heads_first: whether the heads of a page come before its tokens.
        validate: whether values of tables, lengths and bounds are checked.

    Raises:
        ArgumentError: before anything is launched.
    """
    launch: Launch | None = None
    key: Any = None
    absent, present = given_of(given)
    try:
        key = options, absent, heads_first, torch.is_grad_enabled(), mode()
        launch = None if validate else _launches.find(key, present)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        key = None
    result: AttentionResult | None = None if launch is None else launch(present)
    if result is not None:
        return result
    return _attend_checked(given, options, key, heads_first=heads_first, validate=validate)


def _attend_checked(given: Given, options: Options, key: Any, *, heads_first: bool, validate: bool) -> AttentionResult:
    """Check a call and compute it; its launch is kept under ``key``, unless that is None."""
    q, k_cache, v_cache = given[:3]
    cache = check_operands(q, k_cache, v_cache, heads_first=heads_first)
    if options.softcap is not None:
        options = options._replace(softcap=check_softcap(options.softcap))
    check_place(q)
    by_token = given
    if heads_first:
        caches, scales = (k_cache.transpose(1, 2), v_cache.transpose(1, 2)), map(_by_token, given[SCALES])
        by_token = (q, *caches, *given[3:9], *scales, *given[11:])
    kernel: PagedAttentionKernel | PagedPrefillKernel | KeyListsPagedKernel
    call = paged_call(by_token, options, arch_of(q.device))
    of_kind = q.device.index, call.dtype
    of_lists = by_key_blocks(by_token, options, call)
    if of_lists is not None:
        kernel = _list_kernel(q.device.index, of_lists)
    elif call.decode_reason():
        kernel = _kernel(*of_kind, cache, call.head_dim)
    else:
        options_of_kind: dict[str, Any] = {"cache": cache, "sink": call.sink, "softcap": call.softcap}
        kernel = _prefill_kernel(*of_kind, call.head_dim, call.pack, **options_of_kind)
    try:
        launch, result = kernel.attend_checked(by_token, options, validate=validate)
    except ArgumentError as error:
        if error.argument not in LIST_FIELDS:
            raise
        raise ArgumentError(LIST_FIELDS[error.argument], error.reason) from None
    if key is not None:
        _launches.keep(key, given_of(given)[1], launch)
    return result


def check_place(q: torch.Tensor) -> None:
    """Check that a call is on a GPU.

    Raises:
        ArgumentError: if it is not.
    """
    if q.device.type != "cuda":
        raise ArgumentError("q", f"is on {q.device}, expected a CUDA device")


def _by_token(scale: Any) -> Any:
    """Factors of tokens with the heads last, as kernels take them."""
    has_pages = isinstance(scale, torch.Tensor) and scale.dim() == _CACHE_RANK - 1
    return scale.transpose(1, 2) if has_pages else scale


def check_sizes(head_dim: Any, sizes: dict[str, Any]) -> None:
    """Check the sizes of the calls of a workspace.

    Raises:
        ArgumentError: naming the argument.
    """
    if not _is_size(head_dim) or head_dim not in HEAD_DIMS["same"]:
        allowed = ", ".join(map(str, HEAD_DIMS["same"]))
        raise ArgumentError("head_dim", f"is {shown(head_dim)}, expected one of {allowed}")
    for name, size in sizes.items():
        if not _is_size(size):
            raise ArgumentError(name, f"is {shown(size)}, expected an integer from 1 to {MAX_EXTENT}")
    if sizes["heads"] % sizes["kv_heads"]:
        raise ArgumentError("kv_heads", f"is {sizes['kv_heads']}, expected a divisor of the {sizes['heads']} heads")


def bytes_of_workspace(device: torch.device, head_dim: int, sizes: dict[str, int], *, batch_invariant: bool) -> int:
    """Bytes of a workspace for all types of q and of the cache, and for plain calls besides batch-invariant ones."""
    has_e4m3 = ARCHS[arch_of(device)].has_fp8 and head_dim in HEAD_DIMS["e4m3"]
    kernels = [
        _kernel(device.index, "fp16", cache, head_dim) for cache in (("same", "e4m3") if has_e4m3 else ("same",))
    ]
    sizes_of = [
        kernel.workspace_bytes(device, **sizes, batch_invariant=invariant)
        for kernel in kernels
        for invariant in {False, batch_invariant}
    ]
    sizes_of += [kernel.workspace_bytes(device) for kernel in _dividing_kernels(device.index, head_dim)]
    return functools.reduce(WorkspaceBytes.with_room_for, sizes_of).total


def _is_size(size: Any) -> bool:
    """Whether an argument is a size of a tensor."""
    return isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= MAX_EXTENT
