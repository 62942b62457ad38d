"""Expressions over a query and a key, which say what a kernel hides and what becomes of a score.

Text, or a Python function, becomes a typed tree (``nodes``). Everything else reads the tree: it is evaluated, bounded,
differentiated and printed as CUDA. Nothing is pasted as text.
"""
