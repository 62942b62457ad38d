"""Functions on torch tensors, and torch operators. The first call chooses, compiles and caches the kernel."""
