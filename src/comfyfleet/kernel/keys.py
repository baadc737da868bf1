"""Keys are shown once and stored as SHA-256: 256 random bits need no slow hash."""

import hashlib
import hmac
import secrets

KEY_CHARACTERS = 64


def new_key() -> str:
    return secrets.token_hex(KEY_CHARACTERS // 2)


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def fits(key: str, key_hash: str) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(hashed(key), key_hash)
