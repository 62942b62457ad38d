"""Limits of a search, as shown on the command line."""

MOST = 12
"""Most variations of a problem, in addition to shipped kernels."""
