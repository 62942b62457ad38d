"""Common names of GPUs, and the architecture of each."""

from __future__ import annotations

import re

from codegen.arch import ARCHS
from codegen.errors import SpecError
from codegen.wording import alternatives, shown

DEVICES = {arch.name: arch.devices for arch in ARCHS.values()}
"""Devices of each architecture."""


def device_names() -> list[str]:
    """Names of all devices, then those of architectures."""
    return [*(name for names in DEVICES.values() for name in names), *ARCHS]


def arch_of(device: str) -> str:
    """Architecture of a device.

    Args:
        device: name of a GPU, with or without ``NVIDIA``, spaces and capitals; or of an architecture.

    Raises:
        SpecError: if no architecture is known for it.
    """
    known = {_plain(name): arch for arch, names in DEVICES.items() for name in (*names, arch)}
    asked = re.sub(r"^(nvidia|geforce|tesla)+", "", _plain(device))
    if asked in known:
        return known[asked]
    raise SpecError("device", f"is {shown(device)}; {alternatives(device, device_names())}")


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
