"""Import of optional packages, when an integration is registered."""

from __future__ import annotations

import importlib
from types import ModuleType

from codegen.installation import install_command
from runtime.errors import ToolchainError


def optional(module: str, extra: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: its full name, such as ``transformers.masking_utils``.
        extra: the extra of this package's pyproject.toml that installs it.

    Raises:
        ToolchainError: naming the extra, if the package is missing or has no such module.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package, install = module.partition(".")[0], install_command(extra)
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        what = "which is not installed" if missing else f"and the installed one does not import ({error})"
        raise ToolchainError(f"sparse_kernel_codegen.integrations needs {package}, {what}: {install}") from None
