"""Server-sent event streams: limited for each key and user, and closed when their key expires."""

import asyncio
import logging
from asyncio import get_running_loop
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar
from uuid import UUID

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from comfyfleet.errors import TooManyCalls, Unavailable
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db.errors import log_level_of
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import Caller

T = TypeVar("T")


async def run_shielded(work: Coroutine[Any, Any, T]) -> T:
    """To its end, though nobody may wait for it any more: a reader that goes away cancels its answer,
    and a statement that is cut off in the middle takes its connection to the database with it."""
    return await asyncio.shield(asyncio.create_task(work))


logger = logging.getLogger(__name__)
MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
KEY_SECONDS = 3.0
RETRY_SECONDS = 10


class StreamLimiter:
    """Those that this process has open."""

    def __init__(self, *, per_key: int, per_user: int) -> None:
        self._per_key, self._per_user = per_key, per_user
        self._of_keys: Counter[UUID] = Counter()
        self._of_users: Counter[UUID] = Counter()

    def take(self, caller: Caller) -> Callable[[], None]:
        """What gives it back, to be called once."""
        key, user = caller.key.id, caller.user_id
        if self._of_keys[key] >= self._per_key or self._of_users[user] >= self._per_user:
            raise TooManyCalls(
                f"a key follows at most {self._per_key} things at once, and a user {self._per_user}",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._of_keys[key] += 1
        self._of_users[user] += 1

        def give_back() -> None:
            for counter, each in ((self._of_keys, key), (self._of_users, user)):
                counter[each] -= 1
                if not counter[each]:
                    del counter[each]

        return give_back


class EventStream(StreamingResponse):
    """Counted from here to its end, whichever side ends it."""

    def __init__(self, request: Request, caller: Caller, lines: AsyncIterator[str]) -> None:
        streams: StreamLimiter = request.app.state.streams
        self._give_back = streams.take(caller)
        super().__init__(until_unavailable(lines), media_type=MEDIA_TYPE, headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._give_back()


async def until_unavailable(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """A database that goes away ends the stream as its time does: readers come again, and go on from
    the last event that they have."""
    try:
        async for each in lines:
            yield each
    except Unavailable as error:
        logger.log(log_level_of(error), "a stream of events ends: %s", error.message)


class KeyWatch:
    """Whether the key that opened a stream is still good; asked for again every few seconds."""

    def __init__(self, plane: ControlPlane, caller: Caller) -> None:
        self._plane = plane
        self._caller = caller
        self._clock = get_running_loop().time
        self._looked_at = self._clock()

    async def holds(self) -> bool:
        if self._clock() - self._looked_at < KEY_SECONDS:
            return True
        self._looked_at = self._clock()
        return await run_shielded(self._is_good())

    async def _is_good(self) -> bool:
        async with self._plane.central.read() as tx:
            return await tenants.is_key_valid(tx, self._caller.key, now=self._plane.clock())
