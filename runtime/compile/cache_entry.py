"""A compiled kernel as the cache stores it, and by what it is known."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass

from codegen.wording import shown
from runtime.errors import CacheError

SCHEMA = "1"  # of the key: another one makes every key another
MAGIC = "codegen-kernel-2"  # of the file: another one makes every stored entry count as absent
_LENGTH_BYTES = 8


def cache_key(
    *, spec: str, source: str, compiler: str, options: tuple[str, ...], headers: str, target: str, schema: str = SCHEMA
) -> str:
    """Return the SHA-256 over everything a kernel's code depends on, each part labeled and length-prefixed.

    Args:
        spec: canonical JSON of the spec.
        source: the rendered CUDA.
        compiler: compiler and package version.
        options: compiler options in order, without folders.
        headers: digest of the included headers' content.
        target: "cubin" or "ptx".
        schema: version of this layout.
    """
    digest = hashlib.sha256()
    parts = {
        "schema": schema,
        "spec": spec,
        "source": source,
        "compiler": compiler,
        "headers": headers,
        "target": target,
    }
    for label, value in [*parts.items(), *((f"option {i}", option) for i, option in enumerate(options))]:
        data = value.encode()
        digest.update(f"{label}:{len(data)}:".encode() + data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Identity:
    """By what a compiled kernel is known. All of it is in the entry: one that was put in another's place is noticed.

    Attributes:
        key: what ``cache_key`` returns.
        stem: the kernel's name, which is its symbol.
        arch: what it was compiled for: "sm_90a", of PTX "compute_89".
        target: "cubin" or "ptx".
    """

    key: str
    stem: str
    arch: str
    target: str

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{64}", self.key):  # it is the name of a file
            raise CacheError(f"key: is {shown(self.key)}; 64 hex digits are expected, as cache_key returns them")


@dataclass(frozen=True)
class Entry:
    """One compiled kernel.

    Attributes:
        identity: by what it is known.
        log: the compiler's log.
        code: the code itself.
        findings: what was found out about the code since, as JSON; "" if nothing was.
    """

    identity: Identity
    log: str
    code: bytes
    findings: str = ""

    def pack(self) -> bytes:
        """Return the entry as bytes: the code, so that CUDA's tools can read the file, then a footer with a digest."""
        return self.code + self._footer()

    def _footer(self) -> bytes:
        about = {"magic": MAGIC, "log": self.log, "findings": self.findings, **asdict(self.identity)}
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode() + b"\n")
        digest.update(self.code)
        about["sha256"] = digest.hexdigest()
        footer = json.dumps(about, sort_keys=True).encode()
        return footer + len(footer).to_bytes(_LENGTH_BYTES, "little")

    @classmethod
    def unpack(cls, data: bytes) -> Entry | None:
        """Return the entry, or None when the bytes are not a whole, untouched entry."""
        end = len(data) - _LENGTH_BYTES
        start = end - int.from_bytes(data[max(end, 0) :], "little")
        if start < 0:
            return None
        try:
            about = json.loads(data[start:end])
            identity = Identity(about["key"], about["stem"], about["arch"], about["target"])
            entry = cls(identity, about["log"], data[:start], about["findings"])
            "".join(about.values()).encode()  # all of them text that can be printed
            intact = entry._footer() == data[start:]
        except (ValueError, KeyError, TypeError, RecursionError, CacheError):
            return None
        return entry if intact else None
