"""Limits of a search that a command line shows."""

MOST = 12
"""Variations of a problem, beside the shipped kernels."""
