"""Decides when a failed call is retried, based on a back-off and the Retry-After header."""

import asyncio
import email.utils
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

BACKOFF_FIRST_SECONDS = 0.25
BACKOFF_SECONDS_MAX = 8.0
# If a server requests a longer delay than this, the call fails immediately and the caller gets the
# response with the delay.
RETRY_AFTER_SECONDS_MAX = 60.0
_DIGITS_MAX = 9


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of attempts, and the pause between them.

    Tests replace `sleep`, `clock` (monotonic) and `chance` (0 to 1).
    """

    attempts_max: int = 6
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.SystemRandom().random

    async def back_off(self, attempt: int) -> None:
        """Sleeps before the next attempt. `attempt` is the number of failed attempts."""
        await self.sleep(backoff_seconds(attempt, self.chance()))


def backoff_seconds(attempt: int, chance: float) -> float:
    """Returns a pause that doubles with each attempt. Half of it is random, so that callers that
    failed at the same time retry at different times."""
    full = min(BACKOFF_FIRST_SECONDS * 2.0 ** (attempt - 1), BACKOFF_SECONDS_MAX)
    return full * (0.5 + chance / 2)


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Reads Retry-After, which contains seconds or a date according to the server's own clock.
    Returns None if it is missing or invalid."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text) if len(text) <= _DIGITS_MAX else None
    try:
        moment = email.utils.parsedate_to_datetime(text)
        now = email.utils.parsedate_to_datetime(headers.get("date", ""))
        return max(0.0, (moment - now).total_seconds())
    except (TypeError, ValueError, OverflowError):
        return None
