"""One line of the audit log: who did what to what, and when."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.kernel.texts import is_storable

# Whoever may read the log may not act as somebody else with what stands in it.
SECRET_NAMES = ("secret", "password", "authorization", "token", "lease_token", "key", "api_key")
SECRET_ENDINGS = ("_secret", "_password", "_key_hash", "_secret_hash")
LEFT_OUT = "(left out)"
DETAILS_DEPTH_MAX = 8


@dataclass(frozen=True, slots=True)
class Entry:
    id: int
    at: datetime
    actor: str
    action: str
    subject: str
    tenant_id: UUID | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


def without_secrets(details: Any, *, depth: int = DETAILS_DEPTH_MAX) -> Any:
    """The same as plain JSON, with the values of keys and secrets left out, however deep."""
    if depth == 0:
        return LEFT_OUT
    if isinstance(details, Mapping):
        return {
            str(name): LEFT_OUT if is_secret(str(name)) else without_secrets(value, depth=depth - 1)
            for name, value in details.items()
        }
    if isinstance(details, list | tuple | set | frozenset):
        members = sorted(details) if isinstance(details, set | frozenset) else details
        return [without_secrets(each, depth=depth - 1) for each in members]
    if details is None or isinstance(details, bool | int | float):
        return details
    text = str(details)
    return text if is_storable(text) else ascii(text)


def is_secret(name: str) -> bool:
    lowered = name.lower()
    return lowered in SECRET_NAMES or lowered.endswith(SECRET_ENDINGS)
