"""An operator: a person with a key of their own and a role. Pure."""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID

from comfyfleet.kernel.errors import Forbidden, InvalidInput
from comfyfleet.kernel.keys import new_key

# It tells scanners of source code, and whoever finds one, what key this is.
KEY_BEGINS = "cfo_"
SHOWN_CHARACTERS = len(KEY_BEGINS) + 8
# A key's last use is noted once a minute at most: a read of ours must not become a write.
NOTED_EVERY = timedelta(minutes=1)
# The key that the environment names, or that the first start has made.
FIRST_OWNER = "admin"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")


class Role(StrEnum):
    VIEWER = "viewer"  # reads
    OPERATOR = "operator"  # also acts
    OWNER = "owner"  # also operators, tenants' money, quotas and retention, and erasing

    def includes(self, other: "Role") -> bool:
        ranks = list(Role)
        return ranks.index(self) >= ranks.index(other)


@dataclass(frozen=True, slots=True)
class NewOperator:
    """`key` is from `new_operator_key`; only its hash is kept, so it is shown now or never."""

    id: UUID
    name: str
    role: Role
    key: str
    created_by: str


@dataclass(frozen=True, slots=True)
class Operator:
    id: UUID
    name: str
    role: Role
    prefix: str  # the first characters of the key, to tell it from others
    created_at: datetime
    created_by: str
    revoked_at: datetime | None
    last_used_at: datetime | None

    @property
    def subject(self) -> str:
        return f"operator:{self.name}"

    def is_use_noted(self, now: datetime) -> bool:
        return self.last_used_at is not None and now - self.last_used_at < NOTED_EVERY


@dataclass(frozen=True, slots=True)
class Acting:
    """Who stands behind a request: the name is what the audit tells."""

    actor: str
    role: Role

    def require(self, role: Role) -> None:
        if not self.role.includes(role):
            raise Forbidden(
                f"this takes the role {role}, and this key has the role {self.role}", role=role
            )


def new_operator_key() -> str:
    """256 random bits behind our mark; for edges, as all chance is."""
    return KEY_BEGINS + new_key()


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name == FIRST_OWNER:
        raise InvalidInput(
            "an operator's name has 1 to 100 letters, digits and . _ @ -, begins with a letter or "
            f"digit, and is not {FIRST_OWNER}",
            field="name",
        )
    return name
