"""Expressions and torch: functions as FlexAttention has them become trees, and torch evaluates trees.

Needs torch alone, no GPU. What a tree is: :mod:`codegen.expressions.nodes`.
"""
