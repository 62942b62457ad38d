"""Two ranks train a BlockSparseLinear under DistributedDataParallel, with two forward passes before each backward pass.

    python tests/stress/ddp_layers.py          # gloo on the CPU, the definition in place of kernels: half a minute
    python tests/stress/ddp_layers.py --gpu    # nccl on two GPUs, the kernels themselves

Exit code 1 if a step fails, or a gradient is not the mean of those of both ranks' inputs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "support"), str(Path(__file__).resolve().parents[2])]

import bsr_oracle  # noqa: E402

from runtime.nn import BlockSparseLinear  # noqa: E402

OPTIONS: tuple[dict[str, bool], ...] = ({}, {"static_graph": True}, {"find_unused_parameters": True})
RANKS, STEPS = 2, 3


def inputs(device: torch.device) -> torch.Tensor:
    """bfloat16 (ranks, passes, tokens, in_features), the same on each rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(RANKS, 2, 40, 192, generator=generator).bfloat16().to(device)


def run(rank: int, store: str, gpu: bool) -> None:
    """One rank."""
    if not gpu:
        bsr_oracle.install(pytest.MonkeyPatch())
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mask = torch.tensor([[True, False, True], [False, True, False]])
    for options in OPTIONS:
        torch.manual_seed(rank)  # DDP gives all ranks the first one's weights
        layer = BlockSparseLinear.from_mask(mask, 64, dtype=torch.bfloat16, device=device)
        parallel: Any = torch.nn.parallel.DistributedDataParallel(layer, **options)
        x = inputs(device)
        for _ in range(STEPS):
            layer.zero_grad()
            sum(parallel(part).float().square().mean() for part in x[rank]).backward()
        found = layer.values.grad.float()
        layer.zero_grad()
        (sum(layer(part).float().square().mean() for part in x.flatten(0, 1)) / RANKS).backward()
        error = float((found - layer.values.grad.float()).norm() / layer.values.grad.float().norm())
        assert error < 0.02, (options, error)
        if rank == 0:
            print(f"{options or 'plain'}: gradients are those of both ranks, error {error:.1e}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/store", parser.parse_args().gpu), nprocs=RANKS)


if __name__ == "__main__":
    main()
