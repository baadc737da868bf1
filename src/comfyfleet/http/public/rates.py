"""How often a user and a tenant may call: a bucket of calls for each, refilled as time goes by.

In this process only: with n control planes they may call n times as often.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from comfyfleet.kernel.errors import TooManyCalls

KEPT_MAX = 100_000
FETCHES_PER_USER_MAX = 3
FETCHES_MAX = 50
FETCH_RETRY_SECONDS = 10


@dataclass(slots=True)
class _Bucket:
    left: float
    at: datetime


class Rates:
    def __init__(self, whose: str, *, per_second: float, at_once: int) -> None:
        self._whose = whose
        self._per_second = per_second
        self._at_once = at_once
        self._buckets: OrderedDict[UUID, _Bucket] = OrderedDict()

    def take(self, who: UUID, now: datetime) -> None:
        """One call; TooManyCalls says in how many seconds there will be one again."""
        bucket = self._buckets.setdefault(who, _Bucket(self._at_once, now))
        self._buckets.move_to_end(who)
        if len(self._buckets) > KEPT_MAX:
            self._buckets.popitem(last=False)
        seconds = max(0.0, (now - bucket.at).total_seconds())
        bucket.left = min(self._at_once, bucket.left + seconds * self._per_second)
        bucket.at = now
        if bucket.left < 1:
            wait = (1 - bucket.left) / self._per_second
            raise TooManyCalls(
                f"this {self._whose} calls more than {self._per_second:g} times a second",
                retry_after_seconds=round(wait, 3),
            )
        bucket.left -= 1


class Fetches:
    """So many files at customers' URLs are fetched at once: a slow server holds up its own user only."""

    def __init__(self) -> None:
        self._open: Counter[UUID] = Counter()

    @contextmanager
    def one_of(self, user_id: UUID) -> Iterator[None]:
        if self._open[user_id] >= FETCHES_PER_USER_MAX or self._open.total() >= FETCHES_MAX:
            raise TooManyCalls(
                "too many files are being fetched", retry_after_seconds=FETCH_RETRY_SECONDS
            )
        self._open[user_id] += 1
        try:
            yield
        finally:
            self._open[user_id] -= 1
            self._open += Counter()  # forgets those who have none
