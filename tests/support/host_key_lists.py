"""Kernels of attention over lists of keys, and of its gradients, on the host, thread by thread: see host_sm90a.py."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import host_launch
from host_gradients import for_the_host, program_of
from host_sm90a import compiled, host_map

from codegen.library import NamedSpec
from codegen.plan import Plan
from codegen.render import generate
from runtime.kernels.key_lists_backward import KeyListsBackwardKernel
from runtime.kernels.key_lists_forward import KeyListsForwardKernel
from runtime.kernels.key_lists_paged import KeyListsPagedKernel

WAITS = """\
#include "integers.h"
// Other warps run while one waits for its turn: that of a list's second entry for a block comes from the same block.
inline int load_acquire_when_others_ran(const int* from) {
  yield();
  return *from;
}
#define load_acquire load_acquire_when_others_ran
"""


class HostLoaded(host_launch.HostLoaded):
    """Stands for a kernel in the driver, with its prologue and its epilogue.

    Attributes:
        late: whether copies happen when they are waited for, or at once.
    """

    def __init__(self, source: str, plan: Plan, folder: Path) -> None:
        program = program_of(plan).replace('#include "integers.h"\n', WAITS)
        super().__init__(compiled(for_the_host(source), plan, folder, program).run, plan)
        self.late = True

    def launch(self, signature: Any, addresses: Any, stream: int, *, prologue: bool = True) -> None:
        """Run the three kernels."""
        for tensor_map in signature.maps:
            tensor_map.place[:] = host_map(tensor_map.encoder, addresses[tensor_map.name])
        self.point(signature, addresses)
        before = signature.prologue_grid if prologue else 0
        grids = (ctypes.c_int * 3)(before, signature.grid, signature.epilogue_grid)
        self._run(signature.block, grids, self.late, self.order)


class HostKernel(KeyListsBackwardKernel):
    """A kernel that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source, generated.plan, folder)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]


class HostPaged(KeyListsPagedKernel):
    """A kernel of attention over pages that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source, generated.plan, folder)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]

    def attend(self, given: Any, options: Any) -> Any:
        """Compute attention, with the checks of a first call each time."""
        return self.attend_checked(given, options)[1]


class HostForward(KeyListsForwardKernel):
    """A kernel of attention that takes tensors of the CPU.

    Attributes:
        host: how it is run.
    """

    def __init__(self, named: NamedSpec, folder: Path) -> None:
        generated = generate(named)
        self.host = HostLoaded(generated.source, generated.plan, folder)
        super().__init__(SimpleNamespace(named=named, plan=generated.plan), self.host)  # type: ignore[arg-type]
