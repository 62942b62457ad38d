"""Every argument of every public function of attention, given what it is not meant for: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

import odd_values  # noqa: E402
import oracle_kernel  # noqa: E402

import runtime  # noqa: E402
from runtime import convert, explain_attention, merge_attention, patterns, quantized_operands  # noqa: E402
from runtime.errors import ArgumentError  # noqa: E402
from runtime.kernels import arguments  # noqa: E402
from runtime.kernels.attention import AttentionResult  # noqa: E402
from runtime.ops import attention_checks, attention_fp8, attention_launches  # noqa: E402
from runtime.ops.attention import block_sparse_attention, block_sparse_attention_fp8  # noqa: E402
from runtime.ops.attention_calls import Route  # noqa: E402
from runtime.ops.quantize_attention import QuantizedAttention  # noqa: E402

LENGTH = odd_values.LENGTH


def qkv() -> dict[str, Any]:
    return {name: torch.randn(1, 2, LENGTH, 64).bfloat16() for name in ("q", "k", "v")}


def lists(*shape: int, value: int = 0) -> Any:
    return torch.full(shape, value, dtype=torch.int32)


def attend(**arguments: Any) -> Any:
    return block_sparse_attention(**arguments)


def attend_learned(**arguments: Any) -> Any:
    """The same as an operator: some argument requires a gradient."""
    if isinstance(arguments["q"], torch.Tensor) and arguments["q"].dtype == torch.bfloat16:
        arguments["q"] = arguments["q"].requires_grad_()
    return block_sparse_attention(**arguments)


def attend_fp8(*, options: dict[str, Any] | None = None, **fields: Any) -> Any:
    return block_sparse_attention_fp8(
        QuantizedAttention(**fields), patterns.Dense(), return_lse=True, **(options or {})
    )


def attend_fp8_options(**options: Any) -> Any:
    return attend_fp8(**fp8_fields(), options=options)


def by(pattern: Callable[..., Any]) -> Callable[..., Any]:
    """A call with a pattern, as some are looked at there."""
    return lambda **fields: block_sparse_attention(**qkv(), pattern=pattern(**fields), validate=True)


def fp8_fields() -> dict[str, Any]:
    codes = {name: x.to(torch.float8_e4m3fn) for name, x in qkv().items()}
    given = quantized_operands(**codes, q_scale=1.0, k_scale=1.0, v_scale=1.0)
    fields = dict(vars(given))
    for name in ("cache", "k_mean", "hadamard", "rotary", "static_q_scale", "static_k_scale"):  # of other functions
        del fields[name]
    return fields | {"mean_logits": torch.zeros(1, 2, LENGTH)}


OPTIONS = ("scale", "softcap", "score", "sink", "kv_lengths", "return_lse", "out", "validate", "deterministic")
BLOCK = {"block": (64, 64)}


def options() -> dict[str, Any]:
    return dict.fromkeys(OPTIONS[:5]) | {"out": None, "return_lse": False, "validate": False, "deterministic": True}


def block_lists() -> dict[str, Any]:
    counts, indices = lists(1, 2, 1, value=1), lists(1, 2, 1, 1)
    fields: dict[str, Any] = {"kv_num_blocks": counts, "kv_indices": indices, "full_kv_num_blocks": counts * 0}
    rest = {"mask": "bits", "mask_bits": lists(1, 2, 1, 1, 128, value=-1), "overflow": lists(1), "aux": None}
    return {**fields, "full_kv_indices": indices, **BLOCK, **rest}


def masked_lists() -> dict[str, Any]:
    whole = {name: tensor for name, tensor in block_lists().items() if name in ("kv_num_blocks", "kv_indices", "block")}
    return {**whole, "mask": "seen[kv_idx]", "aux": {"seen": torch.ones(LENGTH, dtype=torch.bool)}}


def top_k() -> Any:
    return patterns.TopK(lists(1, 1, 1, 1), **BLOCK)


FUNCTIONS: odd_values.Functions = {
    "block_sparse_attention": (attend, lambda: qkv() | {"pattern": patterns.Causal()} | options()),
    "block_sparse_attention, learned": (attend_learned, lambda: qkv() | {"pattern": patterns.Causal()} | options()),
    "block_sparse_attention_fp8": (attend_fp8, fp8_fields),
    "block_sparse_attention_fp8, options": (attend_fp8_options, lambda: dict.fromkeys(OPTIONS[:5]) | {"out": None}),
    "explain_attention": (
        explain_attention,
        lambda: (
            qkv()
            | {"pattern": patterns.Causal(), "arch": "sm_90a", "gradients": True, "deterministic": True}
            | {"softcap": None, "score": None, "sink": None, "kv_lengths": None, "return_lse": False}
        ),
    ),
    "reference_attention": (
        runtime.reference_attention,
        lambda: (
            qkv()
            | {"pattern": patterns.Causal(), "scale": None, "softcap": None, "score": None, "sink": None}
            | {"kv_lengths": None, "return_lse": False}
        ),
    ),
    "merge_attention": (
        merge_attention,
        lambda: {f"{name}{i}": x for i in (1, 2) for name, x in (("out", torch.ones(2, 3)), ("lse", torch.ones(2)))},
    ),
    "Causal": (by(patterns.Causal), lambda: {"align": "top_left"}),
    "SlidingWindow": (by(patterns.SlidingWindow), lambda: {"left": 8, "right": 1}),
    "SinkWindow": (by(patterns.SinkWindow), lambda: {"sink": 2, "left": 8, "right": 1}),
    "Strided": (by(patterns.Strided), lambda: {"stride": 2, "local": 1, "block": 64, "causal": True}),
    "PrefixLM": (by(patterns.PrefixLM), lambda: {"prefix_len": lists(1, value=3)}),
    "TopK": (by(patterns.TopK), lambda: {"kv_indices": lists(1, 1, 1, 1), **BLOCK}),
    "BlockLists": (by(patterns.BlockLists), block_lists),
    "BlockLists, expression": (by(patterns.BlockLists), masked_lists),
    "Score": (
        lambda **fields: attend(**qkv(), pattern=patterns.Dense(), score=patterns.Score(**fields)),
        lambda: {"value": "score + t[kv_idx]", "aux": {"t": torch.ones(LENGTH)}},
    ),
    "aux": (
        lambda t: attend(**qkv(), pattern=patterns.Dense(), score=patterns.Score("score + t[kv_idx]", aux={"t": t})),
        lambda: {"t": torch.ones(LENGTH)},
    ),
    "quantized_operands": (
        quantized_operands,
        lambda: (
            {name: x.to(torch.float8_e4m3fn) for name, x in qkv().items()}
            | {"q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0, "q_rows": 64, "k_rows": 64, "output": torch.float16}
        ),
    ),
    "from_causal_lists": (
        convert.from_causal_lists,
        lambda: {"kv_indices": lists(1, 1, 1, 1), "q_len": 64, "kv_len": 64, **BLOCK},
    ),
    "from_csr": (
        convert.from_csr,
        lambda: {"indptr": torch.tensor([0, 1]), "indices": lists(1), **BLOCK, "kv_len": 64, "max_blocks": None},
    ),
    "from_q2k": (
        convert.from_q2k,
        lambda: {
            "q2k_block_index": lists(1, 1, 1, 1),
            "q2k_block_nums": lists(1, 1, 1, value=1),
            "block_sizes": lists(1, value=5),
            **BLOCK,
            "max_partial_blocks": None,
        },
    ),
    "from_block_mask": (
        convert.from_block_mask,
        lambda: {
            "block_mask": convert.to_block_mask(top_k(), q_len=64, kv_len=64),
            **dict.fromkeys(("q_len", "kv_len", "batch", "heads", "target", "max_blocks", "max_partial_blocks")),
        },
    ),
    "to_block_mask": (convert.to_block_mask, lambda: {"pattern": top_k(), "q_len": 64, "kv_len": 64, "heads": 2}),
    "from_bool_blocks": (
        convert.from_bool_blocks,
        lambda: {
            "mask": torch.ones(1, 1, dtype=torch.bool),
            **BLOCK,
            **dict.fromkeys(("target", "q_len", "kv_len", "max_blocks", "max_partial_blocks")),
        },
    ),
    "to_bool_blocks": (convert.to_bool_blocks, lambda: {"pattern": top_k(), "kv_len": 64}),
    "to_csr": (convert.to_csr, lambda: {"pattern": top_k()}),
    "to_q2k": (convert.to_q2k, lambda: {"pattern": top_k()}),
    "from_key_mask": (
        convert.from_key_mask,
        lambda: {
            "mask": torch.ones(1, 64, dtype=torch.bool),
            "q_len": 64,
            **BLOCK,
            "max_blocks": None,
            "max_partial_blocks": None,
        },
    ),
    "kv_lengths_from_mask": (convert.kv_lengths_from_mask, lambda: {"mask": torch.ones(1, 64, dtype=torch.bool)}),
    "mask_from_kv_lengths": (convert.mask_from_kv_lengths, lambda: {"kv_lengths": lists(1, value=3), "kv_len": 64}),
    "from_key_ranges": (
        convert.from_key_ranges,
        lambda: {
            "starts": lists(1, 1, 64),
            "stops": lists(1, 1, 64, value=9),
            "kv_len": 64,
            **BLOCK,
            "max_blocks": None,
            "max_partial_blocks": None,
        },
    ),
    "from_cu_seqlens": (
        convert.from_cu_seqlens,
        lambda: {
            "cu_seqlens": torch.tensor([0, 9, 64]),
            "total": 64,
            "causal": True,
            **BLOCK,
            "max_blocks": None,
            "max_partial_blocks": None,
        },
    ),
    "from_token_lists": (
        convert.from_token_lists,
        lambda: {
            "indices": lists(1, 64, 1),
            **BLOCK,
            "heads": 2,
            "layout": "htk",
            "causal": True,
            "kv_len": 64,
            "max_blocks": None,
            "max_partial_blocks": None,
        },
    ),
    "to_token_lists": (
        convert.to_token_lists,
        lambda: {"pattern": patterns.TopK(lists(1, 1, 64, 1), block=(1, 64)), "layout": "htk"},
    ),
    "from_token_mask": (
        convert.from_token_mask,
        lambda: {
            "mask": torch.ones(64, 64, dtype=torch.bool),
            **BLOCK,
            "max_blocks": None,
            "max_partial_blocks": None,
        },
    ),
    "to_token_mask": (
        convert.to_token_mask,
        lambda: {"pattern": top_k(), "q_len": 64, "kv_len": 64, "batch": 1, "heads": 2},
    ),
}


class Fp8Kernel:
    """Stands for a kernel with FP8 inputs, whose checks of scales are those of every kernel."""

    def __call__(self, q: Any, *rest: Any, out: Any, **named: Any) -> AttentionResult:
        for name in ("q_scale", "k_scale", "v_scale"):
            attention_checks.check_tensor(name, named[name], torch.float32, 3, q.device)
        if named["sink"] is not None:
            arguments.check_sink(named["sink"], q.shape[1], q.device)
        for name, tensor in zip(("k", "v_t"), rest, strict=False):
            attention_checks.check_tensor(name, tensor, q.dtype, 4, q.device)
        made = torch.zeros(q.shape, dtype=torch.bfloat16) if out is None else out
        return AttentionResult(made, torch.zeros(q.shape[:3]))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle_kernel.install(monkeypatch)
    monkeypatch.setattr(attention_fp8, "check_tensor", attention_checks.check_tensor)
    monkeypatch.setattr(attention_fp8, "_routes", attention_fp8.Signatures())
    monkeypatch.setattr(attention_launches.launches, "_kept", {})
    monkeypatch.setattr(attention_fp8, "remember", lambda call: Route(Fp8Kernel(), None, None, 0))  # type: ignore[arg-type]


LEGAL = {
    "None": "scale softcap score sink kv_lengths out mean_logits overflow aux block_sizes batch heads target q_len "
    "kv_len max_blocks max_partial_blocks",
    "0": "left right local",
    "True": "return_lse validate deterministic gradients causal",
    "huge": "max_blocks max_partial_blocks",
    "unprintable": "max_blocks max_partial_blocks",
    "list": "block",
    "0-dim": "q_scale k_scale v_scale",
    "two elements": "sink lse1 lse2 t q_scale k_scale v_scale",
    "learned": "sink lse1 lse2 t",
    "integers": "t indptr indices block_sizes kv_lengths cu_seqlens",
    "truths": "t",
}
"""Arguments that some function does take an odd value for."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_whatever_an_argument_is_given_is_refused_by_name(name: str) -> None:
    odd_values.check(FUNCTIONS, name, LEGAL)


def test_lists_that_are_split_are_checked_in_each_call() -> None:
    """Other lists can be made of what is wrong, which the kernel then takes."""
    q, k, v = (torch.randn(1, 2, 512, 64).bfloat16() for _ in range(3))
    counts, indices = lists(1, 2, 2, value=1), lists(1, 2, 2, 3)
    block = {"block": (256, 64)}
    for _ in range(2):
        block_sparse_attention(q, k, v, patterns.BlockLists(counts, indices, **block))
    for wrong in (lists(1, 2, 3, 3), indices.long(), lists(1, 1, 2, 2, 3), indices.float()):
        with pytest.raises(ArgumentError, match=r"^kv_indices: "):
            block_sparse_attention(q, k, v, patterns.BlockLists(counts, wrong, **block))
