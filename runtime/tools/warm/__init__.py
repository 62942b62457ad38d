"""Kernels that are compiled before they are called."""
