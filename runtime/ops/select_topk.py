"""Selection of key blocks on torch tensors. The first call compiles the kernel and caches it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.checks import check_dense, check_flag, refuse_capture
from runtime.errors import ArgumentError
from runtime.kernel import load_kernel
from runtime.kernels.arguments import ATTENTION_RANK, check_shape
from runtime.kernels.select_topk import SelectTopkKernel, checked_selection
from runtime.ops.attention_choice import DTYPES, arch_of
from runtime.ops.operators import NAMESPACE
from runtime.receipts.mode import KERNELS_KEPT, kept_by_mode


def select_topk_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    block: tuple[int, int],
    topk: int,
    *,
    causal: bool,
    always: Sequence[int] = (),
) -> torch.Tensor:
    """Select the key blocks whose mean key has the largest product with the mean query of a query block.

    Means and products are computed in fp32 and not scaled. The result is a list for
    ``sparse_kernel_codegen.patterns.TopK``.

    Args:
        q: (batch, heads, q_len, head_dim), fp16 or bf16, head_dim a multiple of 8 up to 256.
        k: (batch, kv_heads, kv_len, head_dim), dtype of q; heads is a multiple of kv_heads.
        block: queries and keys of a block; the last blocks may be shorter.
        topk: entries of a list, from 1 to 65536.
        causal: exclude key blocks that start after the last query of a query block (bottom-right aligned).
        always: indices of key blocks that are always selected, from -32 to 31. Negative indices count back from the key
            block of the query block's last query, which is -1. Hidden or missing blocks are skipped.

    Returns:
        int32 (batch, heads, ceil(q_len / block[0]), topk), ascending, padded with -1. Ties go to the lower index; NaN
        ranks last.

    Raises:
        ArgumentError: naming the argument, before anything is launched.
        DeviceError: for an unsupported GPU.
    """
    chosen = checked_selection(block, topk, always)
    check_flag("causal", causal)
    for name, tensor in (("q", q), ("k", k)):
        check_dense(name, tensor)
        if tensor.dim() != ATTENTION_RANK:
            raise ArgumentError(name, f"has {tensor.dim()} dimensions {tuple(tensor.shape)}, expected {ATTENTION_RANK}")
    if k.device != q.device:
        raise ArgumentError("k", f"is on {k.device}, q is on {q.device}")
    block_q, block_kv, entries = chosen
    numbers = list(always) if isinstance(always, Sequence) else [always]  # the kernel takes a sequence or a number
    found: torch.Tensor = torch.ops.sparse_kernel_codegen.select_topk_blocks(
        q, k, block_q=block_q, block_kv=block_kv, topk=entries, causal=causal, always=numbers
    )
    return found


@kept_by_mode(KERNELS_KEPT)
def _kernel(index: int, dtype: str) -> SelectTopkKernel:
    device = torch.device("cuda", index)
    refuse_capture("q", device)
    kernel = load_kernel({"op": "select_topk", "arch": arch_of(device), "dtype": dtype}, device=device)
    assert isinstance(kernel, SelectTopkKernel)
    return kernel


def _run(
    q: torch.Tensor, k: torch.Tensor, *, block_q: int, block_kv: int, topk: int, causal: bool, always: list[int]
) -> torch.Tensor:
    """Compute the operator."""
    if q.device.type != "cuda":
        raise ArgumentError("q", f"is on {q.device}, expected a CUDA device")
    if q.dtype not in DTYPES:
        raise ArgumentError("q", f"is {q.dtype}, expected {' or '.join(map(str, DTYPES))}")
    with torch.no_grad():  # block indices have no gradient
        return _kernel(q.device.index, DTYPES[q.dtype])(q, k, (block_q, block_kv), topk, causal=causal, always=always)


def _fake(
    q: torch.Tensor, k: torch.Tensor, *, block_q: int, block_kv: int, topk: int, causal: bool, always: list[int]
) -> torch.Tensor:
    """A tensor with the result's shape and dtype, without values."""
    batch, heads, q_len, head_dim = q.shape
    sizes = (("batch", (batch,)), ("kv_heads", None), ("kv_len", None), ("head_dim", (head_dim,)))
    check_shape("k", k.shape, sizes)
    return q.new_empty((batch, heads, (q_len + block_q - 1) // block_q, topk), dtype=torch.int32)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(
    "select_topk_blocks(Tensor q, Tensor k, *, int block_q, int block_kv, int topk, bool causal, int[] always)"
    " -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("select_topk_blocks", _run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::select_topk_blocks", _fake, lib=_library)
