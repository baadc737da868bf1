"""Signatures of webhook messages: HMAC-SHA256 over `timestamp.body`, in `X-Comfyfleet-Signature:
t=…,v1=…`. Pure."""

import hashlib
import hmac
from collections.abc import Iterable
from typing import NamedTuple

HEADER = "X-Comfyfleet-Signature"
TOLERANCE_SECONDS = 300
PARTS_MAX = 10


def sign(secret: str, body: bytes, *, timestamp: int) -> str:
    """Returns the value of the signature header."""
    return f"t={timestamp},v1={_mac(secret, body, timestamp)}"


def is_signature_valid(
    secret: str,
    body: bytes,
    header: str,
    *,
    now: int,
    tolerance_seconds: int = TOLERANCE_SECONDS,
) -> bool:
    """Checks a signature, for receivers. The header may have several `v1` values while a secret is
    being replaced."""
    signature = verified_signature(
        secret, body, header, now=now, tolerance_seconds=tolerance_seconds
    )
    return signature is not None


class Signature(NamedTuple):
    """A verified signature. Equal signatures belong to the same delivery, regardless of how the
    header was written."""

    timestamp: int
    mac: str


def verified_signature(
    secret: str,
    body: bytes,
    header: str,
    *,
    now: int,
    tolerance_seconds: int = TOLERANCE_SECONDS,
) -> Signature | None:
    """Returns the signature of a body, or None if the header contains no valid one."""
    parts = [part.strip().partition("=") for part in header.split(",", PARTS_MAX)[:PARTS_MAX]]
    timestamp = _timestamp(value for name, _, value in parts if name == "t")
    if timestamp is None or abs(now - timestamp) > tolerance_seconds:
        return None
    mac = _mac(secret, body, timestamp)
    macs = [value.encode() for name, _, value in parts if name == "v1"]
    is_valid = any(hmac.compare_digest(mac.encode(), candidate) for candidate in macs)
    return Signature(timestamp, mac) if is_valid else None


def _timestamp(values: Iterable[str]) -> int | None:
    text = next(iter(values), "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None


def _mac(secret: str, body: bytes, timestamp: int) -> str:
    return hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256).hexdigest()
