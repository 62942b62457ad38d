"""What launches a million times, with calls that only pretend: each difference, failure and growth is told."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from stress import launches, shapes  # noqa: E402

from codegen.library import shipped_names  # noqa: E402
from runtime.kernels.arguments import SIGNATURES_KEPT  # noqa: E402

MIB = launches.MIB


class Counted:
    """A call that returns the same tensor, but for one time."""

    def __init__(self, wrong_at: int = 0) -> None:
        self.calls, self.wrong_at = 0, wrong_at

    def __call__(self, out: Any = None) -> Any:
        self.calls += 1
        return torch.full((3,), float(self.calls == self.wrong_at))


def shape(call: Counted) -> shapes.Shape:
    return shapes.Shape("kernel, shape 1", call, torch.zeros(3), ())


def test_rotating_shapes_are_more_than_a_kernel_remembers_and_kernels_are_shipped() -> None:
    assert shapes.SHAPES > SIGNATURES_KEPT
    assert {*shapes.HOPPER, *shapes.ADA} <= set(shipped_names())


def test_all_launches_are_made_on_streams_that_change() -> None:
    calls, streams = [Counted() for _ in range(4)], []

    def stream() -> Any:
        streams.append(object())
        return streams[-1]

    kernels = [[shape(call) for call in calls[:2]], [shape(call) for call in calls[2:]]]
    launches.launch(kernels, 1000, 0, stream, lambda _: nullcontext())
    assert sum(call.calls for call in calls) == 32 * 32 and all(call.calls for call in calls)
    assert len(streams) == 32 // launches.BURSTS_OF_A_STREAM


def test_a_result_that_differs_at_the_end_of_a_burst_is_told() -> None:
    kernels = [[shape(Counted(wrong_at=2 * launches.BURST))]]

    def work(number: int) -> None:
        if number == 1:
            raise RuntimeError("a launch failed")
        launches.launch(kernels, 1000, 0, object, lambda _: nullcontext())

    assert launches.in_threads(lambda number: None, 3) == []
    different, failed = sorted(launches.in_threads(work, 2), key=len)
    assert different == "another result: kernel, shape 1" and "RuntimeError: a launch failed" in failed


def test_every_shape_is_called_on_every_stream_before() -> None:
    calls = [Counted() for _ in range(3)]
    seen = []

    def on(stream: int) -> Any:
        seen.append(stream)
        return nullcontext()

    assert launches.warm_up([[shape(call)] for call in calls], [5, 6, 7, 8], on) == 12
    assert [call.calls for call in calls] == [4, 4, 4] and seen == [5, 6, 7, 8] * 3


@pytest.mark.parametrize(
    ("last", "told"),
    [
        (launches.Sample(MIB, 64 * MIB, 64 * MIB), ""),
        (launches.Sample(MIB + 1, 0, 0), "allocated grew by 1048577 bytes"),
        (launches.Sample(0, 65 * MIB, 66 * MIB), "taken grew by 68157440 bytes, resident grew by 69206016 bytes"),
    ],
)
def test_memory_that_grows_is_told(last: Any, told: str) -> None:
    assert launches.growth([launches.Sample(0, 0, 0), launches.Sample(9 * MIB, 0, 0), last]) == told


def graph(*results: float) -> Any:
    """A graph whose results follow its inputs, unless told otherwise: the last ones of its replays."""
    inputs, out, left = torch.zeros(1), torch.zeros(1), list(results)

    def replay() -> None:
        out.copy_(inputs if not left else torch.tensor([left.pop(0)]))

    sets = tuple((lambda value=value: inputs.fill_(value)) for value in (1.0, 2.0))
    return launches.Graph("graph", replay, out, sets, (torch.tensor([1.0]), torch.tensor([2.0])), None)


def test_replays_are_compared_with_calls() -> None:
    on: Any = lambda _: nullcontext()  # noqa: E731
    assert launches.replay([graph(), graph()], 1000, 0, on) == []
    stale = [3.0] * (2 * launches.BURST)
    (told,) = launches.replay([graph(), graph(*stale)], 1000, 0, on)
    assert told.startswith("another result of a graph: graph, inputs ")
