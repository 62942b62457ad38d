"""The guard bands of the GPU tests are looked at: a write beside a tensor is told. Needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITES_OUTSIDE = """
import ctypes, torch
from tests.gpu.guard_bands import GuardBands
bands = GuardBands()
x = torch.zeros(100, device="cuda")
assert bands.faults() == []
at = ctypes.c_uint64(x.data_ptr() + {place})
ctypes.CDLL("libcuda.so.1").cuMemsetD8_v2(at, ctypes.c_ubyte(1), ctypes.c_size_t(4))
{then}
print(bands.faults())
"""


@pytest.mark.parametrize(("place", "where"), [(400, "behind"), (512, "behind"), (-4, "before")])
@pytest.mark.parametrize("then", ["", "del x"], ids=["live", "freed"])
def test_a_write_outside_is_told(place: int, where: str, then: str) -> None:
    """In a process of its own, since an allocator cannot be taken back."""
    code = WRITES_OUTSIDE.format(place=place, then=then)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert run.stdout.startswith(f"['wrote 4 bytes {where} a tensor of"), (run.stdout, run.stderr)


ALLOCATES_IN_A_NEW_THREAD = """
import threading, torch
from tests.gpu.guard_bands import GuardBands
bands, made = GuardBands(), []
torch.cuda.current_device(), torch.cuda.init()
thread = threading.Thread(target=lambda: made.append(torch.empty(100, device="cuda").fill_(1)))
thread.start(), thread.join()
x = torch.randn(64, 64, device="cuda", requires_grad=True)
(x @ x).square().sum().backward()
print(bands.faults(), int(made[0].sum()), x.grad.isfinite().all().item())
"""


def test_threads_without_a_context_allocate() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", ALLOCATES_IN_A_NEW_THREAD]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.stdout == "[] 100 True\n", (run.stdout, run.stderr)
