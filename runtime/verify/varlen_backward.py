"""Gradients of attention of packed sequences: the oracle, sequence by sequence, and the run of one case."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from codegen.attention_cases import Case
from codegen.spec import AttentionBackwardSpec
from codegen.varlen_cases import VarlenCase
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.attention_backward import AttentionBackwardKernel
from runtime.verify import attention_backward
from runtime.verify.attention_backward import RELATIVE_LARGEST, Gradients
from runtime.verify.common import RELATIVE_TO_TORCH, Outcome, generator, max_error, poisoned_memory, worst
from runtime.verify.multiplicity import Inputs
from runtime.verify.varlen import VarlenInputs, lists_of, make_inputs, numbers_of

_OF_QUERIES = ("dq",)


class Exact(NamedTuple):
    """A case in float64. Tokens of no sequence have gradients of 0, and NaN in the result and the LSE.

    Attributes:
        out: (1, heads, tokens, head_dim), the forward's result.
        lse: (1, heads, tokens), its log-sum-exp, in float32 as a forward stores it.
        gradients: dq, dk and dv.
        rounded: gradients with the roundings of a kernel, as ``attention_backward.Exact`` has them.
        theirs: gradients of torch's own attention; None if it cannot compute them.
        unseen: where a gradient is 0, as no pair is seen.
        noise: the error floor of float32 arithmetic.
    """

    out: torch.Tensor
    lse: torch.Tensor
    gradients: Gradients
    rounded: Gradients
    theirs: Gradients | None
    unseen: dict[str, torch.Tensor]
    noise: float


class _Sequence(NamedTuple):
    """One sequence of a case, as a batch of padded attention."""

    rows: slice
    keys: slice
    case: Case
    inputs: Inputs


def sequences_of(spec: AttentionBackwardSpec, case: VarlenCase, inputs: VarlenInputs) -> Iterator[_Sequence]:
    """The sequences of a case that have queries and keys."""
    numbers = numbers_of(spec.forward, case)
    q_at = kv_at = case.before
    for place, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        rows, keys = slice(q_at, q_at + q_len), slice(kv_at, kv_at + kv_len)
        q_at, kv_at = rows.stop, keys.stop
        if not q_len or not kv_len:
            continue
        sizes: dict[str, Any] = {"heads": case.heads, "kv_heads": case.kv_heads, "q_len": q_len, "kv_len": kv_len}
        alone = Case(f"{case.name} {place}", **sizes, scale=case.scale, columns=case.columns, **numbers)
        of_one = (inputs.q[:, :, rows], inputs.k[:, :, keys], inputs.v[:, :, keys])
        lists = lists_of(spec.forward, inputs, place, rows.start, q_len)
        yield _Sequence(rows, keys, alone, Inputs(*of_one, lists, inputs.sink, numbers=numbers))


def oracle(spec: AttentionBackwardSpec, case: VarlenCase, inputs: VarlenInputs, dout: torch.Tensor) -> Exact:
    """Compute the gradients of each sequence by formula."""
    padded = spec.model_copy(update={"layout": "padded"})
    operands = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    exact = Exact(
        torch.full_like(inputs.q, torch.nan, dtype=torch.float64),
        torch.full(inputs.q.shape[:3], torch.nan, device=inputs.q.device),
        {name: torch.zeros_like(t, dtype=torch.float64) for name, t in operands.items()},
        {name: torch.zeros_like(t, dtype=torch.float64) for name, t in operands.items()},
        None if inputs.sink is not None else {name: torch.zeros_like(t) for name, t in operands.items()},
        {name: torch.ones(t.shape[:3], dtype=torch.bool, device=t.device) for name, t in operands.items()},
        0.0,
    )
    _fill_empty(case, inputs, exact)
    noise, theirs = 0.0, exact.theirs
    for rows, keys, alone, of_one in sequences_of(spec, case, inputs):
        found = attention_backward.oracle(padded, alone, of_one, dout[:, :, rows])
        exact.out[:, :, rows] = found.out
        exact.lse[:, :, rows] = attention_backward.given_lse(padded, alone, found)
        pairs = found.weight.unflatten(1, (case.kv_heads, -1)).sum((2, 3)) == 0
        other = None
        if theirs is not None:
            other = attention_backward.by_torch(padded, alone, of_one, dout[:, :, rows], found.weight)
            theirs = theirs if other is not None else None
        for name in operands:
            part = (slice(None), slice(None), rows if name in _OF_QUERIES else keys)
            exact.gradients[name][part] = found.gradients[name]
            exact.rounded[name][part] = found.rounded[name]
            exact.unseen[name][part] = found.weight.sum(-1) == 0 if name in _OF_QUERIES else pairs
            if theirs is not None and other is not None:
                theirs[name][part] = other[name]
        noise = max(noise, found.noise)
    return exact._replace(theirs=theirs, noise=noise)


def _fill_empty(case: VarlenCase, inputs: VarlenInputs, exact: Exact) -> None:
    """Set the result and the LSE of queries whose sequence has no keys."""
    ends = list(itertools.accumulate(case.q_lens, initial=case.before))
    for begin, end, kv_len in zip(ends, ends[1:], case.kv_lens, strict=False):
        if not kv_len:
            exact.out[:, :, begin:end] = 0.0
            exact.lse[:, :, begin:end] = -torch.inf if inputs.sink is None else inputs.sink[None, :, None]


def place_of(case: VarlenCase, name: str, found: torch.Tensor, right: torch.Tensor) -> str:
    """Where a gradient (1, heads, tokens, head_dim) is off by the most, in words: the sequence first."""
    error = (found.double() - right).abs().nan_to_num(nan=torch.inf)
    _, head, token, column = (int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    lengths = case.q_lens if name in _OF_QUERIES else case.kv_lens
    ends = list(itertools.accumulate(lengths, initial=case.before))
    number = sum(end <= token for end in ends) - 1
    where = f"token {token}, in no sequence"
    if 0 <= number < len(lengths):
        sizes = f"{case.q_lens[number]} x {case.kv_lens[number]}"
        where = f"sequence {number} ({sizes}), its token {token - ends[number]}"
    values = f"{float(found[0, head, token, column]):.4g} instead of {float(right[0, head, token, column]):.4g}"
    return f"{name}: {values} at head {head}, {where}, column {column}"


def run_case(kernel: AttentionBackwardKernel, case: VarlenCase, device: torch.device) -> Outcome:
    """Run one case twice in poisoned memory and compare it with the oracle and with torch.

    Errors are relative to the tolerance of each gradient, as those of padded attention.
    """
    spec = kernel.spec
    dtype = TORCH_DTYPES[spec.dtype]
    inputs = make_inputs(spec.forward, case, device, sinks=True)
    drawn = torch.randn(inputs.q.shape, generator=generator("dout " + case.name, device), device=device).to(dtype)
    dout = torch.empty_like(inputs.q).copy_(drawn)
    exact = oracle(spec, case, inputs, dout)
    options: dict[str, Any] = {"scale": case.scale, **numbers_of(spec.forward, case)}
    options |= {"out": torch.empty_like(inputs.q).copy_(exact.out.to(dtype)), "dout": dout, "lse": exact.lse}
    given = inputs.of_call()
    with poisoned_memory():
        first, again = (attention_backward.by_name(kernel(*given, **options)) for _ in range(2))
    problems, used, torch_used = [], [0.0], [0.0]
    for name, found in first.items():
        right, theirs = exact.gradients[name], exact.theirs
        repeats = spec.deterministic or name not in _OF_QUERIES
        if repeats and not torch.equal(found, again[name]):
            problems.append(f"two runs of {name} differ")
        if bool((found[exact.unseen[name]] != 0).any()):
            problems.append(f"{name} is not 0 where no pair is seen")
        others = [exact.rounded[name], *([] if theirs is None else [theirs[name]])]
        shares = []
        for factor, error in ((RELATIVE_LARGEST, max_error), (RELATIVE_TO_TORCH, attention_backward.rms)):
            allowed = max(exact.noise, attention_backward.LEAST_NOISE, factor * max(error(o, right) for o in others))
            shares.append(error(found, right) / allowed)
            torch_used.append(0.0 if theirs is None else error(theirs[name], right) / allowed)
        used.append(worst(shares))
        if not used[-1] <= 1.0:
            problems.append(place_of(case, name, found, right))
    return Outcome(
        name=case.name,
        description=f"{case.describe()}; errors as shares of what is allowed",
        max_error=worst(used),
        torch_error=None if exact.theirs is None else max(torch_used),
        tolerance=1.0,
        problem="; ".join(problems),
    )
