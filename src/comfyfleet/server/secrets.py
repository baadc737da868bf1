"""Random keys, and the secrets that all control planes of an installation share.

Keys are shown only once, and only their SHA-256 hashes are stored.
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
    """Checks in constant time whether a key has this hash."""
    return hmac.compare_digest(hash_key(key), key_hash)


ADMIN_KEY_HASH = "admin_key_hash"
WEBHOOK_KEY = "webhook_key"
URL_SECRET = "url_secret"  # noqa: S105 - the name of the stored value, not a secret


@dataclass(frozen=True, slots=True)
class AdminKey:
    key_hash: str
    just_made: str | None = None  # a new key to show once, because only its hash is stored


async def admin_key(central: Database, settings: Settings) -> AdminKey:
    """Returns the admin key from the settings or, without such a setting, the one created at the
    first start."""
    if settings.admin_key:
        return AdminKey(hash_key(settings.admin_key))
    async with central.read() as tx:
        stored_hash = await read_state(tx, ADMIN_KEY_HASH)
    if stored_hash is not None:
        return AdminKey(stored_hash)
    key = new_key()
    async with central.transaction() as tx:
        current_hash = await write_state_if_new(tx, ADMIN_KEY_HASH, hash_key(key))
    return AdminKey(current_hash, just_made=key if current_hash == hash_key(key) else None)


async def replace_admin_key(central: Database, now: datetime) -> str:
    """Replaces the generated admin key, and returns the new one. Running control planes use it
    after a restart."""
    key = new_key()
    async with central.transaction() as tx:
        await write_state(tx, ADMIN_KEY_HASH, hash_key(key))
        await record_audit(tx, "system", "admin_key_replaced", "admin", now)
    return key


async def replace_url_secret(central: Database, now: datetime) -> None:
    """Replaces the secret that signs URLs. After a restart, all earlier URLs are invalid."""
    async with central.transaction() as tx:
        await write_state(tx, URL_SECRET, new_key())
        await record_audit(tx, "system", "url_secret_replaced", "storage", now)


async def replace_webhook_key(central: Database, now: datetime) -> None:
    """Replaces the key from which webhook secrets are derived.

    After a restart of the control planes, all webhooks without a stored secret have new secrets.
    """
    async with central.transaction() as tx:
        await write_state(tx, WEBHOOK_KEY, new_key())
        await record_audit(tx, "system", "webhook_key_replaced", "webhooks", now)


async def url_secret(central: Database) -> str:
    """Returns the secret that signs URLs. All control planes share it, so that they accept each
    other's URLs."""
    return await _read_or_create(central, URL_SECRET)


async def webhook_key(central: Database) -> str:
    """Returns the key from which webhook secrets are derived.

    It isn't stored in the tenant databases, so access to those isn't enough to sign deliveries.
    """
    return await _read_or_create(central, WEBHOOK_KEY)


async def _read_or_create(central: Database, name: str) -> str:
    async with central.transaction() as tx:
        secret: str = await write_state_if_new(tx, name, new_key())
    return secret
