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
from comfyfleet.server.http.deps import plane_of
from comfyfleet.server.tenants import sessions
from comfyfleet.server.tenants.model import Caller

T = TypeVar("T")


async def run_shielded(work: Coroutine[Any, Any, T]) -> T:
    """Runs work to its end even if the reader disconnects: a cancelled statement would cost its
    database connection."""
    task = asyncio.create_task(work)
    # If the reader has gone, nobody else asks for the error.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


logger = logging.getLogger(__name__)
MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
KEY_SECONDS = 3.0
RETRY_SECONDS = 10
# How soon readers reconnect after a control plane has stopped.
RECONNECT_MILLISECONDS = 1000


class StreamLimiter:
    """Limits the open streams of this process per key and user."""

    def __init__(self, *, per_key: int, per_user: int) -> None:
        self._per_key, self._per_user = per_key, per_user
        self._of_keys: Counter[UUID] = Counter()
        self._of_users: Counter[UUID] = Counter()

    def take(self, caller: Caller) -> Callable[[], None]:
        """Counts a stream; returns a function that must be called once when it ends."""
        key, user = caller.key.id, caller.user_id
        if self._of_keys[key] >= self._per_key or self._of_users[user] >= self._per_user:
            raise TooManyCalls(
                f"a key follows at most {self._per_key} things at once, and a user {self._per_user}",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._of_keys[key] += 1
        self._of_users[user] += 1

        def release() -> None:
            for counter, each in ((self._of_keys, key), (self._of_users, user)):
                counter[each] -= 1
                if not counter[each]:
                    del counter[each]

        return release


class EventStream(StreamingResponse):
    """A stream that counts against the limits until either side ends it."""

    def __init__(self, request: Request, caller: Caller, lines: AsyncIterator[str]) -> None:
        streams: StreamLimiter = request.app.state.streams
        self._release = streams.take(caller)
        stopping = plane_of(request).stopping
        lines = until_stop(until_unavailable(lines), stopping)
        super().__init__(lines, media_type=MEDIA_TYPE, headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()


async def until_unavailable(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """Ends the stream if the database becomes unavailable; readers reconnect and resume after their
    last event."""
    try:
        async for each in lines:
            yield each
    except Unavailable as error:
        logger.log(
            log_level_of(error), "event stream ended, database unavailable: %s", error.message
        )


async def until_stop(lines: AsyncIterator[str], stopping: asyncio.Event) -> AsyncIterator[str]:
    """Ends the stream when the control plane stops, and tells readers to reconnect soon."""
    stop = asyncio.ensure_future(stopping.wait())
    try:
        while not stopping.is_set():
            following = asyncio.ensure_future(anext(lines, None))
            try:
                await asyncio.wait({following, stop}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.wait({following})
            if following.cancelled():
                break
            line = following.result()
            if line is None:
                return
            yield line
        yield f"retry: {RECONNECT_MILLISECONDS}\n\n"
    finally:
        stop.cancel()


class StreamKeyCheck:
    """Checks every few seconds whether the key that opened a stream, or the sign-in, is still valid."""

    def __init__(self, plane: ControlPlane, caller: Caller) -> None:
        self._plane = plane
        self._caller = caller
        self._clock = get_running_loop().time
        self._checked_at = self._clock()

    async def is_valid(self) -> bool:
        if self._clock() - self._checked_at < KEY_SECONDS:
            return True
        self._checked_at = self._clock()
        return await run_shielded(self._read_validity())

    async def _read_validity(self) -> bool:
        async with self._plane.central.read() as tx:
            return await sessions.is_caller_valid(tx, self._caller, now=self._plane.clock())
