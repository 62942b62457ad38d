"""Expressions over a query and a key, which define masks and score functions.

Text or a Python function is parsed into a typed tree (``nodes``). The other modules evaluate, bound and differentiate
the tree, and print it as CUDA. User text is never pasted into a source.
"""
