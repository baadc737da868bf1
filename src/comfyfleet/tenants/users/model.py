"""A user: one of a tenant's people, with a wallet and media of their own."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from comfyfleet.kernel.errors import InvalidInput

NAME_CHARACTERS_MAX = 200
EMAIL_CHARACTERS_MAX = 320


@dataclass(frozen=True, slots=True)
class User:
    id: UUID
    tenant_id: UUID
    email: str | None
    name: str | None
    is_active: bool
    created_at: datetime

    @property
    def subject(self) -> str:
        return f"user:{self.id}"


def check_email(email: str | None) -> str | None:
    """In lower case, so that nobody is there twice. Whether it is theirs, only a mail can tell."""
    if email is None:
        return None
    text = email.strip().lower()
    name, at, domain = text.rpartition("@")
    is_short = len(text) <= EMAIL_CHARACTERS_MAX
    if not (name and at and domain and is_short and text.isprintable()) or " " in text:
        raise InvalidInput("that is no e-mail address", field="email")
    return text


def check_name(name: str | None) -> str | None:
    if name is None:
        return None
    text = name.strip()
    if not text or len(text) > NAME_CHARACTERS_MAX or not text.isprintable():
        raise InvalidInput(
            f"a user's name must have 1 to {NAME_CHARACTERS_MAX} characters", field="name"
        )
    return text
