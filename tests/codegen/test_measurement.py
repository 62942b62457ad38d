"""Measuring kernel after kernel in one process, as far as it goes without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime import measurement  # noqa: E402


def doubled(x: Any) -> Any:
    return x * 2


def test_a_peer_is_compiled_for_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    compilations = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        compilations.append([tuple(x.shape) for x in inputs if hasattr(x, "shape")])
        return graph.forward

    def workload(size: int) -> measurement.Workload:
        compiled = torch.compile(doubled, backend=backend, dynamic=False)
        peers = {"peer": lambda: compiled(torch.ones(size))}
        return measurement.Workload(shape=str(size), flops=1e9, call=lambda: None, peers=peers, peer_flops={})

    def timed(calls: dict[str, Any]) -> dict[str, float]:
        for call in calls.values():
            call()
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(measurement, "workload", workload)
    monkeypatch.setattr(measurement, "median_milliseconds", timed)
    kernels = torch._dynamo.config.recompile_limit + 4
    for size in range(1, kernels + 1):
        kernel: Any = type("Kernel", (int,), {"compiled": SimpleNamespace(named=SimpleNamespace(stem="ours"))})(size)
        (record,) = measurement.measure(kernel)
        assert (record.shape, record.peer, record.tflops) == (str(size), "peer", 1.0)
    assert len(compilations) == kernels
