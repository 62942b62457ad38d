"""Preparation of operands on the host, once for many calls. Needs torch, no GPU."""
