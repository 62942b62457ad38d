"""GPUs by the names that people call them, and the architecture whose kernels each one gets."""

from __future__ import annotations

import re

from codegen.arch import ARCHS
from codegen.errors import SpecError
from codegen.wording import alternatives, shown

DEVICES = {
    "sm_80": ("A100", "A30"),
    "sm_86": ("A10", "A40", "A6000", "RTX 3080", "RTX 3090"),
    "sm_89": ("L4", "L40", "L40S", "RTX 4080", "RTX 4090", "RTX 6000 Ada"),
    "sm_90a": ("H100", "H200", "H800", "H20", "GH200"),
    "sm_120": ("RTX 5080", "RTX 5090", "RTX PRO 6000"),
}
"""Devices of each architecture, of compute capability 8.0, 8.6, 8.9, 9.0 and 12.0 by NVIDIA's list of CUDA GPUs."""


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
