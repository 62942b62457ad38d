"""Other libraries' FP8 attention, called on the inputs of benchmarks/fp8.py and fp8_accuracy.py.

Their codes have one scale per tensor, and are computed before the call. Only cuDNN's block-sparse attention takes bf16
tensors. A peer that cannot compute a problem raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from codegen.dtypes import LARGEST
from runtime.tools.bench.timing import Call

E4M3 = torch.float8_e4m3fn
WEIGHT_SCALE = 256.0  # of weights, which are at most 1: a power of two below 448
HEADROOM = 0.5  # of the result's scale: a result is a mean of values, but for the rounding of weights
FLASHINFER_BYTES = 256 << 20  # what FlashInfer's own tests give it to work in


@dataclass(frozen=True)
class Result:
    """A call, and what its result is to be multiplied by: codes of a result stay codes in what is timed."""

    call: Call
    factor: float = 1.0

    def numbers(self, out: torch.Tensor) -> torch.Tensor:
        """A result, dequantized to float32."""
        return out.float() * self.factor


Makers = dict[str, Callable[[], Result]]


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The root mean square of what is off, relative to that of the exact numbers."""
    return float(((found.double() - exact).square().mean() / exact.square().mean()).sqrt())


def of_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes, and the scale of the tensor: float32 ()."""
    scale = x.abs().amax().float() / LARGEST["e4m3"]
    return (x.float() / scale).to(E4M3), scale


@functools.cache
def cudnn_handle() -> tuple[Any, Any]:
    """Return cuDNN's module and a handle on torch's current stream."""
    torch.backends.cudnn.version()  # loads the library that the package needs
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    return cudnn, handle


def cudnn_graph(
    cudnn: Any, handle: Any, q: torch.Tensor, k: torch.Tensor, causal: bool, output: torch.dtype
) -> tuple[Any, list[Any]]:
    """A graph of sdpa_fp8, not built yet, and its tensors: q, k, v, six scales, result and two maxima.

    Args:
        cudnn: the module.
        handle: of a device; None for none.
        q: with the shape (batch, heads, length, head_dim) and the strides of q and of the result.
        k: likewise, of k and v.
        causal: whether later keys are hidden.
        output: type of the result.
    """
    types = {E4M3: cudnn.data_type.FP8_E4M3, torch.bfloat16: cudnn.data_type.BFLOAT16}
    one = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1], "data_type": cudnn.data_type.FLOAT}
    graph = cudnn.pygraph(
        io_data_type=types[E4M3],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    shape, strides = list(q.shape), list(q.stride())
    codes = [
        graph.tensor(name=name, dim=list(like.shape), stride=list(like.stride()), data_type=types[E4M3])
        for name, like in (("q", q), ("k", k), ("v", k))
    ]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = [graph.tensor(name=name, **one) for name in names]
    out, _, *maxima = graph.sdpa_fp8(
        *codes, *scales, attn_scale=shape[-1] ** -0.5, use_causal_mask=causal, generate_stats=False
    )
    out.set_output(True).set_dim(shape).set_stride(strides).set_data_type(types[output])
    for maximum in maxima:  # of the weights and of the result
        maximum.set_output(True).set_dim(one["dim"]).set_stride(one["stride"]).set_data_type(one["data_type"])
    return graph, [*codes, *scales, out, *maxima]


def cudnn_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    heads_inside: bool = False,
    output: torch.dtype = E4M3,
) -> Result:
    """cuDNN's attention through nvidia-cudnn-frontend's graphs.

    Args:
        q: (batch, heads, length, head_dim), fp16 or bf16.
        k: likewise, with as many heads.
        v: as k.
        causal: whether later keys are hidden.
        heads_inside: memory is that of (batch, length, heads, head_dim).
        output: type of the result, e4m3 or bf16.
    """
    cudnn, handle = cudnn_handle()
    pairs = [of_tensor(x.transpose(1, 2).contiguous().transpose(1, 2) if heads_inside else x) for x in (q, k, v)]
    codes, descales = [x for x, _ in pairs], [scale for _, scale in pairs]
    weight_scale = torch.full((), WEIGHT_SCALE, device=q.device)
    out_scale = HEADROOM / descales[2] if output == E4M3 else torch.ones((), device=q.device)
    graph, named = cudnn_graph(cudnn, handle, codes[0], codes[1], causal, output)
    graph.build([cudnn.heur_mode.A])
    out = torch.empty_like(codes[0], dtype=output)
    scales = [x.reshape(1, 1, 1, 1) for x in (*descales, 1 / weight_scale, weight_scale, out_scale)]
    maxima = [torch.zeros((1, 1, 1, 1), device=q.device) for _ in range(2)]
    pack = dict(zip(named, [*codes, *scales, out, *maxima], strict=True))
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)

    def call() -> torch.Tensor:
        graph.execute(pack, workspace, handle=handle)
        return out

    return Result(call, 1 / float(out_scale))


def cudnn_bsa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: torch.Tensor, block: int) -> Result:
    """cuDNN's block-sparse attention, which quantizes q, k and v (bf16) in the call."""
    torch.backends.cudnn.version()
    from cudnn import BSA

    forward: Callable[..., Any] = BSA.block_sparse_attention_fp8_forward
    return Result(lambda: forward(q, k, v, lists, sparse_block_size=block)["o_tensor"])


def flashinfer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> Result:
    """FlashInfer's fmha_v2, with q, k and v side by side in one tensor; compiled at its first call, in minutes."""
    from flashinfer.prefill import trtllm_fmha_v2_prefill

    batch, heads, length, head_dim = q.shape
    (q8, of_q), (k8, of_k), (v8, of_v) = map(of_tensor, (q, k, v))
    packed = torch.stack([x.transpose(1, 2) for x in (q8, k8, v8)], 2).reshape(-1, 3, heads, head_dim)
    begins = torch.arange(0, batch + 1, device=q.device, dtype=torch.int32) * length
    call = functools.partial(
        trtllm_fmha_v2_prefill,
        packed,
        "PACKED_QKV",
        workspace_buffer=torch.zeros(FLASHINFER_BYTES, dtype=torch.int8, device=q.device),
        seq_lens=torch.full((batch,), length, dtype=torch.int32, device=q.device),
        max_q_len=length,
        max_kv_len=length,
        bmm1_scale=float(of_q * of_k) * head_dim**-0.5,
        bmm2_scale=float(of_v),
        batch_size=batch,
        cum_seq_lens_q=begins,
        cum_seq_lens_kv=begins,
        out=torch.empty((batch * length, heads, head_dim), dtype=torch.bfloat16, device=q.device),
        mask_mode="causal" if causal else "padding",
    )
    return Result(lambda: call().view(batch, length, heads, head_dim).transpose(1, 2))
