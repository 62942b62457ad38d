"""Intersections and unions of patterns, where one pattern says them exactly."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from codegen.patterns import PATTERNS
from codegen.patterns.base import MOST_KEYS
from codegen.patterns.block_lists import NAMED_MASKS
from runtime.block_maps import Lists, ascending, is_listed
from runtime.checks import is_same
from runtime.errors import ArgumentError

Classes = Mapping[str, Any]
"""Classes of patterns by kind."""
LISTS = ("topk", "block_lists")
MOST_OF_MASK = 600
"""Characters of a mask in a message."""
_LAST = torch.iinfo(torch.int32).max
_NAMES = {"prefix_len": "prefix"}
"""Names in expressions of tensors whose own names are those of a kernel's parameters."""
_CAUSAL = "kv_idx <= q_idx + kv_len - q_len"


def combined(one: Any, other: Any, sign: str, classes: Classes) -> Any:
    """The pattern of the pairs that two patterns show, both (``&``) or any (``|``) of them.

    Args:
        one, other: the patterns.
        sign: ``&`` or ``|``.
        classes: of all patterns, by kind.

    Raises:
        ArgumentError: naming ``pattern``, where no pattern says it, with what does.
    """
    if getattr(other, "kind", None) not in classes:
        raise ArgumentError("pattern", f"is combined by {sign} with {type(other).__name__}, expected a pattern")
    for first, second in ((one, other), (other, one)):
        if first.kind == "dense":
            return second if sign == "&" else first
    if one is other:
        return one
    listed = [each for each in (one, other) if each.kind in LISTS]
    if len(listed) == 2:
        return _of_lists(one, other, sign, classes)
    if listed:
        (lists,) = listed
        return _hidden(lists, other if lists is one else one, sign, classes)
    return _of_numbers(one, other, sign, classes)


# Patterns of numbers


class _Window(NamedTuple):
    """Query i sees the first ``sink`` keys and those from i - left on, none after i + right; inf: no bound."""

    sink: float
    left: float
    right: float


def _window_of(pattern: Any) -> _Window | None:
    """A pattern as a window; None for others."""
    if pattern.kind == "causal" and pattern.align == "bottom_right":
        return _Window(0, math.inf, 0)
    if pattern.kind in ("sliding_window", "sink_window"):
        return _Window(getattr(pattern, "sink", 0), pattern.left, pattern.right)
    return None


def _pattern_of(window: _Window, classes: Classes) -> Any:
    """The simplest pattern of a window."""
    if window.left == math.inf and window.right == 0:
        return classes["causal"]()
    left, right = (int(min(side, MOST_KEYS)) for side in (window.left, window.right))
    if window.sink == 0 or window.left == math.inf:
        return classes["sliding_window"](left, right)
    return classes["sink_window"](int(window.sink), left, right)


def _of_numbers(one: Any, other: Any, sign: str, classes: Classes) -> Any:
    """Combine patterns without lists."""
    windows = _window_of(one), _window_of(other)
    if windows[0] is not None and windows[1] is not None:
        found = (_both if sign == "&" else _any)(windows[0], windows[1])
        if found is not None:
            return _pattern_of(found, classes)
    if one.spec_json == other.spec_json and not one.tensors:
        return one
    for first, second in ((one, other), (other, one)):
        window = _window_of(second)
        if first.kind == "prefix_lm" and window is not None:
            if window == _Window(0, math.inf, 0):
                return second if sign == "&" else first
            if sign == "|" and window.right == 0:  # a prefix and all keys before a query
                return first
        if first.kind == "prefix_lm" and second.kind == "prefix_lm" and first.prefix_len is second.prefix_len:
            return first
        if first.kind == "strided" and sign == "&" and window == _Window(0, math.inf, 0):
            return classes["strided"](first.stride, first.local, first.block, causal=True)
    raise _no_pattern(one, other, sign, "no pattern of numbers says that")


def _both(one: _Window, other: _Window) -> _Window | None:
    """The intersection of windows: None if the shorter one has the larger sink."""
    short, long = (one, other) if (one.left, one.sink) <= (other.left, other.sink) else (other, one)
    if short.left == long.left:
        sink = min(one.sink, other.sink)
    elif long.left == math.inf or short.sink <= long.sink:
        sink = short.sink
    else:
        return None
    return _Window(sink, short.left, min(one.right, other.right))


def _any(one: _Window, other: _Window) -> _Window:
    """The union of windows: each has its query's own position, so there is no gap between them."""
    return _Window(*(max(sides) for sides in zip(one, other, strict=True)))


def expression_of(pattern: Any) -> tuple[str, dict[str, torch.Tensor]]:
    """The pairs of a pattern without lists as the text of an expression, and its tensors."""
    if pattern.kind == "strided":
        own = "(q_idx + kv_len - q_len)"
        before = f"{own} // {pattern.block} - kv_idx // {pattern.block}"
        near = f"{before} <= {pattern.local}" + ("" if pattern.causal else f" and {before} >= -{pattern.local}")
        text = f"({near} or kv_idx // {pattern.block} % {pattern.stride} == 0)"
        return (f"kv_idx <= {own} and {text}" if pattern.causal else text), {}
    model = PATTERNS[pattern.kind].model_validate(pattern.spec_pattern())
    text = model.pair_mask or "kv_idx >= 0"
    for name, (value, _) in model.constants().items():
        text = re.sub(rf"\b{name}\b", str(value), text)
    tensors = {_NAMES.get(name, name): getattr(pattern, name) for name in pattern.tensors}
    for name, other in _NAMES.items():
        text = re.sub(rf"\b{name}\b", other, text)
    return text, tensors


# Lists


class _Parts(NamedTuple):
    """Lists with their partial and full blocks apart.

    Attributes:
        partial: None if all blocks are full.
        full: None without full blocks.
        mask: of the partial blocks.
        aux: its tensors.
    """

    partial: Lists | None
    full: Lists | None
    mask: str
    aux: Mapping[str, torch.Tensor]


def _parts_of(pattern: Any) -> _Parts:
    if pattern.kind == "topk":
        return _Parts(None, _unique(ascending(pattern.kv_indices)), "none", {})
    lists = _listed(pattern.kv_num_blocks, pattern.kv_indices)
    full = None if pattern.full_kv_indices is None else _listed(pattern.full_kv_num_blocks, pattern.full_kv_indices)
    if pattern.mask == "none":
        return _Parts(None, lists if full is None else _set(lists, full, "|"), "none", {})
    return _Parts(lists, full, pattern.mask, pattern.aux or {})


def _listed(counts: torch.Tensor, indices: torch.Tensor) -> Lists:
    return _unique(ascending(indices, is_listed(counts, indices)))


def _unique(lists: Lists) -> Lists:
    """Ascending lists without repeated entries."""
    indices = lists.indices
    again = torch.zeros_like(indices, dtype=torch.bool)
    again[..., 1:] = indices[..., 1:] == indices[..., :-1]
    return ascending(indices, ~again)


def _set(one: Lists, other: Lists, sign: str) -> Lists:
    """The blocks that are in both lists (``&``), in any (``|``), or in the first one alone (``-``)."""
    sides = [torch.where(each.indices < 0, _LAST, each.indices).long() for each in _alike(one, other)]
    # Twice the number of a block, and 1 for the second list: the sorted entries of a block are neighbors.
    entries = torch.cat([2 * sides[0], 2 * sides[1] + 1], -1).sort(-1).values
    block = entries // 2
    twin = torch.zeros_like(block, dtype=torch.bool)
    twin[..., :-1] = block[..., :-1] == block[..., 1:]
    first = entries % 2 == 0
    kept = {"&": first & twin, "|": first | ~_shifted(twin), "-": first & ~twin}[sign] & (block != _LAST)
    found = ascending(torch.where(kept, block, -1))
    width = {"&": min(side.shape[-1] for side in sides), "-": sides[0].shape[-1]}.get(sign, block.shape[-1])
    return Lists(found.counts, found.indices[..., :width].contiguous(), None)


def _shifted(twin: torch.Tensor) -> torch.Tensor:
    """Whether the entry before is of the same block."""
    return torch.cat([torch.zeros_like(twin[..., :1]), twin[..., :-1]], -1)


def _alike(*lists: Lists) -> list[Lists]:
    """Lists for the same batches and heads.

    Raises:
        ArgumentError: naming ``pattern``, for numbers that do not go together.
    """
    shapes = [each.indices.shape for each in lists]
    batch, heads = (max(shape[axis] for shape in shapes) for axis in (0, 1))
    for axis, (name, most) in enumerate((("batches", batch), ("heads", heads), ("query blocks", shapes[0][2]))):
        for shape in shapes:
            if (
                most % shape[axis]
                or (name != "heads" and shape[axis] not in (most, 1))
                or (axis == 2 and shape[2] != most)
            ):
                raise ArgumentError("pattern", f"has lists of {shape[axis]} {name}, the other one of {most}")

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        repeated = tensor.repeat_interleave(heads // tensor.shape[1], 1)
        return repeated.expand(batch, *repeated.shape[1:])

    return [Lists(spread(each.counts), spread(each.indices), None) for each in lists]


def _of_lists(one: Any, other: Any, sign: str, classes: Classes) -> Any:
    """Combine lists of blocks of one size, whose partial blocks have one mask."""
    if tuple(one.block) != tuple(other.block):
        sizes = f"{tuple(one.block)} and {tuple(other.block)}"
        raise ArgumentError("pattern", f"has blocks of another size, {sizes}: make both of one size (target=)")
    first, second = _parts_of(one), _parts_of(other)
    masks = [each for each in (first, second) if each.partial is not None]
    if "bits" in {each.mask for each in masks}:
        hint = "runtime.convert.from_token_mask of both token masks does (runtime.convert.to_token_mask)"
        raise ArgumentError("pattern", f"has mask='bits', which is not combined by {sign}: {hint}")
    if len(masks) == 2 and not _is_same(*masks):
        raise _no_pattern(one, other, sign, "their masks of partial blocks differ")
    full = _joined(first.full, second.full, sign)
    partial = None
    if masks:
        every = [_joined(each.partial, each.full, "|") for each in (first, second)]
        partial = _joined(every[0], every[1], sign)
        if sign == "|":  # what one of them shows as a whole is full
            partial = _joined(first.partial, second.partial, "|")
        if partial is not None and full is not None:
            partial = _set(partial, full, "-")
    aux = (masks[0].aux or None) if masks else None
    return _made((one, other), classes, partial, full, mask=masks[0].mask if masks else "none", aux=aux)


def _joined(one: Lists | None, other: Lists | None, sign: str) -> Lists | None:
    """Combine lists; None is an empty list."""
    if one is None or other is None:
        return None if sign == "&" else one if other is None else other
    return _set(one, other, sign)


def _is_same(one: _Parts, other: _Parts) -> bool:
    if one.mask != other.mask or one.aux.keys() != other.aux.keys():
        return False
    return all(is_same(tensor, other.aux[name]) for name, tensor in one.aux.items())


def _made(
    of: tuple[Any, Any], classes: Classes, partial: Lists | None, full: Lists | None, *, mask: str, aux: Any
) -> Any:
    """The pattern of lists, which are made of those of two patterns."""
    one, other = of
    overflows = [
        each for each in (getattr(one, "overflow", None), getattr(other, "overflow", None)) if each is not None
    ]
    overflow = torch.cat(overflows).amax(0, keepdim=True) if overflows else None
    block = tuple(one.block)
    if partial is None:
        assert full is not None
        if one.kind == other.kind == "topk":
            return classes["topk"](full.indices, block=block)
        return classes["block_lists"](full.counts, full.indices, block=block, overflow=overflow)
    options = {"block": block, "mask": mask, "aux": aux, "overflow": overflow}
    if full is None:
        return classes["block_lists"](partial.counts, partial.indices, **options)
    full, partial = _alike(full, partial)
    return classes["block_lists"](
        partial.counts.contiguous(),
        partial.indices.contiguous(),
        full.counts.contiguous(),
        full.indices.contiguous(),
        **options,
    )


def _hidden(lists: Any, pattern: Any, sign: str, classes: Classes) -> Any:
    """The pairs of lists that a pattern of numbers shows too: all blocks become partial ones."""
    if sign == "|":
        raise _no_pattern(lists, pattern, sign, "lists hold some of the blocks alone")
    parts, both = _parts_of(lists), (lists, lists)
    text, aux = expression_of(pattern)
    is_causal = _window_of(pattern) == _Window(0, math.inf, 0)
    if parts.partial is None:
        assert parts.full is not None
        mask = "causal" if is_causal else text
        return _made(both, classes, parts.full, None, mask=mask, aux=None if is_causal else (aux or None))
    if is_causal and parts.mask == "causal":
        return _made(both, classes, _joined(parts.partial, parts.full, "|"), None, mask="causal", aux=None)
    if parts.mask == "bits" or parts.full is not None:
        raise _no_pattern(lists, pattern, sign, "full blocks would have another mask than partial ones")
    own = _CAUSAL if parts.mask == "causal" else parts.mask
    tensors = {**parts.aux, **aux}
    if any(name in parts.aux and not is_same(parts.aux[name], tensor) for name, tensor in aux.items()):
        raise _no_pattern(lists, pattern, sign, "their masks have two tensors of one name")
    return _made(both, classes, parts.partial, None, mask=f"({own}) and ({text})", aux=tensors or None)


def _no_pattern(one: Any, other: Any, sign: str, why: str) -> ArgumentError:
    """The error of patterns that no pattern combines, with the expression that does if there is one."""
    texts = [_text_of(each) for each in (one, other)]
    word = {"&": "and", "|": "or"}[sign]
    whole = "" if {one.kind, other.kind}.isdisjoint(LISTS) else "for lists of all blocks of their mask "
    if None in texts:
        hint = "combine their token masks: runtime.convert.to_token_mask, from_token_mask"
    else:
        text = f"({texts[0]}) {word} ({texts[1]})"
        mask = repr(text) if len(text) <= MOST_OF_MASK else "of both masks"
        names = [name for each in (one, other) for name in _aux_names(each)]
        aux = f", aux={{{', '.join(f'{name!r}: ...' for name in dict.fromkeys(names))}}}" if names else ""
        hint = f"{whole}create_block_mask({mask}, B, H, Q_LEN, KV_LEN{aux}) does"
    both = f"{type(one).__name__} {sign} {type(other).__name__}"
    return ArgumentError("pattern", f"{both}: {why}; {hint}")


def _aux_names(pattern: Any) -> tuple[str, ...]:
    """Names of the tensors in the mask of a pattern."""
    return tuple(getattr(pattern, "aux", None) or {}) if pattern.kind in LISTS else tuple(expression_of(pattern)[1])


def _text_of(pattern: Any) -> str | None:
    """The mask of a pattern as an expression, of lists that of their partial blocks; None if it has none."""
    if pattern.kind not in LISTS:
        return expression_of(pattern)[0]
    mask = getattr(pattern, "mask", "none")
    if mask not in NAMED_MASKS:
        return str(mask)
    return _CAUSAL if mask == "causal" else None
