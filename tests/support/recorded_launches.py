"""What launches are given, by checked calls and by kept launches."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from runtime.driver.workspace import NO_MEMORY


def record(monkeypatch: pytest.MonkeyPatch, checked: tuple[ModuleType, ...], kept: ModuleType) -> list[dict[str, Any]]:
    """Note each launch instead of making it: its signature, memory, whether it was kept, addresses that it reads.

    Args:
        monkeypatch: ends this.
        checked: modules of kernel objects.
        kept: the module of their kept launches.
    """
    found: list[dict[str, Any]] = []
    for module in (*checked, kept):

        def note(
            loaded: Any,
            signature: Any,
            addresses: Any,
            device: Any,
            memory: Any = NO_MEMORY,
            *,
            prologue: bool = True,
            is_kept: bool = module is kept,
        ) -> None:
            names = {name for name, _ in signature.pointers} | {tensor_map.name for tensor_map in signature.maps}
            own = {*memory.unused, *(name for name, _ in (*memory.counter_places, *memory.scratch_places))}
            read = {name: addresses.get(name) for name in names - own}
            found.append(
                {"signature": signature, "memory": memory, "prologue": prologue, "kept": is_kept, "read": read}
            )

        monkeypatch.setattr(module, "enqueue", note)
    return found
