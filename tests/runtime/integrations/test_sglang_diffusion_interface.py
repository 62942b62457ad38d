"""The backends of the diffusion runtime against SGLang's own Python: plug-in, selection, and its layers on the CPU.

``python scripts/engines.py sglang`` downloads SGLang's wheels and runs this file.
"""

from __future__ import annotations

import importlib.util
import inspect
import pickle
from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang: python scripts/engines.py sglang", allow_module_level=True)

import absent  # noqa: E402

absent.without_torchvision()

import addict  # noqa: E402
import oracle_kernel  # noqa: E402
import packed_kernel  # noqa: E402
import sglang_diffusion_stand_in as stand_in  # noqa: E402
from sglang.multimodal_gen.runtime.distributed import parallel_state  # noqa: E402
from sglang.multimodal_gen.runtime.layers import usp  # noqa: E402
from sglang.multimodal_gen.runtime.layers.attention import layer as their_layers  # noqa: E402
from sglang.multimodal_gen.runtime.layers.attention import selector  # noqa: E402
from sglang.multimodal_gen.runtime.layers.attention.backends import (  # noqa: E402
    attention_backend,
    sdpa,
    video_sparse_attn,
)
from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context  # noqa: E402
from sglang.multimodal_gen.runtime.pipelines_core.stages import denoising  # noqa: E402
from sglang.multimodal_gen.runtime.platforms import AttentionBackendEnum, plugins  # noqa: E402
from sglang.multimodal_gen.runtime.server_args import server_args as their_arguments  # noqa: E402
from sglang.multimodal_gen.runtime.server_args import set_global_server_args  # noqa: E402

from runtime.errors import ArgumentError  # noqa: E402
from runtime.integrations.sglang import diffusion  # noqa: E402
from runtime.integrations.sglang import diffusion_registration as registration  # noqa: E402

plugins.apply_plugin_hooks()

from runtime.integrations.sglang import diffusion_backend as ours  # noqa: E402

HEADS, D = 4, 64
SCALE = D**-0.5
WINDOW = {"kind": "video_window", "window": [1, 1, 2], "tile": [1, 8, 8]}
ABSTRACT = {"get_enum", "get_impl_cls", "get_metadata_cls", "get_builder_cls"}


class Group(SimpleNamespace):
    """A sequence-parallel group of one process, with the ring that a test says."""

    def __init__(self, ring: int = 1) -> None:
        alone = {"world_size": 1, "rank_in_group": 0, "ulysses_world_size": 1, "ulysses_rank": 0, "ring_rank": 0}
        super().__init__(**alone, ring_world_size=ring)

    def all_to_all_4D(self, x: Any, *dims: Any, **named: Any) -> Any:
        return x


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A process with an H100 that there need not be; the kernels that are loaded compute by the definition."""
    torch.manual_seed(0)
    loaded = oracle_kernel.install(monkeypatch)
    monkeypatch.setattr(diffusion, "capability", lambda: (9, 0))
    monkeypatch.setattr(parallel_state, "_SP", Group())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield loaded
    torch.set_default_dtype(before)
    set_global_server_args(None)


def server(backend: str | None = "block_sparse", config: Any = None, **settings: Any) -> Any:
    """SGLang's settings, which it also keeps for the process."""
    args = object.__new__(their_arguments.ServerArgs)
    fields = {"attention_backend_config": addict.Dict(config or {}), "ring_degree": 1, "kv_gather_degree": 1}
    fields |= {"_explicit_arg_names": {"attention_backend"}, "enable_attention_backend_autotune": False}
    fields["pipeline_config"] = SimpleNamespace(dit_config=SimpleNamespace(patch_size=(1, 2, 2)))
    for name, value in {**fields, "attention_backend": backend, "enable_torch_compile": False, **settings}.items():
        object.__setattr__(args, name, value)
    set_global_server_args(args)
    return args


def rows(batch: int, length: int) -> Any:
    return torch.randn(batch, length, HEADS, D)


def run(layer: Any, *given: Any, metadata: Any = None, latents: Any = None, **named: Any) -> Any:
    """A forward pass of SGLang's layer in a request."""
    request = SimpleNamespace(raw_latent_shape=latents, extra={})
    with torch.no_grad(), set_forward_context(0, metadata, request):
        return layer(*given, **named)


def close(out: Any, right: Any, tolerance: float = 3e-2) -> None:
    torch.testing.assert_close(out.float(), right.float(), atol=tolerance, rtol=tolerance)


# Registration and selection


def test_sglang_loads_the_plugin() -> None:
    assert plugins.GENERAL_PLUGINS_GROUP == "sglang.multimodal_gen.plugins"
    points = metadata.entry_points(group=plugins.GENERAL_PLUGINS_GROUP)
    (point,) = (each for each in points if each.name == "block_sparse")
    assert point.load() is registration.plugin
    assert {registration.CHOICE, registration.ADJUSTMENT} <= plugins.HookRegistry._patched
    member = AttentionBackendEnum["BLOCK_SPARSE"]
    assert AttentionBackendEnum(member.value) is member and str(member) == "block_sparse" and not member.is_sparse
    assert pickle.loads(pickle.dumps(member)) is member
    assert len({each.value for each in AttentionBackendEnum}) == len(list(AttentionBackendEnum))


def test_sglang_takes_the_name_as_a_setting() -> None:
    normalized = their_arguments.ServerArgs._normalize_attention_backend_name
    assert normalized("block_sparse") == "block_sparse"
    split = their_arguments.ServerArgs._split_component_attention_backends
    assert split("transformer=block_sparse,transformer.cross=fa", {})[0] == {"transformer": "block_sparse"}
    assert str(AttentionBackendEnum.BLOCK_SPARSE_ATTN) == "block_sparse_attn", "SGLang's own, on other devices"


def test_options_that_errors_name_are_sglangs() -> None:
    source = inspect.getsource(their_arguments)
    for option in ("--attention-backend", "--attention-backend-config", "--component-attention-backends"):
        assert f'"{option}"' in source
    for option in ("--ring-degree", "--ulysses-degree", "--kv-gather-degree", "--enable-torch-compile"):
        assert f'"{option}"' in source
    for name in ("ring_degree", "kv_gather_degree", "enable_torch_compile", "attention_backend_config"):
        assert name in their_arguments.ServerArgs.__dataclass_fields__


def test_a_ring_may_have_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert their_arguments.ServerArgs._adjust_attention_backend.__wrapped__
    registration.offer_rings()
    assert "block_sparse" in their_arguments.RING_CAPABLE_ATTENTION_BACKENDS
    adjust = their_arguments.ServerArgs._adjust_attention_backend
    maps = {name: {} for name in ("component_attention_backends", "component_attention_backend_roles")}
    asked = {"_requested_component_attention_backends": None, "_requested_component_attention_backend_roles": None}
    args = server(ring_degree=2, backend_=None, model_path="model", **maps, **asked)
    adjust(args)
    assert args.attention_backend == "block_sparse"
    object.__setattr__(args, "attention_backend", "torch_sdpa")
    with pytest.raises(ValueError, match="block_sparse"):
        adjust(args)


def test_the_selected_backend_is_this_one() -> None:
    server()
    for is_cross in (False, True):
        assert selector.get_attn_backend(128, torch.bfloat16, is_cross_attention=is_cross) is ours.BlockSparseBackend
    server(None)
    assert selector.get_attn_backend(128, torch.bfloat16) is sdpa.SDPABackend
    server("torch_sdpa")
    assert selector.get_attn_backend(128, torch.bfloat16) is sdpa.SDPABackend


def test_a_transformer_that_is_not_served_ends_the_start() -> None:
    server()
    with pytest.raises(ValueError, match="head_size: is 60"):
        selector.get_attn_backend(60, torch.bfloat16)
    with pytest.raises(ValueError, match=r"dtype: is torch.float32"):
        selector.get_attn_backend(128, torch.float32)


def test_other_components_use_the_backend_that_sglang_chooses() -> None:
    server(config={"pattern": WINDOW})
    with selector.component_attn_backend_context_manager(None, "text_encoder", allow_global_backend_fallback=True):
        assert selector.get_attn_backend(64, torch.bfloat16) is sdpa.SDPABackend
    with selector.component_attn_backend_context_manager(None, "transformer"):
        assert selector.get_attn_backend(64, torch.bfloat16) is ours.BlockSparseBackend


def test_denoising_passes_no_metadata() -> None:
    stage = SimpleNamespace(attn_backend=ours.BlockSparseBackend)
    assert denoising.DenoisingStage._build_attn_metadata(stage, 0, None, server()) is None


# Interface


def test_each_method_takes_the_arguments_of_sglangs() -> None:
    checked = set()
    for own_class, base in (
        (ours.BlockSparseImpl, attention_backend.AttentionImpl),
        (ours.VideoSparseImpl, video_sparse_attn.VideoSparseAttentionImpl),
        (ours.BlockSparseBackend, attention_backend.AttentionBackend),
    ):
        for name in vars(own_class):
            if (name.startswith("_") and name != "__init__") or not callable(getattr(base, name, None)):
                continue
            own, expected = (inspect.signature(getattr(each, name)).parameters for each in (own_class, base))
            assert list(own)[: len(expected)] == list(expected), name
            assert all(each.default is not each.empty for each in list(own.values())[len(expected) :]), name
            checked.add(name)
    assert checked >= {"__init__", "forward", "forward_varlen", "forward_ring_kv_chunk", *ABSTRACT}
    assert not ours.BlockSparseBackend.__abstractmethods__ and not ours.BlockSparseImpl.__abstractmethods__


def test_a_ring_has_the_log_sum_exp_of_sglangs_attention() -> None:
    """SGLang passes ``return_softmax_lse`` by name."""
    for caller in (usp._ring_attention_varlen, usp.ring_attn, their_layers.USPAttention._replicated_kv_attention):
        assert "return_softmax_lse=True" in inspect.getsource(caller)
    assert "return_softmax_lse" in inspect.signature(ours.BlockSparseImpl.forward).parameters


# Layers


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["USPAttention", "LocalAttention", "UlyssesAttention"])
def test_layers_compute_what_they_do_with_sglangs_backend(process: Any, kind: str, causal: bool) -> None:
    q, k, v = rows(2, 96), rows(2, 96), rows(2, 96)
    outs = []
    for backend in ("block_sparse", "torch_sdpa"):
        server(backend)
        layer = getattr(their_layers, kind)(HEADS, D, causal=causal)
        found = run(layer, q, k, v)
        outs.append(found[0] if isinstance(found, tuple) else found)
    assert isinstance(outs[0], torch.Tensor) and outs[0].shape == q.shape
    close(*outs)
    assert sum(kernel.calls for kernel in process.values()) == 1


def test_cross_attention_is_dense_with_a_pattern(process: Any) -> None:
    server(config={"pattern": WINDOW})
    layer = their_layers.USPAttention(HEADS, D, skip_sequence_parallel=True, is_cross_attention=True)
    q, k = rows(1, 128), rows(1, 33)
    close(run(layer, q, k, k), stand_in.attention(q, k, k, SCALE))


def test_a_window_of_tiles_reaches_the_layer(process: Any) -> None:
    server(config={"pattern": WINDOW})
    layer = their_layers.USPAttention(HEADS, D)
    q, k, v = rows(1, 2 * 10 * 26), rows(1, 2 * 10 * 26), rows(1, 2 * 10 * 26)
    mask = stand_in.window_mask((2, 10, 26), (1, 8, 8), (1, 1, 2))
    close(run(layer, q, k, v, latents=torch.Size((1, 16, 2, 20, 52))), stand_in.attention(q, k, v, SCALE, mask))


def test_packed_sequences_reach_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packed_kernel.install(monkeypatch)
    q, k, v = rows(1, 96), rows(1, 96), rows(1, 96)
    bounds = {"cu_seqlens": torch.tensor([0, 40, 40, 96], dtype=torch.int32), "max_seqlen": 56}
    outs, through_layer = [], []
    for backend in ("block_sparse", "torch_sdpa"):
        server(backend)
        layer = their_layers.USPAttention(HEADS, D)
        outs.append(layer.attn_impl.forward_varlen(q[0], k[0], v[0], **bounds))
        through_layer.append(run(layer, q, k, v, seq_lens=[40, 0, 56]))
    close(*outs)
    close(*through_layer)
    assert len(packed) == 1
    if metadata.version("sglang") != "0.5.22":  # whose layers pass one long sequence
        close(through_layer[0][0], outs[0])
    requirements = attention_backend.AttentionRequirements(packed_varlen=True)
    server(config={"pattern": WINDOW})
    with pytest.raises(ValueError, match="does not implement packed varlen attention"):
        selector.get_attn_backend(D, torch.bfloat16, attention_requirements=requirements)


def test_chunks_merge_as_sglang_merges_them() -> None:
    server(ring_degree=2)
    impl = ours.BlockSparseImpl(HEADS, D, SCALE)
    q, k, v = rows(1, 50), rows(1, 120), rows(1, 120)
    out = lse = None
    for i in range(0, 120, 40):
        step = impl.forward_ring_kv_chunk(q[0], k[0, i : i + 40], v[0, i : i + 40])
        out, lse = usp._ring_merge_attention(out, lse, *step)
    right = stand_in.attention(q, k, v, SCALE)
    close(out, right[0])
    parts = [impl.forward(q, k[:, s], v[:, s], return_softmax_lse=True) for s in (slice(0, 70), slice(70, 120))]
    close(usp._merge_attention_partials(*parts[0], *parts[1]), right)


def test_a_ring_builds_the_layer_without_a_pattern_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "_SP", Group(ring=2))
    server(ring_degree=2)
    assert type(their_layers.USPAttention(HEADS, D).attn_impl) is ours.BlockSparseImpl
    server(config={"pattern": WINDOW}, ring_degree=2)
    with pytest.raises(ValueError, match="--ring-degree: is 2 with a pattern"):
        their_layers.USPAttention(HEADS, D)


def test_masked_calls_are_sglangs_own(process: Any) -> None:
    """A boundary that the guide states: SGLang computes calls with a mask by SDPA, before any backend."""
    server()
    q, mask = rows(2, 40), torch.arange(40).expand(2, 40) < 30
    for kind in ("USPAttention", "LocalAttention"):
        out = run(getattr(their_layers, kind)(HEADS, D), q, q, q, attn_mask=mask)
        close(out, stand_in.attention(q, q, q, SCALE, mask[:, None, None]))
    assert not process


@pytest.mark.parametrize("grid", [(4, 8, 12), (5, 9, 14)])
def test_video_sparse_attention_has_sglangs_tiles_and_metadata(process: Any, grid: tuple[int, int, int]) -> None:
    server("video_sparse_attn", {"VSA_sparsity": 0.6, "kernels": "block_sparse"})
    layer = their_layers.UlyssesAttention_VSA(HEADS, D, prefix="blocks.0.attn1")
    assert type(layer.attn_impl) is ours.VideoSparseImpl and layer.backend.is_sparse
    backend = selector.get_attn_backend(D, torch.float16)
    assert backend is ours.VideoSparseBackend
    latents = (grid[0], grid[1] * 2, grid[2] * 2)
    sizes = {"raw_latent_shape": latents, "patch_size": (1, 2, 2), "VSA_sparsity": 0.6, "device": torch.device("cpu")}
    about = backend.get_builder_cls()().build(current_timestep=0, **sizes)
    given = [rows(2, grid[0] * grid[1] * grid[2]) for _ in range(4)]
    out = run(layer, *given[:3], gate_compress=given[3], metadata=about)
    topk = video_sparse_attn._compute_cur_topk(about)
    assert 1 < topk < about.variable_block_sizes.numel()
    close(out, stand_in.video_sparse(*given, grid, topk, SCALE))
    assert sum(kernel.calls for kernel in process.values()) == 1


def test_without_the_key_video_sparse_attention_is_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = lambda *given: seen.append(given) or sdpa.SDPABackend  # noqa: E731
    server("video_sparse_attn", {"VSA_sparsity": 0.6})
    member = AttentionBackendEnum.VIDEO_SPARSE_ATTN
    assert registration.choose(original, 128, torch.bfloat16, (), member) is sdpa.SDPABackend and len(seen) == 1


def test_a_typing_error_in_the_option_ends_the_start() -> None:
    server(config={"patern": WINDOW})
    with pytest.raises(ValueError, match="has patern, expected some of pattern"):
        their_layers.USPAttention(HEADS, D)
    assert issubclass(ArgumentError, ValueError)
