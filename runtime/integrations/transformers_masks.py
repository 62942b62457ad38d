"""Conversion of the masks of Hugging Face transformers to patterns, once for all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from runtime.convert import from_token_mask, kv_lengths_from_mask
from runtime.errors import ArgumentError
from runtime.integrations.packages import optional
from runtime.patterns import Causal, Dense, Pattern, SlidingWindow

MASKS = "transformers.masking_utils"


@dataclass(frozen=True)
class AttentionMask:
    """The value that layers get as ``attention_mask``.

    Attributes:
        masks: ``transformers.masking_utils``.
        numbers: pattern of the mask without tensors; None if only lists can hold the mask.
        within: pattern of each sequence, counted within it, if the mask has no other restriction than that queries see
            keys of their own sequence; None for any other mask.
        kv_lengths: int32 (batch,), number of valid keys of each batch; None if all are valid.
        q_len: number of queries of the mask.
        kv_len: number of keys of the mask.
        arguments: arguments of the mask interface, from which masks of other implementations are made.
    """

    masks: ModuleType
    numbers: Pattern | None
    within: Pattern | None
    kv_lengths: torch.Tensor | None
    q_len: int
    kv_len: int
    arguments: dict[str, Any]
    others: dict[str, Any] = field(default_factory=dict, repr=False)
    lists: list[Pattern] = field(default_factory=list, repr=False)

    @property
    def is_listed(self) -> bool:
        """Whether lists hold the whole mask, so that no other pattern can replace it."""
        return self.numbers is None

    @property
    def pattern(self) -> Pattern:
        """Pattern of the mask. Lists are made once, and not at all if every layer reads ``within``.

        A compiled layer makes lists that no layer has made before it, and does not keep them: a traced checkpoint must
        not change an object outside of it.
        """
        if self.numbers is not None:
            return self.numbers
        if self.lists:
            return self.lists[0]
        return self._listed() if torch.compiler.is_compiling() else self.keep_lists()

    def keep_lists(self) -> Pattern:
        """Make the lists, for all layers."""
        self.lists.append(self._listed())
        return self.lists[0]

    def _listed(self) -> Pattern:
        """The mask as lists."""
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return from_token_mask(self.masks.sdpa_mask(**{**self.arguments, **skips}))

    def of_implementation(self, name: str, masks: Any) -> Any:
        """The mask in the format of another implementation, made once for all layers.

        Args:
            name: name of the implementation.
            masks: ``transformers.masking_utils``.
        """
        if name not in self.others:
            self.others[name] = masks.ALL_MASK_ATTENTION_FUNCTIONS[name](**self.arguments)
        return self.others[name]


@dataclass(frozen=True)
class MaskInterface:
    """Makes the mask of a forward pass; a function for transformers' ``AttentionMaskInterface``.

    Full, causal and sliding-window masks become patterns without tensors, and padding on the right becomes key lengths.
    To check that padding is on the right, a forward pass synchronizes once. All other masks become exact lists with one
    bit per pair of a partial block: padding on the left, holes, packed sequences, chunks, custom masks, and static
    caches that are not full. They are made from transformers' own boolean mask (batch, 1, q_length, kv_length).

    Attributes:
        masks: ``transformers.masking_utils``.
    """

    masks: ModuleType

    @classmethod
    def of_package(cls) -> MaskInterface:
        """Import transformers.

        Raises:
            ToolchainError: if it is not installed.
        """
        return cls(optional(MASKS, "transformers"))

    def __call__(
        self,
        *,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> AttentionMask:
        """Make the mask of a forward pass.

        Args:
            batch_size: number of sequences.
            q_length: queries per sequence.
            kv_length: keys per sequence, including those of a cache.
            q_offset: position of the first query; an int, or int64 (1,) or () with static caches.
            kv_offset: position of the first key.
            mask_function: visibility of pairs of positions. Default: causal.
            attention_mask: bool (batch, positions), True for valid keys; None if all are valid.
            others: other arguments that transformers passes (device, use_vmap, ...).
        """
        function = self.masks.causal_mask_function if mask_function is None else mask_function  # dynamo traces it
        arguments = {
            **others,
            "batch_size": batch_size,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": function,
            "attention_mask": attention_mask,
        }
        pattern = _of_numbers(self.masks, function, (q_length, kv_length), q_offset, kv_offset)
        lengths = None
        if pattern is not None and attention_mask is not None:
            pattern, lengths = _padded(pattern, attention_mask, kv_offset, kv_length)
        within = pattern if lengths is None and q_length == kv_length else None
        if attention_mask is None and pattern is None and q_length == kv_length and isinstance(q_offset, int):
            within = pattern_within(self.masks, function, kv_length)
        mask = AttentionMask(self.masks, pattern, within, lengths, q_length, kv_length, arguments)
        if pattern is None and (within is None or torch.compiler.is_compiling()):
            mask.keep_lists()  # now, because layers change q_offset of a static cache; a graph drops unused lists
        return mask


def _padded(
    pattern: Pattern, mask: torch.Tensor, kv_offset: int, kv_length: int
) -> tuple[Pattern | None, torch.Tensor | None]:
    """A pattern with key lengths; no pattern if padding is not on the right."""
    if torch.compiler.is_compiling():  # tracing cannot depend on mask values
        return None, None
    keys = F.pad(mask, (0, max(0, kv_offset + kv_length - mask.shape[1])))[:, kv_offset : kv_offset + kv_length]
    lengths = kv_lengths_from_mask(keys)
    elsewhere, any_padding = torch.stack([(lengths < 0).any(), (lengths < kv_length).any()]).tolist()
    if elsewhere:
        return None, None
    return pattern, lengths if any_padding else None


def _of_numbers(
    masks: ModuleType, function: Callable[..., Any], lengths: tuple[int, int], q_offset: Any, kv_offset: int
) -> Pattern | None:
    """The pattern of a mask that transformers describes by parameters; None for any other mask."""
    if function is masks.bidirectional_mask_function:
        return Dense()
    if not isinstance(q_offset, int):
        return None
    q_len, kv_len = lengths
    at_end = q_offset - kv_offset == kv_len - q_len
    if function is masks.causal_mask_function and not at_end:
        return Causal(align="top_left") if q_offset == kv_offset else None
    return _of_parts(masks, _parts(function), kv_len) if at_end else None


def pattern_without_mask(*, is_causal: bool, window: int | None) -> Pattern:
    """Pattern of a call without a mask.

    Args:
        is_causal: whether the call is causal.
        window: number of keys that a causal query sees, including its own.

    Raises:
        ArgumentError: for a window without causal attention.
    """
    if is_causal:
        return Causal() if window is None else SlidingWindow(window - 1)
    if window is not None:
        reason = f"is {window} without causal attention: the visible keys are ambiguous"
        raise ArgumentError("sliding_window", reason)
    return Dense()


def pattern_within(masks: ModuleType, function: Callable[..., Any], kv_len: int) -> Pattern | None:
    """The pattern of a mask within each packed sequence of up to ``kv_len`` keys; None for any other mask."""
    return _of_parts(masks, _parts(function, through_packing=True), kv_len)


def _of_parts(masks: ModuleType, parts: list[Callable[..., Any]], kv_len: int) -> Pattern | None:
    """The pattern of a conjunction of mask functions, with the last query at the last key; None for any other."""
    causal = masks.causal_mask_function in parts
    overlays = [part for part in parts if part not in (masks.causal_mask_function, masks.bidirectional_mask_function)]
    windows = [_window(part) for part in overlays]
    if len(windows) > 1 or None in windows:
        return None
    if not causal and not windows:
        return Dense()
    left, right = (windows and windows[0]) or (kv_len, None)
    if causal:
        return Causal() if kv_len <= left + 1 else SlidingWindow(left)
    return SlidingWindow(left, right) if right is not None else None


def _parts(function: Callable[..., Any], *, through_packing: bool = False) -> list[Callable[..., Any]]:
    """The mask functions whose conjunction is the mask; with ``through_packing`` those within each packed sequence."""
    inner = _enclosed(function, "and_masks").get("mask_functions")
    if inner is None and through_packing:
        if _enclosed(function, "packed_sequence_mask_function"):
            return []
        remapped = _enclosed(function, "remap_positions_for_packed_sequence").get("mask_function")
        inner = None if remapped is None else (remapped,)
    if inner is None:
        return [function]
    return [part for each in inner for part in _parts(each, through_packing=through_packing)]


def _window(function: Callable[..., Any]) -> tuple[int, int | None] | None:
    """The number of keys before and after a query's own in a sliding-window overlay; None for no bound."""
    keys = _enclosed(function, "sliding_window_overlay").get("sliding_window")
    if isinstance(keys, int):
        return keys - 1, None
    around = _enclosed(function, "sliding_window_bidirectional_overlay").get("sliding_window")
    return (around, around) if isinstance(around, int) else None


def _enclosed(function: Callable[..., Any], maker: str) -> dict[str, Any]:
    """The closure variables of a mask function, if transformers' function of that name made it."""
    name = f"{maker}.<locals>."
    if getattr(function, "__module__", "") != MASKS or not getattr(function, "__qualname__", "").startswith(name):
        return {}
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
