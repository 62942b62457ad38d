"""The parts of trees as a list, each once and operands first, for what goes over all of a tree without recursion."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.expressions.nodes import Item, Literal, Node, Variable, children


@dataclass(frozen=True)
class Part:
    """A node, and where its operands are.

    Attributes:
        node: the node; of equal ones, the first.
        operands: their places in the list, all before its own.
    """

    node: Node
    operands: tuple[int, ...]


class Parts:
    """A list that grows by trees. Parts that are equal are one, of several trees too."""

    def __init__(self) -> None:
        self.all: list[Part] = []
        self._places: dict[object, int] = {}
        # Nodes by identity: those of a derivative are shared, and would be walked over again and again. The nodes are
        # kept, for the identity of one that is gone may come again.
        self._known: dict[int, tuple[Node, int]] = {}

    def add(self, root: Node) -> int:
        """Add a tree and return the place of its root."""
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
    """The part of a node beside its operands: a leaf itself, the tensor of an element, or a name."""
    if isinstance(node, Item):
        return node.aux
    return node if isinstance(node, Literal | Variable) else node.name
