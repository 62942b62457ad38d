"""Device memory that kernels keep from launch to launch: one set for each stream, none of it shared with a graph."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from runtime.driver import workspace  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Empties what is kept; its last entry says whether the stream is being captured."""
    state = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[-1])
    monkeypatch.setattr(workspace, "_counters", {})
    monkeypatch.setattr(workspace, "_scratch", {})
    return state


def test_counters_are_zero_and_those_of_their_stream() -> None:
    first = workspace.counters(CPU, 7, 10)
    assert first.dtype == torch.int32 and first.tolist() == [0] * 10
    assert workspace.counters(CPU, 7, 10).data_ptr() == first.data_ptr()
    assert workspace.counters(CPU, 7, 2).data_ptr() == first.data_ptr()
    assert workspace.counters(CPU, 8, 10).data_ptr() != first.data_ptr()


def test_threads_share_those_of_a_stream_unless_its_handle_is_another_stream_in_each_thread() -> None:
    for stream in (7, 2):  # 2 is cudaStreamPerThread
        for find in (workspace.counters, workspace.scratch):
            mine = find(CPU, stream, 4)
            with ThreadPoolExecutor(1) as other:
                theirs = other.submit(find, CPU, stream, 4).result()
            assert (mine is theirs) is (stream == 7)
            assert find(CPU, stream, 4) is mine


def test_more_counters_than_before_are_zero_too() -> None:
    small = workspace.counters(CPU, 7, 2)
    large = workspace.counters(CPU, 7, 500)
    assert large.tolist() == [0] * 500
    assert large.data_ptr() != small.data_ptr()
    assert workspace.counters(CPU, 7, 2).data_ptr() == large.data_ptr()


def test_scratch_grows_and_is_that_of_its_stream() -> None:
    first = workspace.scratch(CPU, 7, 100)
    assert first.dtype == torch.uint8 and first.numel() >= 100
    assert workspace.scratch(CPU, 7, 60).data_ptr() == first.data_ptr()
    assert workspace.scratch(CPU, 8, 100).data_ptr() != first.data_ptr()
    larger = workspace.scratch(CPU, 7, 1000)
    assert larger.numel() >= 1000
    assert workspace.scratch(CPU, 7, 100).data_ptr() == larger.data_ptr()


def test_devices_do_not_share() -> None:
    for take in (workspace.counters, workspace.scratch):
        one, other = take(torch.device("meta", 0), 7, 16), take(torch.device("meta", 1), 7, 16)
        assert one is not other
        assert take(torch.device("meta", 0), 7, 16) is one


def test_a_captured_launch_has_memory_of_its_own(capturing: list[bool]) -> None:
    for take in (workspace.counters, workspace.scratch):
        outside = take(CPU, 7, 16)
        capturing.append(True)
        captured, again = take(CPU, 7, 16), take(CPU, 7, 16)
        capturing.pop()
        assert len({tensor.data_ptr() for tensor in (outside, captured, again)}) == 3
        assert take(CPU, 7, 16) is outside
    capturing.append(True)
    assert workspace.counters(CPU, 7, 3).tolist() == [0] * 3
