"""Signed statements: DSSE envelopes (github.com/secure-systems-lab/dsse, protocol.md) around in-toto statements."""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from codegen.errors import CodegenError, FileError
from codegen.files import read_bytes
from codegen.plain import json_model, json_value
from codegen.wording import one_line
from runtime.tools.attest import keys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
MOST_BYTES = 16 << 20  # of an envelope; the envelope of all shipped kernels has less than one MiB


class _Signature(BaseModel):
    model_config = ConfigDict(strict=True)

    keyid: str = ""
    sig: str


class _Envelope(BaseModel):
    model_config = ConfigDict(strict=True)

    payloadType: str
    payload: str
    signatures: Annotated[list[_Signature], Field(min_length=1, max_length=64)]


def signed_bytes(payload: bytes) -> bytes:
    """The bytes to sign, DSSE's pre-authentication encoding: type and payload with their lengths."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def sealed(statement: dict[str, Any], key: Ed25519PrivateKey) -> str:
    """A statement in a signed envelope; deterministic for a statement and a key."""
    payload = json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()
    signature = {"keyid": keys.key_id(key.public_key()), "sig": _base64(key.sign(signed_bytes(payload)))}
    envelope = {"payloadType": PAYLOAD_TYPE, "payload": _base64(payload), "signatures": [signature]}
    return json.dumps(envelope, indent=2) + "\n"


def opened(path: Path, key: Ed25519PublicKey) -> Any:
    """The statement of an envelope, as JSON, after verifying its signature.

    Raises:
        FileError: if the file is not an envelope, or not signed by this key.
    """
    envelope = _read(path)
    if envelope.payloadType != PAYLOAD_TYPE:
        raise FileError(path, f"has a payload of type {one_line(envelope.payloadType)}, expected {PAYLOAD_TYPE}")
    payload = _decoded(path, "payload", envelope.payload)
    signatures = [_decoded(path, "signatures", each.sig) for each in envelope.signatures]
    if not any(keys.is_signed(key, signature, signed_bytes(payload)) for signature in signatures):
        raise FileError(path, f"is not signed by this key, {keys.key_id(key)}, or was changed afterwards")
    try:
        return json_value(payload)
    except CodegenError as error:
        raise FileError(path, f"its payload {error}") from None


def _read(path: Path) -> _Envelope:
    data = read_bytes(path, MOST_BYTES)
    try:
        return json_model(_Envelope, data)
    except CodegenError as error:
        raise FileError(path, f"is no DSSE envelope: {error}") from None


def _decoded(path: Path, field: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise FileError(path, f"is no DSSE envelope: {field} is not base64 ({error})") from None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
