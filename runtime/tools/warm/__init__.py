"""Compilation of kernels before their first call."""
