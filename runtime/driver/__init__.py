"""Launches: parameter blocks, tensor maps and the device memory that kernels need beside their arguments."""
