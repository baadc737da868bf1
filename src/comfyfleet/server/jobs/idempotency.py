"""Checks idempotency keys: a repeated request returns the result of the first one, and a different
request with the same key is a conflict.
"""

import hashlib
import json
from typing import Protocol, TypeVar

from comfyfleet.errors import Conflict


class KeyedRequest(Protocol):
    """A request with an idempotency key, or the result of such a request."""

    @property
    def request_hash(self) -> str | None: ...


Keyed = TypeVar("Keyed", bound=KeyedRequest)


def hash_request(*parts: object) -> str:
    """Hashes the relevant parts of a request. The hashes are stored, so a request must have the
    same hash in all versions of comfyfleet.
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def require_same_request(earlier: Keyed | None, request_hash: str | None) -> Keyed:
    """Returns the result of an earlier request with the same key. Raises Conflict if that request
    was different.
    """
    if earlier is None or earlier.request_hash != request_hash:
        raise key_conflict()
    return earlier


def key_conflict() -> Conflict:
    return Conflict(
        "idempotency_key was already used for a different request", field="idempotency_key"
    )
