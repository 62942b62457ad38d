"""Calls of kernels for attention over lists of keys, with many queries and K and V in pages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from codegen.problem import PAGE_ROWS, KeyListsShape
from codegen.spec import KeyListsForwardSpec
from runtime.driver.launch import Signature
from runtime.driver.workspace import Memory
from runtime.errors import ArgumentError
from runtime.kernels.arguments import check_memory, check_scale, check_strides, check_tensor
from runtime.kernels.gradient_statistics import LOG2_E
from runtime.kernels.key_lists_forward import arguments_of_slices, enqueue_slices, list_strides
from runtime.kernels.paged_attention import (
    UNBOUNDED,
    Options,
    PagedKernel,
    check_cache,
    check_lists,
    check_paged_options,
    check_paged_out,
    check_requests,
    page_numbers,
    token_strides,
)

REFUSED = ("sink", "k_scale", "v_scale")
"""Arguments of calls over pages that these kernels do not take."""
PLACES = (("q", "q", 0), ("k", "k_cache", 0), ("v", "v_cache", 0))


class _Bound(NamedTuple):
    """What later calls of a signature need: workspaces of a call, and signatures of its launches after the first."""

    memory: Memory
    sizes: Mapping[str, int]
    launches: tuple[Signature, ...]
    places: tuple[tuple[str, str, int], ...] = PLACES


class KeyListsPagedKernel(PagedKernel[KeyListsForwardSpec]):
    """Kernel that computes attention of many queries of each request over lists of key blocks in pages.

    Its calls are those of ``PagedAttentionKernel`` with lists of the spec's entries, and pages of a multiple of 16
    tokens, without other windows, sinks, a softcap and factors of an e4m3 cache. They allocate their memory, whether a
    workspace is given or not.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    def _check(self, tensors: dict[str, Any], options: Options) -> Signature:
        """Check a call of a new signature and prepare its launches."""
        q, k_cache, table, out, lists = (tensors[name] for name in ("q", "k_cache", "block_table", "out", "lists"))
        check_tensor("q", q, self._dtype, 3)
        tokens, heads, d = q.shape
        if d != self.spec.head_dim:
            raise ArgumentError("q", f"has head_dim {d}, expected {self.spec.head_dim}")
        check_strides("q", q)
        self._refuse(tensors, options)
        check_cache(q, k_cache, tensors["v_cache"], self._dtype)
        page_size, kv_heads = k_cache.shape[1:3]
        if heads != kv_heads * self.spec.group:
            has = f"has {heads} heads, {kv_heads} of k_cache"
            raise ArgumentError("q", f"{has}: this kernel has groups of {self.spec.group}")
        if table is not None and page_size % PAGE_ROWS:
            raise ArgumentError("k_cache", f"has pages of {page_size} tokens, expected a multiple of {PAGE_ROWS}")
        batch, max_keys = check_requests(tensors)
        check_lists(lists, tensors["counts"], options.entry_keys, q, kv_heads)
        for name in ("q", "k_cache"):
            if tensors[name].numel() == 0:
                raise ArgumentError(name, f"is empty: {tuple(tensors[name].shape)}")
        if out is not None:
            check_paged_out(out, q)
        check_memory(**{name: tensor for name, tensor in tensors.items() if tensor is not None})
        args = arguments_of_slices(self._plan, KeyListsShape(batch, tokens, max_keys, kv_heads, lists.shape[2]))
        strides = (
            token_strides("out", out) if out is not None else {"out_token_stride": heads * d, "out_head_stride": d}
        )
        scale = 1 / math.sqrt(d) if options.scale is None else check_scale(options.scale)
        values: dict[str, int | float] = {
            "out_head_stride": strides["out_head_stride"],
            "out_row_stride": strides["out_token_stride"],
            "request_queries": tokens // batch if tensors["cu_seqlens_q"] is None else 0,
            "scale_log2": scale * LOG2_E,
            **page_numbers(k_cache, table),
            **list_strides(tensors),
        }
        of_rows, of_cache = q.transpose(0, 1).unsqueeze(0), k_cache.transpose(1, 2)
        maps = {"q": (tuple(of_rows.shape), of_rows.stride())}
        maps |= dict.fromkeys(("k", "v"), (tuple(of_cache.shape), of_cache.stride()))
        later = tuple(self._signature(q.device, of_slice, values, maps) for of_slice in args[1:])
        return self._signature(q.device, args[0], values, maps, _Bound(Memory.of(args[0]), args[0].scratch, later))

    def _refuse(self, tensors: dict[str, Any], options: Options) -> None:
        """Refuse what other kernels over pages compute."""
        check_paged_options(options)
        name = self.compiled.named.stem
        for argument in REFUSED:
            if tensors[argument] is not None:
                raise ArgumentError(argument, f"is given, but {name} does not take it")
        if options.softcap is not None:
            raise ArgumentError("softcap", f"is {options.softcap}, but {name} has none")
        if tensors["lists"] is None:
            raise ArgumentError("lists", f"is missing, but {name} has lists")
        if options.entry_keys != self.spec.entry_keys:
            raise ArgumentError("entry_keys", f"is {options.entry_keys}, expected {self.spec.entry_keys} with {name}")
        if options.window.right != 0 or options.window.left < UNBOUNDED:
            raise ArgumentError("window", f"is {options.window}, but {name} has none besides the causal mask")

    def _submit(self, signature: Signature, addresses: dict[str, int], device: torch.device) -> None:
        """Launch the slices of a call."""
        bound: _Bound = signature.extra
        enqueue_slices(
            self._loaded, (signature, *bound.launches), addresses, device, memory=bound.memory, sizes=bound.sizes
        )
