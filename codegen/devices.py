"""GPUs by their common names, and the architecture of each."""

from __future__ import annotations

import re

from codegen.arch import ARCHS
from codegen.errors import SpecError
from codegen.wording import alternatives, shown

DEVICES = {arch.name: arch.devices for arch in ARCHS.values()}
"""Devices of each architecture."""


DATA_CENTER_BLACKWELL = "data-center Blackwell GPUs (B200, B300, GB200: sm_100, sm_103) are not supported"


def is_data_center_blackwell(device: str) -> bool:
    """Whether a name is that of a data-center Blackwell GPU or of its architecture."""
    return re.fullmatch(r"g?b(100|200|300)(nvl\d*)?|sm10[0-3][af]?|blackwell", _short(device)) is not None


def device_names() -> list[str]:
    """Names of all devices, then those of architectures."""
    return [*(name for names in DEVICES.values() for name in names), *ARCHS]


def arch_of(device: str) -> str:
    """Architecture of a device.

    Args:
        device: its name, with or without the maker's, spaces and capitals; or the name of an architecture.

    Raises:
        SpecError: for a device without kernels, or an unknown one.
    """
    known = {_plain(name): arch for arch, names in DEVICES.items() for name in (*names, arch)}
    asked = _short(device)
    if asked in known:
        return known[asked]
    if is_data_center_blackwell(device):
        raise SpecError("device", f"is {shown(device)}; {DATA_CENTER_BLACKWELL}")
    raise SpecError("device", f"is {shown(device)}; {alternatives(device, device_names())}")


def _short(name: str) -> str:
    """A name without the maker's, spaces and capitals."""
    return re.sub(r"^(nvidia|geforce|tesla)+", "", _plain(name))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
