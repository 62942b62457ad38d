"""The kernel of prefill over pages, which runs on the host, thread by thread: see host_sm90a.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from host_paged import ranges_of
from host_sm90a import HostLoaded

from codegen.library import NamedSpec
from codegen.render import generate
from runtime.kernels import arguments, paged_attention, paged_prefill
from runtime.kernels.paged_prefill import PagedPrefillKernel


class HostKernel(PagedPrefillKernel):
    """A kernel of prefill that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path, source: str | None = None, blocks: int = 3) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source if source is None else source, generated.plan, folder, blocks)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]

    def attend(self, given: Any, options: Any) -> Any:
        """Compute attention, with the checks of a first call each time. Copies may read K and V."""
        ranges = ranges_of(given[1:3])
        self.host.library.let_read(ranges, len(ranges) // 2)
        return self.attend_checked(given, options)[1]


def on_cpu(monkeypatch: Any) -> None:
    """Let kernels take tensors of the CPU."""
    for module in (arguments, paged_attention, paged_prefill):
        monkeypatch.setattr(module, "check_tensor", lambda *given: None)
