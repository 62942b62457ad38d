"""Where the ``codegen`` command begins: a module with a name of its own.

``codegen`` and ``runtime`` are names that other packages have too. Where one of those is found first, this says so.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Run the command line."""
    here = Path(__file__).resolve().parent
    for name in ("codegen", "runtime"):
        found = _place_of(name)
        if found != here / name:
            sys.stderr.write(
                f"error: the module {name} is found at {found}, not at {here / name}: "
                f"rename that one, or take its folder out of PYTHONPATH or its package out of the environment\n"
            )
            raise SystemExit(2)
    from runtime.cli import main as run  # noqa: PLC0415 - not before the names are known to be ours

    run()


def _place_of(name: str) -> Path | None:
    """Return the folder of a package, or the file of a module."""
    found = importlib.util.find_spec(name)
    if found is None:
        return None
    place = next(iter(found.submodule_search_locations or ()), found.origin)
    return None if place is None else Path(place).resolve()


if __name__ == "__main__":
    main()
