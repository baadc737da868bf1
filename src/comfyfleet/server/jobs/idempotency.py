"""Idempotency keys: a repeated request returns the first result, and a different request with the
same key is a conflict.
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
    """Hashes everything that matters in a request. The hashes are stored, so the same request must
    have the same hash in all versions.
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def require_same_request(found: Keyed | None, request_hash: str | None) -> Keyed:
    """Returns the result of an earlier request with this key. Raises Conflict if that was a
    different request.
    """
    if found is None or found.request_hash != request_hash:
        raise key_conflict()
    return found


def key_conflict() -> Conflict:
    return Conflict("idempotency_key was used for another request", field="idempotency_key")
