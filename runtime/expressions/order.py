"""The nodes of a tree in an order in which each comes behind what it is made of."""

from __future__ import annotations

from collections.abc import Iterator

from codegen.expressions.nodes import Node, children


def operands_first(node: Node) -> Iterator[Node]:
    """Yield the nodes of a tree, each once: a part that is shared is one object.

    Neither recursion nor a comparison of trees, so a tree may be as deep as it likes.
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
