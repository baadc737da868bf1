"""Lets those who follow a job in this process know that something about it has changed."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from uuid import UUID


class News:
    """A hint only: what has changed is read from the database."""

    def __init__(self) -> None:
        self._following: defaultdict[UUID, set[asyncio.Event]] = defaultdict(set)
        self._listeners: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)

    def tell(self, job_id: UUID) -> None:
        for event in self._following.get(job_id, ()):
            event.set()

    def tell_run(self, kind: str) -> None:
        """A job that is part of a run of this kind has ended: the outbox has a word of it."""
        for listener in self._listeners.get(kind, ()):
            listener()

    def hear_runs(self, kind: str, listener: Callable[[], None]) -> None:
        self._listeners[kind].append(listener)

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
