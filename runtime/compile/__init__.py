"""Compilation: NVRTC, the kernel cache, discovery of the CUDA tools, and resource usage of cubins."""
