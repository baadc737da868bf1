"""An API key: shown once, kept as a hash, good for one user of one tenant."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID

from comfyfleet.kernel.errors import Forbidden, InvalidInput
from comfyfleet.kernel.keys import new_key
from comfyfleet.tenants.model import Tenant

# It tells scanners of source code, and whoever finds one, whose key this is.
KEY_BEGINS = "cf_"
SHOWN_CHARACTERS = len(KEY_BEGINS) + 8
NAME_CHARACTERS_MAX = 200
KEYS_PER_USER_MAX = 100
# A key's last use is noted once a minute at most: a read of ours must not become a write.
NOTED_EVERY = timedelta(minutes=1)


class Scope(StrEnum):
    READ = "read"  # effects, media, jobs, wallet
    WRITE = "write"  # upload, submit, cancel, retry
    KEYS = "keys"  # make and revoke keys


ALL_SCOPES = frozenset(Scope)


@dataclass(frozen=True, slots=True)
class NewKey:
    """`key` is from `new_api_key`; only its hash is kept, so whoever makes it shows it now or never."""

    id: UUID
    key: str
    tenant_id: UUID
    user_id: UUID
    name: str
    scopes: Collection[str] = ALL_SCOPES
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    id: UUID
    tenant_id: UUID
    user_id: UUID
    name: str
    prefix: str  # the first characters, to tell it from others
    scopes: frozenset[Scope]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None

    def is_use_noted(self, now: datetime) -> bool:
        return self.last_used_at is not None and now - self.last_used_at < NOTED_EVERY


@dataclass(frozen=True, slots=True)
class Caller:
    """Who stands behind a request."""

    key: ApiKey
    tenant: Tenant

    @property
    def user_id(self) -> UUID:
        return self.key.user_id

    def require(self, scope: Scope) -> None:
        if scope not in self.key.scopes:
            raise Forbidden(f"this key has no scope {scope}", scope=scope)


def new_api_key() -> str:
    """256 random bits behind our mark; for edges, as all chance is."""
    return KEY_BEGINS + new_key()


def check_name(name: str) -> str:
    text = name.strip()
    if not text or len(text) > NAME_CHARACTERS_MAX or not text.isprintable():
        raise InvalidInput(
            f"a key's name must have 1 to {NAME_CHARACTERS_MAX} characters", field="name"
        )
    return text


def check_scopes(scopes: Collection[str]) -> frozenset[Scope]:
    known = {str(scope) for scope in Scope}
    unknown = sorted(set(scopes) - known)
    if unknown:
        raise InvalidInput(
            f"there is no scope {unknown[0]!r}; there are: {', '.join(Scope)}", field="scopes"
        )
    found = frozenset(Scope(scope) for scope in scopes)
    if not found:
        raise InvalidInput("a key needs at least one scope", field="scopes")
    return found
