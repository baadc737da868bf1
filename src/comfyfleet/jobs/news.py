"""Lets those who follow a job in this process know that something about it has changed."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from uuid import UUID


class News:
    """A hint only: what has changed is read from the database."""

    def __init__(self) -> None:
        self._following: defaultdict[UUID, set[asyncio.Event]] = defaultdict(set)
        self._listeners: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)
        self._ending: dict[UUID, asyncio.Event] = {}

    def tell(self, job_id: UUID) -> None:
        for event in self._following.get(job_id, ()):
            event.set()

    def tell_run(self, kind: str) -> None:
        """A job that is part of a run of this kind has ended: the outbox has a word of it."""
        for listener in self._listeners.get(kind, ()):
            listener()

    def hear_runs(self, kind: str, listener: Callable[[], None]) -> None:
        self._listeners[kind].append(listener)

    @contextmanager
    def ending(self, job_id: UUID) -> Iterator[None]:
        """While the end of a job is being written."""
        ended = self._ending.setdefault(job_id, asyncio.Event())
        try:
            yield
        finally:
            ended.set()
            self._ending.pop(job_id, None)

    def those_ending(self, job_ids: Iterable[UUID]) -> list[UUID]:
        return [each for each in job_ids if each in self._ending]

    @property
    def is_any_ending(self) -> bool:
        return bool(self._ending)

    async def ended(self, job_ids: Iterable[UUID], seconds: float) -> None:
        """Returns when none of these is ending any more, or the time is up."""
        waits = [self._ending[each].wait() for each in self.those_ending(job_ids)]
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*waits)

    async def changed(self, job_id: UUID, seconds: float) -> bool:
        """False when the time is up first."""
        event = asyncio.Event()
        self._following[job_id].add(event)
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return False
        else:
            return True
        finally:
            self._following[job_id].discard(event)
            if not self._following[job_id]:
                del self._following[job_id]
