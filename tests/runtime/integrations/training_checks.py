"""Checks of training on ranks: FSDP2, activation checkpoints and context parallelism, with models of transformers.

    cd tests/runtime; PYTHONPATH=integrations python distributed/ranks.py training_checks 2 [NAME ...]

Each is held against steps in one process. There, the gradients of the batches of all ranks are averaged in float32, as
FSDP2 averages them.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import oracle_calls
import oracle_kernel
import packed_kernel
import pytest
import torch
import torch.distributed as dist
import transformers
from small_models import NAME, built, grouped_llama, llama, mistral, qwen2, tokens
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from runtime import ArgumentError, CollectiveError
from runtime.distributed import context
from runtime.integrations import ContextParallel, register_transformers
from runtime.ops import (
    attention,
    attention_differentiated,
    attention_gradients,
    attention_operator,
    varlen,
    varlen_differentiated,
    varlen_operator,
)

PROJECT = Path(__file__).resolve().parents[3]
BACKEND = "gloo"
CHECKS: dict[str, Callable[[Here], None]] = {}
LENGTH, STEPS, RATE = 64, 3, 0.05
DTYPE = torch.float16  # in which eager attention rounds little
OPERATORS = torch.ops.sparse_kernel_codegen
SAVED = (
    OPERATORS.block_sparse_attention.default,
    OPERATORS.varlen_attention.default,
    OPERATORS.context_parallel_attention.default,
)
COMPUTED = (
    (attention, "attend"),
    (attention_differentiated, "attend"),
    (attention_operator, "attend"),
    (varlen, "attend_varlen"),
    (varlen_differentiated, "attend_varlen"),
    (varlen_operator, "attend_varlen"),
    (context, "forward"),
)
"""Where forward passes of attention are computed."""
LAYERS = 2
SAME, CLOSE = 3e-3, 0.01
"""Limits of relative errors: beside the same kernels in one process, and beside eager attention."""
DOCUMENTS = (20, 1, 43)


@dataclass(frozen=True)
class Here:
    """A rank.

    Attributes:
        rank, ranks: its number, and how many there are.
        device: its device.
    """

    rank: int
    ranks: int
    device: torch.device

    def mesh(self, sizes: tuple[int, ...] | None = None, names: tuple[str, ...] = ("dp",)) -> Any:
        """A mesh of all ranks."""
        return init_device_mesh(self.device.type, (self.ranks,) if sizes is None else sizes, mesh_dim_names=names)


def here() -> Here:
    """Return this rank; kernels are by the definition from here on."""
    patch = pytest.MonkeyPatch()
    padded, packed = oracle_kernel.install(patch).gradients, packed_kernel.install(patch)

    def loaded(named: Any, device: torch.device) -> Any:
        return (packed if named.spec.layout == "varlen" else padded)(named, device)

    patch.setattr(attention_gradients, "_loaded", loaded)
    oracle_calls.install()
    return Here(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


def check(function: Callable[[Here], None]) -> Callable[[Here], None]:
    """Check on all ranks."""
    CHECKS[function.__name__] = function
    return function


def labeled(ids: Any, **more: Any) -> dict[str, Any]:
    return {"input_ids": ids, "labels": ids, **more}


def rows(here: Here) -> list[dict[str, Any]]:
    """The batch of each rank: two sequences."""
    every = tokens(LENGTH, batch=2 * here.ranks, device=str(here.device))
    return [labeled(part) for part in every.split(2)]


def padded(here: Here, side: str) -> list[dict[str, Any]]:
    """The same, with a third of the second sequence of each rank as padding."""
    found = rows(here)
    for each in found:
        mask = torch.ones_like(each["input_ids"])
        mask[1, slice(2 * LENGTH // 3, None) if side == "right" else slice(LENGTH // 3)] = 0
        labels = torch.where(mask > 0, each["labels"], -100)
        labels[1, LENGTH // 3] = -100  # else padding, which sees no key, predicts it
        each |= {"attention_mask": mask, "labels": labels}
    return found


def packed(here: Here, bounds: bool) -> list[dict[str, Any]]:
    """The batch of each rank: documents in one row."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=bounds)
    found = []
    for ids in tokens(LENGTH, batch=here.ranks):
        batch = collate([{"input_ids": part.tolist()} for part in ids.split(DOCUMENTS)], return_tensors="pt")
        found.append({name: x.to(here.device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()})
    return found


CASES: dict[str, tuple[Callable[[], Any], Callable[[Here], list[dict[str, Any]]]]] = {
    "dense": (partial(llama, is_causal=False), rows),
    "causal": (grouped_llama, rows),
    "window": (mistral, rows),
    "full and window, padding on the right": (qwen2, partial(padded, side="right")),
    "padding on the left, as lists": (grouped_llama, partial(padded, side="left")),
    "packed": (grouped_llama, partial(packed, bounds=True)),
    "packed, window": (mistral, partial(packed, bounds=True)),
    "packed, as lists": (grouped_llama, partial(packed, bounds=False)),
}


@dataclass
class Run:
    """Steps of training.

    Attributes:
        losses: of each step, the mean over ranks.
        gradients: of the first step, float32, by name of the weight.
        calls: number of computed forward passes of attention, of all steps.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: int = 0


@contextmanager
def counted(run: Run) -> Iterator[None]:
    """Count the forward passes of attention that are computed."""

    def counting(real: Any) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            run.calls += 1
            return real(*given, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in COMPUTED:
            patch.setattr(module, name, counting(getattr(module, name)))
        yield


def model_of(kind: Callable[[], Any], implementation: str, here: Here, dtype: torch.dtype) -> Any:
    """A model that trains, with the same weights each time."""
    return built(*kind(), implementation, str(here.device), dtype).train()


def alone(
    kind: Callable[[], Any],
    implementation: str,
    batches: list[dict[str, Any]],
    here: Here,
    dtype: torch.dtype = DTYPE,
) -> Run:
    """Steps in one process, over the batches of all ranks."""
    weights = model_of(kind, implementation, here, torch.float32)
    model = model_of(kind, implementation, here, dtype)
    run = Run()
    with counted(run):
        for _ in range(STEPS):
            with torch.no_grad():
                for mine, weight in zip(model.parameters(), weights.parameters(), strict=True):
                    mine.copy_(weight)
            total = {name: torch.zeros_like(weight) for name, weight in weights.named_parameters()}
            losses = []
            for batch in batches:
                model.zero_grad()
                loss = model(**batch, use_cache=False).loss
                loss.backward()
                losses.append(float(loss.detach()))
                for name, weight in model.named_parameters():
                    total[name] += weight.grad.float()
            run.losses.append(sum(losses) / len(losses))
            mean = {name: gradient / len(batches) for name, gradient in total.items()}
            run.gradients = run.gradients or mean
            with torch.no_grad():
                for name, weight in weights.named_parameters():
                    weight.sub_(RATE * mean[name])
    return run


def sharded(model: Any, mesh: Any) -> Any:
    """A model under FSDP2, each layer by itself."""
    policy = MixedPrecisionPolicy(param_dtype=DTYPE, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def plain_name(name: str) -> str:
    """The name of a weight without those of wrappers."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def train(model: Any, batch: dict[str, Any], here: Here) -> Run:
    """Steps on this rank."""
    run, optimizer = Run(), torch.optim.SGD(model.parameters(), lr=RATE)
    with counted(run):
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            mean = loss.detach().double()
            dist.all_reduce(mean)
            run.losses.append(float(mean) / here.ranks)
            every = {plain_name(n): p.grad.full_tensor().clone() for n, p in model.named_parameters()}
            run.gradients = run.gradients or every
            optimizer.step()
    return run


def on_ranks(kind: Callable[[], Any], batches: list[dict[str, Any]], here: Here, change: Any = None) -> Run:
    """Steps of a sharded model, that ``change`` has changed before it was sharded."""
    model = model_of(kind, NAME, here, torch.float32)
    if change is not None:
        change(model)
    return train(sharded(model, here.mesh()), batches[here.rank], here)


def assert_near(found: Run, right: Run, limit: float) -> None:
    """Hold losses and gradients against right ones: the norm of a difference, relative to that of the right one."""
    assert right.losses[-1] < right.losses[0] - 0.1, "the model does not train"
    for ours, theirs in zip(found.losses, right.losses, strict=True):
        assert abs(ours - theirs) <= limit * abs(theirs), (found.losses, right.losses)
    assert found.gradients.keys() == right.gradients.keys()
    for name, gradient in found.gradients.items():
        error, norm = float((gradient - right.gradients[name]).norm()), float(right.gradients[name].norm())
        assert error <= limit * norm, (name, error, norm)


Change = Callable[[Any], None]


def by_transformers(reentrant: bool, model: Any) -> None:
    """Checkpoint layers as transformers does."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})


def wrap(model: Any, **options: Any) -> None:
    """Wrap layers in torch's checkpoints."""
    wrapper = partial(checkpoint_wrapper, **options)
    layers = tuple(model.model.layers)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: module in layers)


def saving_attention(model: Any) -> None:
    """Wrap layers, and save the results of attention."""

    def policy(_: Any, operator: Any, *given: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    wrap(model, context_fn=partial(create_selective_checkpoint_contexts, policy))


def compiled(first: Change | None, model: Any) -> None:
    """Compile each layer, with its checkpoint."""
    torch._dynamo.reset()
    if first is not None:
        first(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)


AGAIN: dict[str, tuple[Change, int]] = {
    "transformers": (partial(by_transformers, False), 2),
    "transformers, reentrant": (partial(by_transformers, True), 2),
    "torch": (wrap, 2),
    "torch, but attention is saved": (saving_attention, 1),
}
"""Checkpoints, and how often attention is computed."""


@check
def fsdp(here: Here) -> None:
    """Eager attention in one process, and the same kernels in one process."""
    register_transformers()
    for name, (kind, make) in CASES.items():
        batches = make(here)
        found = on_ranks(kind, batches, here)
        assert found.calls == LAYERS * STEPS, name
        assert_near(found, alone(kind, NAME, batches, here), SAME)
        assert_near(found, alone(kind, "eager", batches, here), CLOSE)


@check
def checkpoints(here: Here) -> None:
    """Each checkpoint with causal attention, and two of them with other masks."""
    register_transformers()
    some = ("transformers", "torch, but attention is saved")
    for name, ways in (
        ("causal", tuple(AGAIN)),
        ("full and window, padding on the right", some),
        ("packed", some),
        ("packed, as lists", some),
    ):
        kind, make = CASES[name]
        batches = make(here)
        right = alone(kind, NAME, batches, here)
        for how in ways:
            change, times = AGAIN[how]
            found = on_ranks(kind, batches, here, change)
            assert found.calls == times * LAYERS * STEPS, (name, how, found.calls)
            assert_near(found, right, SAME)


@check
def compiled_layers(here: Here) -> None:
    """Lists of packed sequences are made in the graph of a layer, also in that of a checkpoint."""
    register_transformers()
    for name, change, times in (
        ("full and window, padding on the right", None, 1),
        ("packed", *AGAIN["torch"]),
        ("packed, as lists", *AGAIN["torch, but attention is saved"]),
    ):
        kind, make = CASES[name]
        batches = make(here)
        found = on_ranks(kind, batches, here, partial(compiled, change))
        assert found.calls == times * LAYERS * STEPS, (name, found.calls)
        assert_near(found, alone(kind, NAME, batches, here), SAME)


def partly_labeled(here: Here, count: int) -> list[dict[str, Any]]:
    """Batches of two sequences, with labels that ranks have unequally many of."""
    found = [labeled(part) for part in tokens(LENGTH, batch=2 * count, device=str(here.device)).split(2)]
    for batch in found:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][1, LENGTH // 2 - 3 :] = -100
    return found


def in_parts(
    here: Here, kind: Callable[[], Any], parallel: ContextParallel, batches: Sequence[Any], change: Change | None = None
) -> Run:
    """Steps of a model whose batches are sharded, with the batch of each group of ranks."""
    register_transformers(context_parallel=parallel)
    parts = [parallel.shard(**batch) for batch in batches]
    return on_ranks(kind, [parts[rank * len(parts) // here.ranks] for rank in range(here.ranks)], here, change)


PARTED = {"dense": partial(llama, is_causal=False), "causal": grouped_llama, "window": mistral, "both": qwen2}


@check
def parts_of_sequences(here: Here) -> None:
    """One process that has the whole sequences."""
    batches = partly_labeled(here, 1)
    for kind in PARTED.values():
        register_transformers()
        same, right = (alone(kind, implementation, batches, here) for implementation in (NAME, "eager"))
        for layout in ("zigzag", "contiguous"):
            found = in_parts(here, kind, ContextParallel(here.mesh(), layout), batches)
            assert found.calls == LAYERS * STEPS
            assert_near(found, same, SAME)
            assert_near(found, right, CLOSE)


@check
def parts_of_sequences_and_batches(here: Here) -> None:
    """Pairs of ranks have a batch each; weights are sharded over all ranks."""
    if here.ranks % 2:
        return
    mesh = here.mesh((here.ranks // 2, 2), ("dp", "cp"))
    batches = partly_labeled(here, here.ranks // 2)
    register_transformers()
    right = alone(qwen2, NAME, batches, here)
    assert_near(in_parts(here, qwen2, ContextParallel(mesh["cp"]), batches), right, SAME)


@check
def parts_of_sequences_and_checkpoints(here: Here) -> None:
    batches = partly_labeled(here, 1)
    register_transformers()
    right = alone(qwen2, NAME, batches, here)
    parallel = ContextParallel(here.mesh())
    changes = {**AGAIN, "compiled": (partial(compiled, wrap), 2)}
    for how, (change, times) in changes.items():
        found = in_parts(here, qwen2, parallel, batches, change)
        assert found.calls == times * LAYERS * STEPS, (how, found.calls)
        assert_near(found, right, SAME)


@check
def example(here: Here) -> None:
    """Each choice of examples/train_sharded.py has the same losses, up to the rounding of bfloat16."""
    program = runpy.run_path(str(PROJECT / "examples" / "train_sharded.py"), run_name="example")
    small = ["--length", "32", "--batch", "4", "--width", "128", "--steps", "6"]
    found = [
        program["train"](program["arguments"]([*small, "--checkpoint", kind, "--parts", parts]), here.device)
        for kind, parts in (("none", "1"), ("layers", "2"), ("save_attention", "1"))
    ]
    assert found[0][-1] < found[0][0] - 0.2, found
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], abs=0.02)


@check
def refusals_of_parts(here: Here) -> None:
    """Each rank raises an error, also one whose own arguments are right."""
    parallel = ContextParallel(here.mesh(), "contiguous")
    register_transformers(context_parallel=parallel)
    model = model_of(grouped_llama, NAME, here, DTYPE).eval()
    ids = tokens(8 * here.ranks, device=str(here.device))
    part = parallel.shard(ids)
    with torch.no_grad():
        with pytest.raises(ArgumentError if here.rank else CollectiveError, match="position_ids: are not those of"):
            model(part["input_ids"], use_cache=False)
        assert model(**part, use_cache=False).logits.isfinite().all(), "the next call"
        ones = torch.ones_like(part["input_ids"])
        bounds = torch.tensor([0, 8], dtype=torch.int32, device=here.device)
        for argument, changes in (
            ("attention_mask: is given with context_parallel", {"attention_mask": ones}),
            ("attention_mask: is Tensor, expected None", {"attention_mask": ones[:, None, :, None].bool()}),
            ("cu_seq_lens_q: is given with context_parallel", {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}),
        ):
            with pytest.raises(ArgumentError, match=argument):
                model(**part, **changes, use_cache=False)
        cache = model(**part, use_cache=True).past_key_values
        with pytest.raises(ArgumentError, match="cache: has keys of earlier calls"):
            model(**part, past_key_values=cache)
        register_transformers(context_parallel=parallel, pattern_for=lambda module, q, k, exact: None)
        with pytest.raises(ArgumentError, match="pattern_for: returned NoneType"):
            model(**part, use_cache=False)
    for argument, refused in (
        ("input_ids", lambda: parallel.shard(ids[0])),
        ("labels", lambda: parallel.shard(ids, ids[:, :-1])),
        ("length", lambda: parallel.shard(ids[:, :-1])),
        ("symmetric", lambda: ContextParallel(here.mesh(), symmetric=1)),  # type: ignore[arg-type]
        ("layout", lambda: ContextParallel(here.mesh(), "diagonal")),
        ("mesh_or_group", lambda: ContextParallel(None)),
        ("decode", lambda: register_transformers(context_parallel=parallel, decode="sdpa")),
    ):
        with pytest.raises(ArgumentError, match=argument):
            refused()
