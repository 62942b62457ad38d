"""What stands for a kernel in the driver where it runs on the host."""

from __future__ import annotations

from typing import Any

from codegen.plan import Plan
from runtime.driver import launch


class HostLoaded(launch.LoadedKernel):
    """Stands for a kernel in the driver; ``launch`` is that of each kind.

    Args:
        run: the function that runs a grid.
        plan: of the kernel.
        blocks: thread blocks of a persistent kernel.

    Attributes:
        order: seed of the order in which warps run.
    """

    def __init__(self, run: Any, plan: Plan, blocks: int = 58) -> None:
        self.plan, self.layout = plan, launch.ParameterLayout.of(plan.params)
        self._run = run
        self._sm_counts = {None: blocks}  # type: ignore[dict-item]
        self.order = 1

    def _config(self, grid: int, size: launch.BlockSize) -> None:
        """A host needs none."""

    @staticmethod
    def point(signature: Any, addresses: Any) -> None:
        """Write the addresses of a call into its parameters."""
        for name, pointer in signature.pointers:
            pointer.value = addresses[name]
