"""Attention for the continuous batching of Hugging Face transformers: ``generate_batch`` and its managers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from codegen.installation import install_command
from runtime.errors import ArgumentError, ToolchainError
from runtime.integrations.choosers import Chooser
from runtime.integrations.packages import optional
from runtime.integrations.transformers_attention import FUNCTIONS, TransformersAttention
from runtime.integrations.transformers_masks import MaskInterface

BATCHING = "block_sparse_flash_2"
"""Name of the implementation. Transformers batches implementations of other packages if their name has "flash", and
passes a block table if "2" or "3" follows."""
VERSIONS = ("5.24",)
"""Series of transformers releases whose interface the tests have seen."""
FLASH = "transformers.modeling_flash_attention_utils"


def register_transformers_batching(*, pattern_for: Chooser | None = None) -> None:
    """Register ``attn_implementation="block_sparse_flash_2"`` in transformers, for continuous batching.

    A step in which each request has one query and the cache has a block table is computed by ``paged_attention`` over
    the pages. In all other steps, transformers gathers the keys of a batch, and ``varlen_attention`` computes them:
    prompts, chunks of prompts, mixed batches, models with sliding windows, and requests with more than
    ``max_blocks_per_request`` pages. Softcaps and sink logits are applied. Weights must be float16 or bfloat16. Calls
    outside of a batch are those of :func:`register_transformers`.

    Transformers loads each implementation whose name has "flash" from a package. This function adds the name to its
    loader, ``transformers.modeling_flash_attention_utils._lazy_imports``.

    Args:
        pattern_for: as for :func:`register_transformers`, for layers without a sliding window. It must return ``exact``
            or a pattern of ``varlen_attention``, and k has only those keys that transformers passes.

    Raises:
        ToolchainError: if transformers is not installed, or its version is not one of ``VERSIONS``.
        ArgumentError: naming the argument.
    """
    functions, interface = optional(FUNCTIONS, "transformers"), MaskInterface.of_package()
    check_version()
    if pattern_for is not None and not callable(pattern_for):
        raise ArgumentError("pattern_for", f"is {type(pattern_for).__name__}, expected a function or None")
    flash: Any = optional(FLASH, "transformers")
    if not isinstance(flash._lazy_imports, _Loader):
        flash._lazy_imports = _Loader(flash, flash._lazy_imports)
    functions.AttentionInterface.register(BATCHING, TransformersAttention(pattern_for))
    interface.masks.AttentionMaskInterface.register(BATCHING, interface)


def check_version() -> None:
    """Check the version of transformers.

    Raises:
        ToolchainError: naming the versions that work.
    """
    version = str(optional("transformers", "transformers").__version__)
    found = re.match(r"\d+\.\d+(?=\.|$)", version)
    if found is None or found.group() not in VERSIONS:
        works = " and ".join(f"{series}.*" for series in VERSIONS)
        raise ToolchainError(
            f"the continuous batching of sparse_kernel_codegen is tested with transformers {works}, and {version} is "
            f"installed: {install_command('transformers')}"
        )


@dataclass(frozen=True)
class _Loader:
    """Loader of the functions of implementations, which adds one to those of transformers.

    Attributes:
        flash: ``transformers.modeling_flash_attention_utils``.
        theirs: transformers' loader.
    """

    flash: ModuleType
    theirs: Callable[..., Any]

    def __call__(self, implementation: str | None, *arguments: Any, **options: Any) -> Any:
        """Functions for whole sequences, for packed ones and for pages, and those that pad."""
        if implementation != BATCHING:
            return self.theirs(implementation, *arguments, **options)
        return _refused, _refused, _refused, self.flash._pad_input, self.flash._unpad_input


def _refused(q: Any, k: Any, v: Any, **options: Any) -> NoReturn:
    """Refuse a model that calls FlashAttention's functions without transformers' attention interface."""
    reason = f"is {BATCHING}, and the model calls FlashAttention itself: use its own implementation"
    raise ArgumentError("attn_implementation", reason)
