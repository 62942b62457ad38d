"""All gradients in one kernel without a GPU: the generated source runs on the host, thread by thread."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import host_gradients  # noqa: E402
from host_streams import pretend_stream  # noqa: E402

from codegen.library import find_spec  # noqa: E402
from codegen.render import generate  # noqa: E402
from codegen.varlen_cases import VarlenCase  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels import arguments, attention, attention_backward  # noqa: E402
from runtime.verify import attention_backward as verified  # noqa: E402
from runtime.verify import varlen_backward  # noqa: E402
from runtime.verify.attention import Case  # noqa: E402

RUNS = platform.machine() == "x86_64" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not RUNS, reason="needs g++, and the registers of an x86-64")
CPU = torch.device("cpu")
CASES = (
    Case("grouped_heads", heads=2, kv_heads=1, q_len=150, kv_len=197),
    Case("few_queries", heads=1, kv_heads=1, q_len=70, kv_len=130, layout="bshd"),
)
KERNELS: dict[str, dict[str, Any]] = {
    "causal": {"dtype": "bf16", "head_dim": 128, "pattern": {"kind": "causal"}},
    "dense, heads of 64": {"dtype": "fp16", "head_dim": 64, "pattern": {"kind": "dense"}},
    "causal, heads of 96": {"dtype": "bf16", "head_dim": 96, "pattern": {"kind": "causal"}},
    "dense, heads of 96": {"dtype": "fp16", "head_dim": 96, "pattern": {"kind": "dense"}},
    "causal, heads of 80": {"dtype": "bf16", "head_dim": 80, "pattern": {"kind": "causal"}},
    "dense, heads of 80": {"dtype": "fp16", "head_dim": 80, "pattern": {"kind": "dense"}},
    "dense, heads of 80, lengths": {
        "dtype": "fp16",
        "head_dim": 80,
        "pattern": {"kind": "dense"},
        "kv_lengths": True,
    },
    "causal, heads of 80, steps of 80": {
        "dtype": "fp16",
        "head_dim": 80,
        "pattern": {"kind": "causal"},
        "tile": {"m": 80, "n": 128},
    },
    "dense, heads of 96, rows of 64 bytes": {
        "dtype": "bf16",
        "head_dim": 96,
        "pattern": {"kind": "dense"},
        "tile": {"m": 96, "n": 128},
    },
    "dense, any order": {"dtype": "fp16", "head_dim": 128, "pattern": {"kind": "dense"}, "deterministic": False},
}
PACKED = (
    VarlenCase("grouped", (150, 0, 1, 128), (150, 0, 1, 128), heads=2, kv_heads=1, sinks="none"),
    VarlenCase("tokens_around", (65, 140), (300, 101), before=37, after=150, columns=72, sinks="none"),
    VarlenCase("without_keys", (30, 20, 3), (0, 70, 0), heads=1, kv_heads=1, after=5, sinks="none"),
)
LISTS: dict[str, dict[str, Any]] = {
    "top k": {"dtype": "bf16", "head_dim": 128, "pattern": {"kind": "topk", "block": {"q": 128, "kv": 128}}},
    "top 3, heads of 64": {
        "dtype": "fp16",
        "head_dim": 64,
        "pattern": {"kind": "topk", "k": 3, "block": {"q": 128, "kv": 128}},
        "kv_lengths": True,
    },
    "causal, softcap": {
        "dtype": "fp16",
        "head_dim": 128,
        "pattern": {"kind": "block_lists", "block": {"q": 128, "kv": 128}, "mask": "causal"},
        "softcap": 20.0,
    },
    "bits": {
        "dtype": "bf16",
        "head_dim": 64,
        "pattern": {"kind": "block_lists", "block": {"q": 64, "kv": 128}, "mask": "bits"},
        "tile": {"m": 64, "n": 128},
    },
}
CASES_OF_LISTS = (
    Case("grouped_heads", heads=2, kv_heads=1, q_len=150, kv_len=397, lists="padded", counts="mixed"),
    Case("repeated", heads=1, kv_heads=1, q_len=270, kv_len=130, lists="repeated", counts="edges", layout="bshd"),
)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_stream(monkeypatch)
    for module in (arguments, attention, attention_backward):
        monkeypatch.setattr(module, "check_tensor", lambda *given: None)


@pytest.mark.parametrize("name", [*KERNELS, *LISTS])
def test_gradients_are_those_of_the_definition(name: str, recorded: Callable[..., None], tmp_path: Path) -> None:
    kinds, cases = (KERNELS, CASES) if name in KERNELS else (LISTS, CASES_OF_LISTS)
    named = find_spec({"op": "attention_backward", "arch": "sm_90a", "gradients": "dq_dkdv", **kinds[name]})
    recorded(generate(named).source, repr(cases))
    kernel = host_gradients.HostKernel(named, tmp_path)
    for order, (case, late) in enumerate(product(cases, (True, False))):
        kernel.host.late, kernel.host.order = late, order
        outcome = verified.run_case(kernel, case, CPU)
        assert outcome.passed, outcome


@pytest.mark.parametrize(
    ("head_dim", "m", "kind"),
    [(80, 64, "causal"), (96, 96, "dense")],
)
def test_packed_gradients_of_heads_between(
    head_dim: int, m: int, kind: str, recorded: Callable[..., None], tmp_path: Path
) -> None:
    fields = {"op": "attention_backward", "arch": "sm_90a", "gradients": "dq_dkdv", "layout": "varlen", "dtype": "bf16"}
    named = find_spec({**fields, "head_dim": head_dim, "pattern": {"kind": kind}, "tile": {"m": m, "n": 128}})
    recorded(generate(named).source, repr(PACKED))
    kernel = host_gradients.HostKernel(named, tmp_path)
    for order, case in enumerate(PACKED):
        kernel.host.late, kernel.host.order = order % 2 == 0, order
        outcome = varlen_backward.run_case(kernel, case, CPU)
        assert outcome.passed, outcome


def lists_of_one_head(dtype: Any, fields: dict[str, Any]) -> tuple[Any, ...]:
    """Operands of a call with lists: the second query block lists the last key block, the others the first two."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, length, fields["head_dim"], dtype=dtype) for length in (300, 300, 300, 300))
    v *= 10
    lists = torch.tensor([[0, 1], [2, 2], [1, 0]], dtype=torch.int32)[None, None]
    scores = (q.double() @ k.double().mT) * fields["head_dim"] ** -0.5
    counts = torch.zeros(3, 3, dtype=torch.float64)
    for row, entries in enumerate(lists[0, 0].tolist()):
        for entry in entries:
            counts[row, entry] += 1
    weight = counts.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :300]
    lse = (scores + weight.log()).logsumexp(-1)
    out = (weight * (scores - lse[..., None]).exp()) @ v.double()
    return q, k, v, lists, out.to(dtype), dout, lse.float()


def test_what_fixed_point_does_not_hold_is_nan(recorded: Callable[..., None], tmp_path: Path) -> None:
    fields = {"op": "attention_backward", "arch": "sm_90a", "gradients": "dq_dkdv", **LISTS["top k"]}
    fields |= {"dtype": "fp16", "head_dim": 64}
    named = find_spec(fields)
    recorded(generate(named).source)
    kernel = host_gradients.HostKernel(named, tmp_path)
    q, k, v, lists, out, dout, lse = lists_of_one_head(torch.float16, fields)

    def found(k: Any = k, lse: Any = lse, dout: Any = dout, **more: Any) -> Any:
        return kernel(q, k, v, lists, out=out, dout=dout, lse=lse, **more).dq[0, 0]

    plain = found()
    assert bool(plain.isfinite().all())
    of_another, nan_key, large = lse.clone(), k.clone(), dout.clone()
    of_another[..., 200] -= 30.0  # weights of row 200 add up to e^30
    nan_key[..., 290, 3] = torch.nan
    large[..., 7, :] = 60000.0 * v[0, 0, 0].sign()  # dS of row 7 exceeds fp16
    zero = torch.zeros_like(lse)
    for changed, where in (
        (found(lse=of_another), slice(200, 201)),
        (found(k=nan_key), slice(128, 256)),
        (found(dout=large), slice(7, 8)),
        (found(dlse=zero), slice(0, 0)),
    ):
        assert bool(changed[where].isnan().all())
        same = torch.ones(300, dtype=torch.bool)
        same[where] = False
        assert torch.equal(changed[same], plain[same])


def test_a_gradient_of_the_log_sum_exp_is_a_part_of_the_bound(recorded: Callable[..., None], tmp_path: Path) -> None:
    fields = {"op": "attention_backward", "arch": "sm_90a", "gradients": "dq_dkdv", **LISTS["top k"]}
    fields |= {"dtype": "fp16", "head_dim": 64}
    named = find_spec(fields)
    recorded(generate(named).source)
    kernel = host_gradients.HostKernel(named, tmp_path)
    q, k, v, lists, out, dout, lse = lists_of_one_head(torch.float16, fields)
    more = {"out": out, "dout": torch.zeros_like(dout), "lse": lse}
    found = kernel(q, k, v, lists, dlse=torch.full_like(lse, 200.0), **more)
    scores = (q.double() @ k.double().mT) * 0.125
    counts = torch.tensor([[1, 1, 0], [0, 0, 2], [1, 1, 0]], dtype=torch.float64)
    weight = counts.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :300]
    right = 0.125 * 200.0 * (weight * (scores - lse.double()[..., None]).exp()) @ k.double()
    assert float((found.dq.double() - right).abs().max()) < 2e-3 * float(right.abs().max())
    with pytest.raises(ArgumentError, match=r"^dlse: has strides"):
        kernel(q, k, v, lists, dlse=torch.ones(1, 1, 600)[..., ::2], **more)
    stats = kernel(q, k, v, lists, **more).stats
    again = kernel(q, k, v, lists, stats=stats, **more).dq  # the bounds are computed all the same
    assert torch.equal(again, torch.zeros_like(again))


def test_ds_that_fp16_rounds_to_twice_its_size_stays_within_fixed_point(
    recorded: Callable[..., None], tmp_path: Path
) -> None:
    """Each of 1024 equal weights gives dS slightly above 2^-25, half of the least number; all parts have one sign."""
    fields = {"op": "attention_backward", "arch": "sm_90a", "gradients": "dq_dkdv", **LISTS["top k"]}
    named = find_spec({**fields, "dtype": "fp16", "head_dim": 64})
    recorded(generate(named).source)
    kernel = host_gradients.HostKernel(named, tmp_path)
    q, out, dout = (torch.zeros(1, 1, 128, 64, dtype=torch.float16) for _ in range(3))
    k = torch.zeros(1, 1, 1024, 64, dtype=torch.float16)
    k[..., 0] = 1.0 - 2.0 * (torch.arange(1024) % 2)
    dout[..., 0] = 2.0**-15 * (1 + 2.0**-5)
    lse = torch.full((1, 1, 128), 1024.0).log()
    lists = torch.arange(8, dtype=torch.int32)[None, None, None]
    found = kernel(q, k, k, lists, out=out, dout=dout, lse=lse).dq[..., 0]
    assert bool((found == 2.0**-14 / 8).all())
