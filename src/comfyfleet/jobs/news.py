"""Lets those who follow a job in this process know that something about it has changed."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from uuid import UUID


class News:
    """A hint only: what has changed is read from the database."""

    def __init__(self) -> None:
        self._following: defaultdict[UUID, set[asyncio.Event]] = defaultdict(set)
        self._wakers: dict[str, Callable[[], object]] = {}

    def wake_with(self, run_kind: str, wake: Callable[[], object]) -> None:
        """The sweep that carries on runs of this kind, in this process."""
        self._wakers[run_kind] = wake

    def wake(self, run_kind: str | None) -> None:
        if run_kind in self._wakers:
            self._wakers[run_kind]()

    def tell(self, job_id: UUID) -> None:
        for event in self._following.get(job_id, ()):
            event.set()

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
