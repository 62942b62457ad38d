"""verified_only: a mode in which kernels without a receipt are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any, Generic, ParamSpec, TypeVar

from codegen.wording import shown
from runtime.environment import flag
from runtime.errors import ArgumentError

Given = ParamSpec("Given")
Made = TypeVar("Made")

VARIABLE = "CODEGEN_VERIFIED_ONLY"
KERNELS_KEPT = 128
_mode: ContextVar[bool | None] = ContextVar("verified_only", default=None)

mode = _mode.get
"""The mode of this thread or task, part of the key of every cache of kernels. None: the environment decides."""


def is_on() -> bool:
    """Whether kernels without a receipt are refused in this thread or task.

    Raises:
        ToolchainError: if the environment variable is neither 0 nor 1.
    """
    found = mode()
    return by_environment() if found is None else found


@cache
def by_environment() -> bool:
    """Whether CODEGEN_VERIFIED_ONLY was 1 when the process first chose a kernel. Cached choices depend on it.

    Raises:
        ToolchainError: if the value is neither 0 nor 1.
    """
    return flag(VARIABLE, "refuses kernels without a receipt")


class KeptByMode(Generic[Given, Made]):
    """A function with an LRU cache of its results, separate for each mode."""

    def __init__(self, make: Callable[Given, Made], most: int) -> None:
        self._make, self.__doc__ = make, make.__doc__
        self._kept: Any = lru_cache(maxsize=most)(self._made)

    def __call__(self, *arguments: Given.args, **options: Given.kwargs) -> Made:
        """The result in the current mode."""
        found: Made = self._kept(mode(), *arguments, **options)
        return found

    def _made(self, _mode: bool | None, *arguments: Given.args, **options: Given.kwargs) -> Made:
        return self._make(*arguments, **options)

    def cache_clear(self) -> None:
        """Clear the cache."""
        self._kept.cache_clear()


def kept_by_mode(most: int) -> Callable[[Callable[Given, Made]], KeptByMode[Given, Made]]:
    """Cache the results of a function that loads kernels, separately for each mode.

    Args:
        most: size of the cache.
    """
    return lambda make: KeptByMode(make, most)


def verified_only(on: bool = True) -> AbstractContextManager[None]:
    """Refuse kernels without a receipt: ``with verified_only():``.

    If a call, or ``load_kernel`` of a problem, would choose a kernel without a receipt of its current source, it takes
    a kernel with a receipt that computes the same result, or raises ``UnverifiedError``. Receipts in the package and in
    the user's own folder count (docs/guide/receipts.md). A kernel is checked when it is chosen and loaded: objects that
    ``load_kernel`` returned outside the mode work inside it.

    The mode applies to the thread or asyncio task that entered it; a backward pass has the mode of its forward pass. It
    does not reach regions that torch.compile traces, threads that the program starts, or forward passes that
    ``torch.utils.checkpoint`` recomputes on a GPU: ``CODEGEN_VERIFIED_ONLY=1`` covers the whole process.

    Args:
        on: False allows all kernels again inside a region with the mode on.

    Returns:
        A context manager for one ``with`` statement.

    Raises:
        ArgumentError: if ``on`` is neither True nor False.
    """
    if not isinstance(on, bool):
        raise ArgumentError("on", f"is {shown(on)}, expected True or False")
    return entered(on)


@contextmanager
def entered(found: bool | None) -> Iterator[None]:
    """Apply a result of ``mode`` within a block."""
    token = _mode.set(found)
    try:
        yield
    finally:
        _mode.reset(token)
