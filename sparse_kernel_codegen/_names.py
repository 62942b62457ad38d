"""The check that ``codegen`` and ``runtime`` are the packages of this distribution.

Other projects have packages with these names too. A foreign one that comes first on ``sys.path`` would be imported
instead.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_BESIDE = Path(__file__).resolve().parents[1]
"""The folder that holds the packages of this distribution."""


def foreign() -> str | None:
    """Error message for the first package of another project; None if both packages are ours."""
    for name in ("codegen", "runtime"):
        found = _place_of(name)
        if found != _BESIDE / name:
            return (
                f"the module {name} is found at {found}, not at {_BESIDE / name}: "
                "rename that one, or take its folder out of PYTHONPATH or its package out of the environment"
            )
    return None


def _place_of(name: str) -> Path | None:
    """Folder of a package, or file of a module; None if there is none."""
    found = importlib.util.find_spec(name)
    if found is None:
        return None
    place = next(iter(found.submodule_search_locations or ()), found.origin)
    return None if place is None else Path(place).resolve()
