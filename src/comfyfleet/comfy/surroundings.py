"""Time, ids and chance, as a backend gets them: replaced in tests."""

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

BACKOFF_FIRST_SECONDS = 0.25
BACKOFF_SECONDS_MAX = 8.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`clock` is monotonic, `chance` gives 0 to 1."""

    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.SystemRandom().random
    new_id: Callable[[], str] = lambda: str(uuid.uuid4())

    async def back_off(self, attempt: int) -> None:
        """Sleep before retry number `attempt`, from 1."""
        await self.sleep(backoff_seconds(attempt, self.chance()))


def backoff_seconds(attempt: int, chance: float) -> float:
    """Twice as long each time, half of it by chance: callers that failed together spread out."""
    full = min(BACKOFF_FIRST_SECONDS * 2.0 ** (attempt - 1), BACKOFF_SECONDS_MAX)
    return full * (0.5 + chance / 2)
