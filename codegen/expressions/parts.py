"""The parts of trees as a list, each once and operands first, for traversals without recursion."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.expressions.nodes import Item, Literal, Node, Variable, children


@dataclass(frozen=True)
class Part:
    """A node and the positions of its operands.

    Attributes:
        node: the node; the first one of equal nodes.
        operands: positions in the list, all less than its own.
    """

    node: Node
    operands: tuple[int, ...]


class Parts:
    """A growing list of the parts of trees. Equal parts are stored once, even across trees."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._places: dict[object, int] = {}
        # Nodes by identity: derivatives share nodes, which would be traversed repeatedly. The nodes are kept alive,
        # as the identity of a deleted node may be reused.
        self._known: dict[int, tuple[Node, int]] = {}

    def add(self, root: Node) -> int:
        """Add a tree and return the position of its root."""
        left = [root]
        while left:
            node = left[-1]
            unknown = [child for child in children(node) if id(child) not in self._known]
            if unknown:
                left += reversed(unknown)
                continue
            left.pop()
            if id(node) not in self._known:
                self._known[id(node)] = node, self._place(node)
        return self._known[id(root)][1]

    def _place(self, node: Node) -> int:
        operands = tuple(self._known[id(child)][1] for child in children(node))
        key = _key(node), operands
        if key not in self._places:
            self._places[key] = len(self.all)
            self.all.append(Part(node, operands))
        return self._places[key]


def _key(node: Node) -> object:
    """A node without its operands: a leaf, the tensor of an element, or an operation's name."""
    if isinstance(node, Item):
        return node.aux
    return node if isinstance(node, Literal | Variable) else node.name
