"""Gradients of attention: the cases of the forward, the oracle, and the run of one case."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from codegen.attention_cases import gradient_cases_of
from codegen.library import find_spec
from codegen.spec import AttentionBackwardSpec
from runtime.kernel import Kernel, load_kernel
from runtime.kernels.arguments import TORCH_DTYPES
from runtime.kernels.attention_backward import AttentionBackwardKernel, AttentionGradients
from runtime.verify import attention
from runtime.verify.attention import Case, Inputs
from runtime.verify.aux_gradients import added_to_elements
from runtime.verify.aux_tensors import scored
from runtime.verify.common import RELATIVE_TO_TORCH, Outcome, generator, max_error, poisoned_memory, torch_attention

cases_of = gradient_cases_of  # same name as for other operators

Gradients = dict[str, torch.Tensor]
# Limit of a gradient's largest error relative to the larger of torch's error and the rounding error (see rounded). The
# root mean square error is held to RELATIVE_TO_TORCH; the largest of a million errors varies more.
RELATIVE_LARGEST = 3.0
FLOAT_NOISE = 2.0**-20  # relative to the sum of the terms' magnitudes, for a row of 256
LEAST_NOISE = 1e-30  # if no pair is visible


class Exact(NamedTuple):
    """A case in float64.

    Attributes:
        out: the forward's result.
        lse: the forward's log-sum-exp, -inf for a query without keys.
        weight: multiplicity of each pair.
        gradients: dq, dk and dv.
        rounded: the gradients with P, dS, the result and the gradients rounded to the kernel's dtype and an LSE error
            of one float32 ulp, as in any kernel that multiplies in that dtype.
        noise: float32 rounding error of the difference of dO V^T and delta when both are equal.
        aux: gradients of the score's tensors; the same with rounding errors of the result and the LSE; and the error
            floor of their kernel's float32 arithmetic.
    """

    out: torch.Tensor
    lse: torch.Tensor
    weight: torch.Tensor
    gradients: Gradients
    rounded: Gradients
    noise: float
    aux: tuple[Gradients, Gradients, Gradients]

    def of(self, name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        """A gradient, its rounding error, and the error floor of all roundings."""
        if name in self.gradients:
            return self.gradients[name], self.rounded[name], self.noise
        right, rounded, noise = (each[name] for each in self.aux)
        return right, rounded, max(LEAST_NOISE, float(noise.max()))


def oracle(spec: AttentionBackwardSpec, case: Case, inputs: Inputs, dout: torch.Tensor) -> Exact:
    """Compute the gradients by formula rather than by autograd."""
    out, lse, weight = attention.oracle(spec.forward, case, inputs)
    group, dtype = case.heads // case.kv_heads, TORCH_DTYPES[spec.dtype]
    q, k, v, do = (t.double() for t in (inputs.q, inputs.k, inputs.v, dout))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = attention.softmax_scale(spec.forward, case)
    logits = scores = (q @ k.mT) * scale
    slope = torch.ones((), dtype=torch.float64, device=q.device)
    if spec.softcap is not None:
        tanh = torch.tanh(scores / spec.softcap)
        scores, slope = spec.softcap * tanh, 1 - tanh**2
    if spec.score is not None:
        scores, slope = (scored(of, scores, inputs.aux) for of in (spec.score.expression, spec.score.slope))
    finite = lse.nan_to_num(neginf=0.0)
    dp = do @ v.mT

    def weights(lse: torch.Tensor) -> torch.Tensor:
        return torch.where(weight > 0, (scores - lse[..., None]).exp(), 0.0)

    def of_aux(of_scores: torch.Tensor, *, sizes: bool = False) -> Gradients:
        if spec.score is None:
            return {}
        return added_to_elements(spec.score, spec.aux_gradients, logits, of_scores, inputs.aux, sizes=sizes)

    def delta(out: torch.Tensor) -> torch.Tensor:
        return (do * out).sum(-1, keepdim=True)

    def gradients(lse: torch.Tensor, round_: Callable[[torch.Tensor], torch.Tensor]) -> Gradients:
        # A repeated pair is rounded each time, because a kernel adds its terms one by one.
        p = weights(lse)
        ds = weight * round_(p * (dp - delta(round_(out))) * slope)
        of_heads = {"dk": scale * (ds.mT @ q), "dv": (weight * round_(p)).mT @ do}
        summed = {name: g.unflatten(1, (case.kv_heads, group)).sum(2) for name, g in of_heads.items()}
        return {name: round_(g) for name, g in {"dq": scale * (ds @ k), **summed}.items()}

    off = torch.nextafter(finite.float(), torch.full_like(finite, math.inf).float()).double()
    largest = float((do.abs() @ v.abs().mT).max()) * max(float(q.abs().max()), float(k.abs().max()))
    rounded = gradients(off, lambda x: x.to(dtype).double())
    p = weight * weights(finite)
    # The relative error of a weight equals the absolute error of its logit.
    sizes = (
        p
        * (do.abs() @ v.abs().mT + (do * out).abs().sum(-1, keepdim=True))
        * (1 + torch.where(p > 0, scores.abs(), 0.0))
    )
    aux = (
        of_aux(p * (dp - delta(out))),
        of_aux(weight * weights(off) * (dp - delta(out.to(dtype).double()))),
        of_aux(FLOAT_NOISE * sizes, sizes=True),
    )
    return Exact(out, lse, weight, gradients(finite, lambda x: x), rounded, FLOAT_NOISE * scale * largest, aux)


def given_lse(spec: AttentionBackwardSpec, case: Case, exact: Exact) -> torch.Tensor:
    """Compute the log-sum-exp as a forward stores it: in float32, from logits with the kernels' float32 factor.

    With logits in the thousands, the rounding error of the factor would matter otherwise; forward and backward kernels
    have the same error. With a softcap logits stay small, and a score adds its own terms.
    """
    if spec.softcap is not None or spec.score is not None:
        return exact.lse.float().contiguous()
    scale = attention.softmax_scale(spec.forward, case)
    factor = torch.tensor(scale * math.log2(math.e), dtype=torch.float32).double()
    return (exact.lse * float(factor * math.log(2) / scale)).float().contiguous()


@lru_cache(maxsize=16)
def _forward_of(spec: AttentionBackwardSpec) -> Kernel:
    """Load a forward kernel of the same problem that returns the LSE."""
    asked = spec.model_dump(include={"arch", "dtype", "head_dim", "pattern", "softcap", "score", "kv_lengths"})
    return load_kernel(find_spec({"op": "attention", **asked, "lse": True}), forward_compatible=True)


def forwards_lse(spec: AttentionBackwardSpec, case: Case, inputs: Inputs) -> torch.Tensor:
    """Compute the log-sum-exp with the project's forward kernel.

    Tensor cores truncate: for a logit in the thousands, a dot product over a head is too small by up to one float32 ulp
    per 16 elements. The backward kernel's products have the same error, so the weights are correct only if the LSE has
    it too.
    """
    forward: Any = _forward_of(spec)
    found = forward(inputs.q, inputs.k, inputs.v, *inputs.indices, scale=case.scale, **inputs.options())
    lse: torch.Tensor = found.lse
    return lse.contiguous()


def by_torch(
    spec: AttentionBackwardSpec, case: Case, inputs: Inputs, dout: torch.Tensor, weight: torch.Tensor
) -> Gradients | None:
    """Gradients of torch's own attention in the kernel's dtype; None if torch cannot compute them."""
    if spec.softcap is not None or spec.score is not None or bool((weight > 1).any()):
        return None
    group = case.heads // case.kv_heads
    q, k, v = (t.detach().clone().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen = weight > 0
    any_key = seen.any(-1, keepdim=True)
    # A row without keys is NaN in some of torch's kernels: here it sees all keys, and its dO is 0.
    out = torch_attention(q, keys, values, seen | ~any_key, scale=case.scale)
    grads = torch.autograd.grad(out, (q, k, v), torch.where(any_key, dout, 0.0).to(out.dtype))
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))


def run(
    kernel: AttentionBackwardKernel, case: Case, inputs: Inputs, made: tuple[torch.Tensor, ...]
) -> AttentionGradients:
    """Call a kernel with the tensors of a case; ``made`` has out, dout and lse."""
    out, dout, lse = made
    options: dict[str, Any] = {"out": out, "dout": dout, "lse": lse, "scale": case.scale, **inputs.options()}
    return kernel(inputs.q, inputs.k, inputs.v, *inputs.indices, **options)


def run_case(kernel: AttentionBackwardKernel, case: Case, device: torch.device) -> Outcome:
    """Run one case twice in poisoned memory and compare it with the oracle and with torch.

    Errors are relative to the tolerance of each gradient, because the gradients differ by orders of magnitude.
    """
    spec = kernel.spec
    dtype = TORCH_DTYPES[spec.dtype]
    inputs = attention.make_inputs(spec.forward, case, device)
    drawn = torch.randn(inputs.q.shape, generator=generator("dout " + case.name, device), device=device).to(dtype)
    dout = torch.empty_like(inputs.q).copy_(drawn)
    exact = oracle(spec, case, inputs, dout)
    theirs = by_torch(spec, case, inputs, dout, exact.weight)
    by_forward = case.values == "huge_logit" and device.type == "cuda"
    lse = forwards_lse(spec, case, inputs) if by_forward else given_lse(spec, case, exact)
    given = torch.empty_like(inputs.q).copy_(exact.out.to(dtype)), dout, lse
    with poisoned_memory():
        first, again = (by_name(run(kernel, case, inputs, given)) for _ in range(2))
    pairs = exact.weight.unflatten(1, (case.kv_heads, -1))
    unseen = {"dq": exact.weight.sum(-1) == 0, "dk": pairs.sum((2, 3)) == 0, "dv": pairs.sum((2, 3)) == 0}
    problems, used, torch_used = [], [0.0], [0.0]
    for name, found in first.items():
        right, rounded, noise = exact.of(name)
        repeats = spec.deterministic or name != "dq"  # dK and dV have a fixed order in all kernels
        if repeats and not torch.equal(found, again[name]):
            problems.append(f"two runs of {name} differ")
        if name in unseen and bool((found[unseen[name]] != 0).any()):
            problems.append(f"{name} is not 0 where no pair is seen")
        others = [rounded, *([] if theirs is None else [theirs[name]])]
        for factor, error in ((RELATIVE_LARGEST, max_error), (RELATIVE_TO_TORCH, rms)):
            allowed = max(noise, factor * max(error(other, right) for other in others))
            used.append(error(found, right) / allowed)
            torch_used.append(0.0 if theirs is None else error(theirs[name], right) / allowed)
    return Outcome(
        name=case.name,
        description=f"{case.describe()}; errors as shares of what is allowed",
        max_error=max(used),
        torch_error=None if theirs is None else max(torch_used),
        tolerance=1.0,
        problem="; ".join(problems),
    )


def by_name(found: AttentionGradients) -> Gradients:
    """Gradients that a kernel computed, by name, including those of a score's tensors."""
    computed = {"dq": found.dq, "dk": found.dk, "dv": found.dv, **(found.daux or {})}
    return {name: gradient for name, gradient in computed.items() if gradient is not None}


def rms(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Root mean square of the differences."""
    return float((result.double() - reference).pow(2).mean().sqrt())
