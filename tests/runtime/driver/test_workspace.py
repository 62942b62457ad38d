"""Device memory of launches: one set of counters for each stream that lasts, none of it shared with a graph."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from host_streams import pretend_memory  # noqa: E402

from runtime.driver import streams, workspace  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Empties what is kept; its last entry says whether the stream is being captured."""
    state = [False]
    pretend_memory(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[-1])
    return state


def test_counters_are_zero_and_those_of_their_stream() -> None:
    first = workspace.counters(CPU, 7, 10)
    assert first.dtype == torch.int32 and first.tolist() == [0] * 10
    assert workspace.counters(CPU, 7, 10).data_ptr() == first.data_ptr()
    assert workspace.counters(CPU, 7, 2).data_ptr() == first.data_ptr()
    assert workspace.counters(CPU, 8, 10).data_ptr() != first.data_ptr()


def test_more_counters_than_before_are_zero_too() -> None:
    small = workspace.counters(CPU, 7, 2)
    large = workspace.counters(CPU, 7, 500)
    assert large.tolist() == [0] * 500
    assert large.data_ptr() != small.data_ptr()
    assert workspace.counters(CPU, 7, 2).data_ptr() == large.data_ptr()


def test_scratch_is_not_kept() -> None:
    first = workspace.scratch(CPU, 100)
    assert first.dtype == torch.uint8 and first.shape == (100,)
    assert workspace.scratch(CPU, 100).data_ptr() != first.data_ptr()


def test_devices_do_not_share() -> None:
    one, other = (workspace.counters(torch.device("meta", index), 7, 16) for index in (0, 1))
    assert one is not other
    assert workspace.counters(torch.device("meta", 0), 7, 16) is one


def test_a_captured_launch_has_counters_of_its_own(capturing: list[bool]) -> None:
    outside = workspace.counters(CPU, 7, 16)
    capturing.append(True)
    captured, again = workspace.counters(CPU, 7, 16), workspace.counters(CPU, 7, 16)
    capturing.pop()
    assert len({tensor.data_ptr() for tensor in (outside, captured, again)}) == 3
    assert workspace.counters(CPU, 7, 16) is outside


@pytest.mark.parametrize(
    ("number", "lasts"),
    [(0, True), (7, True), (0x7F31C8, False), (2, False)],
    ids=["default", "pool", "external", "per thread"],
)
def test_nothing_is_kept_for_a_stream_that_may_end(monkeypatch: pytest.MonkeyPatch, number: int, lasts: bool) -> None:
    """``number`` is torch's of a stream: 0, odd, or a pointer."""

    class Stream:
        stream_id = number

    monkeypatch.setattr(streams, "_lasting", set())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    first, second = workspace.counters(CPU, 7, 16), workspace.counters(CPU, 7, 16)
    assert (first is second) is lasts and bool(workspace._counters) is lasts
    assert streams._lasting == ({(None, 7)} if lasts else set())
