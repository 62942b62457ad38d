"""Receipts at run time: the user's own, and the mode that refuses kernels without one."""
