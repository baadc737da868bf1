"""How long to wait before something is asked again. Pure, but for the clock and chance that come in."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

FIRST_SECONDS = 0.25
SECONDS_MAX = 8.0
# A server that wants more than this is not waited for: the caller hears when to come again.
RETRY_AFTER_SECONDS_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Replaced in tests. `clock` is monotonic, `chance` gives 0 to 1."""

    attempts_max: int = 6
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.SystemRandom().random

    async def back_off(self, attempt: int) -> None:
        """Before the next attempt; `attempt` have failed."""
        await self.sleep(backoff_seconds(attempt, self.chance()))


def backoff_seconds(attempt: int, chance: float) -> float:
    """Twice as long each time, half of it by chance: callers that failed together spread out."""
    full = min(FIRST_SECONDS * 2.0 ** (attempt - 1), SECONDS_MAX)
    return full * (0.5 + chance / 2)


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Only as a number: our control plane sends no dates."""
    text = headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None
