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
