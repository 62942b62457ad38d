"""Expressions and torch: FlexAttention's functions become trees, and torch evaluates trees.

Needs only torch, no GPU. :mod:`codegen.expressions.nodes` defines trees.
"""
