"""Choice of the pattern of a model's attention: blocks selected from q and k, or a pattern without tensors."""

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
"""``pattern_for(module, q, k, exact)``, a function that returns the pattern of a call.

Its arguments are the attention module (None if the library passes none), q (batch, heads, q_len, head_dim), k (batch,
kv_heads, kv_len, head_dim), and ``exact``, the pattern of the model's own mask. Returning ``exact`` leaves the model
unchanged.
"""
OF_NUMBERS: dict[str, type[Pattern]] = {kind.kind: kind for kind in (Dense, Causal, SlidingWindow, SinkWindow, Strided)}


@dataclass(frozen=True)
class TopKSelection:
    """A chooser that selects, for each query block, the key blocks with the largest product of mean query and mean key.

    If the model's own pattern is ``Causal``, lists have blocks up to the diagonal, and blocks on the diagonal are
    masked. If it is ``Dense``, lists may have all blocks. Sliding windows are unchanged, and so are calls with fewer
    queries than ``from_len``, such as decoding and short prompts. Any other pattern is refused.

    Attributes:
        topk: key blocks per list.
        block: queries and keys per block.
        always: indices of key blocks that are always selected, as in ``select_topk_blocks``. 0 is the first block, -1
            the block of the query block's last query. Without -1, a causal query may see no key.
        from_len: minimum q_len of calls for which blocks are selected.
    """

    topk: int
    block: tuple[int, int] = (128, 128)
    always: tuple[int, ...] = (0, -1)
    from_len: int = 1024

    def __call__(self, module: Any, q: torch.Tensor, k: torch.Tensor, exact: Pattern) -> Pattern:
        """The pattern of a call; see :data:`Chooser`.

        Args:
            module: the attention module; not used.
            q: (batch, heads, q_len, head_dim), used for the selection.
            k: (batch, kv_heads, kv_len, head_dim), used for the selection.
            exact: the pattern of the model's own mask.

        Returns:
            Lists of the selected blocks: ``TopK``, or ``BlockLists`` with a causal mask; ``exact`` for a sliding window
            and for fewer queries than ``from_len``.

        Raises:
            ArgumentError: for an unsupported mask, or an argument that ``select_topk_blocks`` refuses.
        """
        if q.shape[2] < self.from_len or isinstance(exact, SlidingWindow):
            return exact
        causal = isinstance(exact, Causal) and (exact.align == "bottom_right" or q.shape[2] == k.shape[2])
        if not causal and not isinstance(exact, Dense):
            reason = "is neither full, causal to the last key, nor a sliding window, so blocks cannot be selected: pad"
            raise ArgumentError("attention_mask", f"{reason} on the right, and use no static cache for a prompt")
        lists = select_topk_blocks(q, k, self.block, self.topk, causal=causal, always=self.always)
        if causal:
            return from_causal_lists(lists, q_len=q.shape[2], kv_len=k.shape[2], block=self.block)
        return TopK(lists, block=self.block)


def chooser_of(fields: Mapping[str, Any], name: str = "block_sparse") -> Chooser:
    """Return the chooser described by plain data, such as a model's configuration or a server's options.

    Args:
        fields: ``{"kind": "topk", "topk": 32, ...}`` with the fields of :class:`TopKSelection`, or the kind and the
            parameters of a pattern without tensors: ``{"kind": "sink_window", "sink": 4, "left": 1023}``.
        name: name of the fields in messages.

    Returns:
        A :class:`TopKSelection`, or a function that returns the pattern for every call.

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
    except TypeError as error:  # a missing or unknown field
        raise ArgumentError(name, f"has fields {sorted(numbers)} of kind {kind!r}: {error}") from None
    if isinstance(found, TopKSelection):
        return found
    return lambda module, q, k, exact: found
