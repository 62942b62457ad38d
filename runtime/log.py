"""The log of the package: which kernel is chosen, where its code comes from, and what is compiled."""

from __future__ import annotations

import logging

from runtime.environment import flag

NAME = "sparse_kernel_codegen"
"""The logger. A compilation is of level INFO; choices and code that is there already are of level DEBUG."""
SHOW = "CODEGEN_LOG"
_LOGGER = logging.getLogger(NAME)
_LOGGER.addHandler(logging.NullHandler())
_HANDLER = logging.StreamHandler()
_HANDLER.setFormatter(logging.Formatter("codegen: %(message)s"))


def logger() -> logging.Logger:
    """The logger of the package, which CODEGEN_LOG=1 also shows on standard error.

    Raises:
        ToolchainError: for a value of the variable that is neither yes nor no.
    """
    if flag(SHOW, "the log is written to standard error") and _HANDLER not in _LOGGER.handlers:
        _LOGGER.addHandler(_HANDLER)
        _LOGGER.setLevel(logging.DEBUG)
    return _LOGGER
