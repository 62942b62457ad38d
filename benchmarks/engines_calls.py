"""Calls of benchmarks/engines.py: of this package's adapters, and of what an engine runs without them.

Adapters are called at the entry that the engine calls, with the engine's metadata. Stand-ins of its tests
(tests/support) replace its base classes and batches.

Peers are torch's SDPA, and files of an unpacked vllm wheel: see benchmarks/serving_peers.py. FlashAttention 3 is called
with a schedule that is made before the call, as vLLM and SGLang make it once for all layers. SGLang's Triton kernels
are called where the folder also has these files of an unpacked sglang wheel (0.5.23):

    sglang/kernels/ops/attention/minimax_sparse/*/*.py
    sglang/srt/layers/attention/qsa/sparse_attn.py
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import serving_peers
import torch
from engines_rows import BF16, ListedProblem, PagedProblem, Pages, Row, Video, WholeProblem

SUPPORT = Path(__file__).resolve().parents[1] / "tests" / "support"
Call = Callable[[], torch.Tensor]
FA3, FA3_ALL, SDPA, SDPA_ALL = "FA3", "FA3, all keys", "SDPA", "SDPA, all keys"
VLLM_TRITON, SGLANG_TRITON = "vLLM Triton", "SGLang Triton"
BLOCKS = Path("sglang/kernels/ops/attention/minimax_sparse")
TOKENS = Path("sglang/srt/layers/attention/qsa/sparse_attn.py")
GATHERED = "SDPA over gathered keys"
MOST_DRAFTS = 16
"""Queries of a request up to which SGLang verifies them as drafts, in these rows."""


class Peer(NamedTuple):
    """What an engine runs without an adapter.

    Attributes:
        make: makes its call of a problem.
        all_keys: whether it sees all keys of the model, where the row's pattern has fewer.
    """

    make: Callable[[Any], Call]
    all_keys: bool = False


# Ours


def ours(problem: Any) -> tuple[Call, str]:
    """The call of the adapter of a row, and what is called."""
    if isinstance(problem, ListedProblem):
        return listed_of_sglang(problem) if problem.row.page == "sglang" else listed(problem)
    made: dict[str, Callable[[Any], tuple[Call, str]]] = {
        "vllm": vllm,
        "sglang": sglang,
        "sglang-diffusion": diffusion,
        "transformers": batching if isinstance(problem, PagedProblem) else transformers,
        "diffusers": diffusers,
    }
    return made[problem.row.page](problem)


def stand_ins() -> Any:
    """pytest's patches, for stand-ins that are there while a module is imported."""
    if str(SUPPORT) not in sys.path:
        sys.path.append(str(SUPPORT))
    import pytest

    return pytest.MonkeyPatch.context()


def vllm(problem: PagedProblem) -> tuple[Call, str]:
    """``PagedImpl.forward`` with the metadata of ``PagedMetadataBuilder.build``."""
    model, sizes = problem.row.model, problem.sizes
    with stand_ins() as patch:
        import vllm_stand_in

        window = sizes.window
        policy = None if window is None else {"kind": "sink_window", "sink": window.sink, "left": window.left}
        module = vllm_stand_in.install(patch, None if policy is None else {"block_sparse": policy})
        made = module.PagedImpl(model.heads, model.head_dim, model.head_dim**-0.5, model.kv_heads)
        spec = SimpleNamespace(head_size=model.head_dim)
        builder = module.PagedMetadataBuilder(spec, ["model.layers.0.self_attn.attn"], None, problem.q.device)
        common = vllm_stand_in.common_metadata(problem.bounds.tolist(), problem.lengths, problem.table)
    made.process_weights_after_loading(BF16)
    metadata = builder.build(0, common)
    one = torch.ones((), device=problem.q.device)
    layer = SimpleNamespace(layer_name="model.layers.0.self_attn.attn", _k_scale=one, _v_scale=one)
    cache, out = problem.rows.transpose(1, 2), torch.full_like(problem.q, torch.nan)
    empty = problem.q[:0]
    return lambda: made.forward(layer, problem.q, empty, empty, cache, metadata, out), (
        "PagedImpl.forward, stand-ins for vLLM's classes"
    )


def sglang(problem: PagedProblem) -> tuple[Call, str]:
    """``PagedBackend.forward_decode`` or ``forward_extend`` after ``init_forward_metadata``."""
    model, sizes = problem.row.model, problem.sizes
    batch, width = len(sizes.lengths), problem.table.shape[1]
    with stand_ins() as patch:
        import sglang_stand_in

        module = sglang_stand_in.install(patch)
        layer = sglang_stand_in.RadixAttention(
            model.heads, model.kv_heads, model.head_dim, scaling=model.head_dim**-0.5
        )
        runner = sglang_stand_in.runner_of(
            [layer],
            sizes.page,
            slots=2 * sizes.page,
            context=sizes.page,
            requests=1,
            device=str(problem.q.device),
            dtype=BF16,
            drafts=max(sizes.queries),
        )
        slots = problem.table[:, :, None] * sizes.page + torch.arange(sizes.page, device=problem.q.device)
        runner.req_to_token_pool.req_to_token = slots.view(batch, width * sizes.page).int()
        k, v = (cache.flatten(0, 1).contiguous() for cache in problem.caches)
        runner.token_to_kv_pool.get_kv_buffer = lambda layer_id: (k, v)
        backend = module.PagedBackend(runner)
        mode = "TARGET_VERIFY" if 1 < max(sizes.queries) <= MOST_DRAFTS else None
        requests = sglang_stand_in.batch_of(runner, list(range(batch)), list(sizes.lengths), list(sizes.queries), mode)
    backend.init_forward_metadata(requests)
    steps = requests.forward_mode.is_decode_or_idle()
    forward = backend.forward_decode if steps else backend.forward_extend
    new = None, None  # K and V of the queries: they are in the cache
    if sizes.queries == sizes.lengths:  # prompts
        places = torch.cat(
            [row[:length].flatten() for row, length in zip(slots.flatten(1), sizes.lengths, strict=True)]
        )
        new = k[places], v[places]
    return partial(forward, problem.q.flatten(1), *new, layer, requests, save_kv_cache=False), (
        f"PagedBackend.{forward.__name__}, stand-ins for SGLang's classes"
    )


def diffusion(problem: WholeProblem) -> tuple[Call, str]:
    """``BlockSparseImpl.forward``, or ``VideoSparseImpl.forward`` with tokens in tiles."""
    model, sizes = problem.row.model, problem.row.sizes
    assert isinstance(sizes, Video)
    scale = model.head_dim**-0.5
    with stand_ins() as patch:
        import sglang_diffusion_stand_in as stand_in

        if sizes.pattern == "VSA":
            module = stand_in.install(patch, stand_in.server_args({"kernels": "block_sparse"}))
            sparse = module.VideoSparseImpl(model.heads, model.head_dim, False, scale)
            about = stand_in.metadata(sizes.grid, sizes.sparsity, str(problem.q.device))
            return video_sparse(problem, sparse, about, stand_in, module._compute_cur_topk(about))
        config = {}
        if sizes.pattern == "window":
            config = {"pattern": {"kind": "video_window", "window": list(sizes.window), "tile": list(sizes.tile)}}
        frames, rows, columns = sizes.grid
        module = stand_in.install(patch, stand_in.server_args(config), (1, 16, frames, 2 * rows, 2 * columns))
        layer = module.BlockSparseImpl(model.heads, model.head_dim, scale, num_kv_heads=model.kv_heads)
    return lambda: layer.forward(problem.q, problem.k, problem.v), (
        "BlockSparseImpl.forward, stand-ins for SGLang's classes"
    )


def video_sparse(problem: WholeProblem, layer: Any, about: Any, stand_in: Any, topk: int) -> tuple[Call, str]:
    """A call with the copies that SGLang's layer makes: tokens into the slots of tiles, and back."""
    from runtime.integrations.sglang.video_sparse import coarse

    grid = about.dit_seq_shape
    slots, count = stand_in.slots_of(grid, problem.q.device)
    tile, sizes = stand_in.tiles_of(grid, problem.q.device)
    assert problem.gate is not None
    given = (problem.q, problem.k, problem.v, problem.gate)
    kept = problem.q.new_zeros(len(given), count, *problem.q.shape[2:])

    def in_tiles() -> torch.Tensor:
        kept[:, slots] = torch.cat(given)
        return kept

    q, k, v, _ = (x.transpose(1, 2) for x in in_tiles().chunk(len(given)))
    part = coarse(q, k, v, sizes=sizes, topk=topk, scale=problem.row.model.head_dim**-0.5)
    problem.kept.update(tile=tile, sizes=sizes, selected=part.selected, coarse=part.out)
    return lambda: layer.forward(*in_tiles().chunk(len(given)), about)[:, slots], (
        "VideoSparseImpl.forward between copies of tokens into tiles and back, stand-ins for SGLang's classes"
    )


def transformers(problem: WholeProblem) -> tuple[Call, str]:
    """``TransformersAttention``, the function that transformers calls."""
    from runtime.integrations.transformers_attention import TransformersAttention
    from runtime.patterns import SinkWindow

    window = problem.row.sizes.window  # type: ignore[union-attr] # of a prompt
    pattern = None if window is None else SinkWindow(window.sink, window.left)
    attend = TransformersAttention(None if pattern is None else lambda module, q, k, exact: pattern)
    module = SimpleNamespace(is_causal=True, config=None)
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    scale = problem.row.model.head_dim**-0.5
    return lambda: attend(module, q, k, v, None, scaling=scale)[0], "TransformersAttention"  # type: ignore[arg-type]


def batching(problem: PagedProblem) -> tuple[Call, str]:
    """The same function with the arguments of continuous batching, which also writes K and V of a token."""
    from runtime.integrations.transformers_attention import TransformersAttention

    attend, module = TransformersAttention(), SimpleNamespace(is_causal=True, config=None)
    k_cache, v_cache = (cache.contiguous() for cache in problem.caches)
    place = (problem.lengths - 1).long()
    page = problem.table.gather(1, place[:, None] // problem.sizes.page)[:, 0].long()
    k, v = (cache[page, place % problem.sizes.page].transpose(0, 1)[None] for cache in (k_cache, v_cache))
    q = problem.q.transpose(0, 1)[None]
    keys = torch.nn.functional.pad(problem.lengths.cumsum(0, dtype=torch.int32), (1, 0))
    given = {"cu_seq_lens_q": problem.bounds, "cu_seq_lens_k": keys, "write_index": [place]}
    given |= {"block_table": problem.table, "k_cache": k_cache, "v_cache": v_cache}
    scale = problem.row.model.head_dim**-0.5
    call: Any = partial(attend, module, q, k, v, None, scaling=scale, **given)
    return lambda: call()[0][0], "TransformersAttention, with a block table"


def diffusers(problem: WholeProblem) -> tuple[Call, str]:
    """``diffusers_attention``, what the registered backend calls."""
    from runtime.integrations.diffusers_attention import diffusers_attention
    from runtime.video import VideoWindow

    sizes = problem.row.sizes
    assert isinstance(sizes, Video)
    chooser = None if sizes.pattern == "dense" else VideoWindow(sizes.grid, sizes.window, sizes.tile)
    return lambda: diffusers_attention(problem.q, problem.k, problem.v, pattern_for=chooser), "diffusers_attention"


def listed(problem: ListedProblem) -> tuple[Call, str]:
    """The function that a model's file imports."""
    from runtime.integrations.vllm import selections

    work = problem.inputs.row.work
    makers: dict[str, tuple[Callable[..., Call], Callable[..., Any]]] = {
        "MSA": (serving_peers.msa_call, selections.minimax_m3_sparse_attn_decode),
        "MSA prefill": (serving_peers.msa_prefill_call, selections.minimax_m3_sparse_attn),
        "QSA": (serving_peers.qsa_call, selections.qsa_sparse_paged_attention),
    }
    make, function = makers[work]
    return make(function, problem.inputs), function.__name__


def listed_of_sglang(problem: ListedProblem, folder: Path | None = None) -> tuple[Call, str]:
    """The function that a file of SGLang imports, or SGLang's own with a folder. Pages are those of a block."""
    _settings_of_sglang(problem.inputs.row.page)
    from runtime.integrations.sglang import selections

    inputs = problem.inputs
    row, lists, table = inputs.row, inputs.lists, inputs.table
    assert lists is not None and table is not None
    k, v = (cache.contiguous().flatten(0, 1) for cache in (inputs.k, inputs.v))
    slots = table[:, :, None] * row.page + torch.arange(row.page, device=table.device)
    requests = torch.arange(len(row.lengths), device=table.device)
    lengths, scale = inputs.lengths.long(), row.head_dim**-0.5
    about: dict[str, Any] = {"req_to_token": slots.flatten(1).int(), "slot_ids": requests, "seq_lens": lengths}
    about |= {"q": inputs.q, "k_cache": k, "v_cache": v, "sink": None, "topk_idx": lists.indices, "sm_scale": scale}
    if row.work == "MSA":
        module: Any = selections if folder is None else _module_of_sglang(folder, "decode")
        function = module.flash_decode_with_gqa_share_sparse
        return partial(function, **about, block_size=row.entry_keys, page_size=row.page), function.__name__
    if row.work == "MSA prefill":
        module = selections if folder is None else _module_of_sglang(folder, "prefill")
        function = module.flash_prefill_with_gqa_share_sparse
        about |= {"cu_seqlens": inputs.bounds, "prefix_lens": lengths - row.queries, "max_seqlen_q": row.queries}
        about |= {"block_size_q": 1, "block_size_k": row.entry_keys, "cu_seqblocks_q": inputs.bounds}
        return partial(function, **about, max_seqblock_q=row.queries), function.__name__
    module = selections if folder is None else serving_peers.load(folder / TOKENS)
    function = module.sparse_gqa_fwd_interface_triton_ck
    packed = [torch.cat(rows) for rows in zip(*map(inputs.keys_of, range(len(row.lengths))), strict=True)]
    tokens = lists.indices[0, :, :, None] * row.entry_keys + torch.arange(row.entry_keys, device=table.device)
    firsts = torch.nn.functional.pad(inputs.lengths.cumsum(0), (1, 0)).int()
    given = (inputs.q, *packed, tokens.flatten(1).int(), inputs.bounds, firsts, inputs.lengths, scale)
    return partial(function, *given), function.__name__


def _settings_of_sglang(page_size: int) -> None:
    """Stand-ins for SGLang's settings, and for modules that its Triton kernels import."""
    contents: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.runtime_context": {
            "get_schedule": lambda: SimpleNamespace(page_size=page_size),
            "get_platform": lambda: SimpleNamespace(is_sm90=torch.cuda.get_device_capability() == (9, 0)),
        },
        "sglang.srt.utils": {"is_gfx95_supported": lambda: False},
        "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": lambda: False},
    }
    for name, names in contents.items():
        module = sys.modules.get(name) or ModuleType(name)
        vars(module).update(names)
        sys.modules[name] = module


def _module_of_sglang(folder: Path, step: str) -> Any:
    """A module of SGLang's kernels for MiniMax M3, without the packages around it."""
    name = "sglang_minimax_sparse"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder / BLOCKS)]
        sys.modules[name] = package
    return importlib.import_module(f"{name}.{step}.topk_sparse")


# Peers


def peers_of(row: Row, folder: Path | None) -> dict[str, Peer]:
    """Peers of a row, by label.

    Args:
        row: the row.
        folder: of the unpacked wheel, or None.
    """
    sizes = row.sizes
    if isinstance(sizes, Pages):
        found = {GATHERED: Peer(gathered)} if row.page == "transformers" else {}
        if folder is not None:
            found[FA3 if sizes.window is None else FA3_ALL] = Peer(partial(fa3_pages, folder), sizes.window is not None)
        return found
    if isinstance(sizes, Video):
        is_sparse = sizes.pattern != "dense"
        found = {SDPA_ALL if is_sparse else SDPA: Peer(sdpa, is_sparse)}
        if folder is not None and row.page == "sglang-diffusion":
            found[FA3_ALL if is_sparse else FA3] = Peer(partial(fa3_whole, folder), is_sparse)
        return found
    if row.page == "transformers":
        is_sparse = sizes.window is not None  # type: ignore[union-attr] # of a prompt
        return {SDPA_ALL if is_sparse else SDPA: Peer(sdpa, is_sparse)}
    if folder is None:
        return {}
    if row.page == "sglang":
        there = (folder / BLOCKS).is_dir() and (folder / TOKENS).is_file()
        return {SGLANG_TRITON: Peer(lambda problem: listed_of_sglang(problem, folder)[0])} if there else {}
    works = {"MSA": serving_peers.msa, "MSA prefill": serving_peers.msa_prefill, "QSA": serving_peers.qsa}
    make = works[sizes.work]  # type: ignore[union-attr] # of benchmarks/serving.py
    return {VLLM_TRITON: Peer(lambda problem: make(folder, problem.inputs))}


def sdpa(problem: WholeProblem) -> Call:
    """torch's attention, as transformers and diffusers call it without another backend."""
    from engines_rows import Prompt

    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    causal, grouped = isinstance(problem.row.sizes, Prompt), q.shape[1] != k.shape[1]

    def call() -> torch.Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)
        return out.contiguous() if causal else out  # as transformers, and as diffusers

    return call


def gathered(problem: PagedProblem) -> Call:
    """What transformers runs in a batch without FlashAttention: one sequence of all gathered keys, with a mask.

    With a mask it also repeats K and V for the query heads.
    """
    caches = [cache.contiguous().flatten(0, 1) for cache in problem.caches]
    page, model = problem.sizes.page, problem.row.model
    firsts = problem.table.long()[:, :, None] * page + torch.arange(page, device=problem.q.device)
    slots = torch.cat([row.flatten()[:n] for row, n in zip(firsts, problem.sizes.lengths, strict=True)])
    owner = torch.arange(len(problem.lengths), device=slots.device).repeat_interleave(problem.lengths.long())
    mask = owner == torch.arange(len(problem.q), device=slots.device)[:, None]
    q, group = problem.q.transpose(0, 1)[None], model.heads // model.kv_heads

    def call() -> torch.Tensor:
        k, v = (cache[slots].transpose(0, 1)[None].repeat_interleave(group, 1) for cache in caches)
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return found[0].transpose(0, 1).contiguous()

    return call


def fa3_pages(folder: Path, problem: PagedProblem) -> Call:
    """FlashAttention 3 over pages, all requests in one call."""
    torch.ops.load_library(str(folder / serving_peers.FA3))
    sizes, model = problem.sizes, problem.row.model
    most, longest = max(sizes.queries), max(sizes.lengths)
    make_schedule = torch.ops._vllm_fa3_C.get_scheduler_metadata
    lengths = (len(sizes.lengths), most, longest, model.heads, model.kv_heads, model.head_dim, model.head_dim)
    none = None
    schedule = make_schedule(
        *(*lengths, BF16, problem.lengths, problem.bounds, none, none, none, none, sizes.page),
        *(0, True, -1, -1, False, 0, none, 0),
    )
    caches = problem.caches
    if problem.row.page != "vllm":  # whose K and V are in one row
        caches = caches[0].contiguous(), caches[1].contiguous()
    bounds = (problem.bounds, problem.lengths, most, longest, problem.table)
    return partial(_fa3, problem.q, *caches, torch.empty_like(problem.q), *bounds, True, schedule)


def fa3_whole(folder: Path, problem: WholeProblem) -> Call:
    """FlashAttention 3 over a sequence."""
    torch.ops.load_library(str(folder / serving_peers.FA3))
    out = torch.empty_like(problem.q)
    return partial(_fa3, problem.q, problem.k, problem.v, out, None, None, None, None, None, False, None)


def _fa3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    bounds: torch.Tensor | None,
    lengths: torch.Tensor | None,
    most: int | None,
    longest: int | None,
    table: torch.Tensor | None,
    causal: bool,
    schedule: torch.Tensor | None,
) -> torch.Tensor:
    """A call of FlashAttention 3."""
    k_new, v_new, q_v, cu_seqlens_k, cu_seqlens_k_new, seqused_q = (None,) * 6
    batch_places, left_padding, rotary_cos, rotary_sin, rotary_lengths = (None,) * 5
    q_scale, k_scale, v_scale, pack_gqa, sink, context_lengths = (None,) * 6
    softcap, interleaved, splits, spared_sms, context_size, context_rank = 0.0, True, 0, 0, 1, 0
    found: torch.Tensor = torch.ops._vllm_fa3_C.fwd(
        *(q, k, v, k_new, v_new, q_v, out),
        *(bounds, cu_seqlens_k, cu_seqlens_k_new, seqused_q, lengths, most, longest),
        *(table, batch_places, left_padding, rotary_cos, rotary_sin, rotary_lengths),
        *(q_scale, k_scale, v_scale, q.shape[-1] ** -0.5, causal, -1, -1, softcap, interleaved),
        *(schedule, splits, pack_gqa, spared_sms, sink, context_size, context_rank, context_lengths),
    )[0]
    return found
