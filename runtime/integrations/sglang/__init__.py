"""Attention for SGLang: a backend for layers with a KV cache."""
