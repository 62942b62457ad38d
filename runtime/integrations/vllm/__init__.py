"""Attention for vLLM: a backend for layers with a KV cache, and the attention of models that select keys."""
