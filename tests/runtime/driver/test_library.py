"""When the code of kernels leaves the driver: held against a driver that watches for what no GPU would forgive."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from runtime.driver import library

STREAMS = 5


class Driver:
    """Stands for the driver: each stream has a number of launches behind it, of which some are done."""

    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0)

    def __init__(self) -> None:
        self.mode = "global"
        self.loads = 0
        self.loaded: dict[int, dict[int, int]] = {}  # library -> its last launch on each stream
        self.launches, self.done = [0] * STREAMS, [0] * STREAMS
        self.captured: set[int] = set()
        self.events: dict[int, tuple[int, int]] = {}
        self.made = 0

    def launch(self, handle: int, stream: int) -> None:
        self.launches[stream] += 1
        self.loaded[handle][stream] = self.launches[stream]

    def cuLibraryLoadData(self, code: bytes, *rest: Any) -> tuple[int, int]:
        assert self.mode == "relaxed"  # or the capture of another thread ends
        self.loads += 1
        self.loaded[self.loads] = {}
        return 0, self.loads

    def cuLibraryUnload(self, handle: int) -> tuple[int]:
        assert self.mode == "relaxed"
        assert all(self.done[stream] >= launch for stream, launch in self.loaded.pop(handle).items())
        return (0,)

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> tuple[int, str]:
        self.mode, before = mode, self.mode
        return 0, before

    def cuStreamIsCapturing(self, stream: int) -> tuple[int, int]:
        return 0, int(stream in self.captured)

    def cuEventCreate(self, flags: int) -> tuple[int, int]:
        self.made += 1
        self.events[self.made] = (0, 0)
        return 0, self.made

    def cuEventRecord(self, event: int, stream: int) -> tuple[int]:
        assert stream not in self.captured  # or it is a part of the graph
        self.events[event] = stream, self.launches[stream]
        return (0,)

    def cuEventQuery(self, event: int) -> tuple[int]:
        stream, launch = self.events[event]
        return (0 if self.done[stream] >= launch else 600,)

    def cuEventDestroy(self, event: int) -> tuple[int]:
        del self.events[event]
        return (0,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(library, "driver", lambda: made)
    monkeypatch.setattr(library, "entered", lambda device: nullcontext())
    for name in ("_loaded", "_kept", "_retired", "_waiting"):
        monkeypatch.setattr(library, name, type(getattr(library, name))())
    yield made


def test_a_thousand_kernels_on_streams_that_are_busy_or_captured(driver: Driver) -> None:
    draw = random.Random(0)
    held: list[library.Library] = []
    kept: set[int] = set()
    most = 0
    for number in range(1000):
        found = library.load(b"%d" % (number if draw.random() < 0.8 else draw.randrange(number + 1)))
        held.append(found)
        for _ in range(draw.randrange(4)):
            stream = draw.randrange(STREAMS)
            if stream in driver.captured:
                found.keep()
                kept.add(found.handle)
            else:
                found.launched.add((0, stream))
                driver.launch(found.handle, stream)
        driver.captured = {stream for stream in range(STREAMS) if draw.random() < 0.1}
        stream = draw.randrange(STREAMS)
        driver.done[stream] = draw.randint(driver.done[stream], driver.launches[stream])
        while len(held) > 8:
            held.pop(draw.randrange(8))
        del found
        assert {each.handle for each in held} | kept <= set(driver.loaded)
        most = max(most, len(driver.loaded) - len(kept))
    assert len(kept) < 300 and most < 40
    held.clear()
    gc.collect()
    driver.done, driver.captured = driver.launches, set()
    last = library.load(b"last")
    assert set(driver.loaded) == kept | {last.handle} and not driver.events
    assert driver.mode == "global"


def test_one_copy_of_each_code_and_setting(driver: Driver) -> None:
    first = library.load(b"code", 100, 0)
    assert library.load(b"code", 100, 0) is first
    assert library.load(b"code", 200, 0) is not first and library.load(b"other", 100, 0) is not first
    assert driver.loads == 3


def test_what_a_graph_may_hold_stays_and_is_found_again(driver: Driver) -> None:
    first = library.load(b"code")
    first.keep()
    first.keep()
    handle = first.handle
    del first
    gc.collect()
    library.load(b"other")
    assert library.load(b"code").handle == handle and len(library._kept) == 1


def test_a_refused_load_is_nothing_that_is_loaded(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuLibraryLoadData", lambda *given: (200, None))
    from runtime.errors import DeviceError

    with pytest.raises(DeviceError):
        library.load(b"code")
    assert not library._loaded and driver.mode == "global"
