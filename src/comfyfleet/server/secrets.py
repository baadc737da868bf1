"""Random keys, and secrets that all control planes of an installation share.

Keys are shown once and stored as SHA-256 hashes.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import datetime

from comfyfleet.server.db import Database
from comfyfleet.server.db.coordination import read_state, write_state, write_state_if_new
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.settings import Settings

KEY_CHARACTERS = 64


def new_key() -> str:
    return secrets.token_hex(KEY_CHARACTERS // 2)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def is_key_of_hash(key: str, key_hash: str) -> bool:
    """Compares a key with a hash in constant time."""
    return hmac.compare_digest(hash_key(key), key_hash)


ADMIN_KEY_HASH = "admin_key_hash"
WEBHOOK_KEY = "webhook_key"
URL_SECRET = "url_secret"  # noqa: S105 - the name under which it is stored


@dataclass(frozen=True, slots=True)
class AdminKey:
    key_hash: str
    just_made: str | None = None  # a new key to show once, because only its hash is stored


async def admin_key(central: Database, settings: Settings) -> AdminKey:
    """Returns the admin key from the environment, or else the one created at the first start."""
    if settings.admin_key:
        return AdminKey(hash_key(settings.admin_key))
    async with central.read() as tx:
        kept = await read_state(tx, ADMIN_KEY_HASH)
    if kept is not None:
        return AdminKey(kept)
    key = new_key()
    async with central.transaction() as tx:
        standing = await write_state_if_new(tx, ADMIN_KEY_HASH, hash_key(key))
    return AdminKey(standing, just_made=key if standing == hash_key(key) else None)


async def replace_admin_key(central: Database, now: datetime) -> str:
    """Replaces the created admin key. Running control planes use the new key after a restart."""
    key = new_key()
    async with central.transaction() as tx:
        await write_state(tx, ADMIN_KEY_HASH, hash_key(key))
        await record_audit(tx, "system", "admin_key_replaced", "admin", now)
    return key


async def replace_url_secret(central: Database, now: datetime) -> None:
    """Replaces the secret that signs URLs. After a restart, all URLs issued before are invalid."""
    async with central.transaction() as tx:
        await write_state(tx, URL_SECRET, new_key())
        await record_audit(tx, "system", "url_secret_replaced", "storage", now)


async def replace_webhook_key(central: Database, now: datetime) -> None:
    """Replaces the key from which webhooks' secrets are derived.

    After a restart of the control planes, webhooks without a stored secret have a new one.
    """
    async with central.transaction() as tx:
        await write_state(tx, WEBHOOK_KEY, new_key())
        await record_audit(tx, "system", "webhook_key_replaced", "webhooks", now)


async def url_secret(central: Database) -> str:
    """Returns the secret that signs URLs. Control planes share it to accept each other's URLs."""
    return await _read_or_create(central, URL_SECRET)


async def webhook_key(central: Database) -> str:
    """Returns the key from which webhooks' secrets are derived.

    It isn't stored in the tenants' databases, so access to those isn't enough to sign anything.
    """
    return await _read_or_create(central, WEBHOOK_KEY)


async def _read_or_create(central: Database, name: str) -> str:
    async with central.transaction() as tx:
        secret: str = await write_state_if_new(tx, name, new_key())
    return secret
