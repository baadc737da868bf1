"""The measurement of loop stalls itself."""

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tests.support.server.asgi import free_listener, served, url_of
from tests.support.server.loop_stalls import STALL_MS_MAX, LoopStalls, StallRecord
from tests.support.server.outside import raw_request, send_from_outside


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_work_in_the_loop_is_a_stall_and_a_wait_is_none() -> None:
    async with LoopStalls("a wait") as stalls:
        await asyncio.sleep(0.3)
    assert stalls.turns > 10
    async with LoopStalls("work", StallRecord()) as stalls:
        spin(0.2)
    assert stalls.worst_ms >= 200


async def test_a_thread_that_holds_the_lock_is_a_stall() -> None:
    async with LoopStalls("work in a thread", StallRecord()) as stalls:
        await asyncio.to_thread(sum, range(60_000_000))
    assert stalls.worst_ms > STALL_MS_MAX


async def test_the_work_of_a_client_outside_is_not_counted() -> None:
    sizes: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        sizes.append(len(await Request(scope, receive).body()))
        await Response(b"x" * 3_000_000, 201)(scope, receive, send)

    listener = free_listener()
    request = raw_request("POST", "/", body=b"{}", key="secret")
    async with served(app, listener), LoopStalls("the work of a client"):
        answers = await send_from_outside(url_of(listener), [request] * 3)
    assert sizes == [2, 2, 2]
    assert [each.status for each in answers] == [201, 201, 201]
    assert len(answers[0].body) == 3_000_000
