"""When a delivery is tried again, and when no more. Pure."""

from datetime import datetime, timedelta

# About a day in all: a server that is repaired in the morning has missed nothing.
RETRY_SECONDS = (10, 30, 120, 600, 1800, 7200, 21_600, 43_200)
TRIES_MAX = len(RETRY_SECONDS) + 1
JITTER = 0.2


def next_try(tries: int, now: datetime, *, chance: float) -> datetime | None:
    """After so many tries, all in vain; `chance` (0 to 1) keeps those that failed together apart."""
    if tries >= TRIES_MAX:
        return None
    seconds = RETRY_SECONDS[max(tries, 1) - 1]
    return now + timedelta(seconds=seconds * (1 + JITTER * chance))
