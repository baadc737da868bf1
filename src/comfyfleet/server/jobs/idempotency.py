"""Idempotency keys: the same key with the same request gives what the first one made; with another it is a conflict."""

import hashlib
import json
from typing import Protocol, TypeVar

from comfyfleet.errors import Conflict


class KeyedRequest(Protocol):
    """A request with an idempotency key, or what one has made."""

    @property
    def request_hash(self) -> str | None: ...


Keyed = TypeVar("Keyed", bound=KeyedRequest)


def hash_request(*parts: object) -> str:
    """Hashes everything that matters in a request. Hashes are stored: the same request must always
    give the same hash.
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def require_same_request(found: Keyed | None, request_hash: str | None) -> Keyed:
    """Returns what an earlier request with this key has made; raises Conflict if that was another
    request.
    """
    if found is None or found.request_hash != request_hash:
        raise key_conflict()
    return found


def key_conflict() -> Conflict:
    return Conflict("idempotency_key was used for another request", field="idempotency_key")
