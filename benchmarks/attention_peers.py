"""Other attention kernels, called on the inputs of benchmarks/attention.py.

A peer takes a problem and returns calls by label; each call returns (batch, heads, length, head_dim). A peer that
cannot compute the problem raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from harness import Fields, Peer

from codegen.parse import parse_spec
from codegen.spec import AttentionSpec
from runtime import load_kernel
from runtime.tools.baselines.peers import fa4_call
from runtime.tools.bench.measurement import flex_call, flex_mask, sdpa_calls
from runtime.tools.bench.timing import Call, single_calls


@dataclass(frozen=True)
class Problem:
    """Inputs of a row.

    Attributes:
        spec: our kernel's.
        q: (batch, heads, length, head_dim); k and v alike, with kv_heads.
        lists: those of the pattern, one for each query head, or for each pack of heads that our kernel takes at once.
    """

    spec: AttentionSpec
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lists: tuple[torch.Tensor, ...]
    _copies: list[tuple[Callable[[torch.Tensor], torch.Tensor], tuple[torch.Tensor, ...]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def copies(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """q, k and v in a peer's dtype or layout."""
        made = tuple(map(convert, (self.q, self.k, self.v)))
        self._copies.append((convert, made))
        return made

    def refresh_copies(self) -> None:
        """Bring the peers' copies up to date after q, k and v were given other values."""
        for convert, made in self._copies:
            for tensor, copy in zip((self.q, self.k, self.v), made, strict=True):
                copy.copy_(convert(tensor))

    @property
    def head_lists(self) -> tuple[torch.Tensor, ...]:
        """The lists as peers take them: one for each query head."""
        heads = self.q.shape[1]
        return tuple(t.repeat_interleave(heads // t.shape[1], 1).contiguous() for t in self.lists)


def not_shared(problem: Problem) -> dict[str, Call]:
    """Our kernel that loads K and V for each query block on its own."""
    fields = problem.spec.model_dump(
        by_alias=True, exclude={"share_kv_loads", "query_grouping", "l2_lockstep", "stream_k_tail", "stages"}
    )
    kernel = load_kernel(parse_spec({**fields, "tile": {"m": 128, "n": problem.spec.tile.n}}))
    out = torch.empty_like(problem.q)

    def call() -> torch.Tensor:
        kernel(problem.q, problem.k, problem.v, *problem.lists, out=out)
        return out

    return {"ours, not shared": call}


def sdpa(problem: Problem) -> dict[str, Call]:
    return sdpa_calls(problem.spec, problem.q, problem.k, problem.v)


def flex(problem: Problem) -> dict[str, Call]:
    """FlexAttention with its own options."""
    mask = flex_mask(problem.spec, problem.q.shape[2], problem.lists)
    return {"FlexAttention": flex_call(problem.q, problem.k, problem.v, mask)}


def flex_tuned(problem: Problem) -> dict[str, Call]:
    """FlexAttention with the best of a short list of options."""
    mask = flex_mask(problem.spec, problem.q.shape[2], problem.lists)
    block_q, block_kv = mask.BLOCK_SIZE
    calls = {}
    for columns, warps, stages in ((64, 4, 3), (64, 4, 2), (64, 8, 3), (block_kv, 8, 2)):
        options = {"BLOCK_M": block_q, "BLOCK_N": columns, "num_warps": warps, "num_stages": stages}
        call = flex_call(problem.q, problem.k, problem.v, mask, options)
        try:
            call()
        except Exception as error:  # too much shared memory, for one
            refused = error
            continue
        calls[f"FlexAttention {block_q}x{columns} {warps} warps {stages} stages"] = call
    if not calls:
        raise refused
    times = single_calls(calls, repeats=3, warm_up=1)
    best = min(times, key=lambda label: times[label])
    return {best: calls[best]}


def fa4(problem: Problem) -> dict[str, Call]:
    """FlashAttention 4, which takes (batch, length, heads, head_dim)."""
    q, k, v = problem.copies(lambda t: t.transpose(1, 2).contiguous())
    lists = problem.head_lists if problem.spec.pattern.kind == "topk" else ()
    return {"FA4": fa4_call(problem.spec, q, k, v, lists)}


def cudnn_bsa(problem: Problem) -> dict[str, Call]:
    """cuDNN's block-sparse attention; long sequences also with the key range split, its remedy for a full L2."""
    torch.backends.cudnn.version()  # loads the library that the package needs
    from cudnn import BSA

    (lists,) = problem.head_lists

    def split(parts: int) -> Call:
        def call() -> torch.Tensor:
            results = BSA.block_sparse_attention_forward(
                problem.q,
                problem.k,
                problem.v,
                lists,
                sparse_block_size=problem.spec.pattern.block.q,
                layout="bhsd",
                kv_splits=parts,
            )
            return results["o_tensor"]

        return call

    splits = (2, 4) if problem.q.shape[2] > 65536 else ()
    return {"cuDNN BSA": split(1), **{f"cuDNN BSA {parts} splits": split(parts) for parts in splits}}


def fa3(problem: Problem) -> dict[str, Call]:
    """FlashAttention 3, dense, causal and windows, in bf16: the wheel of its forward pass has no other type."""
    try:
        from flash_attn_interface import flash_attn_func
    except ModuleNotFoundError:
        from fa3_fwd_interface import flash_attn_func

    q, k, v = problem.copies(lambda t: t.transpose(1, 2).to(torch.bfloat16).contiguous())

    pattern = problem.spec.pattern
    options: Fields = {"causal": pattern.kind == "causal"}
    if pattern.kind == "sliding_window":
        options["window_size"] = (pattern.left, pattern.right)

    def call() -> torch.Tensor:
        out = flash_attn_func(q, k, v, **options)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return {"FlashAttention-3 (bf16)": call}


def flashinfer(problem: Problem) -> dict[str, Call]:
    """FlashInfer, which has one list for all heads: heads follow each other in one long sequence."""
    from flashinfer import BlockSparseAttentionWrapper

    (batch, heads, length, head_dim), kv_heads = problem.q.shape, problem.k.shape[1]
    if batch != 1:
        raise ValueError(f"batch is {batch}; heads of one batch entry alone can follow each other")
    device, (lists,), block = problem.q.device, problem.head_lists, problem.spec.pattern.block
    # Block j of a head's keys is block (its K/V head) * (blocks of a head) + j of the long sequence.
    first = torch.arange(heads, device=device, dtype=torch.int32) // (heads // kv_heads) * (length // block.kv)
    columns = (lists[0] + first[:, None, None]).flatten()
    row_starts = torch.arange(heads * length // block.q + 1, device=device, dtype=torch.int32) * lists.shape[3]
    workspaces = [torch.empty(size << 20, dtype=torch.uint8, device=device) for size in (384, 64)]
    wrapper = BlockSparseAttentionWrapper(workspaces[0], backend="fa3")
    wrapper.reset_workspace_buffer(*workspaces)
    wrapper.plan(
        row_starts,
        columns,
        heads * length,
        kv_heads * length,
        block.q,
        block.kv,
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        q_data_type=problem.q.dtype,
        o_data_type=problem.q.dtype,
    )
    q, k, v = (t.reshape(-1, 1, head_dim) for t in (problem.q, problem.k, problem.v))
    return {"FlashInfer": lambda: wrapper.run(q, k, v).view(problem.q.shape)}


def flashinfer_cake(problem: Problem) -> dict[str, Call]:
    """FlashInfer's kernels for lists of 64 x 64 blocks, in bf16, their only type; they get larger blocks as several.

    ``plan`` schedules them on the host, in seconds that are not timed.
    """
    from flashinfer import VariableBlockSparseAttentionWrapper

    size, block, (lists,) = 64, problem.spec.pattern.block, problem.head_lists
    if problem.q.shape[0] != 1:
        raise ValueError(f"batch is {problem.q.shape[0]}; it takes none")
    heads, length = problem.q.shape[1:3]
    kv_heads, keys = problem.k.shape[1:3]
    listed = torch.zeros(heads, length // block.q, keys // block.kv, dtype=torch.bool, device=lists.device)
    listed.scatter_(2, lists[0].long(), True)
    listed = listed.repeat_interleave(block.q // size, 1).repeat_interleave(block.kv // size, 2)
    sizes = [torch.full((heads, blocks), size, dtype=torch.int32) for blocks in listed.shape[1:]]
    q, k, v = problem.copies(lambda t: t[0].to(torch.bfloat16))
    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(0, dtype=torch.uint8, device=q.device), backend="cake")
    wrapper.plan(listed.cpu(), *sizes, heads, kv_heads, problem.q.shape[3], q_data_type=torch.bfloat16)
    return {"FlashInfer cake (bf16)": lambda: wrapper.run(q, k, v)[None]}


PEERS: dict[str, Peer] = {
    "not_shared": Peer(not_shared),
    "sdpa": Peer(sdpa),
    "flex": Peer(flex),
    "flex_tuned": Peer(flex_tuned, opt_in=True),  # compiles five kernels for each row
    "fa3": Peer(fa3, ("flash_attn_interface", "fa3_fwd_interface")),
    "fa4": Peer(fa4, ("flash_attn",)),
    "cudnn_bsa": Peer(cudnn_bsa, ("cudnn",)),
    "flashinfer": Peer(flashinfer, ("flashinfer",)),
    "flashinfer_cake": Peer(flashinfer_cake, ("flashinfer",)),
}
