"""Boolean environment variables."""

from __future__ import annotations

import os

from codegen.wording import shown
from runtime.errors import ToolchainError


def flag(name: str, means: str) -> bool:
    """Whether a variable is 1. Unset, empty and 0 mean no.

    Args:
        name: name of the variable.
        means: effect of 1, for the message.

    Raises:
        ToolchainError: if it has any other value.
    """
    given = os.environ.get(name, "")
    if given not in ("", "0", "1"):
        raise ToolchainError(f"{name} is {shown(given)}; expected 1 ({means}) or 0")
    return given == "1"
