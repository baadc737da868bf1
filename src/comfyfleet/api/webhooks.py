"""Signatures of webhook messages: HMAC-SHA256 over `timestamp.body`, in `X-Comfyfleet-Signature: t=…,v1=…`. Pure."""

import hashlib
import hmac
from collections.abc import Iterable

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
    """Checks a signature, for receivers; the header may have several `v1` while a secret is
    replaced."""
    parts = [part.strip().partition("=") for part in header.split(",", PARTS_MAX)[:PARTS_MAX]]
    timestamp = _timestamp(value for name, _, value in parts if name == "t")
    if timestamp is None or abs(now - timestamp) > tolerance_seconds:
        return False
    wanted = _mac(secret, body, timestamp).encode()
    given = [value.encode() for name, _, value in parts if name == "v1"]
    return any(hmac.compare_digest(wanted, each) for each in given)


def _timestamp(values: Iterable[str]) -> int | None:
    text = next(iter(values), "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None


def _mac(secret: str, body: bytes, timestamp: int) -> str:
    return hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256).hexdigest()
