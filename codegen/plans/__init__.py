"""One module per kernel template: from a spec to its plan. ``codegen.operators`` says which one a spec has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codegen.planning import plan_for, plan_of

__all__ = ["plan_for", "plan_of"]


def __getattr__(name: str) -> Any:
    """Import what the package offers, which is above its modules."""
    if name in __all__:
        from codegen import planning  # noqa: PLC0415 - the operators import the modules of this package

        return getattr(planning, name)
    raise AttributeError(f"module 'codegen.plans' has no attribute {name!r}")
