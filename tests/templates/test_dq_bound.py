"""The bound of dQ in fixed point: no sum of a row's parts exceeds it, whatever the operands are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

MARGIN = 2.125  # kBoundMargin


@given(
    st.integers(0, 2**31),
    st.sampled_from([torch.float16, torch.bfloat16]),
    st.integers(1, 3),
    *(st.floats(-3, 3) for _ in range(4)),
    st.floats(-9, 3),
)
def test_no_sum_of_parts_exceeds_the_bound(
    seed: int,
    dtype: torch.dtype,
    repeated: int,
    q_size: float,
    k_size: float,
    v_size: float,
    dlse: float,
    dout_size: float,
) -> None:
    torch.manual_seed(seed)
    sizes = 10.0 ** torch.tensor([q_size, k_size, v_size])[:, None, None]
    drawn = torch.randn(3, 96, 16) * sizes * 10.0 ** torch.randn(3, 96, 1).clamp(-1, 1)
    q, k, v = (t.clamp(-6e4, 6e4).to(dtype).double() for t in drawn)
    k, v, dout = (
        k.repeat(repeated, 1),
        v.repeat(repeated, 1),
        (torch.randn(96, 16) * 10.0**dout_size).to(dtype).double(),
    )
    scores = q @ k.mT / 4
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp()
    delta = (dout * (weights @ v).to(dtype).double()).sum(-1, keepdim=True) - dlse * 10.0**dout_size
    ds = (weights * (dout @ v.mT - delta)).to(dtype).double()
    parts = ds[:, :, None] * k
    most = torch.maximum(parts.clamp(min=0).sum(1), -parts.clamp(max=0).sum(1)).amax(-1)  # of any of the parts
    bound = k.abs().max() * (dout.norm(dim=-1) * v.norm(dim=-1).max() + delta[:, 0].abs()) * MARGIN
    assert bool((most <= bound)[ds.isfinite().all(-1)].all())
