"""Stores callers' API keys for nodes that call paid services. Each key is used for one run.

The keys are only kept in memory, by the control plane that received the prompt. If the run's worker
is connected to another control plane, that one requests the keys. They are encrypted in transit,
because the message passes through the database.
"""

import asyncio
import base64
import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, NamedTuple
from uuid import UUID

KEPT_MAX = 10_000  # maximum number of jobs whose keys are kept
KEPT_SECONDS = 24 * 3600.0
# Seconds to wait until another control plane responds with the keys.
ANSWER_SECONDS = 3.0
NONCE_BYTES = 12
# Maximum number of job ids per message to other control planes. PostgreSQL limits a message to
# 8,000 bytes.
DROPPED_MAX = 100
WANTED, FOUND, DROPPED = "partner_keys_wanted", "partner_keys_found", "partner_keys_dropped"

# A job's keys by the field of extra_data that contained them.
Keys = Mapping[str, str]


class _Kept(NamedTuple):
    until: float
    keys: Keys
    tenant_id: UUID


class _Asking(NamedTuple):
    private: Any
    answer: "asyncio.Future[Keys]"


class PartnerKeys:
    """Holds the keys of jobs, and exchanges them with other control planes. `announce` sends a
    message to all other control planes.
    """

    def __init__(
        self, announce: Callable[[dict[str, Any]], None], *, has_others: bool = True
    ) -> None:
        self._announce = announce
        self._has_others = has_others
        self._kept: dict[UUID, _Kept] = {}  # ordered from the oldest to the newest
        self._counts: Counter[UUID] = Counter()  # number of jobs with keys for each tenant
        self._asking: dict[UUID, _Asking] = {}

    def keep(self, tenant_id: UUID, job_id: UUID, keys: Keys) -> bool:
        """Stores the keys until the job has ended, for at most a day. Returns True if no keys were
        stored for the job before.

        If there are too many keys, the oldest ones of the tenant with the most keys are removed.
        """
        now, is_new = monotonic(), self._take_out(job_id) is None
        self._kept[job_id] = _Kept(now + KEPT_SECONDS, dict(keys), tenant_id)
        self._counts[tenant_id] += 1
        while self._kept and next(iter(self._kept.values())).until < now:
            self._take_out(next(iter(self._kept)))
        if len(self._kept) > KEPT_MAX:
            ((largest, _),) = self._counts.most_common(1)
            self._take_out(
                next(job for job, entry in self._kept.items() if entry.tenant_id == largest)
            )
        return is_new

    def _take_out(self, job_id: UUID) -> _Kept | None:
        removed = self._kept.pop(job_id, None)
        if removed is not None:
            self._counts[removed.tenant_id] -= 1
            if not self._counts[removed.tenant_id]:
                del self._counts[removed.tenant_id]
        return removed

    def forget(self, job_id: UUID) -> None:
        """Removes the keys of a job that could not be submitted."""
        self._take_out(job_id)

    def drop(self, *job_ids: UUID) -> None:
        """Removes the keys of ended jobs, whichever control plane stores them."""
        elsewhere = [str(job_id) for job_id in job_ids if self._take_out(job_id) is None]
        for start in range(0, len(elsewhere), DROPPED_MAX):
            self._announce({DROPPED: elsewhere[start : start + DROPPED_MAX]})

    async def get(self, job_id: UUID) -> Keys | None:
        """Returns the keys of a job, or None if no control plane has them anymore."""
        stored = self._kept.get(job_id)
        if stored is not None or not self._has_others:
            return None if stored is None or stored.until < monotonic() else stored.keys
        return await self._ask_others(job_id)

    async def _ask_others(self, job_id: UUID) -> Keys | None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        asking = self._asking.get(job_id)
        if asking is None:
            private = X25519PrivateKey.generate()
            asking = _Asking(private, asyncio.get_running_loop().create_future())
            self._asking[job_id] = asking
            public = _text(private.public_key().public_bytes_raw())
            self._announce({WANTED: {"job": str(job_id), "public": public}})
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await asyncio.shield(asking.answer)
        except TimeoutError:
            return None
        finally:
            self._asking.pop(job_id, None)

    def heard(self, message: Mapping[str, Any]) -> None:
        """Handles a message from another control plane."""
        if DROPPED in message:
            for job_id in message[DROPPED]:
                self._take_out(UUID(job_id))
        if WANTED in message:
            self._answer(message[WANTED])
        if FOUND in message:
            self._take(message[FOUND])

    def _answer(self, wanted: Mapping[str, str]) -> None:
        stored = self._kept.get(UUID(wanted["job"]))
        if stored is not None and stored.until >= monotonic():
            sealed = _sealed(json.dumps(stored.keys).encode(), _bytes(wanted["public"]))
            self._announce({FOUND: {"job": wanted["job"], **sealed}})

    def _take(self, found: Mapping[str, str]) -> None:
        asking = self._asking.get(UUID(found["job"]))
        if asking is not None and not asking.answer.done():
            with contextlib.suppress(ValueError):
                asking.answer.set_result(json.loads(_opened(found, asking.private)))


def _sealed(data: bytes, public: bytes) -> dict[str, str]:
    """Encrypts data with a public key, so that only the holder of the private key can read it."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    private = X25519PrivateKey.generate()
    shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    nonce = os.urandom(NONCE_BYTES)
    sealed = ChaCha20Poly1305(_cipher_key(shared)).encrypt(nonce, data, None)
    return {
        "public": _text(private.public_key().public_bytes_raw()),
        "nonce": _text(nonce),
        "sealed": _text(sealed),
    }


def _opened(found: Mapping[str, str], private: Any) -> bytes:
    """Decrypts data. Raises ValueError if it was encrypted for a different key."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    shared = private.exchange(X25519PublicKey.from_public_bytes(_bytes(found["public"])))
    cipher = ChaCha20Poly1305(_cipher_key(shared))
    try:
        return cipher.decrypt(_bytes(found["nonce"]), _bytes(found["sealed"]), None)
    except InvalidTag as error:
        raise ValueError("the keys were encrypted for a different control plane") from error


def _cipher_key(shared: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt=None, info=b"comfyfleet partner keys").derive(shared)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
