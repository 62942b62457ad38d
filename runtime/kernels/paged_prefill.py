"""Calls of kernels of attention of many queries of each request over pages."""

from __future__ import annotations

import math
from typing import Any

import torch

from codegen.patterns.base import MOST_KEYS
from codegen.problem import LARGE_PAGE_ROWS, PAGE_ROWS, AttentionShape
from codegen.spec import AttentionSpec
from runtime.driver.context import entered
from runtime.driver.launch import Signature
from runtime.driver.workspace import NO_MEMORY, Memory
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    TMA_ALIGNMENT,
    TORCH_DTYPES,
    check_memory,
    check_scale,
    check_sink,
    check_strides,
    check_tensor,
)
from runtime.kernels.paged_attention import (
    WORKSPACE_ALIGNMENT,
    Bound,
    Options,
    PagedKernel,
    WorkspaceBytes,
    check_cache,
    check_cache_scales,
    check_paged_options,
    check_paged_out,
    check_requests,
    check_workspace,
    page_numbers,
    token_strides,
)

REFUSED = ("lists", "counts")
"""Arguments of calls over pages that these kernels do not take."""


K_MAPS, V_MAPS = ("k", "k_part"), ("v", "v_part", "v_row")
"""Tensor maps of the caches, without ``_map``."""


class PagedPrefillKernel(PagedKernel[AttentionSpec]):
    """Kernel that computes attention of many queries of each request over K and V in pages.

    Its calls are those of ``PagedAttentionKernel`` without lists, with pages of a multiple of 16 tokens, and with the
    spec's softcap. They have sinks if the spec does, and factors of K and V if its cache is e4m3.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    def workspace_bytes(self, device: torch.device) -> WorkspaceBytes:
        """Bytes of the workspace of any call.

        Args:
            device: device of the call.

        Returns:
            The bytes, which only the device and the kernel determine.

        Raises:
            DeviceError: if the device cannot be entered.
        """
        with entered(device.index):
            slots = self._loaded.slots(device.index)
        of_pattern = dict.fromkeys(("window_left", "window_right", "sink_keys"), 0)
        shape = AttentionShape(1, self.spec.pack_gqa, 1, 1, MOST_KEYS, **of_pattern, sequences=1)
        return WorkspaceBytes.of(self._plan.problem(shape, slots))

    def _check(self, tensors: dict[str, Any], options: Options) -> Signature:
        """Check a call of a new signature and prepare it."""
        q, k_cache, table, out, workspace = (
            tensors[name] for name in ("q", "k_cache", "block_table", "out", "workspace")
        )
        check_tensor("q", q, self._dtype, 3)
        tokens, heads, d = q.shape
        if d != self.spec.head_dim:
            raise ArgumentError("q", f"has head_dim {d}, expected {self.spec.head_dim}")
        check_strides("q", q)
        self._refuse(tensors, options)
        of_codes = self._check_cache(tensors)
        kv_heads = k_cache.shape[2]
        pack = self._check_heads(heads, kv_heads)
        batch, max_keys = _check_pages(tensors)
        if out is not None:
            check_paged_out(out, q)
        check_memory(**{name: tensor for name, tensor in tensors.items() if tensor is not None})
        left, right, sink_keys = (min(number, MOST_KEYS) for number in options.window)
        of_pattern = {"window_left": left, "window_right": right, "sink_keys": sink_keys}
        sizes = 1, heads, kv_heads, tokens, max_keys
        slots = self._loaded.slots(q.device.index) if self.spec.split_kv else 0
        args = self._plan.problem(AttentionShape(*sizes, **of_pattern, sequences=batch), slots)
        if args.numbers["tiles"] >= 2**31:
            raise ArgumentError("q", f"has shape {tuple(q.shape)}: more than 2^31 tiles")
        memory = Memory.of(args)
        cache_maps = {} if of_codes else {**dict.fromkeys(K_MAPS, "k_cache"), **dict.fromkeys(V_MAPS, "v_cache")}
        places = [*((name, cache, 0) for name, cache in cache_maps.items()), ("o", "out", 0)]
        if workspace is not None:
            size = WorkspaceBytes.of(args)
            check_workspace(tensors, size.total)
            places += _places_in(workspace.numel(), memory, size)
            memory = NO_MEMORY._replace(unused=memory.unused)
        # Any readable address stands for bounds or lengths that are not given.
        missing = [name for name in ("cu_seqlens_q", "seq_lens") if tensors[name] is None]
        places += [(name, "q", 0) for name in missing]
        scale = 1 / math.sqrt(d) if options.scale is None else check_scale(options.scale)
        o_strides = token_strides("o", out) if out is not None else {"o_token_stride": heads * d, "o_head_stride": d}
        values = {
            "o_head_stride": o_strides["o_head_stride"],
            "o_row_stride": o_strides["o_token_stride"],
            "head_chunks": d * q.element_size() // TMA_ALIGNMENT,
            "has_bounds": int("cu_seqlens_q" not in missing),
            "has_lengths": int("seq_lens" not in missing),
            "request_queries": tokens // batch if "cu_seqlens_q" in missing else 0,
            "request_keys": max_keys if "seq_lens" in missing else 0,
            "scale_log2": scale * math.log2(math.e),
            **page_numbers(k_cache, table),
            "copy_shift": _copy_rows(k_cache, table).bit_length() - 1,
            **of_codes,
        }
        of_cache = k_cache.transpose(1, 2)
        kv_view = (tuple(of_cache.shape), of_cache.stride())
        of_o = o_strides["o_token_stride"], o_strides["o_head_stride"]
        mapped = {"q": _rows_view(q.shape, pack, q.stride()[:2]), "o": _rows_view(q.shape, pack, of_o)}
        mapped |= dict.fromkeys(cache_maps, kv_view)
        return self._signature(q.device, args, values, mapped, Bound(memory, tuple(places)))

    def _check_cache(self, tensors: dict[str, Any]) -> dict[str, int]:
        """Check K, V and their factors; return the numbers of e4m3 codes by kernel parameter, none for other types."""
        has_codes = self.spec.has_codes
        dtype = TORCH_DTYPES["e4m3"] if has_codes else self._dtype
        strides = check_cache(tensors["q"], tensors["k_cache"], tensors["v_cache"], dtype)
        scales = check_cache_scales(tensors, self.spec)
        strides["kv_head_chunks"] = strides.pop("head_chunks")  # other than those of a row of O
        return {**strides, **scales} if has_codes else {}

    def _check_heads(self, heads: int, kv_heads: int) -> int:
        """Check that the query heads of a K/V head divide into packs; return the heads of a pack."""
        pack, group = self.spec.pack_gqa, heads // kv_heads
        if group % pack:
            has = f"has {heads} heads, {group} for each of k_cache"
            raise ArgumentError("q", f"{has}: this kernel packs {pack}, so a multiple of that")
        return pack

    def _refuse(self, tensors: dict[str, Any], options: Options) -> None:
        """Refuse what other kernels over pages compute."""
        check_paged_options(options)
        name, q = self.compiled.named.stem, tensors["q"]
        refused = REFUSED if self.spec.sink else (*REFUSED, "sink")
        for argument in refused:
            if tensors[argument] is not None:
                raise ArgumentError(argument, f"is given, but {name} does not take it")
        if options.softcap != self.spec.softcap:
            raise ArgumentError("softcap", f"is {options.softcap}, but {name} has {self.spec.softcap}")
        if self.spec.sink:
            check_sink(tensors["sink"], q.shape[1], q.device)


def _copy_rows(k_cache: torch.Tensor, table: torch.Tensor | None) -> int:
    """Keys per copy: many of a large page, or of keys without pages."""
    return LARGE_PAGE_ROWS if table is None or k_cache.shape[1] % LARGE_PAGE_ROWS == 0 else PAGE_ROWS


def _places_in(size: int, memory: Memory, wanted: WorkspaceBytes) -> list[tuple[str, str, int]]:
    """Places of counters at the beginning of a workspace of ``size`` bytes, and of partial results at its end."""
    end = size // WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT
    counters = [(name, "workspace", offset) for name, offset in memory.counter_places]
    return counters + [(name, "workspace", end - wanted.partials + offset) for name, offset in memory.scratch_places]


def _check_pages(tensors: dict[str, Any]) -> tuple[int, int]:
    """Check the pages of a call; return the number of requests and the most keys of one."""
    table, page_size = tensors["block_table"], tensors["k_cache"].shape[1]
    if table is not None and page_size % PAGE_ROWS:
        raise ArgumentError("k_cache", f"has pages of {page_size} tokens, expected a multiple of {PAGE_ROWS}")
    batch, max_keys = check_requests(tensors)
    if max_keys > MOST_KEYS:
        room = f"has room for {max_keys} keys of a request"
        raise ArgumentError("block_table", f"{room}, expected {MOST_KEYS} or less")
    for name in ("q", "k_cache"):
        if tensors[name].numel() == 0:
            raise ArgumentError(name, f"is empty: {tuple(tensors[name].shape)}")
    return batch, max_keys


def _rows_view(shape: tuple[int, ...], pack: int, strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of Q or O as their tensor maps address them.

    Args:
        shape: tokens, heads and head_dim.
        pack: query heads of a tile; if several, a dimension has those of a pack.
        strides: of tokens and of heads.
    """
    (tokens, heads, d), (of_token, of_head) = shape, strides
    if pack == 1:
        return (1, heads, tokens, d), (0, of_head, of_token, 1)
    return (1, heads // pack, tokens, pack, d), (0, of_head * pack, of_token, of_head, 1)
