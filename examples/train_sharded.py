"""Training of a small Llama over several GPUs: FSDP2, activation checkpoints, and sequences that ranks share.

    torchrun --nproc-per-node 2 examples/train_sharded.py [--checkpoint layers|save_attention] [--parts 2]

With ``--parts 2``, each sequence is shared by two ranks. The losses are the same, up to rounding, with each choice of
``--checkpoint`` and ``--parts``. The sequences count upwards from a random number, so the loss falls quickly.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from sparse_kernel_codegen.integrations import ContextParallel, register_transformers

CHECKPOINTS = ("none", "layers", "save_attention")
TOKENS = 64


def checkpoint(model: Any, kind: str) -> None:
    """Recompute layers in the backward pass; with ``save_attention``, all of a layer but attention."""
    if kind == "none":
        return
    operators = torch.ops.sparse_kernel_codegen
    saved = operators.block_sparse_attention.default, operators.context_parallel_attention.default

    def policy(_: Any, operator: Any, *given: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    options = {"context_fn": contexts} if kind == "save_attention" else {}
    layers = tuple(model.model.layers)
    wrapper = partial(checkpoint_wrapper, **options)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: module in layers)


def make_batch(step: int, options: argparse.Namespace, group: int, groups: int, device: torch.device) -> torch.Tensor:
    """Sequences of a group of ranks that share them: int64 (batch / groups, length)."""
    made = torch.Generator().manual_seed(step)
    start = torch.randint(TOKENS, (options.batch, 1), generator=made)
    ids = (start + torch.arange(options.length)) % TOKENS
    return ids.chunk(groups)[group].to(device)


def train(options: argparse.Namespace, device: torch.device) -> list[float]:
    """The losses of all steps, each the mean over ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    ranks, parts = dist.get_world_size(), options.parts
    mesh = init_device_mesh(device.type, (ranks // parts, parts), mesh_dim_names=("dp", "cp"))
    parallel = ContextParallel(mesh["cp"]) if parts > 1 else None
    register_transformers(context_parallel=parallel)

    torch.manual_seed(0)  # the same weights on all ranks
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=2,
        num_attention_heads=options.width // 64,
        num_key_value_heads=options.width // 128,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="block_sparse", dtype=torch.float32).to(device)
    checkpoint(model.train(), options.checkpoint)
    world = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=world, mp_policy=policy)
    fully_shard(model, mesh=world, mp_policy=policy)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(options.steps):
        ids = make_batch(step, options, mesh.get_local_rank("dp"), ranks // parts, device)
        batch = {"input_ids": ids, "labels": ids} if parallel is None else parallel.shard(ids, ids)
        optimizer.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
    return losses


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", choices=CHECKPOINTS, default="none")
    parser.add_argument("--parts", type=int, default=1, help="ranks that share a sequence; a divisor of all ranks")
    parser.add_argument("--length", type=int, default=4096, help="a multiple of twice the parts")
    parser.add_argument("--batch", type=int, default=8, help="sequences of all ranks, a multiple of the ranks")
    parser.add_argument("--width", type=int, default=512, help="a multiple of 128")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU")
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("error: start this program with torchrun")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    losses = train(options, device)
    if dist.get_rank() == 0:
        print("losses:", " ".join(f"{loss:.3f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
