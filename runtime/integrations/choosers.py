"""Which pattern a model's attention is computed with: blocks selected from q and k, or a pattern of numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runtime.convert import from_causal_lists
from runtime.errors import ArgumentError
from runtime.ops.select_topk import select_topk_blocks
from runtime.patterns import Causal, Dense, Pattern, SinkWindow, SlidingWindow, Strided, TopK

Chooser = Callable[[Any, torch.Tensor, torch.Tensor, Pattern], Any]
"""``pattern_for(module, q, k, exact)``: returns the pattern of a call.

Its arguments are the attention module (None where the library tells none), q (batch, heads, q_len, head_dim), k
(batch, kv_heads, kv_len, head_dim), and the pattern of the model's own mask; returning that leaves the model as it is.
"""
OF_NUMBERS: dict[str, type[Pattern]] = {kind.kind: kind for kind in (Dense, Causal, SlidingWindow, SinkWindow, Strided)}


@dataclass(frozen=True)
class TopKSelection:
    """A chooser: each query block sees the key blocks whose mean key fits its mean query best.

    Where the model's own pattern is ``Causal``, the lists are of blocks before the diagonal, and the diagonal's blocks
    are masked; where it is ``Dense``, of all blocks. A sliding window stays as it is, and so does a call that has fewer
    queries than ``from_len``: decoding, and prompts that are too short to gain. Any other pattern is refused.

    Attributes:
        topk: key blocks of a list.
        block: queries and keys of a block.
        always: key blocks that come before all others, as ``select_topk_blocks`` takes them. 0 is the first
            one, -1 that of the query block's last query. Without -1 a causal query may see no key.
        from_len: queries of a call from which on blocks are selected.
    """

    topk: int
    block: tuple[int, int] = (128, 128)
    always: tuple[int, ...] = (0, -1)
    from_len: int = 1024

    def __call__(self, module: Any, q: torch.Tensor, k: torch.Tensor, exact: Pattern) -> Pattern:
        """Return the pattern of a call; see :data:`Chooser`.

        Args:
            module: the attention module; not used.
            q: (batch, heads, q_len, head_dim), from which blocks are selected.
            k: (batch, kv_heads, kv_len, head_dim), the keys of these blocks.
            exact: the pattern of the model's own mask.

        Returns:
            Lists of the selected blocks: ``TopK``, or under a causal mask ``BlockLists``; ``exact`` for a sliding
            window and for fewer queries than ``from_len``.

        Raises:
            ArgumentError: for a mask that lists cannot be selected under, and naming what
                ``select_topk_blocks`` cannot take.
        """
        if q.shape[2] < self.from_len or isinstance(exact, SlidingWindow):
            return exact
        causal = isinstance(exact, Causal) and (exact.align == "bottom_right" or q.shape[2] == k.shape[2])
        if not causal and not isinstance(exact, Dense):
            reason = "is neither full, causal to the last key, nor a sliding window, and blocks are to be selected: pad"
            raise ArgumentError("attention_mask", f"{reason} on the right, and take no static cache for a prompt")
        lists = select_topk_blocks(q, k, self.block, self.topk, causal=causal, always=self.always)
        if causal:
            return from_causal_lists(lists, q_len=q.shape[2], kv_len=k.shape[2], block=self.block)
        return TopK(lists, block=self.block)


def chooser_of(fields: Mapping[str, Any], name: str = "block_sparse") -> Chooser:
    """Return the chooser that plain data describe, as a model's configuration or a server's options have them.

    Args:
        fields: ``{"kind": "topk", "topk": 32, ...}`` with the fields of :class:`TopKSelection`, or the kind and the
            numbers of a pattern without tensors: ``{"kind": "sink_window", "sink": 4, "left": 1023}``.
        name: what the fields are called in messages.

    Returns:
        The :class:`TopKSelection`, or a function that returns the pattern for every call.

    Raises:
        ArgumentError: naming the field.
    """
    if not isinstance(fields, Mapping):
        raise ArgumentError(name, f"is {type(fields).__name__}, expected a mapping such as {{'kind': 'topk', ...}}")
    numbers = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    kind = numbers.pop("kind", None)
    made: Any = TopKSelection if kind == "topk" else OF_NUMBERS.get(kind) if isinstance(kind, str) else None
    if made is None:
        raise ArgumentError(f"{name}.kind", f"is {kind!r}, expected one of {', '.join(('topk', *OF_NUMBERS))}")
    try:
        found: Any = made(**numbers)
    except TypeError as error:  # a field that is missing, or that there is none of
        raise ArgumentError(name, f"has fields {sorted(numbers)} of kind {kind!r}: {error}") from None
    if isinstance(found, TopKSelection):
        return found
    return lambda module, q, k, exact: found
