"""Registration of the attention backend in vLLM."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

from codegen.installation import install_command
from runtime.errors import ToolchainError
from runtime.integrations.packages import optional
from runtime.integrations.vllm.layers import NAME
from runtime.log import logger

VERSIONS = ("0.32", "0.33")
"""Series of vLLM releases whose interface the tests have seen."""
BACKEND = "runtime.integrations.vllm.registration.PagedBackend"
"""Path that vLLM resolves when a layer selects the backend."""
REGISTRY = "vllm.v1.attention.backends.registry"


def register_vllm() -> None:
    """Register the attention backend as ``CUSTOM`` in vLLM.

    ``--attention-backend CUSTOM`` then selects it. A server needs no call of this function: the package has an entry
    point that vLLM calls in each process.

    Raises:
        ToolchainError: if vLLM is not installed, if its version is not one of ``VERSIONS``, or if another package has
            registered ``CUSTOM``.
    """
    check_version()
    owner = _register()
    if owner != BACKEND:
        raise ToolchainError(
            f"vLLM's attention backend {NAME} is {owner}, of another package: uninstall one of the two"
        )


def plugin() -> None:
    """Register the backend: the entry point ``block_sparse`` in the group ``vllm.general_plugins``.

    vLLM calls it in each process, also where another backend is used. Therefore it raises no error: with an untested
    version of vLLM, the error is raised when a layer selects the backend.
    """
    try:
        owner = _register()
    except ToolchainError as error:
        logger().warning("%s", error)
        return
    if owner != BACKEND:
        logger().warning("vLLM's attention backend %s is %s, of another package", NAME, owner)


def check_version() -> None:
    """Check the version of vLLM.

    Raises:
        ToolchainError: naming the versions that work.
    """
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        what = f"needs vLLM {' or '.join(VERSIONS)}, which is not installed"
        raise ToolchainError(f"sparse_kernel_codegen.integrations.vllm {what}: {install_command('vllm')}") from None
    found = re.match(r"\d+\.\d+(?=\.|$)", version)
    if found is None or found.group() not in VERSIONS:
        works = " and ".join(f"{series}.*" for series in VERSIONS)
        raise ToolchainError(
            f"sparse_kernel_codegen's attention backend is tested with vLLM {works}, and {version} is installed: "
            f"install one of these, or select another --attention-backend"
        )


def __getattr__(name: str) -> Any:
    """The class of the backend, imported after the version of vLLM is checked.

    Raises:
        ToolchainError: for an untested version.
    """
    if name != BACKEND.rpartition(".")[2]:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    from runtime.integrations.vllm.backend import PagedBackend  # noqa: PLC0415 - needs vLLM

    return PagedBackend


def _register() -> str:
    """Register the backend unless another package has done so; return the path of the registered class."""
    registry = optional(REGISTRY, "vllm")
    custom = registry.AttentionBackendEnum[NAME]
    if not custom.is_overridden():
        registry.register_backend(custom, BACKEND)
    path: str = custom.get_path()
    return path
