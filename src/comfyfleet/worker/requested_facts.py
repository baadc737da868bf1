"""Requests to read the backend's node types and models. Several requests share one read, and reads
are rate-limited."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from comfyfleet.api.worker import FACTS_TOKENS_MAX, FactsWanted

FACTS_SECONDS_MIN = 5.0
# Minimum seconds between two reads if a call may have changed the backend.
URGENT_FACTS_SECONDS_MIN = 0.5


class RequestedFacts:
    """Collects requests for the backend's facts. `answer` reads and reports the facts, with the
    tokens of the requests."""

    def __init__(
        self,
        answer: Callable[[tuple[str, ...]], Awaitable[None]],
        run_in_background: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._answer = answer
        self._run_in_background = run_in_background
        self._requests: list[FactsWanted] = []
        self._read_at = float("-inf")  # monotonic time
        self._is_running = False
        self._is_new = asyncio.Event()

    def note_reading(self) -> None:
        """Notes that the backend is being read now, which delays the next requested read."""
        self._read_at = time.monotonic()

    def add(self, request: FactsWanted) -> None:
        self._requests.append(request)
        self._is_new.set()
        if not self._is_running:
            self._is_running = True
            self._run_in_background(self._run())

    async def _run(self) -> None:
        try:
            while self._requests:
                await self._wait_until_due()
                requests, self._requests = self._requests, []
                tokens = tuple(token for request in requests for token in request.tokens)
                await self._answer(tokens[-FACTS_TOKENS_MAX:])
        finally:
            self._is_running = False

    async def _wait_until_due(self) -> None:
        """Waits until the backend may be read again. An urgent request that arrives in the meantime
        shortens the wait."""
        while True:
            self._is_new.clear()
            is_urgent = any(request.is_urgent for request in self._requests)
            interval = URGENT_FACTS_SECONDS_MIN if is_urgent else FACTS_SECONDS_MIN
            seconds_left = self._read_at + interval - time.monotonic()
            if seconds_left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds_left):
                    await self._is_new.wait()
