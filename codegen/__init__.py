"""From kernel specs to CUDA sources: pure Python, no GPU, no CUDA, the same bytes every time."""

__version__ = "0.1.0"
