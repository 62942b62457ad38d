"""The log of the package: chosen kernels, the origin of their code, and compilations."""

from __future__ import annotations

import logging

from runtime.environment import flag

NAME = "sparse_kernel_codegen"
"""The logger. Compilations have level INFO; choices and existing code have level DEBUG."""
SHOW = "CODEGEN_LOG"
_LOGGER = logging.getLogger(NAME)
_LOGGER.addHandler(logging.NullHandler())
_HANDLER = logging.StreamHandler()
_HANDLER.setFormatter(logging.Formatter("codegen: %(message)s"))


def logger() -> logging.Logger:
    """The logger of the package, which CODEGEN_LOG=1 also prints to standard error.

    Raises:
        ToolchainError: if CODEGEN_LOG is neither 0 nor 1.
    """
    if flag(SHOW, "write the log to standard error") and _HANDLER not in _LOGGER.handlers:
        _LOGGER.addHandler(_HANDLER)
        _LOGGER.setLevel(logging.DEBUG)
    return _LOGGER
