"""Registration of the attention backend in SGLang."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from codegen.installation import install_command
from runtime.errors import ToolchainError
from runtime.integrations.packages import optional
from runtime.integrations.sglang.layers import NAME
from runtime.log import logger

VERSIONS = ("0.5.22", "0.5.23")
"""Versions of SGLang whose interface the tests have seen."""
REGISTRY = "sglang.srt.layers.attention.attention_registry"
CHOICES = "sglang.srt.arg_groups.choices"
HOOKS = "sglang.srt.plugins.hook_registry"
DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
"""The function that creates backends of draft models, from SGLang's own ones."""


def register_sglang() -> None:
    """Register the attention backend as ``block_sparse`` in SGLang.

    ``--attention-backend block_sparse`` then selects it. A server needs no call of this function: the package has an
    entry point that SGLang calls in each process.

    Raises:
        ToolchainError: if SGLang is not installed, if its version is not one of ``VERSIONS``, or if another package has
            registered ``block_sparse``.
    """
    check_version()
    registry, choices = optional(REGISTRY, "sglang"), optional(CHOICES, "sglang")
    is_new = NAME not in registry.ATTENTION_BACKENDS
    owner = registry.ATTENTION_BACKENDS.setdefault(NAME, create)
    if owner is not create:
        raise ToolchainError(
            f"SGLang's attention backend {NAME} is of {owner.__module__}, of another package: uninstall one of the two"
        )
    registry.register_attention_backend(NAME)(create)
    if is_new:
        hooks = optional(HOOKS, "sglang")
        hooks.HookRegistry.register(DRAFTS, offer_drafts, hooks.HookType.BEFORE)
    for names, add in (
        (choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices),
        (choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES, choices.add_deterministic_attention_backend_choices),
    ):
        if NAME not in names:
            add([NAME])


def plugin() -> None:
    """Register the backend: the entry point ``block_sparse`` in the group ``sglang.srt.plugins``.

    SGLang calls it in each process, also where another backend is used. Therefore it raises no error: with an untested
    version of SGLang it logs a warning, and SGLang has no such backend.
    """
    try:
        register_sglang()
    except ToolchainError as error:
        logger().warning("%s", error)


def check_version() -> None:
    """Check the version of SGLang.

    Raises:
        ToolchainError: naming the versions that work.
    """
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        what = f"needs SGLang {' or '.join(VERSIONS)}, which is not installed"
        raise ToolchainError(f"sparse_kernel_codegen.integrations {what}: {install_command('sglang')}") from None
    if version.partition("+")[0] not in VERSIONS:
        raise ToolchainError(
            f"sparse_kernel_codegen's attention backend is tested with SGLang {' and '.join(VERSIONS)}, and {version} "
            f"is installed: install one of these, or select another --attention-backend"
        )


def create(runner: Any) -> Any:
    """The backend of a model.

    Args:
        runner: SGLang's model runner.

    Raises:
        ArgumentError: for a model or a setting that is not supported, naming it.
    """
    from runtime.integrations.sglang.backend import PagedBackend  # noqa: PLC0415 - needs SGLang

    return PagedBackend(runner)


def offer_drafts(
    factory: Any, name: str, backends: dict[str, Any], message: str, stamps_children: bool = False
) -> None:
    """Add the backend to those of draft models: a hook before SGLang looks for one by its name.

    Args:
        factory: SGLang's, of the draft model.
        name: not read.
        backends: functions that create a backend, by its name; each returns the name and the backend.
        message: not read.
        stamps_children: whether a backend of several steps is created, or one that extends the cache.

    Raises:
        ArgumentError: by those functions, as :func:`create`.
    """
    from runtime.integrations.sglang.backend import PagedBackend, PagedDraftBackend  # noqa: PLC0415 - needs SGLang

    runner, steps = factory.draft_model_runner, factory.speculative_num_steps
    backends[NAME] = lambda: (NAME, PagedDraftBackend(runner, steps) if stamps_children else PagedBackend(runner))
