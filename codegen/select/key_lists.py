"""Kernels of the gradients of attention over lists of keys: limits, and the spec of a call."""

from __future__ import annotations

from typing import Any, get_args

from codegen.arch import ARCHS
from codegen.errors import SpecError
from codegen.spec import KeyListsBackwardSpec

OP = "key_lists_backward"


def _sizes(field: str) -> tuple[int, ...]:
    """Values of a field of the spec."""
    return tuple(get_args(KeyListsBackwardSpec.model_fields[field].annotation))


LIMITS = {field: _sizes(field) for field in ("head_dim", "entry_keys", "group")}
"""Sizes that the kernels have, by field of the spec."""


def gradient_archs() -> tuple[str, ...]:
    """Architectures with kernels."""
    return tuple(name for name, arch in ARCHS.items() if arch.of(OP))


def gradient_fields(
    arch: str, dtype: str, *, head_dim: int, entry_keys: int, group: int, deterministic: bool = True
) -> dict[str, Any]:
    """Fields of the spec of the gradients of a call.

    Raises:
        SpecError: names the first field that no kernel supports, its value and what is allowed.
    """
    sizes = {"arch": arch, "head_dim": head_dim, "entry_keys": entry_keys, "group": group}
    for name, allowed in {"arch": gradient_archs(), **LIMITS}.items():
        if sizes[name] not in allowed:
            choices = ", ".join(map(str, allowed))
            raise SpecError(name, f"is {sizes[name]}; gradients over lists of keys support {choices}")
    fields = {"op": OP, "arch": arch, "dtype": dtype, "head_dim": head_dim, "entry_keys": entry_keys, "group": group}
    return fields if deterministic else {**fields, "deterministic": False}
