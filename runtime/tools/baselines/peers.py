"""Peers by name: the built-in peers of a workload, and optional libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from codegen.errors import CodegenError
from codegen.patterns.topk import TopK
from codegen.spec import AttentionSpec, BsrSpmmSpec
from codegen.wording import alternatives, one_line
from runtime.tools.bench.measurement import Workload
from runtime.tools.bench.timing import Call

LABELS = {
    "sdpa": "SDPA",
    "flex": "FlexAttention",
    "fa4": "FA4",
    "cublas": "cuBLAS",
    "torch": "torch",
    "triton": "Triton bsr_dense_addmm",
}
"""Prefix of the labels of a peer's calls, by its name on the command line."""


def fa4_call(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: tuple[torch.Tensor, ...]
) -> Call:
    """FlashAttention 4's call; its result is (batch, heads, length, head_dim).

    Args:
        spec: spec of the compared kernel.
        q: (batch, length, heads, head_dim), as k and v.
        k: keys.
        v: values.
        lists: lists of the pattern, one per query head.
    """
    from flash_attn.cute import flash_attn_func  # noqa: PLC0415

    pattern = spec.pattern.example()
    options: dict[str, Any] = {"causal": pattern.kind == "causal"}
    if pattern.kind == "sliding_window":
        options = {"window_size": (pattern.left, pattern.right)}  # type: ignore[attr-defined]
    elif isinstance(pattern, TopK):
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # noqa: PLC0415

        (full,) = lists
        partial = torch.zeros(full.shape[:3], dtype=torch.int32, device=q.device)
        sparse = BlockSparseTensorsTorch(
            mask_block_cnt=partial,
            mask_block_idx=partial[..., None].contiguous(),
            full_block_cnt=torch.full_like(partial, full.shape[3]),
            full_block_idx=full,
            block_size=(pattern.block.q, pattern.block.kv),
        )
        options = {"block_sparse_tensors": sparse}

    def call() -> torch.Tensor:
        out = flash_attn_func(q, k, v, **options)
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first.transpose(1, 2)

    return call


def _fa4(load: Workload, spec: Any) -> Call | None:
    plain = isinstance(spec, AttentionSpec) and not (spec.softcap or spec.score or spec.sink or spec.kv_lengths)
    if not plain or spec.pattern.kind not in ("dense", "causal", "sliding_window", "topk"):
        return None
    q, k, v = (load.inputs[name].transpose(1, 2).contiguous() for name in "qkv")
    heads, lists = q.shape[2], load.inputs["lists"]
    return fa4_call(spec, q, k, v, tuple(t.repeat_interleave(heads // t.shape[1], 1).contiguous() for t in lists))


def _triton(load: Workload, spec: Any) -> Call | None:
    plain = isinstance(spec, BsrSpmmSpec) and not (spec.transpose_a or spec.accumulate or spec.epilogue)
    if not plain or spec.block.rows != spec.block.cols:
        return None
    from torch.sparse._triton_ops import bsr_dense_addmm  # noqa: PLC0415

    a, b = load.inputs["a"], load.inputs["b"]
    zeros, out = (torch.zeros((a.shape[0], b.shape[1]), device=b.device, dtype=b.dtype) for _ in range(2))
    return lambda: bsr_dense_addmm(zeros, a, b, beta=0, alpha=1, out=out)


INSTALLED: dict[str, tuple[str, Callable[[Workload, Any], Call | None]]] = {
    "fa4": ("flash_attn", _fa4),
    "triton": ("triton", _triton),
}
"""Optional peers: the package, and a function that returns the call, or None if it cannot compute the problem."""


def check_names(names: Iterable[str]) -> None:
    """Refuse unknown peers, and peers whose package is not installed.

    Raises:
        CodegenError: with the known peers, or the package to install.
    """
    for name in names:
        if name not in LABELS:
            raise CodegenError(f"--peer: unknown peer {one_line(name)}; {alternatives(name, LABELS)}")
        if name in INSTALLED and importlib.util.find_spec(INSTALLED[name][0]) is None:
            raise CodegenError(f"--peer {name}: its package {INSTALLED[name][0]} is not installed")


def peers_of(load: Workload, spec: Any, names: Collection[str]) -> tuple[dict[str, Call], dict[str, str]]:
    """The peers of a workload by label, and the reasons why others are not timed.

    Args:
        load: the workload.
        spec: the kernel's spec.
        names: requested peers; empty for all available ones.
    """
    calls, missing = dict(load.peers), {}
    for name, (package, make) in INSTALLED.items():
        if importlib.util.find_spec(package) is None or (names and name not in names):
            continue
        try:
            found = make(load, spec)
        except Exception as error:  # a foreign library may raise anything
            missing[LABELS[name]] = one_line(f"{type(error).__name__}: {error}")
            continue
        if found is not None:
            calls[LABELS[name]] = found
    if names:
        calls = {label: call for label, call in calls.items() if any(label.startswith(LABELS[name]) for name in names)}
        for name in names:
            label = LABELS[name]
            if not any(each.startswith(label) for each in [*calls, *missing]):
                missing[label] = "does not compute this workload"
    return calls, missing
