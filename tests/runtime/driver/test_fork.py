"""Forked processes: before the first use of CUDA they may use it, after it they are told what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from codegen.library import find_spec
from runtime.driver import launch, process
from runtime.errors import DeviceError

pytestmark = pytest.mark.nvrtc

# What a forked child of this process is told, before and after the parent's first use.
FORK = """
import os
from runtime.driver import process
from runtime.errors import DeviceError

def in_child():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            process.claim()
            os.write(writer, b"ok")
        except DeviceError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reader, 1000).decode()

print(in_child())
process.claim()
process.claim()
print(in_child())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_before_the_first_use_works_and_one_after_it_says_spawn() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True, timeout=60)
    before, after = done.stdout.splitlines()
    assert before == "ok"
    assert after.startswith("this process was forked after the first use of CUDA") and "get_context('spawn')" in after


def test_load_kernel_in_a_process_that_torch_knows_to_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from runtime import load_kernel

    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(DeviceError, match=r"forked after the first use of CUDA.*'spawn'"):
        load_kernel(find_spec("h100_topk32"))


def test_a_launch_that_fails_in_a_fork_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    status = SimpleNamespace(name="CUDA_ERROR_NOT_INITIALIZED")
    assert str(launch._launch_error("k", status)) == "launch of k failed: CUDA_ERROR_NOT_INITIALIZED"
    monkeypatch.setattr(process, "_user", os.getpid() + 1)
    assert "CUDA_ERROR_NOT_INITIALIZED: this process was forked" in str(launch._launch_error("k", status))
