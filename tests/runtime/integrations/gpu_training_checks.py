"""The checks of training_checks.py on GPUs, with the kernels themselves.

cd tests/runtime; PYTHONPATH=integrations python distributed/ranks.py gpu_training_checks 2 [NAME ...]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import training_checks
from training_checks import CLOSE, Here, alone, assert_near, in_parts, partly_labeled, qwen2

from runtime.integrations import ContextParallel

BACKEND = "nccl"
CHECKS: dict[str, Callable[[Here], None]] = training_checks.CHECKS


def here() -> Here:
    """Return this rank."""
    rank = dist.get_rank()
    return Here(rank, dist.get_world_size(), torch.device("cuda", rank))


@training_checks.check
def parts_through_the_memory_of_peers(here: Here) -> None:
    batches = partly_labeled(here, 1)
    found = in_parts(here, qwen2, ContextParallel(here.mesh(), symmetric=True), batches)
    assert_near(found, alone(qwen2, "eager", batches, here), CLOSE)
