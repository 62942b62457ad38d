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
"""The mode of this thread or task: a part of the key of whatever remembers kernels. None: by the environment."""


def is_on() -> bool:
    """Whether kernels without a receipt are refused here.

    Raises:
        ToolchainError: for a value of the environment that is neither yes nor no.
    """
    found = mode()
    return by_environment() if found is None else found


@cache
def by_environment() -> bool:
    """Whether CODEGEN_VERIFIED_ONLY was 1 when a process first chose a kernel: what is remembered depends on it.

    Raises:
        ToolchainError: for a value that is neither yes nor no.
    """
    return flag(VARIABLE, "refuses kernels without a receipt")


class KeptByMode(Generic[Given, Made]):
    """A function whose results are kept, those of each mode apart; the least recently used one goes first."""

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
        """Forget all results."""
        self._kept.cache_clear()


def kept_by_mode(most: int) -> Callable[[Callable[Given, Made]], KeptByMode[Given, Made]]:
    """Keep the results of a function that loads kernels: what one mode permits, another may refuse.

    Args:
        most: the number of results that are kept.
    """
    return lambda make: KeptByMode(make, most)


def verified_only(on: bool = True) -> AbstractContextManager[None]:
    """Refuse kernels without a receipt: ``with verified_only():``.

    Where a call, or ``load_kernel`` of a problem, would choose a kernel that has no receipt of its source as it is
    today, it takes the one with a receipt that computes the same, or raises ``UnverifiedError``. Receipts are those of
    the package and of the user's own folder (docs/guide/receipts.md). A kernel is checked when it is chosen and loaded:
    objects that ``load_kernel`` returned outside of the mode work in it.

    The mode is of the thread, or of the asyncio task, that entered it; a backward pass has that of its forward pass. In
    a region that torch.compile traces, and in threads that the program starts, ``CODEGEN_VERIFIED_ONLY=1`` says so for
    the process.

    Args:
        on: False allows all kernels within a region in which the mode is on.

    Returns:
        The context, for one ``with``.

    Raises:
        ArgumentError: for an ``on`` that is neither True nor False.
    """
    if not isinstance(on, bool):
        raise ArgumentError("on", f"is {shown(on)}, expected True or False")
    return entered(on)


@contextmanager
def entered(found: bool | None) -> Iterator[None]:
    """Set what ``mode`` returned elsewhere, for a block."""
    token = _mode.set(found)
    try:
        yield
    finally:
        _mode.reset(token)
