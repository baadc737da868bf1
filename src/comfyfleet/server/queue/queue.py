"""Provides DispatchQueue, which opens its own transactions, combines concurrent requests into
batches, and lets workers wait for jobs.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from datetime import datetime
from typing import Any, Generic, TypeVar
from uuid import UUID

from comfyfleet.clock import Clock
from comfyfleet.errors import FleetError, LeaseLost
from comfyfleet.server.db import Database
from comfyfleet.server.db.coordination import PAYLOAD_BYTES_MAX, NotifyChannel
from comfyfleet.server.db.errors import log_level_of
from comfyfleet.server.fleets.facts_requests import FactsRequests
from comfyfleet.server.fleets.model import affinity_of
from comfyfleet.server.queue import service
from comfyfleet.server.queue.matcher import Matcher, Matches, ModelSetCache
from comfyfleet.server.queue.model import (
    Dispatch,
    DispatchLease,
    DispatchStatus,
    ExtendedLease,
    NewDispatch,
    QueueLane,
    RequeueReason,
    Waiter,
)
from comfyfleet.server.queue.store import Completion, Extension, HeldLease, open_queue_store, reads
from comfyfleet.server.queue.switch_costs import SwitchCosts
from comfyfleet.server.queue.waiters import HeartbeatWaiters, PollRequest, WaiterPool
from comfyfleet.settings import Settings

Item = TypeVar("Item")
Answer = TypeVar("Answer")
BATCH_MAX = 256  # calls per batch


class Coalescer(Generic[Item, Answer]):
    """Combines concurrent calls into batches. While one batch is executed, the next one is
    collected, so batches grow with the load.
    """

    def __init__(
        self, act: Callable[[list[Item]], Awaitable[Sequence[Answer | Exception]]]
    ) -> None:
        self._act = act
        self._gathered: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._pump: asyncio.Task[None] | None = None

    def ask(self, item: Item) -> "asyncio.Future[Answer]":
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._gathered.append((item, future))
        if self._pump is None:
            self._pump = asyncio.create_task(self._run())
        return future

    async def _run(self) -> None:
        while self._gathered:
            batch = self._gathered[:BATCH_MAX]
            del self._gathered[:BATCH_MAX]
            try:
                answers = await self._act([item for item, _ in batch])
            except Exception as error:  # noqa: BLE001 — raised in every caller
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                _resolve(future, answer)
        # A done callback would reset this too late. A call that arrives before the callback would
        # wait for this task, which has already checked for calls for the last time.
        self._pump = None

    async def close(self) -> None:
        if self._pump is not None:
            await asyncio.wait([self._pump])


def _resolve(future: "asyncio.Future[Answer]", answer: Answer | Exception) -> None:
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


# Seconds between checks for jobs whose notification was lost, and the limits of such a check.
RECHECK_SECONDS = 5.0
AFFINITIES_RECHECKED_MAX = 1_000
RECHECKED_PER_LANE = 64
SWITCH_COSTS_SECONDS = 10.0  # time between updates of the switch costs
RETRY_SECONDS = 0.02  # time until waiters that lost a race are served again
LATE_SECONDS = 0.05  # extra time after the deadline of a poll that is being served
CHANNEL = "comfyfleet_queue"
logger = logging.getLogger(__name__)


class DispatchQueue:
    """The queue of a process. Handles leases, heartbeats, completions and waiting polls."""

    def __init__(
        self, db: Database, *, settings: Settings, clock: Clock, new_token: Callable[[], UUID]
    ) -> None:
        self._db = db
        self._settings = settings
        self._clock = clock
        self._hot = open_queue_store(db, clock)
        self._matcher = Matcher(self._hot, settings=settings, clock=clock, new_token=new_token)
        self._enqueues = Coalescer(self._enqueue)
        self._completes = Coalescer(self._complete)
        self._extends = Coalescer(self._extend)
        self._hints = NotifyChannel(db, CHANNEL)
        self._name = new_token().hex  # identifies the messages that this process has sent
        self._waiting = WaiterPool()
        self._new_requests: list[PollRequest] = []
        self._woken: Counter[QueueLane] = Counter()
        self._woken_affinities: set[str] = set()
        self._unannounced: dict[int, QueueLane] = {}  # jobs not yet announced to other processes
        self._unannounced_affinities: set[str] = set()
        self._unannounced_orders: list[dict[str, Any]] = []
        self.heartbeat_waiters = HeartbeatWaiters()
        self.facts = FactsRequests(self.announce, self.dismiss)
        # Called with each message from another control plane.
        self.hearers: list[Callable[[Mapping[str, Any]], None]] = [self.facts.heard]
        self._is_serving = False
        self._pump: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._learned_at: datetime | None = None  # time of the newest run that was read
        self.dismissals = 0  # how many times polls were dismissed

    async def lease(
        self, waiter: Waiter, *, wait_seconds: float, as_of: int | None = None
    ) -> DispatchLease | None:
        """Leases the best queued job for this worker, or the first one that arrives within
        `wait_seconds`. On SQLite, a power failure can undo the lease until the database's
        `persist` returns.
        """
        request = self.ask(waiter, wait_seconds=wait_seconds, as_of=as_of)
        try:
            return await request.future
        except asyncio.CancelledError:
            self.leave(request)
            raise

    def ask(self, waiter: Waiter, *, wait_seconds: float, as_of: int | None = None) -> PollRequest:
        """Starts a poll and returns its request, whose future gets the lease or None.

        `as_of` is the number of dismissals before the caller read the waiter's permissions. If
        there was another dismissal since, they may be outdated, so the poll ends and the caller
        must read them again. A waiter without lanes gets no job. Its poll only ends by dismissal or
        timeout.
        """
        loop = asyncio.get_running_loop()
        request = PollRequest(waiter, loop.create_future(), loop.time() + wait_seconds)
        if self._is_closed or as_of not in {None, self.dismissals}:
            request.future.set_result(None)
            return request
        if not waiter.lanes:
            self._park(request)
            return request
        self._new_requests.append(request)
        self._start()
        return request

    def leave(self, request: PollRequest) -> None:
        """Abandons a poll. If it has just received a lease, the lease is requeued if necessary."""
        self._waiting.discard(request)
        if request.timer is not None:
            request.timer.cancel()
        if not request.future.done():
            request.future.cancel()
        elif not request.future.cancelled() and not request.future.exception():
            lease = request.future.result()
            if lease is not None:
                self._give_back(request, lease)

    @property
    def model_sets(self) -> ModelSetCache:
        return self._matcher.model_sets

    @property
    def switch_costs(self) -> SwitchCosts:
        return self._matcher.switch_costs

    async def enqueue(self, new: Sequence[NewDispatch]) -> list[Dispatch]:
        """Adds dispatches, commits, wakes waiters for them, and returns the new dispatches.

        On SQLite, a power failure can undo this until the database's `persist` returns.
        """
        if not new:
            return []
        return await self._enqueues.ask(new)

    async def complete(
        self, dispatch_id: int, token: UUID, *, duration: float | None = None
    ) -> None:
        """Completes a dispatch. A repeated call with the same token succeeds, and another token
        raises LeaseLost. On SQLite, a power failure can undo this until the database's `persist`
        returns.
        """
        await self._completes.ask(Completion(dispatch_id, token, duration))

    async def extend(
        self, dispatch_id: int, token: UUID, *, started: bool, worker_id: str | None = None
    ) -> ExtendedLease:
        extended = await self._extends.ask(Extension(dispatch_id, token, started, worker_id))
        await self._db.persist()
        return extended

    def arrived(self, rows: Collection[Dispatch], preferred: Iterable[str] = ()) -> None:
        """Wakes waiters for dispatches that were enqueued or requeued. Must be called after the
        commit.

        `preferred` contains the affinities of workers for which the dispatches are briefly
        reserved. These workers are woken in addition to the best waiters, which can't lease the
        dispatches yet.
        """
        arrived = {row.id: row.lane for row in rows}
        bound = {row.backend_affinity for row in rows if row.backend_affinity}
        preferred_affinities = set(preferred)
        self._woken.update(arrived.values())
        self._woken_affinities |= bound | preferred_affinities
        if self._hints.reach_others:
            self._unannounced |= arrived
            elsewhere = preferred_affinities.difference(
                self._waiting.waited_affinities(preferred_affinities)
            )
            self._unannounced_affinities |= bound | elsewhere
        if arrived:
            self._start()

    def order(self, worker_ids: Iterable[str] | None = None) -> None:
        """Ends the polls of these workers, or of all workers, at every control plane, because they
        have new orders.
        """
        ids = None if worker_ids is None else sorted(set(worker_ids))
        self.dismiss(ids)
        self.announce({"dismissed": ids})

    def push(self, dispatch_ids: Iterable[int]) -> None:
        """Ends the waiting heartbeats of these dispatches at every control plane, so that their
        workers receive orders immediately.
        """
        ids = sorted(set(dispatch_ids))
        if ids:
            self.heartbeat_waiters.push(ids)
            self.announce({"pushed": ids})

    def announce(self, order: dict[str, Any]) -> None:
        """Sends a message to all other control planes."""
        if self._hints.reach_others:
            self._unannounced_orders.append(order)
            self._start()

    def dismiss(self, worker_ids: Iterable[str] | None = None) -> None:
        """Ends the polls of these workers, or of all workers, without a job. The workers'
        permissions are then read again.
        """
        self.dismissals += 1
        ids = None if worker_ids is None else set(worker_ids)
        self.heartbeat_waiters.push(ids)
        for request in [*self._waiting, *self._new_requests]:
            if ids is None or request.waiter.worker_id in ids:
                request.deadline = 0.0
                if not request.is_being_served:
                    self._answer(request, None)

    def end_prefetch_wait(self, worker_id: str) -> bool:
        """Ends the worker's prefetch poll without a job, because one of the worker's leases has
        ended. Returns False if no such poll is waiting in this process.
        """
        request = self._waiting.prefetching(worker_id)
        if request is None or request.is_being_served:
            return False
        self._answer(request, None)
        return True

    def waiting(self) -> int:
        return len(self._waiting) + len(self._new_requests)

    def parked(self) -> int:
        """Counts the polls that wait for a job and are not being served at the moment."""
        return sum(not request.is_being_served for request in self._waiting)

    def requests_not_seen_since(self, when: float) -> list[PollRequest]:
        return [request for request in self._waiting if request.looked_at <= when]

    async def run(self) -> None:
        """Listens for messages from other processes and checks the queue every few seconds. Runs
        until cancelled.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hints.listen(self._on_hint, self._wake_all))
            tasks.create_task(self._recheck())
            tasks.create_task(self._refresh_switch_costs())

    async def close(self) -> None:
        """Ends all polls without a job and waits until all work in progress is finished."""
        self.dismiss()
        self._is_closed = True
        if self._pump is not None:
            await asyncio.wait([self._pump])
        await self._enqueues.close()
        await self._completes.close()
        await self._extends.close()
        if self._background:
            await asyncio.wait(self._background)
        await self._hints.close()
        await self._hot.close()

    # Leasing

    def _start(self) -> None:
        if not self._is_closed and self._pump is None:
            self._pump = asyncio.create_task(self._run_pump())

    async def _run_pump(self) -> None:
        while self._has_work():
            batch, self._new_requests = (
                self._new_requests[:BATCH_MAX],
                self._new_requests[BATCH_MAX:],
            )
            requests = [request for request in batch if not request.future.done()]
            try:
                await self._serve(requests + self._woken_requests(requests))
                await self._announce()
            except Exception as error:  # noqa: BLE001 — raised in every caller
                self._fail(requests, error)
        self._pump = None

    def _has_work(self) -> bool:
        woken = self._woken or self._woken_affinities
        unannounced = self._unannounced or self._unannounced_affinities or self._unannounced_orders
        return bool(self._new_requests or woken or unannounced)

    def _woken_requests(self, requests: Sequence[PollRequest]) -> list[PollRequest]:
        """Returns the waiting requests that must be served with the new ones. They include idle
        workers for the lanes of each new prefetch request, so that a prefetch never gets a job
        before an idle worker.
        """
        woken, self._woken = self._woken, Counter()
        affinities, self._woken_affinities = self._woken_affinities, set()
        for request in requests:
            if request.waiter.is_prefetch:
                woken.update(request.waiter.lanes)
        return self._waiting.shortlist(woken, affinities)

    async def _serve(self, requests: Sequence[PollRequest]) -> None:
        if not requests:
            return
        for request in requests:
            request.is_being_served = True
        self._is_serving = True
        try:
            matches = await self._matcher.give([request.waiter for request in requests])
        finally:
            self._is_serving = False
            for request in requests:
                request.is_being_served = False
        for index, request in enumerate(requests):
            if (lease := matches.leases.get(index)) is not None:
                # Jobs are removed by id, because other jobs may have arrived in the meantime.
                self._unannounced.pop(lease.dispatch_id, None)
                self._answer(request, lease)
            elif index in matches.refused:
                self._answer(request, None)
            else:
                self._park(request)
        self._schedule_recheck(requests, matches)

    def _schedule_recheck(self, requests: Sequence[PollRequest], matches: Matches) -> None:
        unserved = [
            request.waiter for index, request in enumerate(requests) if index not in matches.leases
        ]
        lanes = {lane for waiter in unserved for lane in waiter.lanes}
        if matches.has_more or matches.refused:
            # These waiters lost a race, or the probe did not read far enough, or a job was refused
            # to one waiter and may be given to another. They shouldn't have to wait for the
            # periodic check.
            self._wake_after(RETRY_SECONDS, lanes)
        if matches.has_fresh:
            busy = {
                lane
                for request in requests
                if request.waiter.is_prefetch
                for lane in request.waiter.lanes
            }
            self._wake_after(self._settings.prefetch_after_seconds + RETRY_SECONDS, busy)
        if matches.held_seconds is not None:
            self._wake_after(matches.held_seconds + RETRY_SECONDS, lanes)

    def _park(self, request: PollRequest) -> None:
        loop = asyncio.get_running_loop()
        if request.future.done():
            return
        if request.deadline <= loop.time():
            self._answer(request, None)
        elif request not in self._waiting:
            self._waiting.add(request)
            request.looked_at = loop.time()
            request.timer = loop.call_at(request.deadline, self._timed_out, request)

    def _timed_out(self, request: PollRequest) -> None:
        if request.is_being_served:
            # The running statement may have a job for this poll. A late response is better than a
            # requeue.
            request.timer = asyncio.get_running_loop().call_later(
                LATE_SECONDS, self._timed_out, request
            )
        else:
            self._answer(request, None)

    def _answer(self, request: PollRequest, lease: DispatchLease | None) -> None:
        self._waiting.discard(request)
        if request.timer is not None:
            request.timer.cancel()
        if not request.future.done():
            request.future.set_result(lease)
        elif lease is not None:
            self._give_back(request, lease)

    def _fail(self, requests: Sequence[PollRequest], error: Exception) -> None:
        if requests:
            logger.warning("%d polls failed: %s", len(requests), error)
        else:
            logger.warning("new jobs could not be assigned to waiting workers: %s", error)
        self._unannounced.clear()
        self._unannounced_affinities.clear()
        self._unannounced_orders.clear()
        for request in requests:
            if not request.future.done():
                request.future.set_exception(error)

    def _give_back(self, request: PollRequest, lease: DispatchLease) -> None:
        """Requeues a lease whose poll has ended, unless the worker lists its leases in its polls.

        Such a worker receives the lease with its next poll, whose response may already have been
        sent. So the lease must stay valid.
        """
        if not request.waiter.tells_leases:
            self._run_in_background(self._requeue(lease))

    async def _requeue(self, lease: DispatchLease) -> None:
        """Requeues a lease. If that fails, the lease expires. The attempt isn't counted, because
        the job never started.
        """
        try:
            async with self._db.transaction() as tx:
                requeued = await service.requeue(
                    tx, lease.dispatch_id, lease.token, RequeueReason.WAITER_GONE, now=self._clock()
                )
        except FleetError as error:
            logger.warning("dispatch %d could not be requeued: %s", lease.dispatch_id, error)
        else:
            self.arrived([requeued])

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # The methods below check the queue regularly and exchange messages with other processes.

    def _wake_after(self, seconds: float, lanes: Iterable[QueueLane]) -> None:
        counts = Counter(lanes)
        asyncio.get_running_loop().call_later(seconds, self._wake_lanes, counts)

    def _wake_lanes(self, lanes: Counter[QueueLane]) -> None:
        # A request that is being served may have read the queue before the job arrived and be about
        # to wait.
        if self._is_serving or self._waiting.has_waiter_for(lanes):
            self._woken += lanes
            self._start()

    def _wake_affinities(self, affinities: Sequence[str]) -> None:
        waited = affinities if self._is_serving else self._waiting.waited_affinities(affinities)
        if waited:
            self._woken_affinities.update(waited)
            self._start()

    def _wake_all(self) -> None:
        self._wake_lanes(Counter(dict.fromkeys(self._waiting.lanes(), RECHECKED_PER_LANE)))

    async def _recheck(self) -> None:
        while True:
            await asyncio.sleep(RECHECK_SECONDS)
            if not len(self._waiting):
                continue
            self._wake_all()
            try:
                bound = await self._hot.bound(limit=AFFINITIES_RECHECKED_MAX)
            except FleetError as error:
                logger.log(log_level_of(error), "the queue could not be checked: %s", error)
                continue
            self._wake_affinities(bound)

    async def _refresh_switch_costs(self) -> None:
        while True:
            try:
                await self.learn()
            except FleetError as error:
                logger.log(log_level_of(error), "the switch costs could not be updated: %s", error)
            await asyncio.sleep(SWITCH_COSTS_SECONDS)

    async def learn(self) -> None:
        """Stores the durations of runs that ended here, and reloads the switch costs if any control
        plane has stored some.
        """
        costs = self.switch_costs
        runs, costs.noted = costs.noted, []
        if runs:
            async with self._db.transaction() as tx:
                await service.add_runs(tx, runs, now=self._clock())
        async with self._db.read() as tx:
            changed_at = await service.switches_changed_at(tx)
            if changed_at != self._learned_at:
                costs.estimates = await service.switch_costs(tx)
                self._learned_at = changed_at

    def _on_hint(self, payload: str) -> None:
        message = json.loads(payload)
        if message["from"] == self._name:
            return
        self._wake_lanes(
            Counter({QueueLane(*lane): jobs for *lane, jobs in message.get("lanes", ())})
        )
        self._wake_affinities(message.get("affinities", ()))
        self.heartbeat_waiters.push(message.get("pushed", ()))
        if "dismissed" in message:
            self.dismiss(message["dismissed"])
        for hear in self.hearers:
            hear(message)

    async def _announce(self) -> None:
        """Notifies other processes, once per batch, of jobs that are bound to a backend or that no
        worker here has leased.
        """
        unannounced, self._unannounced = Counter(self._unannounced.values()), {}
        affinities, self._unannounced_affinities = self._unannounced_affinities, set()
        orders, self._unannounced_orders = self._unannounced_orders, []
        if unannounced or affinities:
            await self._hints.send(_wake_payload(self._name, unannounced, affinities))
        for order in orders:
            await self._hints.send(_order_payload(self._name, order))

    # The methods below execute batches of enqueues, heartbeats and completions.

    async def _enqueue(
        self, batch: Sequence[Sequence[NewDispatch]]
    ) -> Sequence[list[Dispatch] | Exception]:
        try:
            added = await self._hot.enqueue(
                [dispatch for new in batch for dispatch in new], now=self._clock()
            )
        except FleetError:
            raise
        except Exception as error:  # noqa: BLE001 — raised in the affected caller
            if len(batch) == 1:
                return [error]
            # One call can't be executed. The others must still succeed.
            return [answer for new in batch for answer in await self._enqueue([new])]
        preferred = {dispatch.preferred_worker_id for new in batch for dispatch in new}
        self.arrived(added, map(affinity_of, filter(None, preferred)))
        added_by_key = {(dispatch.tenant_id, dispatch.job_id): dispatch for dispatch in added}
        keys = [[(dispatch.tenant_id, dispatch.job_id) for dispatch in new] for new in batch]
        return [[added_by_key[key] for key in mine if key in added_by_key] for mine in keys]

    async def _complete(self, batch: Sequence[Completion]) -> Sequence[Exception | None]:
        ended = await self._hot.complete(batch)
        if len(ended) == len(batch):
            return [None] * len(batch)
        done = set(ended)
        missing = {item.dispatch_id for item in batch if item[:2] not in done}
        if missing:
            done |= await self._completed_before(missing)
        return [None if item[:2] in done else _lease_lost(item.dispatch_id) for item in batch]

    async def _completed_before(self, dispatch_ids: Collection[int]) -> set[HeldLease]:
        async with self._db.read() as tx:
            return {
                (row.id, row.lease_token)
                for row in await reads.get_many(tx, dispatch_ids)
                if row.status is DispatchStatus.COMPLETED and row.lease_token
            }

    async def _extend(self, batch: Sequence[Extension]) -> Sequence[ExtendedLease | Exception]:
        seconds = self._settings.lease_seconds
        extended = await self._hot.extend(batch, seconds=seconds)
        return [extended.get(item[:2]) or _lease_lost(item.dispatch_id) for item in batch]


def _lease_lost(dispatch_id: int) -> LeaseLost:
    return LeaseLost(
        f"the lease of dispatch {dispatch_id} is no longer held", dispatch_id=dispatch_id
    )


def _wake_payload(name: str, lanes: Counter[QueueLane], affinities: Iterable[str]) -> str:
    """Encodes a message that wakes waiters at other processes. Jobs that don't fit are left out.
    Other processes find them when they check the queue.
    """
    jobs_by_lane = [[*lane, jobs] for lane, jobs in lanes.items()]
    bound = sorted(affinities)
    while len(payload := _wake_json(name, jobs_by_lane, bound)) > PAYLOAD_BYTES_MAX:
        jobs_by_lane, bound = jobs_by_lane[: len(jobs_by_lane) // 2], bound[: len(bound) // 2]
    return payload


def _order_payload(name: str, order: dict[str, Any]) -> str:
    """Encodes a message with an order. If it contains too many workers, it dismisses all workers
    instead. If it contains too many dispatches to push, it is dropped, and the next heartbeats
    return the orders.
    """
    payload = json.dumps({"from": name, **order})
    if len(payload) <= PAYLOAD_BYTES_MAX:
        return payload
    return json.dumps({"from": name, **({"dismissed": None} if "dismissed" in order else {})})


def _wake_json(name: str, lanes: list[list[Any]], affinities: list[str]) -> str:
    return json.dumps({"from": name, "lanes": lanes, "affinities": affinities})
