"""Callers' keys for nodes that call paid services, for one run each.

They are in the memory of the control plane that took the prompt, and nowhere else. If the worker of the run is at
another control plane, that one asks for them; they are encrypted on the way, because the message passes the database."""

import asyncio
import base64
import contextlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, NamedTuple
from uuid import UUID

KEPT_MAX = 10_000
KEPT_SECONDS = 24 * 3600.0
ANSWER_SECONDS = 3.0
NONCE_BYTES = 12
WANTED, FOUND, DROPPED = "partner_keys_wanted", "partner_keys_found", "partner_keys_dropped"

Keys = Mapping[str, str]  # by the field of extra_data that had them


class _Kept(NamedTuple):
    until: float
    keys: Keys


class _Asking(NamedTuple):
    private: Any
    answer: "asyncio.Future[Keys]"


class PartnerKeys:
    """`announce` sends a message to all other control planes."""

    def __init__(
        self, announce: Callable[[dict[str, Any]], None], *, has_others: bool = True
    ) -> None:
        self._announce = announce
        self._has_others = has_others
        self._kept: OrderedDict[UUID, _Kept] = OrderedDict()
        self._asking: dict[UUID, _Asking] = {}

    def keep(self, job_id: UUID, keys: Keys) -> bool:
        """Keeps the keys until the job has ended, a day at most. Returns whether it had none here."""
        now, is_new = monotonic(), job_id not in self._kept
        self._kept[job_id] = _Kept(now + KEPT_SECONDS, dict(keys))
        self._kept.move_to_end(job_id)
        old = [job for job, kept in self._kept.items() if kept.until < now]
        for job in old or list(self._kept)[: len(self._kept) - KEPT_MAX]:
            del self._kept[job]
        return is_new

    def forget(self, job_id: UUID) -> None:
        """Forgets keys that were kept here for a job that was not submitted."""
        self._kept.pop(job_id, None)

    def drop(self, job_id: UUID) -> None:
        """Forgets the keys of a job that has ended, at whichever control plane they are."""
        if self._kept.pop(job_id, None) is None:
            self._announce({DROPPED: str(job_id)})

    async def get(self, job_id: UUID) -> Keys | None:
        """Returns the keys of a job; None if no control plane has them any more."""
        kept = self._kept.get(job_id)
        if kept is not None or not self._has_others:
            return None if kept is None or kept.until < monotonic() else kept.keys
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
        """Handles a message of another control plane."""
        if DROPPED in message:
            self._kept.pop(UUID(message[DROPPED]), None)
        if WANTED in message:
            self._answer(message[WANTED])
        if FOUND in message:
            self._take(message[FOUND])

    def _answer(self, wanted: Mapping[str, str]) -> None:
        kept = self._kept.get(UUID(wanted["job"]))
        if kept is not None and kept.until >= monotonic():
            sealed = _sealed(json.dumps(kept.keys).encode(), _bytes(wanted["public"]))
            self._announce({FOUND: {"job": wanted["job"], **sealed}})

    def _take(self, found: Mapping[str, str]) -> None:
        asking = self._asking.get(UUID(found["job"]))
        if asking is not None and not asking.answer.done():
            with contextlib.suppress(ValueError):
                asking.answer.set_result(json.loads(_opened(found, asking.private)))


def _sealed(data: bytes, public: bytes) -> dict[str, str]:
    """Encrypts data for the holder of a private key."""
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
    """Decrypts data. Raises ValueError if it isn't for this key."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    shared = private.exchange(X25519PublicKey.from_public_bytes(_bytes(found["public"])))
    cipher = ChaCha20Poly1305(_cipher_key(shared))
    try:
        return cipher.decrypt(_bytes(found["nonce"]), _bytes(found["sealed"]), None)
    except InvalidTag as error:
        raise ValueError("the keys are for somebody else") from error


def _cipher_key(shared: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt=None, info=b"comfyfleet partner keys").derive(shared)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
