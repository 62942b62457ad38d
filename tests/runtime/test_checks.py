"""Devices that functions are given, in code that torch.compile traces: the machine need not have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime import video  # noqa: E402
from runtime.checks import present_device  # noqa: E402
from runtime.distributed import Layout  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def devices_traced(call: Callable[[], Any]) -> set[torch.device]:
    """Devices that the one graph of a call names; the graph does not run.

    Args:
        call: of no arguments, which returns one tensor.
    """
    found: set[torch.device] = set()

    def backend(graph: Any, inputs: Any) -> Any:
        named = [value for node in graph.graph.nodes for value in (*node.args, *node.kwargs.values())]
        found.update(value for value in named if isinstance(value, torch.device))
        return lambda *given: (torch.empty(0, device="meta"),)

    torch.compile(call, fullgraph=True, backend=backend)()
    return found


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.zeros(4, device=present_device("device", "cuda:0")),
        lambda: torch.zeros(4, device=present_device("device", 0)),
        lambda: Layout.zigzag(2).positions(1, 64, "cuda:0"),
        lambda: video.VideoTiles((2, 8, 16), (1, 8, 8), device="cuda:0").to_tiles,
    ],
    ids=["name", "number", "Layout.positions", "VideoTiles"],
)
def test_a_cuda_device_is_traced_in_one_graph(call: Callable[[], Any]) -> None:
    assert GPU in devices_traced(call)


def test_a_cuda_device_that_torch_sees_is_accepted_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cuda", "cuda:1", torch.device("cuda", 1)):
        assert present_device("device", device) == torch.device(device)
    assert present_device("device", 0) == GPU
    with pytest.raises(ArgumentError, match="torch sees 2 CUDA devices"):
        present_device("device", 2)
