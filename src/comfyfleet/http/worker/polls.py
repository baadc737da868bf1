"""The answer to a poll, which may be long in coming."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from comfyfleet.dispatch.model import Lease
from comfyfleet.dispatch.waiting import Asked
from comfyfleet.fleets.model import Worker
from comfyfleet.http.access import POLL, apology
from comfyfleet.http.connections import Connection
from comfyfleet.http.direct import as_json
from comfyfleet.http.errors import ANSWERED, answer_to_any
from comfyfleet.http.parked import PARKED, Parked, connection_of
from comfyfleet.http.worker.auth import read_with_key
from comfyfleet.http.worker.vanishing import Late
from comfyfleet.jobs import polling
from comfyfleet.jobs.polling import Polling, ReadWithKey, Wait
from comfyfleet.kernel.tracing import bound
from comfyfleet.plane import Plane
from comfyfleet.wire.messages import Poll, Polled, with_plain_fields

T = TypeVar("T")
logger = logging.getLogger(__name__)


async def polled(
    plane: Plane, worker: Worker, said: Poll, read: ReadWithKey | None = None
) -> Polled:
    return as_asked(await polling.poll(plane.sides, worker, said, read), is_brief=said.is_brief)


def as_asked(found: Polled, *, is_brief: bool) -> Polled:
    if found.job is None or is_brief:
        return found
    return found.model_copy(update={"job": with_plain_fields(found.job)})


class PollAnswer(Response):
    """On our own server the poll is parked when it has to wait; under another its coroutine waits."""

    def __init__(self, plane: Plane, worker: Worker, said: Poll) -> None:
        super().__init__()
        self._plane, self._worker, self._said = plane, worker, said

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plane, worker, said = self._plane, self._worker, self._said
        connection, read = connection_of(scope), read_with_key(scope)
        if connection is None:
            await Late(polled(plane, worker, said, read))(scope, receive, send)
            return
        going = Polling(worker, said)
        found = await unless_lost(connection, going.begin(plane.sides, worker, said, read))
        if found is None:
            return
        if isinstance(found, Wait) and (parked := connection.park()) is not None:
            scope["state"][PARKED] = parked
            ParkedPoll(plane, going, parked, is_brief=said.is_brief).wait(found)
            return
        if isinstance(found, Wait):
            going.end(plane.sides)
            connection.let_go()
            await Late(polled(plane, worker, said))(scope, receive, send)
            return
        await as_json(as_asked(found, is_brief=said.is_brief))(scope, receive, send)


async def unless_lost(connection: Connection, work: Coroutine[Any, Any, T]) -> T | None:
    """None if the client goes away first; the work is then cancelled, and gives back its lease."""
    working = asyncio.current_task()
    if working is None or connection.is_lost:
        work.close()
        return None
    connection.on_lost = working.cancel
    try:
        return await work
    except asyncio.CancelledError:
        if not connection.is_lost:
            raise
        working.uncancel()
        return None
    finally:
        connection.on_lost = None


class ParkedPoll:
    """One poll that waits without a coroutine: something is done only when its wait is over."""

    __slots__ = ("_is_brief", "_parked", "_pending", "_plane", "_polling")

    def __init__(self, plane: Plane, going: Polling, parked: Parked, *, is_brief: bool) -> None:
        self._plane, self._polling, self._parked = plane, going, parked
        self._is_brief = is_brief
        self._pending: Asked | asyncio.TimerHandle | asyncio.Task[None] | None = None
        parked.waiting = self

    def wait(self, wait: Wait) -> None:
        if wait.waiter is None:
            loop = asyncio.get_running_loop()
            self._pending = loop.call_later(wait.seconds, self._go_on, None)
            return
        self._pending = asked = self._plane.queue.ask(
            wait.waiter, wait_seconds=wait.seconds, as_of=wait.as_of
        )
        asked.future.add_done_callback(self._go_on)

    def lost(self) -> None:
        """The worker has hung up: a job that was for it goes to another."""
        self._polling.end(self._plane.sides)
        if isinstance(self._pending, Asked):
            self._plane.queue.leave(self._pending)
        elif self._pending is not None:
            self._pending.cancel()

    def stopped(self) -> None:
        """This process is about to end; the worker asks again, another one or the next."""
        if not isinstance(self._pending, asyncio.Task):
            self.lost()
            self._answer(as_json(Polled(reason="the control plane stops")))

    def _go_on(self, waited: "asyncio.Future[Lease | None] | None") -> None:
        if self._parked.waiting is self:
            self._pending = self._parked.run(self._proceed(waited))

    async def _proceed(self, waited: "asyncio.Future[Lease | None] | None") -> None:
        with bound(request_id=self._parked.request_id):
            try:
                lease = None if waited is None else waited.result()
                found = await self._polling.go_on(self._plane.sides, lease)
            except ANSWERED as error:
                self._answer(answer_to_any(error, POLL, self._plane.meters))
            except Exception:
                logger.exception("unexpected error in POST %s", POLL)
                self._answer(apology(self._parked.request_id))
            else:
                self._tell(found)

    def _answer(self, response: Response) -> None:
        self._polling.end(self._plane.sides)
        self._parked.answer(response)

    def _tell(self, found: Polled | Wait) -> None:
        if not isinstance(found, Wait):
            self._answer(as_json(as_asked(found, is_brief=self._is_brief)))
        elif self._parked.closes:
            self._pending = None
            self.stopped()
        else:
            self.wait(found)
