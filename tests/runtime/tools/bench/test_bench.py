"""The clock on a fake device, and what the logits of each data set are like."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from codegen.errors import CodegenError  # noqa: E402
from runtime.tools.bench import data_sets, timing  # noqa: E402


def test_medians_of_single_calls_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order, slept = [], []
    times = {"a": iter([5.0, 1.0, 3.0, 9.0, 2.0]), "b": iter([7.0, 8.0, 6.0, 6.5, 7.5])}

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return next(times[order[-2]])

    clock = itertools.count(0.0, 1e-3)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    assert timing.single_calls(calls, repeats=5, warm_up=2) == {"a": 3.0, "b": 7.0}
    assert order[:4] == ["a", "a", "b", "b"]  # before anything is timed
    assert order[4:] == ["event", "a", "event", "event", "b", "event"] * 5
    assert slept == [pytest.approx(4_000_000, rel=1e-3)] * 10  # twice as long as a call takes to be enqueued


class Device:
    """A clock that calls move on, and what ran between two events of one block.

    Attributes:
        blocks: name of the call, number of calls and milliseconds of each block.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.ran: list[str] = []
        self.blocks: list[tuple[str, int, float]] = []
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at, self.ran = device.now, len(device.ran)

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Event) -> float:
                names = device.ran[self.ran : other.ran]
                assert len(set(names)) == 1
                device.blocks.append((names[0], len(names), other.at - self.at))
                return other.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)

    def call(self, name: str, milliseconds: Callable[[], float]) -> timing.Call:
        def call() -> None:
            self.ran.append(name)
            self.now += milliseconds()

        return call


def test_calls_back_to_back_fill_blocks_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    calls = {"a": device.call("a", lambda: 2.0), "b": device.call("b", lambda: 100.0)}
    assert timing.back_to_back(calls) == {"a": pytest.approx(2.0), "b": pytest.approx(100.0)}
    assert device.ran[:2] == ["a", "b"]  # what is compiled is compiled before
    a = [("a", 3, 6.0), ("a", 25, 50.0), ("a", 125, 250.0)]  # to know the length, to settle, and the one that counts
    b = [("b", 3, 300.0)] * 3  # a block has three calls, however long they are
    assert device.blocks == (a + b) * 3


def test_the_median_of_the_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    length = iter([4.0, 1.0, 9.0])
    now = [0.0]

    def first(call: timing.Call, seconds: float, expected: float = math.inf) -> float:
        if seconds == 0.25:
            now[0] = next(length)
        return now[0]

    monkeypatch.setattr(timing, "block_milliseconds", first)
    assert timing.back_to_back({"a": device.call("a", lambda: 1.0)}) == {"a": 4.0}


def test_a_block_that_ends_too_soon_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    # Expected to take 10 ms each, they take 4: 25 calls are 100 ms of the 250, 38 more fill it.
    assert timing.block_milliseconds(device.call("a", lambda: 4.0), 0.25, 10.0) == pytest.approx(4.0)
    assert device.blocks == [("a", 25, 100.0), ("a", 63, 252.0)]


@pytest.mark.parametrize(
    ("seconds", "milliseconds", "calls"),
    [(0.25, 2.0, 125), (0.25, 1.999, 126), (0.25, 0.01, 25000), (0.25, 1000.0, 3), (0.0, math.inf, 3)],
)
def test_calls_of_a_block(seconds: float, milliseconds: float, calls: int) -> None:
    assert timing.calls_of_block(seconds, milliseconds) == calls


def made(
    name: str, heads: int = 16, kv_heads: int = 16, length: int = 1024, head_dim: int = 128, dtype: Any = None
) -> tuple[Any, Any, Any]:
    q, k, v = (
        torch.empty(1, count, length, head_dim, dtype=dtype or torch.float32) for count in (heads, kv_heads, kv_heads)
    )
    data_sets.make_data(name, q, k, v, torch.Generator().manual_seed(0))
    return q, k, v


def logits(q: Any, k: Any) -> Any:
    """Scaled logits, (heads, queries, keys), of the only batch entry."""
    return (q[0] @ k[0].repeat_interleave(q.shape[1] // k.shape[1], 0).mT) * q.shape[3] ** -0.5


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("name", "std"), [("std1", 1.0), ("std2", 2.0), ("std4", 4.0), ("std9", 9.0)])
def test_logits_have_the_standard_deviation_of_the_name(name: str, std: float, head_dim: int) -> None:
    q, k, v = made(name, heads=2, kv_heads=2, head_dim=head_dim)
    assert float(logits(q, k).std()) == pytest.approx(std, rel=0.03)
    assert float(v.std()) == pytest.approx(1.0, rel=0.02)
    assert float(q.std()) == pytest.approx(float(k.std()), rel=0.02)


def test_key_norms_are_log_normal() -> None:
    _, k, _ = made("key_norms", heads=4, kv_heads=4)
    norms = (k.norm(dim=-1) / 128**0.5).log()
    assert float(norms.mean()) == pytest.approx(0.0, abs=0.05)
    assert float(norms.std()) == pytest.approx(0.8, rel=0.05)


def test_heads_have_the_stds_of_an_encoder() -> None:
    q, k, _ = made("heads")
    found = logits(q, k).flatten(1).std(1).tolist()
    assert found == pytest.approx(data_sets.HEAD_STDS, rel=0.05)
    assert data_sets.head_stds(16) == list(data_sets.HEAD_STDS)
    assert data_sets.head_stds(8) == list(data_sets.HEAD_STDS[1::2])
    assert data_sets.head_stds(64) == list(data_sets.HEAD_STDS) * 4
    assert (
        data_sets.head_stds(1) == [19.7] and len(data_sets.head_stds(12)) == 12 and data_sets.head_stds(12)[-1] == 19.7
    )


def test_query_heads_of_one_kv_head_differ() -> None:
    q, k, _ = made("heads", heads=64, kv_heads=8, length=256)
    found = logits(q, k).flatten(1).std(1).tolist()
    assert found == pytest.approx(data_sets.head_stds(64), rel=0.1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2)])
def test_a_sink_is_the_first_key(heads: int, kv_heads: int) -> None:
    found = logits(*made("sink", heads=heads, kv_heads=kv_heads)[:2])
    first, others = found[..., 0], found[..., 1:]
    expected = 6.0 * 22.0 / 128**0.5  # 11.7
    assert first.mean(1).tolist() == pytest.approx([expected] * heads, abs=2.0)
    assert float(others.mean()) == pytest.approx(0.0, abs=0.1)
    assert float(others.std()) == pytest.approx(math.hypot(1.0, 6.0 / 128**0.5), rel=0.05)
    weight = found.softmax(-1)[..., 0].mean()
    assert 0.9 < float(weight) < 1.0


def test_rotation_keeps_lengths_and_depends_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 1, 64).expand(2, 300, 64)
    q, k = data_sets.rotated(x), data_sets.rotated(y)
    torch.testing.assert_close(q.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(q[0], x[0])
    products = q @ k.T
    for distance in (0, 1, 50):
        along = products.diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)


def test_rotary_data_have_a_sink_and_wave_with_the_distance() -> None:
    q, k, _ = made("rotary", heads=4, kv_heads=4)
    found = logits(q, k)
    norms = k.norm(dim=-1)
    assert norms[..., 0].flatten().tolist() == pytest.approx([30.0] * 4, rel=1e-4)
    # The length of noise and mean together: sqrt(1.4^2 + 0.7^2) * sqrt(d).
    assert float(norms[..., 1:].mean()) == pytest.approx(math.hypot(1.4, 0.7) * 128**0.5, rel=0.02)
    # What q has along u in any case gives 6 * 30 / sqrt(d), 16; what the turned mean has left of u adds to that.
    assert all(10.0 < logit < 40.0 for logit in found[..., 0].mean(1).tolist())
    near = found.diagonal(-1, 1, 2)[:, 1:].mean()
    # Mean times mean, not yet turned apart: 0.49 sqrt(d).
    assert float(near) > 4.0
    assert float(near) > float(found.diagonal(-700, 1, 2).mean()) + 1.0


@pytest.mark.parametrize("head_dim", [64, 128])
def test_logits_rise_by_five_from_block_to_block(head_dim: int) -> None:
    q, k, _ = made("rising", heads=2, kv_heads=2, length=2048, head_dim=head_dim)
    blocks = logits(q, k).mean(1).unflatten(1, (-1, 128)).mean(2)  # of each head
    steps = blocks.diff(dim=1).flatten()
    assert float(steps.mean()) == pytest.approx(5.0, abs=0.3)
    assert float(steps.min()) > 3.0


def test_falling_logits_are_rising_ones_in_reverse() -> None:
    rising, falling = (made(name, heads=2, kv_heads=2, length=512, head_dim=64) for name in ("rising", "falling"))
    directions = [
        (logits(q, k).mean(1).unflatten(1, (-1, 128)).mean(2).diff(dim=1) > 0) for q, k, _ in (rising, falling)
    ]
    assert bool(directions[0].all()) and not bool(directions[1].any())


def test_keys_of_rising_logits_stay_finite_in_fp16() -> None:
    q, k, _ = made("rising", heads=1, kv_heads=1, length=32768, dtype=torch.float16)
    assert bool(torch.isfinite(k).all()) and bool(torch.isfinite(q).all())
    lengths = k[0, 0].float().norm(dim=-1)
    assert float(lengths[-1]) == pytest.approx(500.0, rel=0.02) == float(lengths.max())


@pytest.mark.parametrize("name", data_sets.DATA)
def test_data_are_the_same_each_time_and_rounded_from_float32(name: str) -> None:
    exact = made(name, heads=4, kv_heads=2, length=256, head_dim=64)
    for dtype in (torch.float16, torch.bfloat16):
        for whole, rounded in zip(exact, made(name, 4, 2, 256, 64, dtype), strict=True):
            assert torch.equal(whole.to(dtype), rounded)
    assert data_sets.DATA[name].why


def test_an_unknown_data_set_is_refused() -> None:
    q = torch.empty(1, 1, 8, 8)
    with pytest.raises(CodegenError, match=r"name is 'std3', which is not a data set; did you mean std\d"):
        data_sets.make_data("std3", q, q, q)
