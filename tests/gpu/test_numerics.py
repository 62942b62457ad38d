"""The contract of docs/reference/numerics.md: many equal keys, large logits, NaN and infinity in K and V."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from codegen.library import find_spec  # noqa: E402
from codegen.spec import AttentionSpec  # noqa: E402
from runtime import load_kernel  # noqa: E402
from runtime.verify.attention import Case, Inputs, make_inputs, multiplicity  # noqa: E402

HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
DENSE = [
    pytest.param("h100_dense", marks=HOPPER),
    pytest.param("h100_dense_d64", marks=HOPPER),
    pytest.param("h100_dense_few_tiles", marks=HOPPER),  # the keys of a row in two parts
    "l4_dense",
    "l4_dense_wmma",
]
ALL = [
    *DENSE,
    pytest.param("h100_causal", marks=HOPPER),
    pytest.param("h100_window2k", marks=HOPPER),
    pytest.param("h100_topk32", marks=HOPPER),
    pytest.param("h100_topk32_b64_shared", marks=HOPPER),
    "l4_causal",
    "l4_topk32",
]
NAN, INF = float("nan"), float("inf")


@cache
def kernel_of(name: str) -> Any:
    return load_kernel(name, forward_compatible=True)


def spec_of(name: str) -> AttentionSpec:
    spec = find_spec(name).spec
    assert isinstance(spec, AttentionSpec)
    return spec


def call(name: str, inputs: Inputs, **more: Any) -> Any:
    return kernel_of(name)(inputs.q, inputs.k, inputs.v, *inputs.indices, **more)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(("log_keys", "allowed"), [(16, 1e-3), (18, 3e-3)])
def test_the_mean_of_many_equal_keys(name: str, log_keys: int, allowed: float) -> None:
    head_dim = spec_of(name).head_dim
    q = torch.zeros(1, 1, 320, head_dim, device="cuda", dtype=torch.float16)
    k, v = (torch.randn(1, 1, 1 << log_keys, head_dim, device="cuda") for _ in range(2))
    v = (1.0 + 0.1 * v).half()
    out, lse = kernel_of(name)(q, k.half(), v)
    mean = v.double().mean(2)
    assert ((out.double() - mean[:, :, None]).abs() / mean[:, :, None]).max() < allowed
    torch.testing.assert_close(lse, torch.full_like(lse, log_keys * 0.6931471805599453), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ALL)
def test_logits_up_to_1e7(name: str) -> None:
    # Products that fp32 holds exactly: logits are whole multiples of 2^20, and a row's result the mean of its winners.
    spec, case = spec_of(name), Case("logits_up_to_1e7", q_len=300, kv_len=700, lists="padded", scale=1.0)
    inputs = make_inputs(spec, case, torch.device("cuda"))
    column = torch.randint(0, 4, inputs.q.shape[:3], device="cuda")
    inputs.q.zero_().scatter_(3, column[..., None], 4096.0)
    inputs.k.zero_()[..., :4] = torch.randint(-9, 10, (*inputs.k.shape[:3], 4), device="cuda") * 256.0
    out, _ = call(name, inputs, scale=1.0)
    counts = multiplicity(spec, case, inputs)
    scores = (inputs.q.double() @ inputs.k.double().mT).masked_fill(counts == 0, -INF)
    weights = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num(0.0) * counts
    expected = (weights @ inputs.v.double()) / weights.sum(-1, keepdim=True).clamp(min=1e-30)
    assert float(scores[counts > 0].max()) > 9e6
    assert (out.double() - expected).abs().max() < 2e-3


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_not_finite_in_k_or_v_reaches_only_rows_that_see_it(name: str, value: float, where: str) -> None:
    spec, case = spec_of(name), Case("not_finite", q_len=2500, kv_len=2500, lists="padded")
    inputs = make_inputs(spec, case, torch.device("cuda"))
    clean = call(name, inputs)[0].clone()
    key = 1700
    (inputs.k if where == "k" else inputs.v)[0, 1, key] = value
    out = call(name, inputs)[0]
    sees = multiplicity(spec, case, inputs)[..., key] > 0
    sees[:, :] &= torch.tensor([[False, True]], device="cuda")[..., None]  # the head whose K and V were changed
    assert not out[sees].isfinite().all(-1).any()
    apart = ~sees
    if where == "v" and spec.pattern.fixed_block is None:
        # Weight 0 times NaN: rows to which the key is hidden have it too if their tile reads its step.
        reach = spec.tile.m + spec.tile.n
        query = torch.arange(case.q_len, device="cuda")
        near = torch.stack([sees[0, 1].roll(shift) for shift in (-reach, reach)]).any(0)
        near |= (query - key).abs() <= reach
        apart[0, 1] &= ~near
    assert torch.equal(out[apart], clean[apart])


@pytest.mark.parametrize("name", ALL)
def test_keys_beyond_the_end_are_not_read(name: str) -> None:
    # K and V are views of longer tensors, whose rest is NaN.
    spec, case = spec_of(name), Case("beyond_the_end", q_len=300, kv_len=700, lists="padded")
    inputs = make_inputs(spec, case, torch.device("cuda"))
    clean = call(name, inputs)[0].clone()
    padded = [torch.nn.functional.pad(t, (0, 0, 0, 100), value=NAN)[:, :, : case.kv_len] for t in (inputs.k, inputs.v)]
    out = kernel_of(name)(inputs.q, *padded, *inputs.indices)[0]
    assert torch.equal(out, clean)
