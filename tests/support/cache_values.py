"""Kernels that were never compiled, for the tests of the cache."""

from __future__ import annotations

import hashlib
import struct
from typing import NoReturn

from runtime.compile.cache_entry import Entry, Identity

CODE, LOG = b"\x7fELF" + bytes(range(256)), "log of the compiler"


def identity(name: str) -> Identity:
    """Return the identity of a kernel that is known by its name alone."""
    return Identity(hashlib.sha256(name.encode()).hexdigest(), name, "sm_90a", "cubin")


def entry(name: str, code: bytes = CODE, log: str = LOG) -> Entry:
    """Return the entry of such a kernel."""
    return Entry(identity(name), log, code)


def build() -> tuple[bytes, str]:
    """Compile it."""
    return CODE, LOG


def build_never() -> NoReturn:
    """Fail: the entry is in the cache."""
    raise AssertionError("the entry is in the cache")


def acl_of(uid: int) -> bytes:
    """Return an access control list that lets another user read, write and search, as the kernel keeps it."""
    nobody = 0xFFFFFFFF
    entries = ((0x01, 7, nobody), (0x02, 7, uid), (0x04, 5, nobody), (0x10, 7, nobody), (0x20, 0, nobody))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
