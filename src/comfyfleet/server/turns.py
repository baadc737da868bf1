"""Limits long-running concurrent work, and distributes the slots fairly among callers."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from comfyfleet.errors import TooManyCalls

T = TypeVar("T")
RETRY_SECONDS = 5


class FairTurns:
    """Grants slots to waiting callers in rotation, so that no caller has to wait for another
    caller's whole backlog."""

    def __init__(self, at_once_max: int, *, waiting_each_max: int) -> None:
        self._free = at_once_max
        self._waiting_each_max = waiting_each_max
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, who: Hashable) -> AsyncIterator[None]:
        """Waits for a slot. Raises TooManyCalls if the caller already has too many waiting
        calls."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(who)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, who: Hashable) -> None:
        line = self._waiting.setdefault(who, deque())
        if len(line) >= self._waiting_each_max:
            raise TooManyCalls(
                f"{len(line)} of your requests are already waiting (the limit)",
                retry_after_seconds=RETRY_SECONDS,
            )
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            who, line = self._waiting.popitem(last=False)
            first = line.popleft()
            if line:
                self._waiting[who] = line  # moves the caller behind all others
            if not first.done():
                first.set_result(None)
                return
        self._free += 1


class FairThreads:
    """A thread pool for long computations. The shared pool isn't used, because all file access runs
    there."""

    def __init__(self, name: str, at_once_max: int, *, waiting_each_max: int) -> None:
        self._threads = ThreadPoolExecutor(at_once_max, thread_name_prefix=name)
        self._turns = FairTurns(at_once_max, waiting_each_max=waiting_each_max)

    async def run(self, who: Hashable, work: Callable[[], T]) -> T:
        """Runs work in a thread. Raises TooManyCalls if the caller already has too many waiting
        calls."""
        async with self._turns.turn(who):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
