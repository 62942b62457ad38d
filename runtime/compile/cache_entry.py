"""Cache entries: the file format of a compiled kernel, its key and its identity."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass

from codegen.wording import shown
from runtime.errors import CacheError

SCHEMA = "1"  # of the key: a new value changes every key
MAGIC = "codegen-kernel-2"  # of the file: a new value invalidates every stored entry
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
    """Identity of a compiled kernel. The entry stores all of it, so a misplaced file is detected.

    Attributes:
        key: the result of ``cache_key``.
        stem: the kernel's name, which is its symbol.
        arch: target architecture: "sm_90a", or "compute_89" for PTX.
        target: "cubin" or "ptx".
    """

    key: str
    stem: str
    arch: str
    target: str

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{64}", self.key):  # the key is a file name
            raise CacheError(f"key: is {shown(self.key)}; 64 hex digits are expected, as cache_key returns them")


@dataclass(frozen=True)
class Entry:
    """One compiled kernel.

    Attributes:
        identity: the kernel's identity.
        log: the compiler's log.
        code: the code itself.
        findings: later findings about the code, as JSON; "" without any.
    """

    identity: Identity
    log: str
    code: bytes
    findings: str = ""

    def pack(self) -> bytes:
        """Serialize an entry: the code first, so that CUDA's tools can read the file, then a footer with a digest."""
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
        """Parse an entry; None if the bytes are truncated or modified."""
        end = len(data) - _LENGTH_BYTES
        start = end - int.from_bytes(data[max(end, 0) :], "little")
        if start < 0:
            return None
        try:
            about = json.loads(data[start:end])
            identity = Identity(about["key"], about["stem"], about["arch"], about["target"])
            entry = cls(identity, about["log"], data[:start], about["findings"])
            "".join(about.values()).encode()  # all of them printable text
            intact = entry._footer() == data[start:]
        except (ValueError, KeyError, TypeError, RecursionError, CacheError):
            return None
        return entry if intact else None
