"""A long poll whose client has gone must not take a job with it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class Late(Response):
    """Answers when the work is done. Thousands wait at a time: nothing of the request is kept."""

    media_type = "application/json"

    def __init__(self, work: Coroutine[Any, Any, BaseModel]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        made = await unless_gone(receive, self._work)
        # Nobody reads the answer to one who is gone.
        self.body = made.model_dump_json().encode() if made else b"{}"
        self.init_headers()
        await super().__call__(scope, receive, send)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, BaseModel]) -> BaseModel | None:
    """None if the client went away first; the work is then cancelled, and gives back its lease."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
            return None
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
