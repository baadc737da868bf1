"""Who owns jobs, which pool they live in, and how far their priorities reach."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.kernel.texts import is_storable

NAME_CHARACTERS_MAX = 200
PRIORITY_MIN, PRIORITY_MAX = -10, 10
PRIORITY_LIMIT = 1_000_000
RETENTION_DAYS_MAX = 36_500
ERASED = "erased"
# Whose jobs an operator's are, unless told otherwise. There from the first start.
DEFAULT_TENANT = UUID("de7a0170-0000-4000-8000-000000000000")


@dataclass(frozen=True, slots=True)
class Tenant:
    id: UUID
    name: str
    pool: str
    min_priority: int
    max_priority: int
    max_queued: int | None  # None: as many as the settings allow
    created_at: datetime
    retention_days: int | None = None  # None: as the settings say
    max_storage_bytes: int | None = None  # None: as the settings say
    erasing_at: datetime | None = None
    erased_at: datetime | None = None

    @property
    def subject(self) -> str:
        return f"tenant:{self.id}"

    def clamped(self, priority: int) -> int:
        """The nearest priority that this tenant may use."""
        return max(self.min_priority, min(self.max_priority, priority))


def check_name(name: str) -> str:
    text = name.strip()
    if not text or len(text) > NAME_CHARACTERS_MAX or not is_storable(text):
        raise InvalidInput(
            f"a tenant's name must have 1 to {NAME_CHARACTERS_MAX} characters", field="name"
        )
    return text


def check_limits(*, min_priority: int, max_priority: int, max_queued: int | None) -> None:
    if not -PRIORITY_LIMIT <= min_priority <= max_priority <= PRIORITY_LIMIT:
        raise InvalidInput(
            f"the priorities {min_priority} to {max_priority} are no range within ±{PRIORITY_LIMIT:,}",
            field="min_priority",
        )
    if max_queued is not None and max_queued < 0:
        raise InvalidInput(
            f"max_queued must not be below zero, not {max_queued}", field="max_queued"
        )


def check_retention(days: int | None) -> int | None:
    if days is not None and not 1 <= days <= RETENTION_DAYS_MAX:
        raise InvalidInput(
            f"retention_days must be 1 to {RETENTION_DAYS_MAX:,}, not {days}",
            field="retention_days",
        )
    return days
