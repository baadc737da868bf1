"""One stream of server-sent events after another, resumed where the last one was cut."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Generic, TypeVar

import httpx

from comfyfleet.client.answers import error_of
from comfyfleet.client.calls import PASSING, Call, Calls
from comfyfleet.kernel.errors import LimitExceeded
from comfyfleet.kernel.server_events import EventParser, ServerEvent

# A stream says something, if only that it lives, more often than this.
SILENCE_SECONDS_MAX = 45.0
# Streams in a row that told nothing; then something else is tried.
FRUITLESS_MAX = 3
NO_STREAM = frozenset({404, 405, 406, 501})
Told = TypeVar("Told")


class Listening(Generic[Told]):
    """`last_id` is where it stands: a later reader may begin there."""

    def __init__(
        self,
        calls: Calls,
        path: str,
        parse: Callable[[ServerEvent], Told | None],
        *,
        last_id: str = "",
    ) -> None:
        self._calls = calls
        self._path = path
        self._parse = parse
        self.last_id = last_id
        self.is_over = False  # nothing more will come
        self.may_stream = True

    async def heard(self) -> AsyncGenerator[Told, None]:
        """What one stream tells, until it is cut or the server ends it: to hang up on it would be rude."""
        headers = {"Accept": "text/event-stream"}
        if self.last_id:
            headers["Last-Event-ID"] = self.last_id
        call = Call("GET", self._path, headers=headers, answer_seconds=SILENCE_SECONDS_MAX)
        parser = EventParser(self.last_id)
        try:
            async with self._calls.stream(call) as response:
                if not await self._is_stream(response):
                    return
                async for piece in response.aiter_bytes():
                    for found in parser.feed(piece):
                        event = self._parse(found)
                        if event is not None:
                            # Only what was told counts as heard: an id whose event was cut off is asked for again.
                            self.last_id = found.id
                            yield event
                    if self.is_over and parser.comments:
                        return  # the server keeps the stream open, and has nothing more to tell
                    parser.comments = 0
        except (httpx.TransportError, LimitExceeded):
            return

    async def _is_stream(self, response: httpx.Response) -> bool:
        if response.status_code == httpx.codes.NO_CONTENT:
            self.is_over = True  # all has been told
            return False
        kind = response.headers.get("content-type", "")
        if response.is_success and kind.startswith("text/event-stream"):
            return True
        self.may_stream = response.status_code in PASSING
        if response.is_success or response.status_code in PASSING | NO_STREAM:
            return False
        await response.aread()
        raise error_of(response)

    async def all_heard(self) -> AsyncGenerator[Told, None]:
        """Stream after stream, until it is over or they are given up."""
        fruitless = 0
        while not self.is_over and self.may_stream and fruitless < FRUITLESS_MAX:
            fruitless += 1
            async with aclosing(self.heard()) as heard:
                async for event in heard:
                    fruitless = 0
                    yield event
            if fruitless and self.may_stream and not self.is_over:
                await self._calls.patience.back_off(fruitless)
