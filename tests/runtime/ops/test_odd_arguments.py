"""Every argument of the public functions beside attention, given what it is not meant for: refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

import bsr_oracle  # noqa: E402
import odd_values  # noqa: E402

import runtime  # noqa: E402
from codegen import select  # noqa: E402
from runtime import distributed, patterns, video  # noqa: E402
from runtime.errors import ArgumentError, DeviceError  # noqa: E402
from runtime.nn import BlockSparseLinear  # noqa: E402
from runtime.ops import select_topk  # noqa: E402
from runtime.ops.attention_choice import DTYPES  # noqa: E402

BSR = bsr_oracle.drawn((2, 3), (64, 64))
WHOLE = {"dtype": "bf16", "block": {"rows": 64, "cols": 64}, "tile": {"n": 64}, "stages": 4}
PROBLEM = {"block": {"rows": 64, "cols": 64}, "m": 4096, "k": 4096}
LENGTH = odd_values.LENGTH
CPU = torch.device("cpu")


def floats(*shape: int, device: str = "cpu") -> Any:
    return torch.randn(shape, device=device).bfloat16()


def matrix() -> Any:
    return runtime.prepare_bsr(BSR)


def product(device: str = "cpu") -> dict[str, Any]:
    made = {"b": floats(192, 24, device=device), "bias": floats(128, device=device)}
    made["c"] = floats(128, 24, device=device)
    return made | {"activation": "gelu", "beta": 0.5, "transpose_a": False, "arrange": False, "validate": False}


def matmul_of_parts(**parts: Any) -> Any:
    return runtime.bsr_matmul(runtime.BsrMatrix(**parts), floats(192, 24))


def sddmm_of_parts(**parts: Any) -> Any:
    return runtime.bsr_sddmm(floats(128, 64), floats(192, 64), runtime.BsrMatrix(**parts))


def parts() -> dict[str, Any]:
    return dict(vars(matrix()))


def on_meta() -> Any:
    """A matrix on meta whose values require a gradient: its products are the operator's, which have shapes alone."""
    made = {name: part.to("meta") if isinstance(part, torch.Tensor) else part for name, part in parts().items()}
    made["values"].requires_grad_()
    return runtime.BsrMatrix(**{**made, "order": (), "index": ()})


def learned(**arguments: Any) -> Any:
    """The same as an operator: the values require a gradient."""
    a = matrix()
    return runtime.bsr_matmul(a.with_values(a.values.requires_grad_()), **arguments)


def layer() -> Any:
    return BlockSparseLinear(BSR, floats(128))


def by_torch() -> dict[str, Any]:
    """Operands by torch's names."""
    return {name: floats(1, 2, LENGTH, 64) for name in ("query", "key", "value")}


def qkv(device: str = "cpu") -> dict[str, Any]:
    return {name: floats(1, 2, LENGTH, 64, device=device) for name in ("q", "k", "v")}


def whole(device: str = "cpu") -> dict[str, Any]:
    angles = torch.ones(LENGTH, 32, device=device)
    scales = {"q_scale": 1.0, "k_scale": None, "v_scale": None}
    rows = {"dtype": "e4m3", "q_rows": 64, "k_rows": 64, "smooth_k": True, "hadamard": False}
    rest = {"rotary": (angles, angles), "rotary_interleaved": False, "kv_capacity": None, "validate": False}
    return {**qkv(device), **rows, **rest, **scales}


def cache() -> Any:
    return runtime.quantize_attention(*(floats(1, 2, 128, 64) for _ in range(3)), kv_capacity=256)


def load(**arguments: Any) -> None:
    """Load a kernel up to where a GPU is looked for."""
    with contextlib.suppress(DeviceError):
        runtime.load_kernel(**arguments)


def decoding(cache: Any = torch.bfloat16) -> dict[str, Any]:
    """A call over pages with all its arguments."""
    made: dict[str, Any] = {"q": floats(2, 4, 64), "pattern": patterns.Causal(), "layout": "NHD"}
    made |= {name: floats(6, 16, 2, 64).to(cache) for name in ("k_cache", "v_cache")}
    made |= {"block_table": torch.zeros(2, 3, dtype=torch.int32), "seq_lens": torch.ones(2, dtype=torch.int32)}
    made |= {"cu_seqlens_q": torch.arange(3, dtype=torch.int32), "scale": 0.5, "softcap": 3.0, "sink": torch.zeros(4)}
    made |= {"out": floats(2, 4, 64), "workspace": torch.zeros(1 << 24, dtype=torch.uint8), "return_lse": True}
    return made | {"batch_invariant": False, "validate": True}


def decoding_of_codes() -> dict[str, Any]:
    return decoding(torch.float8_e4m3fn) | {"k_scale": torch.ones(1), "v_scale": torch.ones(2)}


def key_lists() -> dict[str, Any]:
    return {"indices": torch.zeros(2, 2, 5, dtype=torch.int32), "counts": torch.ones(2, 2).int(), "keys": 4}


def decoding_of_lists(**given: Any) -> Any:
    call = {name: each for name, each in decoding().items() if name != "pattern"}
    return runtime.paged_attention(**call, pattern=runtime.KeyLists(**given))


def workspace_sizes() -> dict[str, Any]:
    return {"batch": 2, "tokens": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "batch_invariant": False}


def bytes_of_workspace(**given: Any) -> None:
    """Up to where a GPU is looked for."""
    with contextlib.suppress(AssertionError, RuntimeError), pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "device_count", lambda: 1)
        runtime.paged_workspace(**given)


def tiles() -> Any:
    return video.VideoTiles((4, 16, 16), (4, 8, 8), text=3)


def small_tiles() -> Any:
    return video.VideoTiles((1, 8, 8), (1, 8, 8))


FUNCTIONS: odd_values.Functions = {
    "bsr_matmul": (runtime.bsr_matmul, lambda: {"a": BSR, **product()}),
    "bsr_matmul, prepared": (runtime.bsr_matmul, lambda: {"a": matrix(), **product()}),
    "bsr_matmul, learned": (learned, product),
    "bsr_matmul, on meta": (lambda **given: runtime.bsr_matmul(on_meta(), **given), lambda: product("meta")),
    "bsr_matmul, BsrMatrix": (matmul_of_parts, parts),
    "bsr_sddmm": (
        runtime.bsr_sddmm,
        lambda: {"a": floats(128, 64), "b": floats(192, 64), "pattern": BSR, "validate": False},
    ),
    "bsr_sddmm, on meta": (
        lambda a, b: runtime.bsr_sddmm(a, b, on_meta()),
        lambda: {"a": floats(128, 64, device="meta").requires_grad_(), "b": floats(192, 64, device="meta")},
    ),
    "bsr_sddmm, BsrMatrix": (sddmm_of_parts, parts),
    "BsrMatrix.with_values": (lambda values: matrix().with_values(values), lambda: {"values": BSR.values()}),
    "PreparedBsr.with_values": (
        lambda values: runtime.PreparedBsr(BSR).with_values(values),
        lambda: {"values": BSR.values()},
    ),
    "prepare_bsr": (runtime.prepare_bsr, lambda: {"a": BSR}),
    "bsr_problem": (
        runtime.bsr_problem,
        lambda: (
            {"a": BSR, "n": 128, "op": "bsr_spmm", "arch": "sm_90a", "transpose_a": False, "dtype": "bf16"}
            | {"epilogue": None, "prepared": "rows"}
        ),
    ),
    "explain_matmul": (
        runtime.explain_matmul,
        lambda: (
            {name: each for name, each in product().items() if name not in ("beta", "arrange", "validate")}
            | {"a": BSR, "gradients": False, "arch": "sm_90a"}
        ),
    ),
    "BlockSparseLinear": (BlockSparseLinear, lambda: {"weight": BSR, "bias": floats(128)}),
    "BlockSparseLinear.forward": (layer(), lambda: {"x": floats(3, 192)}),
    "BlockSparseLinear.from_linear": (
        BlockSparseLinear.from_linear,
        lambda: {"linear": torch.nn.Linear(64, 64), "block": (64, 64), "density": 0.5, "mask": None},
    ),
    "BlockSparseLinear.from_linear, mask": (
        BlockSparseLinear.from_linear,
        lambda: {"linear": torch.nn.Linear(64, 64), "block": 64, "mask": torch.ones(1, 1, dtype=torch.bool)},
    ),
    "BlockSparseLinear.from_mask": (
        BlockSparseLinear.from_mask,
        lambda: (
            {"mask": torch.ones(1, 1, dtype=torch.bool), "block": 64, "bias": True, "device": None}
            | {"dtype": torch.float32}
        ),
    ),
    "quantize_matrix": (
        runtime.quantize_matrix,
        lambda: {"x": floats(64, 128), "block": (1, 128), "dtype": "e4m3"},
    ),
    "quantize_attention": (runtime.quantize_attention, whole),
    "quantize_attention, on meta": (runtime.quantize_attention, lambda: whole("meta")),
    "QuantizedAttention.append": (
        lambda **given: cache().append(**given),
        lambda: {"k": floats(1, 2, 8, 64), "v": floats(1, 2, 8, 64), "rotary": None},
    ),
    "QuantizedAttention.with_queries": (
        lambda **given: cache().with_queries(**given),
        lambda: {"q": floats(1, 2, 8, 64), "rotary": None},
    ),
    "paged_attention": (runtime.paged_attention, decoding),
    "paged_attention, e4m3": (runtime.paged_attention, decoding_of_codes),
    "paged_attention, KeyLists": (decoding_of_lists, key_lists),
    "KeyLists": (runtime.KeyLists, key_lists),
    "paged_workspace": (bytes_of_workspace, workspace_sizes),
    "scales_of": (runtime.scales_of, lambda: {"x": floats(1, 2, 8, 64), "per": "head", "dtype": "e4m3"}),
    "flex_attention": (
        runtime.compat.flex_attention,
        lambda: (
            by_torch()
            | {"score_mod": patterns.Score("score"), "block_mask": patterns.Causal(), "scale": 0.5, "enable_gqa": True}
            | {"return_lse": False, "kernel_options": None, "return_aux": None}
        ),
    ),
    "scaled_dot_product_attention": (
        runtime.compat.scaled_dot_product_attention,
        lambda: (
            by_torch()
            | {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool), "dropout_p": 0.0, "is_causal": False}
            | {"scale": 0.5, "enable_gqa": True}
        ),
    ),
    "flash_attn_func": (
        runtime.compat.flash_attn_func,
        lambda: (
            {name: floats(1, LENGTH, 2, 64) for name in "qkv"}
            | {"dropout_p": 0.0, "softmax_scale": None, "causal": True, "window_size": (5, 0), "softcap": 0.0}
            | {"alibi_slopes": torch.ones(2), "deterministic": True, "return_attn_probs": False}
        ),
    ),
    "flash_attn_qkvpacked_func": (
        runtime.compat.flash_attn_qkvpacked_func,
        lambda: {"qkv": floats(1, LENGTH, 3, 2, 64)},
    ),
    "create_block_mask": (
        runtime.create_block_mask,
        lambda: (
            {"mask_mod": "doc[q_idx] == doc[kv_idx]", "B": 1, "H": 2, "Q_LEN": LENGTH, "KV_LEN": LENGTH}
            | {"BLOCK_SIZE": (64, 64), "aux": {"doc": torch.zeros(LENGTH, dtype=torch.int32)}, "device": None}
        ),
    ),
    "create_block_mask, aux": (
        lambda **aux: runtime.create_block_mask("doc[q_idx] == doc[kv_idx]", 1, 2, LENGTH, LENGTH, aux=aux),
        lambda: {"doc": torch.zeros(LENGTH, dtype=torch.int32)},
    ),
    "create_block_mask, function": (
        lambda **given: runtime.create_block_mask(lambda b, h, i, j: i >= j, **given, BLOCK_SIZE=(64, 64), aux=None),
        lambda: {"B": 1, "H": 2, "Q_LEN": LENGTH, "KV_LEN": LENGTH, "device": None},
    ),
    "create_block_mask, what a function returns": (
        lambda returned: runtime.create_block_mask(lambda *_: returned, 1, 1, LENGTH, LENGTH),
        lambda: {"returned": True},
    ),
    "select_topk_blocks": (
        runtime.select_topk_blocks,
        lambda: (
            {"q": floats(1, 2, LENGTH, 64), "k": floats(1, 2, LENGTH, 64), "block": (64, 64), "topk": 1}
            | {"causal": True, "always": (0, -1)}
        ),
    ),
    "select_topk_blocks, on meta": (
        lambda **given: runtime.select_topk_blocks(**given, block=(64, 64), topk=1, causal=True),
        lambda: {name: floats(1, 2, LENGTH, 64, device="meta") for name in "qk"},
    ),
    "VideoTiles": (
        video.VideoTiles,
        lambda: {"grid": (4, 16, 16), "tile": (4, 8, 8), "text": 3, "text_first": False, "device": "cpu"},
    ),
    "VideoTiles.tile": (lambda **given: tiles().tile(**given), lambda: {"x": floats(1, 1027, 8), "dim": 1}),
    "VideoTiles.untile": (lambda **given: tiles().untile(**given), lambda: {"x": floats(1, 1152, 8), "dim": 1}),
    "VideoTiles.pattern": (
        lambda visible: tiles().pattern(visible),
        lambda: {"visible": torch.ones(4, 4, dtype=torch.bool)},
    ),
    "tile_window": (video.tile_window, lambda: {"tiles": tiles(), "window": (1, 1, 1)}),
    "tiled_attention": (
        video.tiled_attention,
        lambda: qkv() | {"tiles": small_tiles(), "pattern": patterns.Dense(), "scale": 0.5, "softcap": None},
    ),
    "VideoWindow": (
        lambda **sizes: video.VideoWindow(**sizes)(None, floats(1, 2, 131, 64), floats(1, 2, 131, 64), None),
        lambda: {"grid": (2, 8, 8), "window": (1, 1, 1), "tile": (2, 8, 8), "text": 3, "text_first": False},
    ),
    "VideoWindow, call": (
        lambda **given: video.VideoWindow((1, 8, 8), (1, 1, 1), (1, 8, 8))(None, **given, exact=patterns.Dense()),
        lambda: {name: floats(1, 2, LENGTH, 64) for name in "qk"},
    ),
    "VideoWindow.made": (
        lambda device: video.VideoWindow((1, 8, 8), (1, 1, 1), (1, 8, 8)).made(device),
        lambda: {"device": CPU},
    ),
    "load_kernel": (
        load,
        lambda: (
            {"spec": {"op": "attention", "arch": "sm_90a", "head_dim": 64, "pattern": {"kind": "dense"}}}
            | {"problem": None, "forward_compatible": False, "device": None, "cache": None}
        ),
    ),
    "choose": (
        select.choose,
        lambda: {"given": {"op": "bsr_spmm", "arch": "sm_90a", **WHOLE}, "problem": {"n": 4096}},
    ),
    "parse_problem": (select.parse_problem, lambda: {"data": {"op": "bsr_spmm", "arch": "sm_90a", **PROBLEM}}),
    "planned": (select.planned, lambda: {"choice": select.choose("h100_dense")}),
    "Layout": (distributed.Layout, lambda: {"chunks": ((0,), (1,))}),
    "Layout.contiguous": (distributed.Layout.contiguous, lambda: {"ranks": 2}),
    "Layout.zigzag": (distributed.Layout.zigzag, lambda: {"ranks": 2}),
    "Layout.balanced": (distributed.Layout.balanced, lambda: {"work": [1.0, 2.0], "ranks": 2}),
    "Layout.chunk_size": (distributed.Layout.zigzag(2).chunk_size, lambda: {"length": 64}),
    "Layout.spans": (distributed.Layout.zigzag(2).spans, lambda: {"rank": 1, "length": 64}),
    "Layout.positions": (distributed.Layout.zigzag(2).positions, lambda: {"rank": 1, "length": 64, "device": "cpu"}),
    "Layout.shard": (distributed.Layout.zigzag(2).shard, lambda: {"tensor": floats(8, 8), "rank": 1, "dim": 0}),
    "Layout.join": (distributed.Layout.zigzag(2).join, lambda: {"parts": [floats(4, 8), floats(4, 8)], "dim": 0}),
    "Layout.join, a part": (
        lambda part: distributed.Layout.zigzag(2).join([part, floats(4, 8)], 0),
        lambda: {"part": floats(4, 8)},
    ),
    "keys_received": (
        distributed.keys_received,
        lambda: (
            {"pattern": patterns.Causal(), "layout": distributed.Layout.zigzag(2), "rank": 1}
            | {"q_len": 64, "kv_len": 64}
        ),
    ),
    "local_lists": (
        distributed.local_lists,
        lambda: (
            {"pattern": patterns.TopK(torch.zeros(1, 1, 2, 1, dtype=torch.int32), block=(64, 64))}
            | {"layout": distributed.Layout.contiguous(2), "rank": 1}
        ),
    ),
}
LEGAL = {
    "None": "B H activation alibi_slopes attn_mask beta bias block_mask c cache device epilogue k_scale "
    "kernel_options kv_capacity "
    "mask n prepared problem q_scale return_aux score_mod softmax_scale rotary scale softcap v_scale "
    "counts cu_seqlens_q out seq_lens sink workspace",
    "-1": "always beta dim",
    "0": "always beta device dim dropout_p softcap kv_len length q_len rank text",
    "True": "arrange batch_invariant bias causal deterministic enable_gqa return_lse forward_compatible gradients "
    "hadamard returned rotary_interleaved smooth_k text_first transpose_a validate",
    "empty str": "always",
    "dtype": "dtype",
    "list": "always block window_size work",
    "empty list": "always",
    "array": "work",
    "0-dim": "k_scale q_scale v_scale",
    "two elements": "alibi_slopes k_scale q_scale v_scale work",
    "empty": "tensor",
    "integers": "col_indices crow_indices work",
    "truths": "work",
    "learned": "alibi_slopes work",
    "on meta": "k q v x",
    "vector on meta": "tensor",
    "bsr": "a",
}
"""Arguments that some function does take an odd value for."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    odd_values.install(monkeypatch)
    library = torch.library.Library("sparse_kernel_codegen", "IMPL")
    library.impl("select_topk_blocks", selected, "CPU")
    yield
    library._destroy()


def selected(q: Any, k: Any, *, block_q: int, block_kv: int, **rest: Any) -> Any:
    if q.dtype not in DTYPES:
        raise ArgumentError("q", f"is {q.dtype}")
    return select_topk._kernel(None, DTYPES[q.dtype])(q, k, (block_q, block_kv), **rest)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_whatever_an_argument_is_given_is_refused_by_name(name: str) -> None:
    odd_values.check(FUNCTIONS, name, LEGAL)
