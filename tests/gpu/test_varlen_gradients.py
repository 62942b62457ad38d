"""Gradients of packed sequences on a GPU: beside float64 of each sequence, bit for bit, and under torch's machinery.

pytest -n 12 tests/gpu/test_varlen_gradients.py

A failure names every gradient and sequence that is off, by how much, and where.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import gradient_oracle  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from codegen.arch import ARCHS  # noqa: E402
from codegen.library import find_spec  # noqa: E402
from codegen.select.backward import backward_archs  # noqa: E402
from runtime import ArgumentError, varlen_attention  # noqa: E402
from runtime.kernel import load_kernel  # noqa: E402
from runtime.ops import varlen_gradients  # noqa: E402
from runtime.patterns import Causal, Dense, SinkWindow, SlidingWindow  # noqa: E402
from runtime.verify.common import poisoned_memory  # noqa: E402
from runtime.verify.run import run_case, verification_of  # noqa: E402

WRITTEN = [ARCHS[name].compute_capability for name in backward_archs()]
HERE = torch.cuda.get_device_capability() if torch.cuda.is_available() else WRITTEN[0]
pytestmark = pytest.mark.skipif(HERE not in WRITTEN, reason=f"gradients are written for {', '.join(backward_archs())}")
ARCH = next((name for name in backward_archs() if ARCHS[name].compute_capability == HERE), "sm_90a")
DTYPES = (torch.float16, torch.bfloat16)
OPERATORS = torch.ops.sparse_kernel_codegen
PATTERNS: dict[str, Callable[[], Any]] = {
    "dense": Dense,
    "causal": Causal,
    "top left": lambda: Causal(align="top_left"),
    "window": lambda: SlidingWindow(100, 30),
    "sink window": lambda: SinkWindow(70, 100),
    "sink window, both sides": lambda: SinkWindow(130, 60, 50),
}
NAMES = ("dq", "dk", "dv")


class Lengths(NamedTuple):
    """Lengths of packed sequences, and the tokens around them."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    before: int = 0
    after: int = 0


ODD = Lengths((333, 0, 1, 129, 64, 700), (333, 0, 1, 129, 64, 700))
LENGTHS = {
    "odd": ODD,
    "one": Lengths((1000,), (1000,)),
    "more keys": Lengths((100, 77, 0, 200), (300, 900, 50, 201)),
    "more queries": Lengths((300, 900, 70), (100, 77, 0)),
    "around": Lengths((100, 333), (333, 77), before=37, after=501),
    "tile edges": Lengths((63, 64, 65, 79, 80, 81, 127, 128, 129, 160), (63, 64, 65, 79, 80, 81, 127, 128, 129, 160)),
    "many": Lengths(tuple(1 + 37 * i % 90 for i in range(60)), tuple(1 + 37 * i % 90 for i in range(60))),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture(params=["single", "pair"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether a single kernel computes all gradients, where there is one, or a pair of them."""
    least = 0 if request.param == "single" else 1 << 40
    monkeypatch.setattr(varlen_gradients, "LEAST_OF_ONE_KERNEL", least)
    kind: str = request.param
    return kind


def bounds_of(lengths: tuple[int, ...], before: int = 0) -> Any:
    ends = list(itertools.accumulate(lengths, initial=before))
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def operands(
    lengths: Lengths = ODD, heads: int = 4, kv_heads: int = 2, head_dim: int = 128, dtype: Any = torch.bfloat16
) -> list[Any]:
    """q, k and v with random values, also in tokens of no sequence."""
    sizes = ((heads, lengths.q), (kv_heads, lengths.k), (kv_heads, lengths.k))
    shapes = ((lengths.before + sum(each) + lengths.after, n, head_dim) for n, each in sizes)
    return [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]


def call(tensors: list[Any], pattern: Any, lengths: Lengths, **options: Any) -> Any:
    bounds = {
        "cu_seqlens_q": bounds_of(lengths.q, lengths.before),
        "cu_seqlens_k": bounds_of(lengths.k, lengths.before),
    }
    return varlen_attention(*tensors, pattern, **bounds, **options)


def gradients(
    tensors: list[Any], pattern: Any, lengths: Lengths, dout: Any, dlse: Any = None, sink: Any = None, **options: Any
) -> tuple[Any, ...]:
    leaves = [*tensors, *([] if sink is None else [sink])]
    in_order = options.get("deterministic", True)  # poisoning asks torch for deterministic algorithms
    with poisoned_memory() if in_order else nullcontext():
        out, lse = call(tensors, pattern, lengths, sink=sink, return_lse=True, **options)
        outputs, given = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
        return torch.autograd.grad(outputs, leaves, given)


def alone(tensor: Any, begin: int, length: int) -> Any:
    """The rows of one sequence, as (1, heads, length, head_dim)."""
    return tensor.detach()[begin : begin + length].transpose(0, 1)[None]


def check(
    tensors: list[Any],
    pattern: Any,
    lengths: Lengths = ODD,
    *,
    dlse: Any = None,
    sink: Any = None,
    deterministic: bool = True,
    **options: Any,
) -> None:
    """Compare gradients with those of each sequence in float64, and with what rounding makes of them."""
    dout = torch.randn_like(tensors[0])
    found = gradients(tensors, pattern, lengths, dout, dlse, sink, deterministic=deterministic, **options)
    exact, off = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in zip(NAMES, tensors, strict=True)}, []
    unseen = {
        name: torch.ones(t.shape[:2], dtype=torch.bool, device="cuda") for name, t in zip(NAMES, tensors, strict=True)
    }
    of_sink = None if sink is None else sink.detach().double() * 0
    sink_squares = None if sink is None else sink.detach().double() * 0
    parts = []
    q_at = k_at = lengths.before
    for number, (q_len, k_len) in enumerate(zip(lengths.q, lengths.k, strict=True)):
        begins = dict(zip(NAMES, (q_at, k_at, k_at), strict=True))
        sizes = dict(zip(NAMES, (q_len, k_len, k_len), strict=True))
        rows = slice(q_at, q_at + q_len)
        q_at, k_at = q_at + q_len, k_at + k_len
        if sink is not None and q_len and not k_len and dlse is not None:
            of_sink += dlse[:, rows].double().sum(1)
        if not q_len or not k_len:
            continue
        one = [alone(t, begins[name], sizes[name]) for name, t in zip(NAMES, tensors, strict=True)]
        of_out = alone(dout, rows.start, q_len)
        of_lse = None if dlse is None else dlse[None, :, rows]
        right = gradient_oracle.exact(*one, pattern, of_out, of_lse, sink=sink, **options)
        if sink is not None:
            of_sink += right.pop("dsink")
            sink_squares += sink_allowance(one, pattern, of_out, sink, **options)
        seen = gradient_oracle.seen_by(pattern, *one[:2])[0]
        unseen["dq"][rows] = (seen.sum(-1) == 0).T
        for name in NAMES[1:]:
            of_keys = seen.unflatten(0, (one[1].shape[1], -1)).sum((1, 2)) == 0
            unseen[name][begins[name] : begins[name] + k_len] = of_keys.T
        others = [gradient_oracle.rounded(*one, pattern, of_out, sink=sink, **options)] if dlse is None else []
        noise = gradient_oracle.noise(*one, of_out, options.get("scale"))
        for name in NAMES:
            part = slice(begins[name], begins[name] + sizes[name])
            exact[name][part] = right[name][0].transpose(0, 1)
            got = found[NAMES.index(name)][part].double()
            error = (got - exact[name][part]).abs()
            roundoff = 1.5 * gradient_oracle.ROUNDOFF[dout.dtype] * float(exact[name][part].abs().max())
            most = max(
                (float((o[name][0].transpose(0, 1) - exact[name][part]).abs().max()) for o in others), default=0.0
            )
            limit = max(3 * most, 2 * roundoff, noise)
            if dlse is not None:
                limit *= 4  # the roundings of P and dS are not known here
            parts.append(f"{name} of sequence {number} ({q_len} x {k_len}): {float(error.max()):.3g} of {limit:.3g}")
            if not float(error.max()) <= limit:
                token, head, column = (
                    int(i) for i in torch.unravel_index(error.nan_to_num(torch.inf).argmax(), error.shape)
                )
                value, expected = float(got[token, head, column]), float(exact[name][part][token, head, column])
                bad = int((~(error <= limit)).sum())
                off.append(
                    f"{parts[-1]}; worst at its token {token}, head {head}, column {column}: {value:.5g} instead of "
                    f"{expected:.5g}; {bad} of {error.numel()} elements, tokens "
                    f"{(~(error <= limit)).any(2).any(1).nonzero().flatten()[:12].tolist()}"
                )
    for name, gradient in zip(NAMES, found, strict=False):
        wrong = unseen[name] & (gradient != 0).any(2)
        if bool(wrong.any()):
            off.append(f"{name} is not 0 where no pair is seen: (token, head) {wrong.nonzero()[:12].tolist()}")
    if sink is not None:
        error, limit = (found[3].double() - of_sink).abs(), 6 * sink_squares.sqrt() + 1e-4 * of_sink.abs().max() + 1e-5
        if not bool((error <= limit).all()):
            off.append(f"dsink: {found[3].tolist()} instead of {of_sink.tolist()}, allowed {limit.tolist()}")
    assert not off, "\n".join([f"{pattern}, {options}, {lengths}", *off])


def sink_allowance(one: list[Any], pattern: Any, dout: Any, sink: Any, **options: Any) -> Any:
    """Squares of the error that rounding of the result leaves in the gradient of the sinks."""
    seen = gradient_oracle.seen_by(pattern, *one[:2])
    out, lse = gradient_oracle.dense(*(t.double() for t in one), seen, sink=sink.detach().double(), **options)
    share = (sink.detach().double()[:, None] - lse).exp()
    return (share[..., None] * out * dout.double() * gradient_oracle.ROUNDOFF[dout.dtype]).pow(2).sum((0, 2, 3))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name: str, head_dim: int, dtype: Any) -> None:
    check(operands(head_dim=head_dim, dtype=dtype), PATTERNS[name]())


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", ["dense", "causal", "window", "sink window"])
def test_lengths(name: str, lengths: str) -> None:
    check(operands(LENGTHS[lengths]), PATTERNS[name](), LENGTHS[lengths])


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", ["causal", "window"])
@pytest.mark.parametrize("head_dim", [8, 72, 96, 120, 192, 256])
def test_head_sizes(head_dim: int, name: str) -> None:
    check(operands(head_dim=head_dim), PATTERNS[name]())


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("name", ["dense", "causal", "sink window"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("options", [{"softcap": 1.5}, {"scale": 0.3}, {"softcap": 20.0, "scale": 0.3}], ids=str)
def test_options(options: dict[str, Any], head_dim: int, name: str) -> None:
    check(operands(head_dim=head_dim), PATTERNS[name](), **options)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("lengths", ["odd", "more queries", "around"])
@pytest.mark.parametrize("with_dlse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("with_sink", [False, True], ids=["no sinks", "sinks"])
def test_sinks_and_a_loss_of_the_log_sum_exp(with_sink: bool, with_dlse: bool, lengths: str) -> None:
    given = LENGTHS[lengths]
    tensors = operands(given)
    sink = torch.randn(4, device="cuda").add_(3.0).requires_grad_() if with_sink else None
    dlse = torch.randn(4, tensors[0].shape[0], device="cuda") if with_dlse else None
    check(tensors, Causal(), given, sink=sink, dlse=dlse)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("lengths", ["odd", "more queries", "around", "many"])
@pytest.mark.parametrize("head_dim", [56, 128])
def test_sums_in_any_order(head_dim: int, lengths: str) -> None:
    """dK and dV have one order all the same."""
    given, pattern = LENGTHS[lengths], Causal()
    tensors = operands(given, heads=8, head_dim=head_dim)
    check(tensors, pattern, given, deterministic=False)
    dout = torch.randn_like(tensors[0])
    first, again = (gradients(tensors, pattern, given, dout, deterministic=False) for _ in range(2))
    assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 1), (6, 2), (16, 16)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    check(operands(heads=heads, kv_heads=kv_heads), Causal())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["dense", "causal", "window"])
def test_interleaved_heads_have_the_bits_of_heads_alone(
    name: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels interleave the tiles of some K/V heads: of 26 with up to 40 tiles each, the last group is not full."""
    monkeypatch.setattr(varlen_gradients, "LEAST_OF_ONE_KERNEL", 0)
    lengths, pattern = Lengths((4000, 77, 1043), (4000, 77, 1043)), PATTERNS[name]()
    tensors = operands(lengths, heads=26, kv_heads=26, head_dim=head_dim)
    dout = torch.randn_like(tensors[0])
    together = gradients(tensors, pattern, lengths, dout)
    for head in (0, 10, 11, 22, 23, 25):
        one = slice(head, head + 1)
        leaves = [t[:, one].detach().clone().requires_grad_() for t in tensors]
        found = gradients(leaves, pattern, lengths, dout[:, one])
        assert all(map(torch.equal, found, [t[:, one] for t in together])), head


KERNELS = [
    {"gradients": gradients, "head_dim": head_dim, "pattern": {"kind": kind}, "dtype": dtype}
    for gradients in ("dq", "dkdv", "dq_dkdv")
    for head_dim, kind, dtype in (
        (128, "causal", "bf16"),
        (128, "dense", "fp16"),
        (64, "causal", "fp16"),
        *(((64, "sliding_window", "bf16"),) if gradients == "dq_dkdv" else ()),
        *(((256, "sliding_window", "bf16"), (96, "sink_window", "bf16")) if gradients != "dq_dkdv" else ()),
    )
]


@pytest.mark.parametrize("shapes", ["cases", "random"])
@pytest.mark.parametrize(
    "fields", KERNELS, ids=lambda fields: f"{fields['gradients']}-{fields['head_dim']}-{fields['pattern']['kind']}"
)
def test_cases_between_guard_bands(fields: dict[str, Any], shapes: str) -> None:
    if ARCH == "sm_89" and (fields["head_dim"] == 96 or fields["gradients"] == "dq_dkdv"):
        pytest.skip("there is no such kernel")
    named = find_spec({"op": "attention_backward", "arch": ARCH, "layout": "varlen", **fields})
    kernel, verification = load_kernel(named), verification_of(named.spec)
    cases = (
        verification.random_cases(named.spec)
        if shapes == "random"
        else verification.cases(kernel.compiled.plan, named.spec)
    )
    outcomes = [run_case(kernel, case, torch.device("cuda", 0)) for case in cases]
    failed = [f"{o.name} ({o.description}): {o.max_error:.3g}; {o.problem}" for o in outcomes if not o.passed]
    assert not failed, f"{len(failed)} of {len(outcomes)} failed\n" + "\n".join(failed)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("name", ["dense", "causal", "window"])
def test_a_hundred_runs_beside_a_busy_stream_have_the_same_bits(name: str, head_dim: int) -> None:
    lengths = Lengths((700, 1, 333, 1500, 64), (700, 1, 333, 1500, 64))
    tensors, pattern = operands(lengths, heads=8, kv_heads=2, head_dim=head_dim), PATTERNS[name]()
    dout = torch.randn_like(tensors[0])
    first = gradients(tensors, pattern, lengths, dout)
    busy, a = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for run in range(100):
        with torch.cuda.stream(busy):
            for _ in range(run % 5):
                a = (a @ a).tanh()
        again = gradients(tensors, pattern, lengths, dout)
        different = [name for name, one, other in zip(NAMES, first, again, strict=True) if not torch.equal(one, other)]
        assert not different, f"run {run}: {different}"


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_neighbours_hold_has_no_effect(head_dim: int) -> None:
    """Tails of tiles hold rows of the next sequence: other values there, however large, change no bit."""
    lengths = Lengths((100, 77, 200), (130, 77, 65))
    tensors = operands(lengths, head_dim=head_dim)
    dout = torch.randn_like(tensors[0])
    right = gradients(tensors, Causal(), lengths, dout)
    with torch.no_grad():
        tensors[0][177:].mul_(100.0)
        tensors[1][207:].mul_(-100.0)
        tensors[2][207:].mul_(100.0)
        dout[177:].mul_(-100.0)
    found = gradients(tensors, Causal(), lengths, dout)
    for name, one, other, end in zip(NAMES, right, found, (177, 207, 207), strict=True):
        assert torch.equal(one[:end], other[:end]), name


@pytest.mark.usefixtures("form")
@pytest.mark.own_allocator
def test_a_graph_of_both_passes_serves_other_bounds() -> None:
    lengths = [
        Lengths((700, 300, 24), (700, 300, 24)),
        Lengths((0, 1000, 20), (5, 900, 20)),
        Lengths((1, 2, 3), (3, 2, 1)),
    ]
    q, k, v = (torch.randn(1024, n, 128, device="cuda").bfloat16().requires_grad_() for n in (4, 2, 2))
    dout = torch.randn_like(q)
    of_q, of_k = bounds_of(lengths[0].q), bounds_of(lengths[0].k)

    def step() -> tuple[Any, ...]:
        out = varlen_attention(q, k, v, Causal(), cu_seqlens_q=of_q, cu_seqlens_k=of_k)
        return torch.autograd.grad(out, (q, k, v), dout)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for each in lengths:
        of_q.copy_(bounds_of(each.q))
        of_k.copy_(bounds_of(each.k))
        for gradient in captured:
            gradient.fill_(torch.nan)
        graph.replay()
        for name, one, other in zip(NAMES, captured, step(), strict=True):
            assert torch.equal(one, other), f"{name} of {each}"


def test_bounds_that_fall_neither_hang_nor_spoil_the_next_call() -> None:
    """Tiles that take turns wait for others: bounds that fall count as the largest before them."""
    tensors, lengths = operands(Lengths((1000,), (1000,))), Lengths((600, 0, 400), (600, 0, 400))
    dout, good = torch.randn_like(tensors[0]), bounds_of(lengths.q)

    def step(bounds: Any) -> tuple[Any, ...]:
        out = varlen_attention(*tensors, Causal(), cu_seqlens_q=bounds, cu_seqlens_k=bounds)
        return torch.autograd.grad(out, tensors, dout)

    right = step(good)
    for values in ((0, 900, 100, 1000), (1000, 0, 1000, 0), (-(2**31), 2**31 - 1, -7, 5), (500, 400, 300, 200)):
        step(torch.tensor(values, dtype=torch.int32, device="cuda"))
        torch.cuda.synchronize()
        assert all(map(torch.equal, step(good), right)), values


def test_views_of_packed_qkv_and_a_gradient_that_no_kernel_can_read() -> None:
    qkv = torch.randn(1163, 3, 4, 72, device="cuda").bfloat16().requires_grad_()
    bounds = bounds_of((700, 463))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return varlen_attention(q, k, v, Causal(), cu_seqlens_q=bounds)

    out = attend(*qkv.unbind(1))
    assert out.is_contiguous()
    (found,) = torch.autograd.grad(out.float().sum(), qkv)
    apart = [t.detach().clone().requires_grad_() for t in qkv.unbind(1)]
    right = torch.autograd.grad(attend(*apart), apart, torch.ones_like(out))
    assert torch.equal(found, torch.stack(right, 1))


def test_sinks_alone_have_a_gradient() -> None:
    tensors = [t.detach() for t in operands()]
    dout = torch.randn_like(tensors[0])
    found = []
    for with_q in (False, True):
        sink = torch.linspace(-1, 4, 4, device="cuda").requires_grad_()
        tensors[0].requires_grad_(with_q)
        found.append(torch.autograd.grad(call(tensors, Causal(), ODD, sink=sink), sink, dout)[0])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_only_what_is_wanted_is_computed(wanted: tuple[bool, ...]) -> None:
    tensors = operands()
    dout = torch.randn_like(tensors[0])
    right = gradients(tensors, Causal(), ODD, dout)
    for tensor, needs in zip(tensors, wanted, strict=True):
        tensor.requires_grad_(needs)
    call(tensors, Causal(), ODD).backward(dout)
    for tensor, needs, expected in zip(tensors, wanted, right, strict=True):
        assert (tensor.grad is not None) == needs
        assert tensor.grad is None or torch.equal(tensor.grad, expected)


def test_without_tokens() -> None:
    q, k, v = (torch.randn(n, 4, 64, device="cuda").half().requires_grad_() for n in (10, 0, 0))
    bounds = {"cu_seqlens_q": bounds_of((6, 3), 1), "cu_seqlens_k": bounds_of((0, 0))}
    sink = torch.ones(4, device="cuda").requires_grad_()
    out, lse = varlen_attention(q, k, v, Dense(), **bounds, sink=sink, return_lse=True)
    found = torch.autograd.grad([out, lse], [q, k, v, sink], [torch.ones_like(out), torch.ones_like(lse)])
    assert not found[0].any() and found[1].shape == k.shape
    assert torch.equal(found[3], torch.full_like(sink, 9.0))


def test_opcheck() -> None:
    tensors, bounds = operands(), bounds_of(ODD.q)
    text, sink = Causal().spec_json, torch.zeros(4, device="cuda")
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    forward = OPERATORS.varlen_attention.default
    torch.library.opcheck(forward, (*tensors, bounds, bounds, sink, [], text), {"lse": True}, test_utils=checks)
    q, k, v = (t.detach() for t in tensors)
    out, lse = forward(q, k, v, bounds, bounds, None, [], text, lse=True)
    given = (torch.randn_like(out), q, k, v, bounds, bounds, out, lse, torch.randn_like(lse), sink, [], text)
    backward = OPERATORS.varlen_attention_backward.default
    for options in ({}, {"dsink": True}, {"dq": False}, {"dkdv": False}):
        torch.library.opcheck(backward, given, options, test_utils=checks[:2])


@pytest.mark.own_allocator
def test_compile_takes_a_training_step_whole() -> None:
    bounds = bounds_of(ODD.q)

    def step(q: Any, k: Any, v: Any, sink: Any) -> Any:
        out, lse = varlen_attention(q, k, v, Causal(), cu_seqlens_q=bounds, sink=sink, return_lse=True)
        return out.float().pow(2).sum() + lse.nan_to_num(neginf=0.0).sum()

    found = []
    for function in (step, torch.compile(step, fullgraph=True)):
        torch.manual_seed(1)
        leaves = [*operands(), torch.ones(4, device="cuda").requires_grad_()]
        found.append(torch.autograd.grad(function(*leaves), leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_checkpoint_and_autocast() -> None:
    bounds = bounds_of(ODD.q)
    leaves = [torch.randn(t.shape, device="cuda").requires_grad_() for t in operands()]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return varlen_attention(q, k, v, Causal(), cu_seqlens_q=bounds)

    with torch.autocast("cuda", torch.bfloat16):
        right = torch.autograd.grad(attend(*leaves).float().sum(), leaves)
        found = torch.autograd.grad(checkpoint(attend, *leaves, use_reentrant=False).float().sum(), leaves)
    for one, other in zip(right, found, strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other)


def test_what_has_no_gradient_is_refused() -> None:
    tensors = operands()
    with pytest.raises(ArgumentError, match=r"^out: is given, and q requires a gradient"):
        call(tensors, Causal(), ODD, out=torch.empty_like(tensors[0]))
    (first,) = torch.autograd.grad(call(tensors, Causal(), ODD).float().sum(), tensors[:1], create_graph=True)
    with pytest.raises(ArgumentError, match=r"^varlen_attention: has no gradient of its gradient"):
        first.float().sum().backward()
