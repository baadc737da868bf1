"""Requests to read the backend's node types and models. Several requests share one read, and reads
are rate-limited."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from comfyfleet.api.worker import FACTS_TOKENS_MAX, FactsWanted

FACTS_SECONDS_MIN = 5.0
# Minimum seconds between reads after a call that may have changed the backend.
URGENT_FACTS_SECONDS_MIN = 0.5


class RequestedFacts:
    """Collects requests. `answer` reads and reports the backend's facts, with the tokens of the
    requests."""

    def __init__(
        self,
        answer: Callable[[tuple[str, ...]], Awaitable[None]],
        run_in_background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._answer = answer
        self._run_in_background = run_in_background
        self._wanted: list[FactsWanted] = []
        self._read_at = float("-inf")  # by the monotonic clock
        self._is_running = False
        self._is_new = asyncio.Event()

    def note_reading(self) -> None:
        """Notes that the backend is being read now, for whatever reason."""
        self._read_at = time.monotonic()

    def want(self, wanted: FactsWanted) -> None:
        self._wanted.append(wanted)
        self._is_new.set()
        if not self._is_running:
            self._is_running = True
            self._run_in_background(self._run())

    async def _run(self) -> None:
        try:
            while self._wanted:
                await self._wait_until_due()
                wanted, self._wanted = self._wanted, []
                tokens = tuple(token for each in wanted for token in each.tokens)
                await self._answer(tokens[-FACTS_TOKENS_MAX:])
        finally:
            self._is_running = False

    async def _wait_until_due(self) -> None:
        """Waits until the backend may be read again. An urgent request that arrives in the meantime
        shortens the wait."""
        while True:
            self._is_new.clear()
            is_urgent = any(each.is_urgent for each in self._wanted)
            least = URGENT_FACTS_SECONDS_MIN if is_urgent else FACTS_SECONDS_MIN
            left = self._read_at + least - time.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._is_new.wait()
