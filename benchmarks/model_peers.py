"""Other libraries' attention and products, called on the inputs of benchmarks/models.py.

A peer takes inputs and returns a call. Forward, attention returns (batch, heads, q_len, head_dim) and a product
(rows, tokens); backward, a call returns (dq, dk, dv) in those shapes, or (dA, dB). A peer that cannot compute the
problem raises. docs/notebook/measuring.md says how their packages are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from model_problems import (
    AttentionInputs,
    BandWithSink,
    CausalBlocks,
    CausalPattern,
    DensePattern,
    Documents,
    Lists,
    ProductInputs,
    RandomBlocks,
    Tiles,
    Window,
)
from records import DETERMINISTIC

from runtime.tools.bench.measurement import flex_call
from runtime.tools.bench.timing import Call

Fields = dict[str, Any]
WHOLE = (DensePattern, CausalPattern)
LISTED = (RandomBlocks, Tiles)
RANK = 4
"""Dimensions of q: batch, heads, tokens, head_dim."""
FEWEST_FLEX_ROWS = 128
"""Rows of a block of FlexAttention's masks without lists."""


def leaves(inputs: AttentionInputs, convert: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Copies of q, k and v in a peer's layout; backward they require gradients."""
    found = [convert(t) for t in (inputs.q, inputs.k, inputs.v)]
    if inputs.dout is None:
        return found
    return [t.detach().clone().requires_grad_() for t in found]


def differentiated(
    inputs: AttentionInputs,
    tensors: Sequence[torch.Tensor],
    forward: Call,
    convert: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
) -> Call:
    """The call of a forward pass, or that of its gradients.

    Args:
        inputs: of the row.
        tensors: q, k and v as the peer takes them.
        forward: returns the result in the peer's layout.
        convert: the layout of the tables from the peer's, and back.
    """
    if inputs.dout is None:
        return lambda: convert(forward())
    dout = convert(inputs.dout).contiguous()
    with torch.enable_grad():
        out = forward()

    def call() -> tuple[torch.Tensor, ...]:
        return tuple(map(convert, torch.autograd.grad(out, tensors, dout, retain_graph=True)))

    return call


def sdpa(inputs: AttentionInputs, backend: str) -> Call:
    """torch's attention by one of its backends. Its causal masks begin at the first key."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    causal, size = isinstance(inputs.problem.pattern, CausalPattern), inputs.size
    if causal and size.keys != size.q_len:
        raise ValueError("is_causal aligns the mask to the first key")
    if inputs.sink is not None:
        raise ValueError("has no sinks")
    q, k, v = leaves(inputs, lambda t: t)
    grouped = inputs.problem.kv_count != inputs.problem.heads
    chosen = getattr(SDPBackend, backend)

    def forward() -> torch.Tensor:
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return differentiated(inputs, (q, k, v), forward)


def swapped(t: torch.Tensor) -> torch.Tensor:
    """Heads and tokens exchanged."""
    return t.transpose(1, 2)


def packed_layout(t: torch.Tensor) -> torch.Tensor:
    """(1, heads, tokens, head_dim) as packed (tokens, heads, head_dim), contiguous; packed tensors as the former."""
    return swapped(t)[0].contiguous() if t.dim() == RANK else swapped(t[None])


def _first(found: Any) -> torch.Tensor:
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out


def find_fa3() -> Any:
    """Import FlashAttention 3's module."""
    try:
        import flash_attn_interface
    except ModuleNotFoundError:
        import fa3_fwd_interface as flash_attn_interface
    return flash_attn_interface


def find_fa4() -> Any:
    """Import FlashAttention 4's module."""
    import flash_attn.cute

    return flash_attn.cute


def find_cudnn_bsa() -> Any:
    """Import cuDNN's block-sparse attention."""
    torch.backends.cudnn.version()  # loads the library that the package needs
    import cutlass  # noqa: F401 - what its functions import
    from cudnn import BSA

    return BSA


def flash_options(inputs: AttentionInputs) -> Fields:
    """Options of a pattern that FlashAttention 3 and 4 share."""
    pattern = inputs.problem.pattern
    if isinstance(pattern, Window):
        return {"window_size": (pattern.left, pattern.right)}
    return {"causal": getattr(pattern, "causal", isinstance(pattern, CausalPattern))}


def packed(
    inputs: AttentionInputs, function: Callable[..., Any], tensors: Sequence[torch.Tensor], more: Fields | None = None
) -> Call:
    """The call of packed documents: tensors in ``packed_layout``, and where documents begin."""
    assert inputs.cu_seqlens is not None
    longest = int(inputs.cu_seqlens.diff().max())
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    options = dict(zip(names, (inputs.cu_seqlens, inputs.cu_seqlens, longest, longest), strict=True))
    options |= {**flash_options(inputs), **(more or {})}
    return lambda: _first(function(*tensors, **options))


def fa3(inputs: AttentionInputs) -> Call:
    """FlashAttention 3, in bf16: the wheel of its forward pass has no other type."""
    if inputs.dout is not None:
        raise ValueError("the wheel has no backward")
    if inputs.sink is not None:
        raise ValueError("has no sinks")
    module = find_fa3()
    is_packed = isinstance(inputs.problem.pattern, Documents)
    layout = packed_layout if is_packed else swapped
    tensors = [layout(t).to(torch.bfloat16).contiguous() for t in (inputs.q, inputs.k, inputs.v)]
    if is_packed:
        forward = packed(inputs, module.flash_attn_varlen_func, tensors)
    else:
        function, options = module.flash_attn_func, flash_options(inputs)
        forward = lambda: _first(function(*tensors, **options))  # noqa: E731
    return lambda: layout(forward())


def fa4_lists(lists: Lists) -> Any:
    """Lists of FlashAttention 4; a query's own block is a masked one."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    masked = torch.zeros_like(lists.full_counts)
    own = torch.arange(masked.shape[2], dtype=torch.int32, device=masked.device).expand_as(masked)
    return BlockSparseTensorsTorch(
        mask_block_cnt=torch.ones_like(masked) if lists.diagonal else masked,
        mask_block_idx=(own if lists.diagonal else masked)[..., None].contiguous(),
        full_block_cnt=lists.full_counts,
        full_block_idx=lists.full,
        block_size=(lists.block, lists.block),
    )


def transposed(lists: Lists, keys: int) -> Lists:
    """Lists of the query blocks of each key block, as backward kernels take them."""
    columns = keys // lists.block
    counted = torch.arange(lists.full.shape[3], device=lists.full.device) < lists.full_counts[..., None]
    listed = torch.zeros((*lists.full.shape[:3], columns), dtype=torch.int32, device=lists.full.device)
    by_keys = listed.scatter_add_(3, lists.full.long(), counted.int()).transpose(2, 3)
    counts = by_keys.sum(-1, dtype=torch.int32).contiguous()
    order = by_keys.sort(dim=-1, descending=True, stable=True).indices[..., : int(counts.max())]
    return Lists(lists.block, order.int().contiguous(), counts, lists.diagonal)


def fa4(inputs: AttentionInputs, *, deterministic: bool = False) -> Call:
    """FlashAttention 4, which takes (batch, length, heads, head_dim)."""
    module, pattern = find_fa4(), inputs.problem.pattern
    options: Fields = {} if inputs.sink is None else {"learnable_sink": inputs.sink}
    if deterministic:
        options["deterministic"] = True
    if isinstance(pattern, Documents):
        tensors = leaves(inputs, packed_layout)
        forward = packed(inputs, module.flash_attn_varlen_func, tensors, options)
        return differentiated(inputs, tensors, forward, packed_layout)
    tensors = leaves(inputs, lambda t: swapped(t).contiguous())
    if inputs.lists is not None:
        lists = inputs.lists.of_heads(inputs.problem.heads)
        options["block_sparse_tensors"] = fa4_lists(lists)
        if lists.diagonal:
            from expression_peers import functions

            options["mask_mod"] = functions()["causal"][0]
        if inputs.dout is not None:
            options["block_sparse_tensors_bwd"] = fa4_lists(transposed(lists, inputs.size.keys))
    else:
        options |= flash_options(inputs)
    return differentiated(inputs, tensors, lambda: _first(module.flash_attn_func(*tensors, **options)), swapped)


def cudnn_bsa(inputs: AttentionInputs) -> Call:
    """cuDNN's block-sparse attention."""
    bsa, lists = find_cudnn_bsa(), inputs.lists
    assert lists is not None
    full = lists.of_heads(inputs.problem.heads).full
    tensors, options = (inputs.q, inputs.k, inputs.v), {"sparse_block_size": lists.block, "layout": "bhsd"}
    if inputs.dout is None:
        return lambda: bsa.block_sparse_attention_forward(*tensors, full, **options)["o_tensor"]
    made = bsa.block_sparse_attention_forward(*tensors, full, **options)

    def call() -> tuple[torch.Tensor, ...]:
        found = bsa.block_sparse_attention_backward(
            *(inputs.dout, *tensors, made["o_tensor"], made["lse_tensor"], full), **options
        )
        return tuple(found[name] for name in ("dq_tensor", "dk_tensor", "dv_tensor"))

    return call


def flex_mask(inputs: AttentionInputs) -> Any:
    """FlexAttention's mask of the same pairs."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    size, pattern = inputs.size, inputs.problem.pattern
    shift = size.keys - size.q_len
    if inputs.lists is not None:
        return _flex_lists(inputs, BlockMask)
    sees: Callable[..., Any]
    if isinstance(pattern, CausalPattern):
        sees = lambda b, h, q, k: k <= q + shift  # noqa: E731
    elif isinstance(pattern, Window):
        left, right = pattern.left, pattern.right
        sees = lambda b, h, q, k: (k >= q - left) & (k <= q + right)  # noqa: E731
    elif isinstance(pattern, BandWithSink):
        first, left, right = pattern.sink, pattern.left, pattern.right
        sees = lambda b, h, q, k: ((k >= q - left) | (k < first)) & (k <= q + right)  # noqa: E731
    elif isinstance(pattern, Documents):
        documents = inputs.documents
        assert documents is not None
        if pattern.causal:
            sees = lambda b, h, q, k: (documents[q] == documents[k]) & (k <= q)  # noqa: E731
        else:
            sees = lambda b, h, q, k: documents[q] == documents[k]  # noqa: E731
    else:
        return None
    return create_block_mask(sees, None, None, size.q_len, size.keys, device=inputs.q.device)


def _flex_lists(inputs: AttentionInputs, block_mask: Any) -> Any:
    lists = inputs.lists
    assert lists is not None
    lists = lists.of_heads(inputs.problem.heads)
    columns = inputs.size.keys // lists.block
    full = torch.nn.functional.pad(lists.full, (0, columns - lists.full.shape[3])).contiguous()
    counts = torch.zeros_like(lists.full_counts)
    partial_lists = torch.zeros_like(full)
    if lists.diagonal:
        counts = torch.ones_like(counts)
        partial_lists[..., 0] = torch.arange(counts.shape[2], dtype=torch.int32, device=counts.device)
    return block_mask.from_kv_blocks(
        counts,
        partial_lists,
        lists.full_counts,
        full,
        BLOCK_SIZE=(lists.block, lists.block),
        mask_mod=(lambda b, h, q, k: k <= q) if lists.diagonal else None,
        seq_lengths=(inputs.size.q_len, inputs.size.keys),
    )


def flex(inputs: AttentionInputs, backend: str | None = None) -> Call:
    """FlexAttention, compiled: by Triton, or by FlashAttention 4 with the backend ``FLASH``."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = flex_mask(inputs)
    options: Fields | None = None
    if backend is not None:
        find_fa4()  # without it torch's error is long
        options = {"BACKEND": backend}
    elif inputs.lists is not None and inputs.lists.block < FEWEST_FLEX_ROWS:
        options = {"BLOCK_M": inputs.lists.block, "BLOCK_N": inputs.lists.block}
    q, k, v = leaves(inputs, lambda t: t)
    if inputs.dout is None and mask is not None:
        return flex_call(q, k, v, mask, options, sink=inputs.sink)
    if inputs.sink is not None:
        raise ValueError("a sink is worked in afterwards, which has no fused gradient")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    grouped = inputs.problem.kv_count != inputs.problem.heads
    forward = partial(compiled, q, k, v, block_mask=mask, enable_gqa=grouped, kernel_options=options)
    return differentiated(inputs, (q, k, v), forward)


def cublas(inputs: ProductInputs) -> Call:
    """The dense layer of the same shape."""
    dense, b = inputs.dense, inputs.b
    if inputs.dout is not None:
        dense, b = (t.detach().clone().requires_grad_() for t in (dense, b))
    if inputs.problem.activations == "tokens":
        x = b.mT
        forward: Call = lambda: torch.nn.functional.linear(x, dense).mT  # noqa: E731
    else:
        forward = lambda: torch.mm(dense, b)  # noqa: E731
    if inputs.dout is None:
        return forward
    with torch.enable_grad():
        if inputs.problem.activations == "tokens":
            x = b.mT
        out = forward()
    return lambda: torch.autograd.grad(out, (dense, b), inputs.dout, retain_graph=True)


def torch_bsr(inputs: ProductInputs) -> Call:
    """What torch does for A @ B."""
    if inputs.dout is not None:
        raise ValueError("has no gradient of A's blocks")
    return lambda: inputs.sparse @ inputs.b


def triton(inputs: ProductInputs) -> Call:
    """torch's bsr_dense_addmm with the options that it has stored."""
    if inputs.dout is not None:
        raise ValueError("has no gradient")
    from torch.sparse._triton_ops import bsr_dense_addmm

    zeros = torch.zeros((inputs.problem.rows, inputs.size.tokens), device=inputs.b.device, dtype=inputs.b.dtype)
    return lambda: bsr_dense_addmm(zeros, inputs.sparse, inputs.b, beta=0, alpha=1)


@dataclass(frozen=True)
class Peer:
    """A library.

    Attributes:
        label: its name in tables.
        make: takes inputs, returns the call; raises if it cannot compute the problem.
        patterns: those of attention that it is run on; () for products.
        usual: whether it is run without --all-peers on dense and causal rows too.
        dense: whether it computes the whole product, of blocks that are not stored too.
        dtype: the only type that it has, if it is one.
        gradients: whether it is run on gradients alone.
    """

    label: str
    make: Callable[[Any], Call]
    patterns: tuple[type, ...] = ()
    usual: bool = True
    dense: bool = False
    dtype: str | None = None
    gradients: bool = False

    def computes(self, inputs: AttentionInputs | ProductInputs, *, every: bool) -> bool:
        """Whether a row is run with this peer."""
        if isinstance(inputs, ProductInputs):
            return not self.patterns
        if self.gradients and inputs.dout is None:
            return False
        pattern = inputs.problem.pattern
        # FlexAttention beside three libraries of dense attention takes its time and is never the fastest; where none
        # of those computes the row, it is the peer that there is.
        plain = isinstance(pattern, WHOLE) and inputs.sink is None and inputs.size.keys == inputs.size.q_len
        plain = plain or isinstance(pattern, DensePattern)
        return isinstance(pattern, self.patterns) and (self.usual or every or not plain)


ANY = (DensePattern, CausalPattern, Window, BandWithSink, Documents, RandomBlocks, Tiles, CausalBlocks)
PEERS = (
    Peer("SDPA flash", partial(sdpa, backend="FLASH_ATTENTION"), WHOLE),
    Peer("SDPA cuDNN", partial(sdpa, backend="CUDNN_ATTENTION"), WHOLE),
    Peer("FA3 (bf16)", fa3, (*WHOLE, Window, Documents), dtype="bf16"),
    Peer("FA4", fa4, (*WHOLE, Window, Documents, RandomBlocks, Tiles, CausalBlocks)),
    Peer(DETERMINISTIC, partial(fa4, deterministic=True), (*WHOLE, Window, Documents), gradients=True),
    Peer("cuDNN BSA", cudnn_bsa, LISTED),
    Peer("FlexAttention", flex, ANY, usual=False),
    Peer("FlexAttention FLASH", partial(flex, backend="FLASH"), ANY, usual=False),
    Peer("cuBLAS, dense", cublas, dense=True),
    Peer("torch BSR", torch_bsr),
    Peer("Triton bsr_dense_addmm", triton),
)
