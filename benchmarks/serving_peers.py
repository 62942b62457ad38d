"""Other libraries' attention over a KV cache, called on the inputs of benchmarks/serving.py.

torch's SDPA is always there. FlashAttention 4 is called if it is installed. FlashAttention 3 with pages and vLLM's
Triton kernels come from a folder with these files of an unpacked vllm wheel (0.33.0); neither vllm nor its
dependencies need to be installed:

    vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so
    vllm/models/minimax_m3/common/ops/sparse_attn.py
    vllm/models/qwen4_exp/nvidia/ops/qsa.py
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from serving_rows import Inputs, Make, Row

Call = Callable[[], torch.Tensor]
FA3 = Path("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
MSA = Path("vllm/models/minimax_m3/common/ops/sparse_attn.py")
QSA = Path("vllm/models/qwen4_exp/nvidia/ops/qsa.py")
OPEN_GATE = 30.0
"""A gate of QSA's kernel, which multiplies results by its sigmoid: 1."""


class Peer(NamedTuple):
    """A function of another library.

    Attributes:
        label: name in results.
        make: makes its call; raises for inputs that the library does not take.
        computes: whether it is called in a row.
    """

    label: str
    make: Make
    computes: Callable[[Row], bool]


def sdpa(inputs: Inputs) -> Call:
    """torch's attention over contiguous K and V, copied from the pages."""
    k, v = inputs.contiguous()
    q = inputs.q[:, :, None]  # (batch, heads, 1, head_dim)

    def call() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, :, 0]

    return call


def fa4(inputs: Inputs) -> Call:
    """FlashAttention 4 over contiguous K and V, queries packed."""
    from flash_attn.cute import flash_attn_varlen_func

    bounds = torch.arange(len(inputs.q) + 1, dtype=torch.int32, device=inputs.q.device)
    options = {"cu_seqlens_q": bounds, "seqused_k": inputs.lengths, "max_seqlen_q": 1, "causal": True}

    def call() -> torch.Tensor:
        found = flash_attn_varlen_func(inputs.q, inputs.k, inputs.v, **options)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out

    return call


def fa3(folder: Path, inputs: Inputs) -> Call:
    """FlashAttention 3, which chooses the number of its splits."""
    torch.ops.load_library(str(folder / FA3))
    forward = torch.ops._vllm_fa3_C.fwd
    row, q, out = inputs.row, inputs.q, torch.empty_like(inputs.q)
    bounds: torch.Tensor | None = inputs.bounds
    longest: int | None = max(row.lengths)
    if inputs.table is None:  # queries as (batch, 1, heads, head_dim)
        q, out, bounds, longest = q[:, None], out[:, None], None, None
    k_new, v_new, q_v, cu_seqlens_k, cu_seqlens_k_new, seqused_q = (None,) * 6
    batch_places, left_padding, rotary_cos, rotary_sin, rotary_lengths = (None,) * 5
    q_scale, k_scale, v_scale, metadata, pack_gqa, sink, context_lengths = (None,) * 7
    most_queries = None if bounds is None else row.queries
    causal, left, right, softcap, interleaved, splits, spared_sms = True, -1, -1, 0.0, True, 0, 0
    context_size, context_rank = 1, 0

    def call() -> torch.Tensor:
        found: torch.Tensor = forward(
            *(q, inputs.k, inputs.v, k_new, v_new, q_v, out),
            *(bounds, cu_seqlens_k, cu_seqlens_k_new, seqused_q, inputs.lengths, most_queries, longest),
            *(inputs.table, batch_places, left_padding, rotary_cos, rotary_sin, rotary_lengths),
            *(q_scale, k_scale, v_scale, row.head_dim**-0.5, causal, left, right, softcap, interleaved),
            *(metadata, splits, pack_gqa, spared_sms, sink, context_size, context_rank, context_lengths),
        )[0]
        return found.view(inputs.q.shape)

    return call


def msa(folder: Path, inputs: Inputs) -> Call:
    """vLLM's decoding with MiniMax M3's block lists."""
    return msa_call(load(folder / MSA).minimax_m3_sparse_attn_decode, inputs)


def msa_call(decode: Callable[..., Any], inputs: Inputs) -> Call:
    """A call of a function with the arguments of vLLM's ``minimax_m3_sparse_attn_decode``."""
    row, q, out, lists = inputs.row, inputs.q, torch.empty_like(inputs.q), inputs.lists
    assert lists is not None
    scales = () if inputs.scale is None else (inputs.scale, inputs.scale)
    about = (lists.indices, inputs.table, inputs.lengths, row.kv_heads, row.head_dim**-0.5)

    def call() -> torch.Tensor:
        decode(q, inputs.rows, *about, out, row.queries, *scales)
        return out

    return call


def msa_prefill(folder: Path, inputs: Inputs) -> Call:
    """vLLM's prefill with MiniMax M3's block lists."""
    return msa_prefill_call(load(folder / MSA).minimax_m3_sparse_attn, inputs)


def msa_prefill_call(attend: Callable[..., Any], inputs: Inputs) -> Call:
    """A call of a function with the arguments of vLLM's ``minimax_m3_sparse_attn``."""
    row, q, out, lists = inputs.row, inputs.q, torch.empty_like(inputs.q), inputs.lists
    assert lists is not None
    about = (lists.indices, inputs.table, inputs.bounds, inputs.lengths, inputs.lengths - row.queries, row.queries)

    def call() -> torch.Tensor:
        attend(q, inputs.rows, *about, row.kv_heads, row.head_dim**-0.5, out)
        return out

    return call


def qsa(folder: Path, inputs: Inputs) -> Call:
    """vLLM's attention over token lists in groups of 4."""
    return qsa_call(load(folder / QSA).qsa_sparse_paged_attention, inputs)


def qsa_call(attend: Callable[..., Any], inputs: Inputs) -> Call:
    """A call of a function with the arguments of vLLM's ``qsa_sparse_paged_attention``."""
    row, q, out, lists = inputs.row, inputs.q, torch.empty_like(inputs.q), inputs.lists
    assert lists is not None
    tokens = lists.indices[0, :, :, None] * row.entry_keys + torch.arange(row.entry_keys, device=q.device)
    tokens = tokens.flatten(1)
    counts = torch.full((len(q), 1), tokens.shape[1], device=q.device)
    packed = torch.cat((tokens, counts), 1).int().contiguous()
    requests = torch.arange(len(row.lengths), dtype=torch.int32, device=q.device).repeat_interleave(row.queries)
    gate = torch.full((len(q), row.heads * row.head_dim), OPEN_GATE, dtype=q.dtype, device=q.device)

    def call() -> torch.Tensor:
        attend(q, inputs.k, inputs.v, packed, inputs.table, requests, row.is_prefill, out, output_gate=gate)
        return out

    return call


class _Platform:
    """Properties of the GPU for vLLM's kernels: one with programmatic dependent launches."""

    def is_arch_support_pdl(self) -> bool:
        return True

    def get_device_capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability()

    def has_device_capability(self, least: int) -> bool:
        major, minor = torch.cuda.get_device_capability()
        return major * 10 + minor >= least

    def __getattr__(self, name: str) -> Callable[..., bool]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: False


def load(path: Path) -> ModuleType:
    """A module of vLLM, with stand-ins for the modules that it imports."""
    name = f"serving_peer_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    if "vllm.triton_utils" not in sys.modules:
        _stand_in()
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _stand_in() -> None:
    """Put stand-ins for other modules of vLLM into ``sys.modules``."""
    import triton
    import triton.language as tl

    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.model_executor": {},
        "vllm.model_executor.warmup": {},
        "vllm.utils": {},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"tl": tl, "triton": triton, "HAS_TRITON": True},
        "vllm.model_executor.warmup.jit_warmup_triton_helper": {
            "TritonWarmupTensor": object,
            "triton_scalar_specialization_rep": lambda *_, **__: None,
        },
        "vllm.utils.math_utils": {"cdiv": cdiv, "round_up": lambda a, b: cdiv(a, b) * b},
    }
    for name, names in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(names)
        sys.modules[name] = module


def _decodes_all(row: Row) -> bool:
    return row.work in ("dense", "contiguous", "front door")


def _by_fa3(row: Row) -> bool:
    return _decodes_all(row) or (row.work == "prefill" and row.cache == "bf16")  # queries have the type of the cache


def peers_of(folder: Path | None) -> Sequence[Peer]:
    """Peers that can be called, in the order of the table.

    Args:
        folder: of the unpacked wheel, or None.
    """
    found = [Peer("SDPA, contiguous", sdpa, lambda row: _decodes_all(row) and len(set(row.lengths)) == 1)]
    if importlib.util.find_spec("flash_attn") is not None:
        found.append(Peer("FA4", fa4, lambda row: row.work in ("contiguous", "front door")))
    if folder is not None:
        found += [
            Peer("FA3", partial(fa3, folder), _by_fa3),
            Peer("vLLM Triton", partial(msa, folder), lambda row: row.work == "MSA"),
            Peer("vLLM Triton", partial(msa_prefill, folder), lambda row: row.work == "MSA prefill"),
            Peer("vLLM Triton", partial(qsa, folder), lambda row: row.work in ("QSA", "QSA prefill")),
        ]
    return found


def check_folder(folder: Path) -> None:
    """Check that the folder has the files.

    Raises:
        SystemExit: with those that it lacks.
    """
    if missing := [str(path) for path in (FA3, MSA, QSA) if not (folder / path).is_file()]:
        raise SystemExit(f"error: --peers {folder} lacks {', '.join(missing)}; unpack a vllm wheel there")
