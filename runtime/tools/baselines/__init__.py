"""Kernels beside named peers in one process, and stored timings to compare with: the command ``codegen bench``."""
