"""Environment variables that are yes or no."""

from __future__ import annotations

import os

from codegen.wording import shown
from runtime.errors import ToolchainError


def flag(name: str, means: str) -> bool:
    """Whether a variable is 1; unset, empty and 0 are no.

    Args:
        name: of the variable.
        means: what 1 does, for the message.

    Raises:
        ToolchainError: for any other value.
    """
    given = os.environ.get(name, "")
    if given not in ("", "0", "1"):
        raise ToolchainError(f"{name} is {shown(given)}; 1 ({means}) or 0 is expected")
    return given == "1"
