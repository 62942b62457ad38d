"""GPUs by the names that people call them, and the architecture whose kernels each one gets."""

from __future__ import annotations

import re

from codegen.arch import ARCHS
from codegen.errors import SpecError
from codegen.wording import alternatives, shown

DEVICES = {arch.name: arch.devices for arch in ARCHS.values()}
"""Devices of each architecture."""


def device_names() -> list[str]:
    """Return the names of all devices, then those of architectures."""
    return [*(name for names in DEVICES.values() for name in names), *ARCHS]


def arch_of(device: str) -> str:
    """Return the architecture of a device.

    Args:
        device: its name, with or without the maker's, spaces and capitals; or that of an architecture.

    Raises:
        SpecError: if no kernel is known to be for it.
    """
    known = {_plain(name): arch for arch, names in DEVICES.items() for name in (*names, arch)}
    asked = re.sub(r"^(nvidia|geforce|tesla)+", "", _plain(device))
    if asked in known:
        return known[asked]
    raise SpecError("device", f"is {shown(device)}; {alternatives(device, device_names())}")


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
