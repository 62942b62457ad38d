"""The backends of SGLang's diffusion runtime without SGLang: what layers compute, what is refused, registration."""

from __future__ import annotations

import json
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import oracle_kernel  # noqa: E402
import packed_kernel  # noqa: E402
import selection_oracle  # noqa: E402
import sglang_diffusion_stand_in as stand_in  # noqa: E402

from runtime.errors import ArgumentError, ToolchainError  # noqa: E402
from runtime.integrations import choosers  # noqa: E402
from runtime.integrations.sglang import diffusion, diffusion_registration, video_sparse  # noqa: E402

PROJECT = Path(__file__).resolve().parents[3]
HEADS, KV_HEADS, D, SCALE = 4, 2, 64, 0.2
WINDOW = {"kind": "video_window", "window": [1, 1, 2], "tile": [1, 8, 8]}


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch.manual_seed(0)
    return oracle_kernel.install(monkeypatch)


def rows(batch: int, length: int, heads: int = HEADS) -> Any:
    return torch.randn(batch, length, heads, D).bfloat16()


def layer_of(monkeypatch: pytest.MonkeyPatch, config: Any = None, latents: Any = None, **fields: Any) -> Any:
    """A layer of the dense backend, with stand-ins."""
    server = {
        name: fields.pop(name) for name in ("ring_degree", "kv_gather_degree", "enable_torch_compile") if name in fields
    }
    server |= {"patch_size": fields.pop("patch_size")} if "patch_size" in fields else {}
    module = stand_in.install(monkeypatch, stand_in.server_args(config, **server), latents)
    given = {"num_heads": HEADS, "head_size": D, "softmax_scale": SCALE, "num_kv_heads": KV_HEADS, "prefix": "x.impl"}
    return module.BlockSparseImpl(**{**given, **fields})


def close(out: Any, right: Any, tolerance: float = 2e-2) -> None:
    torch.testing.assert_close(out.float(), right.float(), atol=tolerance, rtol=tolerance)


# Dense attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [70, 130])
def test_layers_compute_the_models_attention(monkeypatch: pytest.MonkeyPatch, causal: bool, keys: int) -> None:
    layer = layer_of(monkeypatch, causal=causal, is_cross_attention=False, quant_config=None)
    q, k, v = rows(2, 70), rows(2, keys, KV_HEADS), rows(2, keys, KV_HEADS)
    mask = torch.ones(70, keys, dtype=torch.bool).tril(keys - 70) if causal else None
    out = layer.forward(q, k, v, None)
    assert out.shape == q.shape and out.dtype == q.dtype
    close(out, stand_in.attention(q, k, v, SCALE, mask))
    again, lse = layer.forward(q, k, v, attn_metadata=object(), return_softmax_lse=True)
    assert torch.equal(again, out) and lse.shape == (2, HEADS, 70) and lse.dtype == torch.float32


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_see_themselves_alone(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    packed = packed_kernel.install(monkeypatch)
    layer = layer_of(monkeypatch, causal=causal)
    bounds = [0, 5, 5, 90, 128]
    q, k, v = rows(1, 128)[0], rows(1, 128, KV_HEADS)[0], rows(1, 128, KV_HEADS)[0]
    given = {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32), "max_seqlen": 85, "cu_seqlens_host": tuple(bounds)}
    out = layer.forward_varlen(q, k, v, **given)
    own = torch.bucketize(torch.arange(128), torch.tensor(bounds), right=True)
    mask = own[:, None] == own
    right = stand_in.attention(q[None], k[None], v[None], SCALE, mask.tril() if causal else mask)[0]
    close(out, right)
    assert len(packed) == 1


def test_chunks_of_a_ring_merge_into_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(monkeypatch, ring_degree=3)
    q, k, v = rows(1, 50)[0], rows(1, 120, KV_HEADS)[0], rows(1, 120, KV_HEADS)[0]
    parts = [layer.forward_ring_kv_chunk(q, k[i : i + 40], v[i : i + 40]) for i in range(0, 120, 40)]
    for out, lse in parts:
        assert out.shape == q.shape and lse.shape == (HEADS, 50) and lse.dtype == torch.float32
    weights = torch.stack([lse for _, lse in parts]).softmax(0).mT[..., None]
    merged = sum(w * out.float() for w, (out, _) in zip(weights, parts, strict=True))
    close(merged, stand_in.attention(q[None], k[None], v[None], SCALE)[0])


# Patterns


def test_a_window_of_tiles_comes_from_the_request(monkeypatch: pytest.MonkeyPatch, loaded: Any) -> None:
    layer = layer_of(monkeypatch, {"pattern": WINDOW}, (1, 16, 2, 20, 52))
    grid = (2, 10, 26)
    q, k, v = rows(1, 520), rows(1, 520, KV_HEADS), rows(1, 520, KV_HEADS)
    right = stand_in.attention(q, k, v, SCALE, stand_in.window_mask(grid, (1, 8, 8), (1, 1, 2)))
    out = layer.forward(q, k, v, None)
    close(out, right)
    assert not torch.allclose(right, stand_in.attention(q, k, v, SCALE), atol=0.1), "the window hides nothing"
    cross = layer_of(monkeypatch, {"pattern": WINDOW}, (1, 16, 2, 20, 52), is_cross_attention=True)
    text = rows(1, 33, KV_HEADS)
    close(cross.forward(q, text, text, None), stand_in.attention(q, text, text, SCALE))


@pytest.mark.parametrize("text_first", [False, True])
def test_text_sees_all_and_all_see_it(monkeypatch: pytest.MonkeyPatch, text_first: bool) -> None:
    fields = {**WINDOW, "text_first": text_first}
    layer = layer_of(monkeypatch, {"pattern": fields}, (1, 16, 2, 8, 16), patch_size=1, num_kv_heads=None)
    q, k, v = rows(2, 256 + 21), rows(2, 256 + 21), rows(2, 256 + 21)
    mask = stand_in.window_mask((2, 8, 16), (1, 8, 8), (1, 1, 2), 21, text_first=text_first)
    close(layer.forward(q, k, v, None), stand_in.attention(q, k, v, SCALE, mask))


def test_a_pattern_of_token_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosers, "select_topk_blocks", selection_oracle.select)
    fields = {"kind": "topk", "topk": 2, "block": [64, 64], "always": [], "from_len": 1}
    layer = layer_of(monkeypatch, {"pattern": fields})
    q, k, v = rows(1, 256), rows(1, 256, KV_HEADS), rows(1, 256, KV_HEADS)
    lists = selection_oracle.select(q.transpose(1, 2), k.transpose(1, 2), (64, 64), 2, causal=False, always=())
    blocks = torch.zeros(1, HEADS, 4, 4, dtype=torch.bool).scatter_(-1, lists.long(), True)
    mask = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)
    close(layer.forward(q, k, v, None), stand_in.attention(q, k, v, SCALE, mask))


@pytest.mark.parametrize("config", [None, {"pattern": {"kind": "dense"}}])
def test_without_a_pattern_rings_and_packed_sequences_are_offered(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    module = stand_in.install(monkeypatch, stand_in.server_args(config))
    assert module.BlockSparseBackend.supports_ring_rotation() and module.BlockSparseBackend.supports_packed_varlen()
    module = stand_in.install(monkeypatch, stand_in.server_args({"pattern": WINDOW}))
    assert not module.BlockSparseBackend.supports_ring_rotation()
    assert not module.BlockSparseBackend.supports_packed_varlen()


# Video sparse attention


@pytest.mark.parametrize(("grid", "kinds"), [((4, 8, 12), {"topk"}), ((5, 9, 14), {"block_lists"})])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99])
def test_video_sparse_attention_is_the_definition(
    monkeypatch: pytest.MonkeyPatch, loaded: Any, grid: tuple[int, int, int], kinds: set[str], sparsity: float
) -> None:
    module = stand_in.install(monkeypatch, stand_in.server_args({"kernels": "block_sparse"}))
    layer = module.VideoSparseImpl(HEADS, D, False, SCALE, HEADS, "blocks.0.attn1.impl", is_cross_attention=False)
    given = [rows(2, grid[0] * grid[1] * grid[2]) for _ in range(4)]
    about = stand_in.metadata(grid, sparsity)
    slots, _ = stand_in.slots_of(grid)
    out = layer.forward(*(stand_in.in_slots(x, grid) for x in given), about)[:, slots]
    topk = module._compute_cur_topk(about)
    close(out, stand_in.video_sparse(*given, grid, topk, SCALE), 3e-2)
    assert {json.loads(spec)["pattern"]["kind"] for spec in loaded} == kinds


def test_lists_name_each_selected_tile_once() -> None:
    sizes = torch.tensor([64, 32, 64, 16])
    selected = torch.tensor([[0, 1, 2], [1, 2, 3]])[None, None]
    found = video_sparse.pattern_of(selected, sizes)
    counts, partial, full_counts, full = found.index_tensors()[:4]
    assert counts.tolist() == [[[1, 2]]] and full_counts.tolist() == [[[2, 1]]]
    assert partial[0, 0, 0, :1].tolist() == [1] and partial[0, 0, 1, :2].tolist() == [1, 3]
    assert full[0, 0, 0, :2].tolist() == [0, 2] and full[0, 0, 1, :1].tolist() == [2]
    assert video_sparse.pattern_of(selected, None).index_tensors()[0].tolist() == selected.tolist()


# Refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_size": 60}, "head_size: is 60, expected a multiple of 8 up to 256: select another"),
        ({"head_size": 264}, "head_size: is 264"),
        ({"num_kv_heads": 3}, "num_kv_heads: is 3, expected a divisor of num_heads 4"),
        ({"dropout_p": 0.1}, "dropout_p: is 0.1, which is not supported: select another"),
        ({"score_mod": print}, "score_mod: is .*, which is not supported"),
        ({"config": {"patern": WINDOW}}, "--attention-backend-config: has patern, expected some of pattern"),
        ({"config": {"pattern": "window"}}, "pattern: is 'window', expected a mapping"),
        ({"config": {"pattern": {"kind": "all"}}}, "pattern.kind: is 'all'"),
        ({"config": {"pattern": {"kind": "video_window", "windows": [1, 1, 1]}}}, "pattern: has fields .*windows"),
        ({"config": {"pattern": {**WINDOW, "tile": [1, 3, 8]}}}, "tile: is .*expected a multiple of 64"),
        ({"config": {"pattern": {**WINDOW, "grid": [1, 8, 8]}}}, "pattern.grid: is given, and each request sets it"),
        ({"config": {"pattern": WINDOW}, "causal": True}, "pattern: is given, and the layer is causal"),
        ({"config": {"pattern": WINDOW}, "ring_degree": 2}, "--ring-degree: is 2 with a pattern"),
        ({"config": {"pattern": WINDOW}, "kv_gather_degree": 2}, "--kv-gather-degree: is 2 with a pattern"),
        ({"config": {"pattern": WINDOW}, "enable_torch_compile": True}, "--enable-torch-compile: is set with"),
        ({"config": {"kernels": "mine"}}, "kernels: is 'mine', expected 'block_sparse'"),
    ],
)
def test_layers_and_settings_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        layer_of(monkeypatch, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"causal": True}, "causal: is not that of video sparse attention"),
        ({"num_kv_heads": 2}, "num_kv_heads: is not that"),
        ({"is_cross_attention": True}, "is_cross_attention: is not that"),
        ({"dropout_p": 0.5}, "dropout_p: is 0.5"),
    ],
)
def test_layers_of_video_sparse_attention_are_refused(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    module = stand_in.install(monkeypatch, stand_in.server_args({"kernels": "block_sparse"}))
    given = {"num_heads": HEADS, "head_size": D, "causal": False, "softmax_scale": SCALE}
    with pytest.raises(ArgumentError, match=message):
        module.VideoSparseImpl(**{**given, **fields})


@pytest.mark.parametrize(
    ("latents", "patch", "lengths", "message"),
    [
        (None, (1, 2, 2), (128, 128), "raw_latent_shape: is missing in the request"),
        ((1, 16, 2), (1, 2, 2), (128, 128), "raw_latent_shape: has 3 dimensions"),
        ((1, 16, 2, 15, 16), (1, 2, 2), (128, 128), "patch_size: is .*does not divide the latents"),
        ((1, 16, 2, 16, 16), (1, 2, 2), (128, 33), "pattern: is given, .*has 128 queries and 33 keys"),
        ((1, 16, 2, 16, 16), (1, 2, 2), (77, 77), "pattern: is given, and a layer has 77 tokens"),
        ((1, 16, 2, 16, 16), (1, 2, 2), (150, 150), "text_first: is missing"),
    ],
)
def test_calls_without_a_video_are_refused(
    monkeypatch: pytest.MonkeyPatch, loaded: Any, latents: Any, patch: Any, lengths: tuple[int, int], message: str
) -> None:
    layer = layer_of(monkeypatch, {"pattern": WINDOW}, latents, patch_size=patch)
    q, k = rows(1, lengths[0]), rows(1, lengths[1], KV_HEADS)
    with pytest.raises(ArgumentError, match=message):
        layer.forward(q, k, k, None)
    assert not loaded


def test_packed_sequences_and_rings_are_refused_with_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(monkeypatch, {"pattern": WINDOW}, (1, 16, 2, 16, 16))
    q, bounds = rows(1, 128)[0], torch.tensor([0, 128], dtype=torch.int32)
    with pytest.raises(ArgumentError, match="the sequences are packed"):
        layer.forward_varlen(q, q[:, :2], q[:, :2], cu_seqlens=bounds, max_seqlen=128)
    with pytest.raises(ArgumentError, match="ring attention: set --ring-degree 1"):
        layer.forward_ring_kv_chunk(q, q[:, :2], q[:, :2])
    with pytest.raises(ArgumentError, match="causal: is True in ring attention"):
        layer_of(monkeypatch, causal=True).forward_ring_kv_chunk(q, q[:, :2], q[:, :2])


def test_a_patch_may_be_one_number() -> None:
    assert diffusion.patch_of(SimpleNamespace(patch_size=[1, 2, 2])) == (1, 2, 2)
    assert diffusion.patch_of(SimpleNamespace(patch_size=2)) == (2, 2, 2)
    assert diffusion.patch_of(SimpleNamespace(patch_size=2, patch_size_t=1)) == (1, 2, 2)


# Registration


class Hooks:
    """SGLang's registry of hooks."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def register(self, target: str, hook: Any, kind: str) -> None:
        assert target not in self.found
        self.found[target] = hook, kind


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's enumeration, hooks and settings."""
    names, hooks = stand_in.names(), Hooks()
    kinds = SimpleNamespace(AROUND="around", BEFORE="before")
    settings = stand_in.server_args()
    selector = SimpleNamespace(component=None)
    selector.get_component_attn_backend_name = lambda: selector.component
    arguments = SimpleNamespace(get_global_server_args=lambda: settings, RING_CAPABLE_ATTENTION_BACKENDS=("fa",))
    modules = {
        diffusion_registration.PLATFORMS: SimpleNamespace(AttentionBackendEnum=names),
        diffusion_registration.PLUGINS: SimpleNamespace(HookRegistry=hooks, HookType=kinds),
        diffusion_registration.SELECTOR: selector,
        diffusion_registration.SERVER_ARGS: arguments,
        stand_in.KEPT: stand_in.install(monkeypatch, settings, enumeration=names),
    }
    monkeypatch.setattr(diffusion_registration, "optional", lambda name, extra: modules[name])
    monkeypatch.setattr(diffusion_registration, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.23")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    backend = modules[stand_in.KEPT]
    return SimpleNamespace(
        names=names, hooks=hooks, settings=settings, selector=selector, arguments=arguments, backend=backend
    )


def test_the_backend_is_registered_once(engine: Any) -> None:
    for _ in range(2):
        diffusion_registration.register()
    member = engine.names["BLOCK_SPARSE"]
    assert [each.name for each in engine.names][-1] == "BLOCK_SPARSE" and member.value == 4
    assert engine.names(4) is member and engine.names.BLOCK_SPARSE is member and isinstance(member, engine.names)
    assert engine.backend.BlockSparseBackend.get_enum() is member
    assert engine.hooks.found == {
        diffusion_registration.CHOICE: (diffusion_registration.choose, "around"),
        diffusion_registration.ADJUSTMENT: (diffusion_registration.offer_rings, "before"),
    }
    for _ in range(2):
        assert diffusion_registration.offer_rings() is None
    assert engine.arguments.RING_CAPABLE_ATTENTION_BACKENDS == ("fa", "block_sparse")


def test_another_package_keeps_its_name(engine: Any) -> None:
    diffusion_registration.add_member(engine.names, object.__new__(engine.names), "BLOCK_SPARSE", 9)
    with pytest.raises(ToolchainError, match="block_sparse is of another package: uninstall one of the two"):
        diffusion_registration.register()


@pytest.mark.parametrize("version", ["0.5.21", "0.5.24", "0.6.0"])
def test_another_version_leaves_sglang_as_it_is(engine: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(ToolchainError, match=rf"SGLang 0.5.22 and 0.5.23, and {version} is installed"):
        diffusion_registration.register()
    diffusion_registration.plugin()
    assert not engine.hooks.found and "BLOCK_SPARSE" not in engine.names.__members__


def choose(engine: Any, name: str | None, head_size: int = 128, dtype: Any = torch.bfloat16) -> Any:
    diffusion_registration.register()
    selected = None if name is None else engine.names[name]
    return diffusion_registration.choose(lambda *given: ("SGLang's", *given), head_size, dtype, (), selected)


def test_only_selected_backends_change(engine: Any) -> None:
    for name in (None, "FA", "VIDEO_SPARSE_ATTN"):
        assert choose(engine, name)[0] == "SGLang's"
    assert choose(engine, "BLOCK_SPARSE") is engine.backend.BlockSparseBackend
    engine.settings.attention_backend_config = {"VSA_sparsity": 0.9, "kernels": "block_sparse"}
    assert choose(engine, "VIDEO_SPARSE_ATTN") is engine.backend.VideoSparseBackend
    assert choose(engine, "FA")[0] == "SGLang's"
    engine.settings.attention_backend_config = {"kernels": "other"}
    with pytest.raises(ArgumentError, match="kernels: is 'other'"):
        choose(engine, "VIDEO_SPARSE_ATTN")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"head_size": 36}, "head_size: is 36"),
        ({"dtype": torch.float32}, "dtype: is torch.float32, expected torch.float16 or torch.bfloat16"),
    ],
)
def test_layers_without_kernels_are_refused(engine: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"{message}.*such as fa"):
        choose(engine, "BLOCK_SPARSE", **given)


def test_hosts_without_kernels_are_refused(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (7, 5))
    with pytest.raises(ArgumentError, match="--attention-backend: runs on sm_75, kernels are written for sm_80"):
        choose(engine, "BLOCK_SPARSE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match="--attention-backend: is block_sparse, and torch finds no CUDA GPU"):
        choose(engine, "BLOCK_SPARSE")


def test_components_without_a_video_have_no_pattern(engine: Any) -> None:
    engine.settings.attention_backend_config = {"pattern": WINDOW}
    for component in (None, "transformer", "transformer_2"):
        engine.selector.component = component
        assert choose(engine, "BLOCK_SPARSE") is engine.backend.BlockSparseBackend
    engine.selector.component = "text_encoder"
    with pytest.raises(ArgumentError, match="pattern: is for videos, and text_encoder has none: select another"):
        choose(engine, "BLOCK_SPARSE")
    engine.settings.attention_backend_config = {"kernels": "block_sparse"}
    with pytest.raises(ArgumentError, match="--attention-backend: is for videos, and text_encoder has none"):
        choose(engine, "VIDEO_SPARSE_ATTN")
    assert choose(engine, "BLOCK_SPARSE") is engine.backend.BlockSparseBackend


def test_the_entry_point_is_declared() -> None:
    points = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["entry-points"]
    own = f"{diffusion_registration.__name__}:{diffusion_registration.plugin.__name__}"
    assert points["sglang.multimodal_gen.plugins"] == {"block_sparse": own}
