"""Registration of the attention backends in SGLang's diffusion runtime."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from runtime.errors import ArgumentError, ToolchainError
from runtime.integrations.enumerations import add_member
from runtime.integrations.packages import optional
from runtime.integrations.sglang.diffusion import ELSEWHERE, NAME, OPTION, check_device, settings_of
from runtime.integrations.sglang.registration import check_version
from runtime.log import logger

PLATFORMS = "sglang.multimodal_gen.runtime.platforms"
PLUGINS = "sglang.multimodal_gen.runtime.platforms.plugins"
SELECTOR = "sglang.multimodal_gen.runtime.layers.attention.selector"
SERVER_ARGS = "sglang.multimodal_gen.runtime.server_args.server_args"
CHOICE = f"{SELECTOR}._cached_get_attn_backend"
"""The function that turns a name of a backend into its class."""
ADJUSTMENT = f"{SERVER_ARGS}.ServerArgs._adjust_attention_backend"
"""The function that checks names of backends with ring parallelism."""
MEMBER = NAME.upper()
VSA = "VIDEO_SPARSE_ATTN"
TRANSFORMER = "transformer"
"""Name of the component whose layers may have a pattern; a second one has another ending."""
_added: set[Any] = set()


def plugin() -> None:
    """Register the backends: the entry point ``block_sparse`` in the group ``sglang.multimodal_gen.plugins``.

    SGLang calls it in each process, also where another backend is used. Therefore it raises no error: with an untested
    version of SGLang it logs a warning, and SGLang has no such backend.
    """
    try:
        register()
    except ToolchainError as error:
        logger().warning("%s", error)


def register() -> None:
    """Add ``block_sparse`` to the names of SGLang's diffusion backends, and hooks for its class and for rings.

    Raises:
        ToolchainError: if SGLang is not installed, if its version is not tested, or if it has another backend with this
            name.
    """
    check_version()
    names, plugins = optional(PLATFORMS, "sglang").AttentionBackendEnum, optional(PLUGINS, "sglang")
    if MEMBER in names.__members__:
        if names[MEMBER] not in _added:
            raise ToolchainError(f"SGLang's diffusion backend {NAME} is of another package: uninstall one of the two")
        return
    value = max(each.value for each in names) + 1
    _added.add(add_member(names, object.__new__(names), MEMBER, value))
    plugins.HookRegistry.register(CHOICE, choose, plugins.HookType.AROUND)
    plugins.HookRegistry.register(ADJUSTMENT, offer_rings, plugins.HookType.BEFORE)


def choose(original: Any, head_size: int, dtype: torch.dtype, supported: Any, selected: Any) -> Any:
    """The class of a backend: a hook around SGLang's function.

    Args:
        original: SGLang's function.
        head_size: of the layer.
        dtype: of the layer.
        supported: backends that SGLang may choose by itself.
        selected: a backend by name; None to let SGLang choose.

    Raises:
        ArgumentError: for a layer or a setting that is not supported, naming it. For the transformer, it ends the start
            of the server; for other components, SGLang chooses another backend and logs it.
    """
    name = getattr(selected, "name", None)
    if name not in (MEMBER, VSA):
        return original(head_size, dtype, supported, selected)
    server_args = importlib.import_module(SERVER_ARGS).get_global_server_args()
    if name == VSA and (server_args.attention_backend_config or {}).get("kernels") is None:
        return original(head_size, dtype, supported, selected)
    check_device(head_size, dtype)
    settings = settings_of(server_args)
    settings.check()
    component = importlib.import_module(SELECTOR).get_component_attn_backend_name()
    of_video = name == VSA or settings.pattern is not None
    if of_video and component is not None and not component.startswith(TRANSFORMER):
        what = "--attention-backend" if name == VSA else f"{OPTION} pattern"
        raise ArgumentError(what, f"is for videos, and {component} has none: {ELSEWHERE} for it")
    backend = importlib.import_module("runtime.integrations.sglang.diffusion_backend")
    return backend.BlockSparseBackend if name == MEMBER else backend.VideoSparseBackend


def offer_rings(*arguments: Any, **options: Any) -> None:
    """Add the backend to those of ring attention: a hook before SGLang checks names.

    Args:
        arguments: SGLang's, not read.
        options: SGLang's, not read.
    """
    server_args: Any = importlib.import_module(SERVER_ARGS)
    names = server_args.RING_CAPABLE_ATTENTION_BACKENDS
    if NAME not in names:
        server_args.RING_CAPABLE_ATTENTION_BACKENDS = (*names, NAME)
