"""Small models of transformers with random weights, for integration tests, beside another implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from runtime import convert
from runtime.integrations import register_transformers

NAME = "block_sparse"
TOKENS = 97
SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0}


def llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**{**GROUPED, "num_key_value_heads": 4, **changes})


def grouped_llama() -> Any:
    return llama(num_key_value_heads=2)


def mistral() -> Any:
    return transformers.MistralForCausalLM, transformers.MistralConfig(**GROUPED, sliding_window=24)


def qwen2() -> Any:
    """Full and sliding layers in one model."""
    layers = ["full_attention", "sliding_attention"]
    config = transformers.Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=16, layer_types=layers)
    return transformers.Qwen2ForCausalLM, config


def modernbert() -> Any:
    """Full and local layers of an encoder, which sees both sides."""
    config = transformers.ModernBertConfig(**SIZES, pad_token_id=0, local_attention=32, global_attn_every_n_layers=2)
    return transformers.ModernBertForMaskedLM, config


def bert() -> Any:
    return transformers.BertForMaskedLM, transformers.BertConfig(**SIZES)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "grouped llama": grouped_llama,
    "mistral, window 24": mistral,
    "qwen2, full and window 16": qwen2,
    "bert": bert,
    "modernbert, full and local 32": modernbert,
}
CAUSAL = ("grouped llama", "mistral, window 24", "qwen2, full and window 16")


def gemma2(implementation: str) -> Any:
    """Return a model with softcaps, which SDPA has not: its peer is eager attention."""
    config = transformers.Gemma2Config(
        **{**GROUPED, "query_pre_attn_scalar": 64}, sliding_window=24, attn_logit_softcapping=5.0
    )
    return built(transformers.Gemma2ForCausalLM, config, implementation, dtype=torch.float16)


def gpt_oss(implementation: str) -> Any:
    """Return a model with sink logits, which SDPA has not: its peer is eager attention. No expert is left out."""
    config = transformers.GptOssConfig(**GROUPED, sliding_window=24, num_local_experts=2, num_experts_per_tok=2)
    return built(transformers.GptOssForCausalLM, config, implementation, dtype=torch.float16)


BESIDE_EAGER: dict[str, Callable[[str], Any]] = {"gemma2": gemma2, "gpt-oss": gpt_oss}


def built(
    kind: Any, config: Any, implementation: str = NAME, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Return a model with the same random weights each time, some of them larger than its initializer makes them."""
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=implementation, dtype=dtype).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "query", "key", "Wqkv", "sinks")):
                weight.normal_(std=0.12)  # so that the softmax is far from uniform, and a wrong mask shows
    return model.to(device)


def tokens(length: int, batch: int = 2, device: str = "cpu") -> Any:
    torch.manual_seed(1)
    return torch.randint(1, TOKENS, (batch, length), device=device)


def padding(length: int, side: str, device: str = "cpu") -> Any:
    """Return the mask of two sequences, the second one shorter by a third; None for no padding."""
    if side == "none":
        return None
    mask = torch.ones(2, length, dtype=torch.int64, device=device)
    short = slice(2 * length // 3, None) if side == "right" else slice(length // 3)
    mask[1, short] = 0
    if side == "holes":
        mask[1] = torch.arange(length, device=device) % 5 != 1
    return mask


@torch.no_grad()
def logits_beside(model: Any, peer: str, mask: Any, ids: Any, **more: Any) -> tuple[Any, Any]:
    """Return the logits of the tokens that are no padding, in float32: ours, and those with another implementation."""
    keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    found = []
    for implementation in (NAME, peer):
        model.set_attn_implementation(implementation)
        found.append(model(ids, attention_mask=mask, **more).logits[keep].float())
    return found[0], found[1]


class Recorded:
    """A chooser that keeps what another one chose for each layer."""

    def __init__(self, choose: Any) -> None:
        self.choose = choose
        self.patterns: dict[int, Any] = {}

    def __call__(self, module: Any, q: Any, k: Any, exact: Any) -> Any:
        found = self.patterns[module.layer_idx] = self.choose(module, q, k, exact)
        return found

    def attention(self, module: Any, q: Any, k: Any, v: Any, mask: Any, *, scaling: Any = None, **others: Any) -> Any:
        """Compute a layer by torch, with the pairs of what was chosen for it written out."""
        sizes = {"q_len": q.shape[2], "kv_len": k.shape[2], "batch": q.shape[0], "heads": q.shape[1]}
        pairs = convert.to_token_mask(self.patterns[module.layer_idx], **sizes)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=pairs.to(q.device), scale=scaling)
        return out.transpose(1, 2).contiguous(), None


def logits_beside_recorded(model: Any, ids: Any, choose: Any) -> tuple[Any, Any, Recorded]:
    """Return the logits with chosen patterns, those with the same pairs by torch, and what was chosen."""
    recorded = Recorded(choose)
    register_transformers(pattern_for=recorded)
    transformers.AttentionInterface.register("written_out", recorded.attention)
    ours, right = logits_beside(model, "written_out", None, ids, use_cache=False)
    del transformers.AttentionInterface._global_mapping["written_out"]
    return ours, right, recorded


@torch.no_grad()
def decoded(model: Any, implementation: str, ids: Any, mask: Any, cache: Any = None) -> Any:
    """Return the logits of a prompt in two parts and of four steps that follow, in float32."""
    model.set_attn_implementation(implementation)
    found, start, length = [], 0, ids.shape[1]
    for stop in (length - 20, *range(length - 4, length + 1)):
        past = None if mask is None else mask[:, :stop]
        result = model(ids[:, start:stop], attention_mask=past, past_key_values=cache, use_cache=True)
        cache, start = result.past_key_values, stop
        found.append(result.logits.float())
    return torch.cat(found, 1)
