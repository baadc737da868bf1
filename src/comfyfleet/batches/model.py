"""A batch: up to a thousand sets of properties for one effect."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from comfyfleet.kernel.errors import InvalidInput

JOBS_PER_BATCH_MAX = 1000
ADMITTED_AT_ONCE_MAX = 5


@dataclass(frozen=True, slots=True)
class Batch:
    id: UUID
    tenant_id: UUID
    user_id: UUID
    effect_id: UUID
    total: int
    idempotency_key: str | None
    request_hash: str
    created_at: datetime
    cancelled_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class RollUp:
    """All jobs of a batch in a few figures."""

    total: int
    held: int  # not yet admitted to the queue
    counts: Mapping[str, int]  # by status, of those that were admitted
    reserved_tokens: int  # not settled yet
    consumed_tokens: int
    refunded_tokens: int

    @property
    def ended(self) -> int:
        return sum(self.counts.get(each, 0) for each in ("completed", "failed", "cancelled"))

    @property
    def progress(self) -> float:
        return self.ended / self.total

    @property
    def is_ended(self) -> bool:
        return self.ended == self.total


def check_total(total: int) -> int:
    if not 1 <= total <= JOBS_PER_BATCH_MAX:
        raise InvalidInput(
            f"a batch has 1 to {JOBS_PER_BATCH_MAX:,} sets of properties, not {total:,}",
            field="properties",
        )
    return total
