"""Hands calls to custom nodes' routes to workers that wait for them at any control plane.

A call that a worker has received is never handed out again, because its backend may have acted on
it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from time import monotonic
from typing import Any
from uuid import UUID

from comfyfleet.api.route_calls import RouteAnswer, RouteCall, is_below
from comfyfleet.clock import Clock
from comfyfleet.errors import NotFound, OutcomeUnknown, TooManyCalls, Unavailable
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.coordination import NotifyChannel
from comfyfleet.server.fleets import store_route_calls as store
from comfyfleet.server.fleets.model import FleetWorker
from comfyfleet.server.fleets.store_route_calls import NEW, WaitingCall

logger = logging.getLogger(__name__)
PICKUP_SECONDS = 10.0
ANSWER_SECONDS = 60.0
# Seconds for delivering the worker's answer, in addition to the backend's time.
DELIVERY_SECONDS = 10.0
PER_TENANT_MAX = 8
# Maximum calls at one control plane, without copies. Each may hold a body or an answer in memory.
AT_ONCE_MAX = 32
# Calls with larger bodies have lower limits, per tenant and in total. Each needs several times its
# size, in the database and as text.
LARGE_BODY_BYTES = 256 * 1024
LARGE_PER_TENANT_MAX, LARGE_AT_ONCE_MAX = 4, 16
WAITING_PER_WORKER_MAX = 4
# Seconds between checks when no hint arrives, by callers and by the matching loop.
LOOK_SECONDS = 1.0
MATCH_SECONDS = 2.0
# Seconds until a worker that isn't allowed to work may poll again.
HELD_BACK_SECONDS = 5.0
RETRY_AFTER_SECONDS = 5
# How long a user's prompts prefer the workers that accepted the user's last upload.
UPLOADS_KEPT = timedelta(hours=1)


class NoWorker(Unavailable):
    """No worker has taken the call, so it may be repeated."""


@dataclass(frozen=True)
class NewRouteCall:
    """A call to a route. Workers of the fleets in `fleet_ids` may take it, or only `for_worker_id`
    if that is set.

    A copy is sent to an additional worker and doesn't count against the tenant's limit.
    `pickup_seconds` is how long the call waits for a worker. None means the usual time.
    """

    id: UUID
    tenant_id: UUID
    fleet_ids: Sequence[int]
    method: str
    path: str
    target: str
    headers: dict[str, str]
    body: bytes = field(repr=False)
    for_worker_id: str | None = None
    is_copy: bool = False
    pickup_seconds: float | None = None

    def row(self) -> dict[str, Any]:
        row = {**vars(self), "fleet_ids": list(self.fleet_ids)}
        del row["pickup_seconds"]
        return row


@dataclass(eq=False)
class RouteWaiter:
    """A worker that waits for a call."""

    worker: FleetWorker
    prefixes: Sequence[str]
    call: "asyncio.Future[RouteCall | None]"
    is_leaving: bool = False

    def takes(self, call: WaitingCall) -> bool:
        is_ours = self.worker.fleet_id in call.fleet_ids
        is_ours = is_ours and call.for_worker_id in (None, self.worker.worker_id)
        return is_ours and any(is_below(each, call.path) for each in self.prefixes)


class LargeCalls:
    """Limits concurrent calls with large bodies."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(LARGE_AT_ONCE_MAX)
        self._of_tenants: dict[UUID, asyncio.Semaphore] = {}
        self._counts: Counter[UUID] = Counter()  # calls that wait or have a turn, by tenant

    @asynccontextmanager
    async def turn(self, call: NewRouteCall) -> AsyncIterator[None]:
        """Waits for a turn. One tenant's calls don't block those of others."""
        if len(call.body) <= LARGE_BODY_BYTES:
            yield
            return
        tenant_id = call.tenant_id
        new = asyncio.Semaphore(LARGE_PER_TENANT_MAX)
        of_tenant = self._of_tenants.setdefault(tenant_id, new)
        self._counts[tenant_id] += 1
        try:
            async with of_tenant, self._all:
                yield
        finally:
            self._counts[tenant_id] -= 1
            if not self._counts[tenant_id]:
                del self._counts[tenant_id], self._of_tenants[tenant_id]


class RouteCalls:
    def __init__(self, central: Database, clock: Clock) -> None:
        self._central = central
        self._clock = clock
        self._hints = NotifyChannel(central, store.CHANNEL)
        self._waiters: list[RouteWaiter] = []
        self._answered: dict[UUID, asyncio.Event] = {}
        self._at_once = 0  # without copies
        self._large = LargeCalls()
        self._is_new = asyncio.Event()

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._hints.listen(self._heard, self._is_new.set))
            both.create_task(self._match_all())

    async def close(self) -> None:
        await self._hints.close()

    def _heard(self, hint: str) -> None:
        if hint == NEW:
            self._is_new.set()
        elif (event := self._answered.get(UUID(hint))) is not None:
            event.set()

    # For callers

    async def send(self, call: NewRouteCall) -> RouteAnswer:
        """Sends a call and returns the answer of a worker's backend.

        Raises TooManyCalls. Raises Unavailable if no worker took the call, which means that none
        will, and OutcomeUnknown if a worker took it and didn't answer.
        """
        pickup_seconds = PICKUP_SECONDS if call.pickup_seconds is None else call.pickup_seconds
        if self._at_once >= AT_ONCE_MAX and not call.is_copy:
            raise _too_many()
        self._at_once += not call.is_copy
        try:
            async with self._large.turn(call):
                return await self._send(call, pickup_seconds)
        finally:
            self._at_once -= not call.is_copy

    async def _send(self, call: NewRouteCall, pickup_seconds: float) -> RouteAnswer:
        event = self._answered[call.id] = asyncio.Event()
        try:
            await self._add(call, pickup_seconds)
            self._heard(NEW)
            return await self._answer_to(call.id, event, pickup_seconds)
        finally:
            del self._answered[call.id]
            await asyncio.shield(self._forget(call.id))

    async def _add(self, call: NewRouteCall, pickup_seconds: float) -> None:
        now = self._clock()
        async with self._central.transaction() as tx:
            is_full = await store.count_of(tx, call.tenant_id, now=now) >= PER_TENANT_MAX
            if is_full and not call.is_copy:
                raise _too_many()
            await store.add(tx, call.row(), now=now, seconds=pickup_seconds + LOOK_SECONDS)
            await store.hint(tx, NEW)

    async def _answer_to(
        self, call_id: UUID, event: asyncio.Event, pickup_seconds: float
    ) -> RouteAnswer:
        begun = monotonic()
        while (waited := monotonic() - begun) < pickup_seconds + ANSWER_SECONDS + DELIVERY_SECONDS:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await event.wait()
            event.clear()
            try:
                found = await self._look(call_id, is_due=waited >= pickup_seconds)
            except NoWorker:
                raise
            except Unavailable:
                continue  # the call's state is unknown without the database
            if found is not None:
                return found
        raise OutcomeUnknown("a backend was asked, and did not answer in time")

    async def _look(self, call_id: UUID, *, is_due: bool) -> RouteAnswer | None:
        async with self._central.read() as tx:
            status = await store.status(tx, call_id)
            if status == store.ANSWERED:
                return await store.get_answer(tx, call_id)
        if status is None:
            raise OutcomeUnknown("the call was given up")
        if status == store.WAITING and is_due and await self._withdraw(call_id):
            raise NoWorker(
                "no worker that passes this route on is free",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        return None

    async def _withdraw(self, call_id: UUID) -> bool:
        async with self._central.transaction() as tx:
            return await store.withdraw(tx, call_id)

    async def _forget(self, call_id: UUID) -> None:
        # If this fails, a sweep removes the call later.
        with suppress(Unavailable):
            async with self._central.transaction() as tx:
                await store.remove(tx, call_id)

    # For workers

    async def take(
        self, worker: FleetWorker, prefixes: Sequence[str], seconds: float
    ) -> RouteCall | None:
        """Waits for a call that the worker may pass on. If the wait is cancelled, another worker
        gets the call."""
        if not worker.takes_jobs:
            await asyncio.sleep(min(seconds, HELD_BACK_SECONDS))
            return None
        waiting = Counter(each.worker.worker_id for each in self._waiters)
        if waiting[worker.worker_id] >= WAITING_PER_WORKER_MAX:
            raise _too_many()
        waiter = RouteWaiter(worker, prefixes, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._is_new.set()
        try:
            return await self._wait(waiter, seconds)
        except asyncio.CancelledError:
            await asyncio.shield(self._leave(waiter))
            raise

    async def _wait(self, waiter: RouteWaiter, seconds: float) -> RouteCall | None:
        await asyncio.wait({waiter.call}, timeout=seconds)
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            return None
        # A call is being assigned to this waiter or has been.
        waiter.is_leaving = True
        return await waiter.call

    async def _leave(self, waiter: RouteWaiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        call = waiter.call.result() if waiter.call.done() and not waiter.call.cancelled() else None
        waiter.call.cancel()
        if call is not None:
            await self._put_back(waiter, call)

    def dismiss(self) -> None:
        """Ends all waits without a call, because this process is stopping."""
        for waiter in self._waiters:
            waiter.call.set_result(None)
        self._waiters.clear()

    async def answer(self, answered: RouteAnswer) -> None:
        """Stores an answer and notifies the caller. Raises NotFound if no caller is waiting for
        it."""
        async with self._central.transaction() as tx:
            if not await store.answer(tx, answered):
                raise NotFound("nobody waits for an answer to this call")
            await store.hint(tx, str(answered.call_id))
        self._heard(str(answered.call_id))

    async def note_upload(self, tenant_id: UUID, user_id: UUID, worker_ids: Sequence[str]) -> None:
        """Stores which workers accepted a user's upload. The user's next prompts prefer these
        workers."""
        async with self._central.transaction() as tx:
            await store.put_upload(tx, tenant_id, user_id, worker_ids, now=self._clock())

    async def remove_expired(self) -> None:
        """Removes old uploads, and calls left by control planes that ended while callers waited."""
        now = self._clock()
        async with self._central.transaction() as tx:
            await store.remove_expired(tx, now=now)
            await store.remove_old_uploads(tx, before=now - UPLOADS_KEPT)

    # Between both

    async def _match_all(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(MATCH_SECONDS):
                    await self._is_new.wait()
            self._is_new.clear()
            try:
                await self._match()
            except Unavailable as error:
                logger.debug("calls of routes can't be read: %s", error.message)

    async def _match(self) -> None:
        if not self._waiters:
            return
        async with self._central.read() as tx:
            calls = await store.waiting(tx, now=self._clock())
        for call in calls:
            waiter = next((each for each in self._waiters if each.takes(call)), None)
            if waiter is not None:
                await self._give(call, waiter)

    async def _give(self, call: WaitingCall, waiter: RouteWaiter) -> None:
        self._waiters.remove(waiter)
        found: RouteCall | None = None
        is_serving = True
        try:
            async with self._central.transaction() as tx:
                is_serving = await store.is_serving(tx, waiter.worker.id)
                if is_serving:
                    found = await self._taken(tx, call, waiter)
        except BaseException:
            self._settle(waiter, None, is_serving=True)
            raise
        if found is not None and waiter.call.cancelled():
            await self._put_back(waiter, found)
        else:
            self._settle(waiter, found, is_serving=is_serving)

    async def _taken(self, tx: Tx, call: WaitingCall, waiter: RouteWaiter) -> RouteCall | None:
        return await store.take(
            tx, call.id, waiter.worker.worker_id, now=self._clock(), seconds=ANSWER_SECONDS
        )

    def _settle(self, waiter: RouteWaiter, found: RouteCall | None, *, is_serving: bool) -> None:
        """Ends a worker's wait, or lets it continue if it got no call."""
        if waiter.call.cancelled():
            return
        if found is None and is_serving and not waiter.is_leaving:
            self._waiters.append(waiter)
        else:
            waiter.call.set_result(found)

    async def _put_back(self, waiter: RouteWaiter, call: RouteCall) -> None:
        async with self._central.transaction() as tx:
            await store.put_back(tx, call.id, waiter.worker.worker_id)
            await store.hint(tx, NEW)
        self._is_new.set()


def _too_many() -> TooManyCalls:
    return TooManyCalls("too many such calls at once", retry_after_seconds=1)


async def accepted_upload(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, now: datetime
) -> Sequence[str]:
    """Returns the workers that accepted the user's last upload, unless it is too old."""
    return await store.get_upload(tx, tenant_id, user_id, since=now - UPLOADS_KEPT)
