"""Data sets of attention: values of q and k modeled on real models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from codegen.errors import CodegenError
from codegen.wording import alternatives, shown

# Standard deviations of a row's logits in 16 heads, spread as in a trained text encoder.
HEAD_STDS = (0.6, 0.9, 1.0, 1.1, 1.2, 1.3, 1.3, 1.4, 1.6, 2.0, 2.5, 2.9, 3.3, 3.7, 5.0, 19.7)
KEY_NORM_SIGMA = 0.8
SINK_QUERY, SINK_KEY = 6.0, 22.0  # lengths along u; the first key's logit is larger by their product / sqrt(d)
ROTARY_NOISE, ROTARY_MEAN, ROTARY_KEY, ROTARY_BASE = 1.4, 0.7, 30.0, 1e4
RISING_QUERY, RISE, RISE_KEYS, LONGEST_KEY = 8.0, 5.0, 128, 500.0

Inputs = tuple[torch.Tensor, torch.Tensor]  # q and k


@dataclass(frozen=True)
class DataSet:
    """Values of q and k for attention; v is normal in all of them.

    Attributes:
        why: the property of real data that it models, in one line.
        change: a function of standard normal q and k (float32), a unit vector per K/V head (batch, kv_heads, 1,
            head_dim), and a random generator, that returns q and k.
    """

    why: str
    change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Generator | None], Inputs]


def _scaled(std: float) -> DataSet:
    def change(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, generator: torch.Generator | None) -> Inputs:
        return q * math.sqrt(std), k * math.sqrt(std)

    return DataSet(f"logits of standard deviation {std:g}", change)


def _key_norms(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, generator: torch.Generator | None) -> Inputs:
    norms = torch.randn((*k.shape[:3], 1), generator=generator, device=k.device)
    return q, k * (KEY_NORM_SIGMA * norms).exp()


def head_stds(heads: int) -> list[float]:
    """Standard deviation of the logits per query head.

    HEAD_STDS repeat for more heads; fewer heads get an evenly spaced subset that includes the largest.
    """
    known = len(HEAD_STDS)
    if heads < known:
        return [HEAD_STDS[math.ceil((head + 1) * known / heads) - 1] for head in range(heads)]
    return [HEAD_STDS[head % known] for head in range(heads)]


def _heads(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, generator: torch.Generator | None) -> Inputs:
    # Scale q only, because the query heads of a K/V head differ.
    return q * torch.tensor(head_stds(q.shape[1]), device=q.device)[:, None, None], k


def of_query_heads(u: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Values of K/V heads expanded to their query heads."""
    return u.repeat_interleave(q.shape[1] // u.shape[1], 1)


def _sink(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, generator: torch.Generator | None) -> Inputs:
    k = k.clone()
    k[:, :, :1] += SINK_KEY * u
    return q + SINK_QUERY * of_query_heads(u, q), k


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x (..., positions, head_dim) with a rotary embedding that pairs dimensions i and i + head_dim/2."""
    positions, half = x.shape[-2], x.shape[-1] // 2
    rates = ROTARY_BASE ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = torch.arange(positions, dtype=torch.float64, device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _rotary(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, generator: torch.Generator | None) -> Inputs:
    mean = ROTARY_MEAN * math.sqrt(q.shape[3]) * u
    own = of_query_heads(u, q)
    q = rotated(ROTARY_NOISE * q + of_query_heads(mean, q)) + SINK_QUERY * own
    k = rotated(ROTARY_NOISE * k + mean)
    k[:, :, :1] = ROTARY_KEY * u
    return q, k


def _rising(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, generator: torch.Generator | None) -> Inputs:
    step = RISE / RISING_QUERY * math.sqrt(k.shape[3])  # of a key's length, from block to block
    lengths = (torch.arange(k.shape[2], device=k.device) / RISE_KEYS * step).clamp(max=LONGEST_KEY)
    return q + RISING_QUERY * of_query_heads(u, q), k + lengths[:, None] * u


def _falling(q: torch.Tensor, k: torch.Tensor, u: torch.Tensor, generator: torch.Generator | None) -> Inputs:
    q, k = _rising(q, k.flip(2), u, generator)
    return q, k.flip(2)


DATA: dict[str, DataSet] = {
    **{f"std{std}": _scaled(std) for std in (1, 2, 4, 9)},
    "key_norms": DataSet("keys of very different length: log-normal, sigma 0.8", _key_norms),
    "heads": DataSet("heads of very different logits, as in a trained text encoder", _heads),
    "sink": DataSet("an attention sink: the first key has much of every row's weight", _sink),
    "rotary": DataSet("rotary embedding of q and k with a mean, and a sink: logits wave with the distance", _rotary),
    "rising": DataSet("logits that rise by 5 from 128 keys to the next: each block has a new maximum", _rising),
    "falling": DataSet("rising, keys in reverse: the same for kernels that take the last keys first", _falling),
}


def make_data(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator | None = None
) -> None:
    """Fill q, k and v with a data set. Values are computed in float32 and rounded to the tensors' dtype.

    Args:
        name: name of a data set in DATA.
        q: (batch, heads, length, head_dim); overwritten.
        k: (batch, kv_heads, length, head_dim), with kv_heads a divisor of heads; overwritten.
        v: as k.
        generator: random generator on the tensors' device. Default: torch's own.

    Raises:
        CodegenError: for an unknown data set.
    """
    if name not in DATA:
        raise CodegenError(f"name is {shown(name)}, which is not a data set; {alternatives(name, DATA)}")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=q.device)

    u = normal(*k.shape[:2], 1, k.shape[3])
    u /= u.norm(dim=-1, keepdim=True)
    v.copy_(normal(*v.shape))
    for tensor, values in zip((q, k), DATA[name].change(normal(*q.shape), normal(*k.shape), u, generator), strict=True):
        tensor.copy_(values)
