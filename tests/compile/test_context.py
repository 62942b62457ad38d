"""A thread that has no CUDA context gets one, with the driver's part played here."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from runtime.driver import api


@pytest.mark.parametrize("current", [0, 7])
def test_a_thread_without_a_context_gets_its_devices_once(monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    asked: list[Any] = []

    def answer(name: str, *results: Any) -> Any:
        return lambda *arguments: asked.append((name, *arguments)) or (0, *results)

    functions = {"cuCtxGetCurrent": (current,), "cuDeviceGet": ("device 3",), "cuDevicePrimaryCtxRetain": ("its",)}
    names = (*functions, "cuCtxSetCurrent")
    driver = SimpleNamespace(**{name: answer(name, *functions.get(name, ())) for name in names})
    # A call without results returns its status alone.
    monkeypatch.setattr(api, "call", lambda function, *arguments: next(iter(function(*arguments)[1:]), None))
    monkeypatch.setattr(api, "driver", lambda: driver)

    def twice() -> None:
        api.make_context_current(3)
        api.make_context_current(3)

    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    wanted: list[Any] = [("cuCtxGetCurrent",)]
    if current == 0:
        wanted += [("cuDeviceGet", 3), ("cuDevicePrimaryCtxRetain", "device 3"), ("cuCtxSetCurrent", "its")]
    assert asked == wanted
