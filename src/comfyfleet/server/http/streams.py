"""Server-sent event streams, limited per key and user.

A stream closes when its key is no longer valid.
"""

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
    """Runs the work to completion even if the client disconnects, because canceling an SQL
    statement would close its database connection."""
    task = asyncio.create_task(work)
    # Retrieves the error so that asyncio doesn't log it if the client has disconnected.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


logger = logging.getLogger(__name__)
MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
# Seconds between two checks of a stream's key.
KEY_SECONDS = 3.0
# Seconds after which a client may retry if it has too many streams open.
RETRY_SECONDS = 10
# Delay after which clients reconnect if the control plane stops.
RECONNECT_MILLISECONDS = 1000


class StreamLimiter:
    """Limits the open streams of this process per key and user."""

    def __init__(self, *, per_key: int, per_user: int) -> None:
        self._per_key, self._per_user = per_key, per_user
        self._of_keys: Counter[UUID] = Counter()
        self._of_users: Counter[UUID] = Counter()

    def take(self, caller: Caller) -> Callable[[], None]:
        """Counts a new stream, and returns a function to call once when the stream ends.

        Raises TooManyCalls if the key or user has reached its limit.
        """
        key, user = caller.key.id, caller.user_id
        if self._of_keys[key] >= self._per_key or self._of_users[user] >= self._per_user:
            raise TooManyCalls(
                f"too many open event streams: at most {self._per_key} per key"
                f" and {self._per_user} per user",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._of_keys[key] += 1
        self._of_users[user] += 1

        def release() -> None:
            for counter, holder_id in ((self._of_keys, key), (self._of_users, user)):
                counter[holder_id] -= 1
                if not counter[holder_id]:
                    del counter[holder_id]

        return release


class EventStream(StreamingResponse):
    """An event stream that counts toward the caller's limits until it is closed."""

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
    """Ends the stream if the database becomes unavailable. Clients reconnect and resume after the
    last event that they received."""
    try:
        async for line in lines:
            yield line
    except Unavailable as error:
        logger.log(
            log_level_of(error), "event stream closed, database unavailable: %s", error.message
        )


async def until_stop(lines: AsyncIterator[str], stopping: asyncio.Event) -> AsyncIterator[str]:
    """Ends the stream when the control plane stops, with an event that makes clients reconnect."""
    stop = asyncio.ensure_future(stopping.wait())
    try:
        while not stopping.is_set():
            next_line = asyncio.ensure_future(anext(lines, None))
            try:
                await asyncio.wait({next_line, stop}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not next_line.done():
                    next_line.cancel()
                    await asyncio.wait({next_line})
            if next_line.cancelled():
                break
            line = next_line.result()
            if line is None:
                return
            yield line
        yield f"retry: {RECONNECT_MILLISECONDS}\n\n"
    finally:
        stop.cancel()


class StreamKeyCheck:
    """Checks every few seconds whether the key or session that opened a stream is still valid."""

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
