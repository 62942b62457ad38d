"""Ed25519 keys in PEM files, as openssl makes them; the boundary to ``cryptography``."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from codegen.errors import FileError
from codegen.files import read_bytes
from codegen.installation import install_command
from runtime.errors import ToolchainError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PASSWORD = "CODEGEN_KEY_PASSWORD"
"""Environment variable with the password of an encrypted private key."""
MOST_BYTES = 16 << 10
MAKE = "openssl genpkey -algorithm ed25519 -out key.pem"


def private_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key.

    Raises:
        FileError: if the file cannot be read, is not a private ed25519 key in PEM, or its password is wrong.
        ToolchainError: without ``cryptography``.
    """
    serialization, ed25519 = _modules()
    data, password = read_bytes(path, MOST_BYTES), os.environ.get(PASSWORD)
    try:
        key = serialization.load_pem_private_key(data, password.encode() if password else None)
    except TypeError:  # a password without an encrypted key, or an encrypted key without a password
        told = f"has no password, but {PASSWORD} is set" if password else f"has a password: set {PASSWORD} to it"
        raise FileError(path, told) from None
    except Exception as error:  # any error of malformed bytes
        raise FileError(path, f"is no private key in PEM ({_first_line(error)}); to make one: {MAKE}") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise FileError(path, f"is a key of another kind; ed25519 is wanted: {MAKE}")
    return cast("Ed25519PrivateKey", key)


def public_key(path: Path) -> Ed25519PublicKey:
    """Read a public key.

    Raises:
        FileError: if the file cannot be read, or is not a public ed25519 key in PEM.
        ToolchainError: without ``cryptography``.
    """
    serialization, ed25519 = _modules()
    data = read_bytes(path, MOST_BYTES)
    if b"PRIVATE KEY" in data:
        raise FileError(path, "is a private key; verification needs the public key: openssl pkey -in key.pem -pubout")
    try:
        key = serialization.load_pem_public_key(data)
    except Exception as error:  # any error of malformed bytes
        raise FileError(path, f"is no public key in PEM ({_first_line(error)})") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise FileError(path, "is a key of another kind; ed25519 is wanted")
    return cast("Ed25519PublicKey", key)


def key_id(key: Ed25519PublicKey) -> str:
    """SHA-256 of a public key (its DER): the key ID of signatures."""
    serialization, _ = _modules()
    formats = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(*formats)).hexdigest()


def is_signed(key: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    """Whether a key has signed a message."""
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415

    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


def require() -> None:
    """Check that the packages for attestations are installed.

    Raises:
        ToolchainError: if a package is not installed.
    """
    _modules()


def _modules() -> tuple[Any, Any]:
    try:
        import packaging  # noqa: F401, PLC0415 - parses requirements of packages
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    except ImportError as error:
        raise ToolchainError(
            f"attestations need cryptography and packaging ({error}): {install_command('attest')}"
        ) from None
    return serialization, ed25519


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
