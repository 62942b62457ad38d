"""From a source to machine code: NVRTC, the cache, where the tools are, and what a cubin uses."""
