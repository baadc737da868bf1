"""A batch in hand: many jobs of one effect, waited for as one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from uuid import UUID

from comfyfleet.client.answers import parsed
from comfyfleet.client.calls import Call, Calls
from comfyfleet.client.jobs import JobHandle
from comfyfleet.client.model import Batch
from comfyfleet.kernel.errors import RunTimedOut

POLL_SECONDS = 1.0
POLL_SECONDS_MAX = 10.0
PAGE = 100


class BatchHandle:
    """`batch` is as it was last heard of."""

    def __init__(self, calls: Calls, batch: Batch) -> None:
        self._calls = calls
        self.batch = batch

    @property
    def id(self) -> UUID:
        return self.batch.id

    def __repr__(self) -> str:
        return f"BatchHandle({self.id}, {self.batch.progress:g}% of {self.batch.total})"

    async def refresh(self) -> Batch:
        self.batch = await self._page(0)
        return self.batch

    async def wait(
        self,
        *,
        timeout_seconds: float | None = None,
        on_change: Callable[[Batch], None] | None = None,
    ) -> Batch:
        """The batch when all its jobs have ended, however they did: `counts` tells.

        Raises RunTimedOut when the time is up; the batch goes on.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ended(on_change)
        except TimeoutError as error:
            raise RunTimedOut(
                f"batch {self.id} has not ended within {timeout_seconds} s; it goes on"
            ) from error
        return self.batch

    async def _ended(self, on_change: Callable[[Batch], None] | None) -> None:
        seconds = POLL_SECONDS
        while not (await self.refresh()).is_ended:
            if on_change:
                on_change(self.batch)
            await self._calls.patience.sleep(seconds)
            seconds = min(seconds * 1.5, POLL_SECONDS_MAX)

    async def jobs(self) -> AsyncIterator[JobHandle]:
        """In the order in which their properties were given."""
        start = 0
        while True:
            page = await self._page(start)
            for each in page.jobs:
                yield JobHandle(self._calls, each)
            if page.next is None:
                return
            start = page.next

    async def cancel(self) -> Batch:
        """Whatever has not ended; what was reserved for it comes back."""
        answer = await self._calls.ask(Call("DELETE", f"/api/ai-jobs/batches/{self.id}"))
        self.batch = parsed(Batch, answer)
        return self.batch

    async def _page(self, start: int) -> Batch:
        query = {"start": start, "limit": PAGE}
        call = Call("GET", f"/api/ai-jobs/batches/{self.id}", query=query)
        return parsed(Batch, await self._calls.ask(call))
