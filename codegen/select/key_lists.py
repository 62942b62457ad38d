"""Kernels of attention over lists of keys and of its gradients: limits, and the specs of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from codegen.arch import ARCHS
from codegen.errors import SpecError
from codegen.spec import KeyListsBackwardSpec, KeyListsForwardSpec

OP, FORWARD = "key_lists_backward", "key_lists_forward"
LEAST_QUERIES, LEAST_OF_BLOCK = 1024, 32
"""Queries, and queries that list a key block on average, from which calls take the kernel by key blocks. It loads keys
once for all of them, but writes each query's parts of the result to device memory and reads them again. For 1024
queries of 64:4 heads of 128 and 16 blocks of 128 keys, it takes 0.157 ms on an H200, and the decode kernel 0.34. Fewer
queries were not measured, nor fewer of a key block."""


def _limits(spec: type[KeyListsBackwardSpec | KeyListsForwardSpec]) -> dict[str, tuple[int, ...]]:
    """Values of the fields of a spec."""
    return {field: get_args(spec.model_fields[field].annotation) for field in ("head_dim", "entry_keys", "group")}


LIMITS, FORWARD_LIMITS = _limits(KeyListsBackwardSpec), _limits(KeyListsForwardSpec)
"""Sizes that the kernels of gradients have, and those of a forward pass by key blocks, by field of the spec."""


def gradient_archs() -> tuple[str, ...]:
    """Architectures with kernels."""
    return tuple(name for name, arch in ARCHS.items() if arch.of(OP))


def gradient_fields(arch: str, dtype: str, *, head_dim: int, entry_keys: int, group: int) -> dict[str, Any]:
    """Fields of the spec of the gradients of a call.

    Raises:
        SpecError: names the first field that no kernel supports, its value and what is allowed.
    """
    sizes = {"arch": arch, "head_dim": head_dim, "entry_keys": entry_keys, "group": group}
    for name, allowed in {"arch": gradient_archs(), **LIMITS}.items():
        if sizes[name] not in allowed:
            choices = ", ".join(map(str, allowed))
            raise SpecError(name, f"is {sizes[name]}; gradients over lists of keys support {choices}")
    return {"op": OP, "arch": arch, "dtype": dtype, "head_dim": head_dim, "entry_keys": entry_keys, "group": group}


@dataclass(frozen=True)
class KeyListsCall:
    """What the choice of the kernels of a forward pass depends on.

    Attributes:
        arch: architecture of the GPU.
        dtype: type of q.
        head_dim: elements per head.
        entry_keys: keys of an entry.
        group: query heads per KV head.
        queries: queries of all sequences.
        keys: keys of all sequences.
        entries: entries of a list.
        options: whether there is anything else that the kernel by key blocks does not take.
        layout: of K and V: varlen or paged; keys are then those that requests have room for.
    """

    arch: str
    dtype: str
    head_dim: int
    entry_keys: int
    group: int
    queries: int
    keys: int
    entries: int
    options: bool = False
    layout: str = "varlen"

    def by_keys(self) -> bool:
        """Whether a call takes the kernel by key blocks; otherwise it takes the decode kernel."""
        sizes = {"head_dim": self.head_dim, "entry_keys": self.entry_keys, "group": self.group}
        fits = all(size in FORWARD_LIMITS[name] for name, size in sizes.items())
        dense = self.queries * self.entries * self.entry_keys >= LEAST_OF_BLOCK * self.keys
        many = self.queries >= LEAST_QUERIES and dense
        return bool(ARCHS[self.arch].of(FORWARD)) and fits and many and not self.options

    def kernel(self) -> tuple[tuple[str, Any], ...]:
        """Fields of the spec of the kernel by key blocks."""
        sizes = {"head_dim": self.head_dim, "entry_keys": self.entry_keys, "group": self.group}
        layout = {} if self.layout == "varlen" else {"layout": self.layout}
        return tuple({"op": FORWARD, "arch": self.arch, "dtype": self.dtype, **sizes, **layout}.items())
