"""Processes that are forked before and after the first use of CUDA, as a data loader's are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import multiprocessing
import torch
from runtime import load_kernel
from runtime.errors import DeviceError

def attempt(queue):
    try:
        load_kernel("l4_topk32_d64", forward_compatible=True)
        queue.put("loaded")
    except DeviceError as error:
        queue.put(str(error))

def in_child(how):
    context = multiprocessing.get_context(how)
    queue = context.SimpleQueue()
    child = context.Process(target=attempt, args=(queue,))
    child.start()
    told = queue.get()
    child.join()
    return told

if __name__ == "__main__":
    print(in_child("fork"))
    load_kernel("l4_topk32_d64", forward_compatible=True)
    print(in_child("fork"))
    print(in_child("spawn"))
"""


def test_fork_before_the_first_use_works_and_after_it_spawn_does(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    before, after, spawned = done.stdout.splitlines()
    assert (before, spawned) == ("loaded", "loaded") and "multiprocessing.get_context('spawn')" in after
