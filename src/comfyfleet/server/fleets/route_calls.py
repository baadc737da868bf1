"""Forwards calls to custom nodes' routes to workers, which may wait for them at any control plane.

A call that a worker has received is never passed to another worker, because its backend may already
have executed it.
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
# Time limits in seconds for a worker to take the call, for its backend to respond, and for the
# response to be delivered.
PICKUP_SECONDS = 10.0
ANSWER_SECONDS = 60.0
DELIVERY_SECONDS = 10.0
PER_TENANT_MAX = 8  # concurrent calls per tenant
# Maximum number of concurrent calls at a control plane. Copies don't count. Each call may hold a
# body or a response in memory.
AT_ONCE_MAX = 32
# Calls with bodies larger than this have lower limits, both per tenant and in total, because each
# call needs several times its body's size in memory.
LARGE_BODY_BYTES = 256 * 1024
LARGE_PER_TENANT_MAX, LARGE_AT_ONCE_MAX = 4, 16
WAITING_PER_WORKER_MAX = 4  # waiting polls
# Seconds between checks of the database, by callers and by the matching loop, if no hint arrives.
LOOK_SECONDS = 1.0
MATCH_SECONDS = 2.0
# Maximum number of seconds that a poll waits if its worker accepts no jobs.
HELD_BACK_SECONDS = 5.0
RETRY_AFTER_SECONDS = 5
# How long a user's prompts prefer the workers that accepted the user's last upload.
UPLOADS_KEPT = timedelta(hours=1)


class NoWorker(Unavailable):
    """Raised when no worker has taken a call. The caller may then repeat it."""


@dataclass(frozen=True)
class NewRouteCall:
    """A call to a custom node's route. Any worker of the fleets in `fleet_ids` may take it, or only
    `for_worker_id` if that is set.

    A copy is sent to an additional worker and doesn't count toward the tenant's limit.
    `pickup_seconds` is the time for which the call waits for a worker. None means the default.
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
    """A worker's poll that waits for a call."""

    worker: FleetWorker
    prefixes: Sequence[str]
    call: "asyncio.Future[RouteCall | None]"
    is_leaving: bool = False

    def takes(self, call: WaitingCall) -> bool:
        is_ours = self.worker.fleet_id in call.fleet_ids
        is_ours = is_ours and call.for_worker_id in (None, self.worker.worker_id)
        return is_ours and any(is_below(prefix, call.path) for prefix in self.prefixes)


class LargeCalls:
    """Limits concurrent calls with large bodies."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(LARGE_AT_ONCE_MAX)
        self._of_tenants: dict[UUID, asyncio.Semaphore] = {}
        self._counts: Counter[UUID] = Counter()  # waiting and current calls by tenant

    @asynccontextmanager
    async def turn(self, call: NewRouteCall) -> AsyncIterator[None]:
        """Waits for a turn if the call is large. The calls of one tenant don't block those of
        others.
        """
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
    """Connects the callers of routes with the workers that forward the calls, across control
    planes.
    """

    def __init__(self, central: Database, clock: Clock) -> None:
        self._central = central
        self._clock = clock
        self._hints = NotifyChannel(central, store.CHANNEL)
        self._waiters: list[RouteWaiter] = []
        self._answered: dict[UUID, asyncio.Event] = {}
        self._active_calls = 0  # without copies
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
        """Sends a call and returns the response of a worker's backend.

        Raises TooManyCalls if a limit is exceeded, NoWorker if no worker took the call in time, and
        OutcomeUnknown if a worker took it but didn't respond.
        """
        pickup_seconds = PICKUP_SECONDS if call.pickup_seconds is None else call.pickup_seconds
        if self._active_calls >= AT_ONCE_MAX and not call.is_copy:
            raise _too_many()
        self._active_calls += not call.is_copy
        try:
            async with self._large.turn(call):
                return await self._send(call, pickup_seconds)
        finally:
            self._active_calls -= not call.is_copy

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
                response = await self._look(call_id, is_due=waited >= pickup_seconds)
            except NoWorker:
                raise
            except Unavailable:
                continue  # without the database, the state of the call is unknown
            if response is not None:
                return response
        raise OutcomeUnknown("a backend received the call but did not respond in time")

    async def _look(self, call_id: UUID, *, is_due: bool) -> RouteAnswer | None:
        async with self._central.read() as tx:
            status = await store.status(tx, call_id)
            if status == store.ANSWERED:
                return await store.get_answer(tx, call_id)
        if status is None:
            raise OutcomeUnknown("the call was removed, so its outcome is unknown")
        if status == store.WAITING and is_due and await self._withdraw(call_id):
            raise NoWorker(
                "no worker is available for this route",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        return None

    async def _withdraw(self, call_id: UUID) -> bool:
        async with self._central.transaction() as tx:
            return await store.withdraw(tx, call_id)

    async def _forget(self, call_id: UUID) -> None:
        # If this fails, a sweep will remove the call.
        with suppress(Unavailable):
            async with self._central.transaction() as tx:
                await store.remove(tx, call_id)

    # For workers

    async def take(
        self, worker: FleetWorker, prefixes: Sequence[str], seconds: float
    ) -> RouteCall | None:
        """Waits for a call that the worker may pass to its backend. If the wait is cancelled, the
        call remains available to other workers.
        """
        if not worker.takes_jobs:
            await asyncio.sleep(min(seconds, HELD_BACK_SECONDS))
            return None
        waiting = Counter(waiter.worker.worker_id for waiter in self._waiters)
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
        # A call has been assigned to this waiter, or is being assigned now.
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
        """Stores a backend's response and notifies the caller. Raises NotFound if no caller is
        waiting for it.
        """
        async with self._central.transaction() as tx:
            if not await store.answer(tx, answered):
                raise NotFound("no caller is waiting for a response to this call")
            await store.hint(tx, str(answered.call_id))
        self._heard(str(answered.call_id))

    async def note_upload(self, tenant_id: UUID, user_id: UUID, worker_ids: Sequence[str]) -> None:
        """Records which workers accepted a user's upload. The user's next prompts prefer these
        workers.
        """
        async with self._central.transaction() as tx:
            await store.put_upload(tx, tenant_id, user_id, worker_ids, now=self._clock())

    async def remove_expired(self) -> None:
        """Removes old uploads, and calls that a control plane left behind when it stopped."""
        now = self._clock()
        async with self._central.transaction() as tx:
            await store.remove_expired(tx, now=now)
            await store.remove_old_uploads(tx, before=now - UPLOADS_KEPT)

    # Matching

    async def _match_all(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(MATCH_SECONDS):
                    await self._is_new.wait()
            self._is_new.clear()
            try:
                await self._match()
            except Unavailable as error:
                logger.debug("route calls could not be read: %s", error.message)

    async def _match(self) -> None:
        if not self._waiters:
            return
        async with self._central.read() as tx:
            calls = await store.waiting(tx, now=self._clock())
        for call in calls:
            waiter = next((waiting for waiting in self._waiters if waiting.takes(call)), None)
            if waiter is not None:
                await self._give(call, waiter)

    async def _give(self, call: WaitingCall, waiter: RouteWaiter) -> None:
        self._waiters.remove(waiter)
        assigned: RouteCall | None = None
        is_serving = True
        try:
            async with self._central.transaction() as tx:
                is_serving = await store.is_serving(tx, waiter.worker.id)
                if is_serving:
                    assigned = await self._taken(tx, call, waiter)
        except BaseException:
            self._settle(waiter, None, is_serving=True)
            raise
        if assigned is not None and waiter.call.cancelled():
            await self._put_back(waiter, assigned)
        else:
            self._settle(waiter, assigned, is_serving=is_serving)

    async def _taken(self, tx: Tx, call: WaitingCall, waiter: RouteWaiter) -> RouteCall | None:
        return await store.take(
            tx, call.id, waiter.worker.worker_id, now=self._clock(), seconds=ANSWER_SECONDS
        )

    def _settle(self, waiter: RouteWaiter, call: RouteCall | None, *, is_serving: bool) -> None:
        """Ends a worker's wait with its call. Without a call, the wait continues unless the worker
        is leaving or may no longer serve calls.
        """
        if waiter.call.cancelled():
            return
        if call is None and is_serving and not waiter.is_leaving:
            self._waiters.append(waiter)
        else:
            waiter.call.set_result(call)

    async def _put_back(self, waiter: RouteWaiter, call: RouteCall) -> None:
        async with self._central.transaction() as tx:
            await store.put_back(tx, call.id, waiter.worker.worker_id)
            await store.hint(tx, NEW)
        self._is_new.set()


def _too_many() -> TooManyCalls:
    return TooManyCalls("too many concurrent calls to routes", retry_after_seconds=1)


async def accepted_upload(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, now: datetime
) -> Sequence[str]:
    """Returns the ids of the workers that accepted the user's last upload, or none if it is too
    old.
    """
    return await store.get_upload(tx, tenant_id, user_id, since=now - UPLOADS_KEPT)
