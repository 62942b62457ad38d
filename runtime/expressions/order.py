"""Topological order of a tree's nodes: operands first."""

from __future__ import annotations

from collections.abc import Iterator

from codegen.expressions.nodes import Node, children


def operands_first(node: Node) -> Iterator[Node]:
    """Yield each node of a tree once; a shared part is one object.

    Without recursion or comparison of trees, so that trees may have any depth.
    """
    left, seen = [(node, False)], set[int]()
    while left:
        one, is_ready = left.pop()
        if id(one) in seen:
            continue
        if is_ready:
            seen.add(id(one))
            yield one
        else:
            left.append((one, True))
            left += [(child, False) for child in reversed(children(one))]
