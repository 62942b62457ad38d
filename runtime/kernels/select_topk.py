"""Calls of kernels that select key blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from codegen.problem import SelectShape
from codegen.spec import SelectTopkSpec
from codegen.wording import shown
from runtime.driver.allocate import allocator, contiguous
from runtime.driver.context import entered, is_elsewhere
from runtime.driver.enqueue import enqueue
from runtime.driver.launch import Signature
from runtime.driver.workspace import Memory
from runtime.errors import ArgumentError
from runtime.kernels.arguments import (
    call_key,
    check_addresses,
    check_keys,
    check_memory,
    check_strides,
    check_tensor,
    row_strides,
)
from runtime.kernels.bound_call import BoundCall

CHUNK = 8  # elements of one 16-byte load
FARTHEST_ALWAYS = 32  # blocks from either end that can always be selected
MOST_ENTRIES = 1 << 16  # entries of a list, at most


class _Selection(NamedTuple):
    """Options of a call; the last two are sets of 32 bits, as signed integers."""

    block_q: int
    block_kv: int
    topk: int
    causal: bool
    always_first: int
    always_last: int


class SelectTopkKernel(BoundCall[SelectTopkSpec]):
    """Kernel that selects, for each query block, the KV blocks whose mean key has the largest product with the mean
    query.

    Attributes:
        compiled: source, plan, code and compiler log.
        spec: the spec.
    """

    _argument_names = ("q", "k", "block", "topk")

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        block: tuple[int, int],
        topk: int,
        *,
        causal: bool = False,
        always: Sequence[int] = (),
    ) -> torch.Tensor:
        """Select key blocks.

        Args:
            q: (batch, heads, q_len, head_dim), the spec's dtype, head_dim a multiple of 8 up to 256; the last dimension
                contiguous, other strides any multiple of 16 bytes.
            k: (batch, kv_heads, kv_len, head_dim); heads is a multiple of kv_heads.
            block: queries and keys of a block, at least 1 each; the last blocks may be shorter.
            topk: entries of a list, from 1 to 65536.
            causal: hide KV blocks that begin after the last query of a query block.
            always: KV blocks to select before all others, from -32 to 31. Negative numbers count back from the KV block
                of the query block's last query (positions aligned at the end), which is -1. Hidden or missing blocks
                are skipped.

        Returns:
            int32 (batch, heads, ceil(q_len / block[0]), topk): the KV blocks with the largest products of mean query
            and mean key, computed in fp32, in ascending order of block number, then -1. Among equal products, the lower
            block number is selected; NaN ranks last.

        Raises:
            ArgumentError: naming the argument, before anything is launched.
        """
        if is_elsewhere(q):
            with entered(q.device.index):
                return self(q, k, block, topk, causal=causal, always=always)
        selection = _Selection(*checked_selection(block, topk, always), bool(causal), *_always(always))
        key = (selection, call_key(q, k))
        signature = self._bound(key)
        if signature is None:
            signature = self._signatures.keep(key, self._check(q, k, selection))
        shape, memory = signature.extra
        kv_indices = allocator(q.device)(*contiguous(shape), torch.int32)
        addresses = {"q": q.data_ptr(), "k": k.data_ptr(), "kv_indices": kv_indices.data_ptr()}
        check_addresses(addresses)
        enqueue(self._loaded, signature, addresses, q.device, memory)
        return kv_indices

    def _check(self, q: Any, k: Any, selection: _Selection) -> Signature:
        """Check a call of a new signature and prepare it."""
        check_tensor("q", q, self._dtype, 4)
        check_tensor("k", k, self._dtype, 4, q.device)
        batch, heads, q_len, d = q.shape
        if d % CHUNK or d > self.spec.widest_head:
            raise ArgumentError("q", f"has head_dim {d}, expected a multiple of {CHUNK} up to {self.spec.widest_head}")
        check_keys(q, k)
        kv_heads, kv_len = k.shape[1:3]
        for name, tensor in (("q", q), ("k", k)):
            check_strides(name, tensor)
        index, plan = q.device.index, self._plan
        shape = SelectShape(batch, heads, kv_heads, q_len, kv_len, d, selection.block_q, selection.block_kv)
        args = plan.problem(shape, self._loaded.slots(index))
        assert args.block is not None
        if args.block.shared_bytes > plan.shared_bytes:
            most = f"which need {args.block.shared_bytes} bytes of shared memory, expected {plan.shared_bytes} or less"
            raise ArgumentError("block", f"makes {args.numbers['key_blocks']} blocks of {kv_len} keys, {most}")
        if args.prologue_grid >= 2**31:
            raise ArgumentError("block", f"makes {args.prologue_grid} blocks of q and k, expected less than 2^31")
        values = {**selection._asdict(), **row_strides(q=q, k=k)}
        check_memory(q=q, k=k)
        lists = (batch, heads, args.numbers["query_blocks"], selection.topk)
        return self._signature(q.device, args, values, extra=(lists, Memory.of(args)))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _block(block: Any) -> tuple[int, int]:
    """Queries and keys of a block."""
    pair = tuple(block) if isinstance(block, Sequence) else ()
    if len(pair) != 2 or not all(_whole(size) and 1 <= size < 2**30 for size in pair):
        raise ArgumentError("block", f"is {shown(block)}, expected the queries and keys of a block, at least 1 each")
    return pair


def checked_selection(block: Any, topk: Any, always: Any) -> tuple[int, int, int]:
    """Check the queries and keys of a block, and the entries of a list.

    Raises:
        ArgumentError: naming the invalid argument.
    """
    _always(always)
    return (*_block(block), _topk(topk))


def _topk(topk: Any) -> int:
    if not _whole(topk) or not 1 <= topk <= MOST_ENTRIES:
        raise ArgumentError("topk", f"is {shown(topk)}, expected a number of key blocks from 1 to {MOST_ENTRIES}")
    return int(topk)


def _always(always: Any) -> tuple[int, int]:
    """Blocks that are always selected, as two sets of 32 bits in signed integers: from the first block, from the
    last."""
    first = last = 0
    for number in always if isinstance(always, Sequence) else (always,):
        if not _whole(number) or not -FARTHEST_ALWAYS <= number < FARTHEST_ALWAYS:
            allowed = f"expected numbers of blocks from {-FARTHEST_ALWAYS} to {FARTHEST_ALWAYS - 1}"
            raise ArgumentError("always", f"has {shown(number)}, {allowed}")
        if number >= 0:
            first |= 1 << number
        else:
            last |= 1 << (-1 - number)
    return _signed(first), _signed(last)


def _signed(bits: int) -> int:
    return bits - 2**32 if bits >= 2**31 else bits
