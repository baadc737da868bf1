"""How many jobs wait. Counting a million rows at each submit would cost more than the submit."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

FRESH = timedelta(seconds=2)


class ActiveMax(NamedTuple):
    """So many jobs may be queued or running at once, whichever way they came."""

    of_user: int
    of_tenant: int


@dataclass
class _Count:
    queued: int
    at: datetime


@dataclass
class Caps:
    """Counts are kept for a moment; a refusal always rests on a fresh one."""

    _counts: dict[UUID | None, _Count] = field(default_factory=dict)

    def forget(self) -> None:
        self._counts.clear()

    async def has_room(
        self,
        whose: UUID | None,
        more: int,
        most: int,
        *,
        count: Callable[[], Awaitable[int]],
        now: datetime,
    ) -> bool:
        kept = self._counts.get(whose)
        if kept is None or now - kept.at > FRESH or kept.queued + more > most:
            kept = self._counts[whose] = _Count(await count(), now)
        if kept.queued + more > most:
            return False
        kept.queued += more
        return True
