"""Generates CUDA sources from kernel specs: pure Python, deterministic output, no GPU or CUDA required."""

__version__ = "0.1.0"
