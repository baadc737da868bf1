"""DispatchQueue: opens its own transactions, coalesces concurrent requests into batches, and lets workers wait."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from datetime import datetime
from typing import Any, Generic, TypeVar
from uuid import UUID

from comfyfleet.clock import Clock
from comfyfleet.errors import FleetError, LeaseLost
from comfyfleet.server.db import Database
from comfyfleet.server.db.coordination import PAYLOAD_BYTES_MAX, NotifyChannel
from comfyfleet.server.db.errors import log_level_of
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
BATCH_MAX = 256


class Coalescer(Generic[Item, Answer]):
    """While one batch is on its way the next gathers, so batches grow with the load by themselves."""

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
            except Exception as error:  # noqa: BLE001 — told to each who asked
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                _resolve(future, answer)
        # Here, and not when the loop learns that this is done: whoever asks in between would wait
        # for a pump that has already looked for the last time.
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


RECHECK_SECONDS = 5.0
AFFINITIES_RECHECKED_MAX = 1_000
RECHECKED_PER_LANE = 64
SWITCH_COSTS_SECONDS = 10.0
RETRY_SECONDS = 0.02
LATE_SECONDS = 0.05
CHANNEL = "comfyfleet_queue"
logger = logging.getLogger(__name__)


class DispatchQueue:
    """Leases, heartbeats and completes of one process, and those who wait in it."""

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
        self._name = new_token().hex  # tells our own hints from those of others
        self._waiting = WaiterPool()
        self._asking: list[PollRequest] = []
        self._woken: Counter[QueueLane] = Counter()
        self._woken_affinities: set[str] = set()
        self._untold: dict[int, QueueLane] = {}  # dispatches that other processes have not heard of
        self._untold_affinities: set[str] = set()
        self._untold_orders: list[dict[str, Any]] = []
        self.heartbeat_waiters = HeartbeatWaiters()
        self._is_serving = False
        self._pump: asyncio.Task[None] | None = None
        self._aside: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._learned_at: datetime | None = None  # the newest run that is known here
        self.dismissals = 0  # how often waits were ended from outside

    async def lease(
        self, waiter: Waiter, *, wait_seconds: float, as_of: int | None = None
    ) -> DispatchLease | None:
        """The best job for this worker now, or the first that comes while it waits."""
        asked = self.ask(waiter, wait_seconds=wait_seconds, as_of=as_of)
        try:
            return await asked.future
        except asyncio.CancelledError:
            self.leave(asked)
            raise

    def ask(self, waiter: Waiter, *, wait_seconds: float, as_of: int | None = None) -> PollRequest:
        """The same for who has no coroutine that waits: its future is told.

        `as_of` is the number of dismissals before the caller looked at what the waiter may run:
        after another one it may be wrong, and the caller must look again. A waiter without lanes
        gets nothing, and waits to be dismissed.
        """
        loop = asyncio.get_running_loop()
        asked = PollRequest(waiter, loop.create_future(), loop.time() + wait_seconds)
        if self._is_closed or as_of not in {None, self.dismissals}:
            asked.future.set_result(None)
            return asked
        if not waiter.lanes:
            self._park(asked)
            return asked
        self._asking.append(asked)
        self._start()
        return asked

    def leave(self, asked: PollRequest) -> None:
        """It is gone; a job that it was just given goes back, see `_give_back`."""
        self._waiting.discard(asked)
        if asked.timer is not None:
            asked.timer.cancel()
        if not asked.future.done():
            asked.future.cancel()
        elif not asked.future.cancelled() and not asked.future.exception():
            lease = asked.future.result()
            if lease is not None:
                self._give_back(asked, lease)

    @property
    def model_sets(self) -> ModelSetCache:
        return self._matcher.model_sets

    @property
    def switch_costs(self) -> SwitchCosts:
        return self._matcher.switch_costs

    async def enqueue(self, new: Sequence[NewDispatch]) -> list[Dispatch]:
        """Those that are new, committed; whoever waits for them is woken."""
        return await self._enqueues.ask(new) if new else []

    async def complete(
        self, dispatch_id: int, token: UUID, *, duration: float | None = None
    ) -> None:
        """Said again with the same token it is answered as before; with another it is LeaseLost."""
        await self._completes.ask(Completion(dispatch_id, token, duration))

    async def extend(
        self, dispatch_id: int, token: UUID, *, started: bool, worker_id: str | None = None
    ) -> ExtendedLease:
        return await self._extends.ask(Extension(dispatch_id, token, started, worker_id))

    def arrived(self, rows: Collection[Dispatch]) -> None:
        """These have come into the queue, or back to it; to be called after the commit."""
        arrived = {each.id: each.lane for each in rows}
        bound = {each.backend_affinity for each in rows if each.backend_affinity}
        self._woken.update(arrived.values())
        self._woken_affinities |= bound
        if self._hints.reach_others:
            self._untold |= arrived
            self._untold_affinities |= bound
        if arrived:
            self._start()

    def order(self, worker_ids: Iterable[str] | None = None) -> None:
        """These workers (or all) were given orders: at every control plane they ask anew."""
        those = None if worker_ids is None else sorted(set(worker_ids))
        self.dismiss(those)
        self._tell({"dismissed": those})

    def push(self, dispatch_ids: Iterable[int]) -> None:
        """Whoever holds these hears at once what is asked of it, wherever its heartbeat waits."""
        those = sorted(set(dispatch_ids))
        if those:
            self.heartbeat_waiters.push(those)
            self._tell({"pushed": those})

    def _tell(self, order: dict[str, Any]) -> None:
        if self._hints.reach_others:
            self._untold_orders.append(order)
            self._start()

    def dismiss(self, worker_ids: Iterable[str] | None = None) -> None:
        """Ends waits with nothing, so that these workers (or all) ask anew, as what they are now."""
        self.dismissals += 1
        those = None if worker_ids is None else set(worker_ids)
        self.heartbeat_waiters.push(those)
        for asked in [*self._waiting, *self._asking]:
            if those is None or asked.waiter.worker_id in those:
                asked.deadline = 0.0
                if not asked.in_hand:
                    self._answer(asked, None)

    def end_prefetch_wait(self, worker_id: str) -> bool:
        """A lease of this worker has ended: its wait to prefetch ends with nothing, to be looked at
        anew. False if it does not wait here."""
        asked = self._waiting.prefetching(worker_id)
        if asked is None or asked.in_hand:
            return False
        self._answer(asked, None)
        return True

    def waiting(self) -> int:
        return len(self._waiting) + len(self._asking)

    def parked(self) -> int:
        """Those for whom nothing was there, and who are not looked after at this moment."""
        return sum(not asked.in_hand for asked in self._waiting)

    def parked_requests(self) -> list[PollRequest]:
        return list(self._waiting)

    def requests_not_seen_since(self, when: float) -> list[PollRequest]:
        return [asked for asked in self._waiting if asked.looked_at <= when]

    def has_other_waiter(self, waiter: Waiter) -> bool:
        return self._waiting.another(waiter)

    async def run(self) -> None:
        """Until cancelled: listens to other processes, and looks again every few seconds."""
        async with asyncio.TaskGroup() as all_:
            all_.create_task(self._hints.listen(self._heard, self._look_again))
            all_.create_task(self._recheck())
            all_.create_task(self._refresh_switch_costs())

    async def close(self) -> None:
        """Whoever waits is sent away; what is under way is brought to its end."""
        self.dismiss()
        self._is_closed = True
        if self._pump is not None:
            await asyncio.wait([self._pump])
        await self._enqueues.close()
        await self._completes.close()
        await self._extends.close()
        if self._aside:
            await asyncio.wait(self._aside)
        await self._hints.close()
        await self._hot.close()

    # Leasing

    def _start(self) -> None:
        if not self._is_closed and self._pump is None:
            self._pump = asyncio.create_task(self._run_pump())

    async def _run_pump(self) -> None:
        while self._has_work():
            asking, self._asking = self._asking[:BATCH_MAX], self._asking[BATCH_MAX:]
            askers = [asked for asked in asking if not asked.future.done()]
            try:
                await self._serve(askers + self._called(askers))
                await self._tell_others()
            except Exception as error:  # noqa: BLE001 — told to each who asked
                self._fail(askers, error)
        self._pump = None

    def _has_work(self) -> bool:
        woken = self._woken or self._woken_affinities
        untold = self._untold or self._untold_affinities or self._untold_orders
        return bool(self._asking or woken or untold)

    def _called(self, askers: Sequence[PollRequest]) -> list[PollRequest]:
        """Who is woken. Whoever only wants to prefetch never comes before one who waits idle."""
        woken, self._woken = self._woken, Counter()
        affinities, self._woken_affinities = self._woken_affinities, set()
        for asked in askers:
            if asked.waiter.is_prefetch:
                woken.update(asked.waiter.lanes)
        return self._waiting.shortlist(woken, affinities)

    async def _serve(self, asked: Sequence[PollRequest]) -> None:
        if not asked:
            return
        for each in asked:
            each.in_hand = True
        self._is_serving = True
        try:
            given = await self._matcher.give([each.waiter for each in asked])
        finally:
            self._is_serving = False
            for each in asked:
                each.in_hand = False
        for place, each in enumerate(asked):
            if (lease := given.leases.get(place)) is not None:
                # By its id: a job may be given that others have heard of, while another one comes.
                self._untold.pop(lease.dispatch_id, None)
                self._answer(each, lease)
            elif place in given.refused:
                self._answer(each, None)
            else:
                self._park(each)
        self._look_again_after(asked, given)

    def _look_again_after(self, asked: Sequence[PollRequest], given: Matches) -> None:
        left = [each.waiter for place, each in enumerate(asked) if place not in given.leases]
        lanes = {lane for waiter in left for lane in waiter.lanes}
        if given.has_more or given.refused:
            # They lost a race, or could not look far enough; what was refused to one is for the
            # next in line: not something to wait 5 s for.
            self._again_after(RETRY_SECONDS, lanes)
        if given.has_fresh:
            busy = {lane for each in asked if each.waiter.is_prefetch for lane in each.waiter.lanes}
            self._again_after(self._settings.prefetch_after_seconds + RETRY_SECONDS, busy)
        if given.held_seconds is not None:
            self._again_after(given.held_seconds + RETRY_SECONDS, lanes)

    def _park(self, asked: PollRequest) -> None:
        loop = asyncio.get_running_loop()
        if asked.future.done():
            return
        if asked.deadline <= loop.time():
            self._answer(asked, None)
        elif asked not in self._waiting:
            self._waiting.add(asked)
            asked.looked_at = loop.time()
            asked.timer = loop.call_at(asked.deadline, self._timed_out, asked)

    def _timed_out(self, asked: PollRequest) -> None:
        if asked.in_hand:
            # The statement under way may have a job for it; a little late is better than given back.
            asked.timer = asyncio.get_running_loop().call_later(
                LATE_SECONDS, self._timed_out, asked
            )
        else:
            self._answer(asked, None)

    def _answer(self, asked: PollRequest, lease: DispatchLease | None) -> None:
        self._waiting.discard(asked)
        if asked.timer is not None:
            asked.timer.cancel()
        if not asked.future.done():
            asked.future.set_result(lease)
        elif lease is not None:
            self._give_back(asked, lease)

    def _fail(self, askers: Sequence[PollRequest], error: Exception) -> None:
        logger.warning("a batch of %d leases failed: %s", len(askers), error)
        self._untold.clear()
        self._untold_affinities.clear()
        self._untold_orders.clear()
        for asked in askers:
            if not asked.future.done():
                asked.future.set_exception(error)

    def _give_back(self, asked: PollRequest, lease: DispatchLease) -> None:
        """A worker that tells which leases it knows gets it with its next poll, which may have been
        answered with it already: it must not be taken from it then."""
        if not asked.waiter.tells_leases:
            self._do_aside(self._requeue(lease))

    async def _requeue(self, lease: DispatchLease) -> None:
        """If this fails too, the lease expires; it never started, so the attempt comes back then."""
        try:
            async with self._db.transaction() as tx:
                back = await service.requeue(
                    tx, lease.dispatch_id, lease.token, RequeueReason.WAITER_GONE, now=self._clock()
                )
        except FleetError as error:
            logger.warning("dispatch %d was not given back: %s", lease.dispatch_id, error)
        else:
            self.arrived([back])

    def _do_aside(self, work: Coroutine[Any, Any, None]) -> None:
        doing = asyncio.create_task(work)
        self._aside.add(doing)
        doing.add_done_callback(self._aside.discard)

    # Looking again, and other processes

    def _again_after(self, seconds: float, lanes: Iterable[QueueLane]) -> None:
        wanted = Counter(lanes)
        asyncio.get_running_loop().call_later(seconds, self._wake_here, wanted)

    def _wake_here(self, lanes: Counter[QueueLane]) -> None:
        # Whoever is being served may have looked before the job came, and be about to wait.
        if self._is_serving or self._waiting.has_waiter_for(lanes):
            self._woken += lanes
            self._start()

    def _wake_bound_here(self, affinities: Sequence[str]) -> None:
        here = affinities if self._is_serving else self._waiting.waited_affinities(affinities)
        if here:
            self._woken_affinities.update(here)
            self._start()

    def _look_again(self) -> None:
        self._wake_here(Counter(dict.fromkeys(self._waiting.lanes(), RECHECKED_PER_LANE)))

    async def _recheck(self) -> None:
        while True:
            await asyncio.sleep(RECHECK_SECONDS)
            if not len(self._waiting):
                continue
            self._look_again()
            try:
                bound = await self._hot.bound(limit=AFFINITIES_RECHECKED_MAX)
            except FleetError as error:
                logger.log(log_level_of(error), "the queue can't be looked at: %s", error)
                continue
            self._wake_bound_here(bound)

    async def _refresh_switch_costs(self) -> None:
        while True:
            try:
                await self.learn()
            except FleetError as error:
                logger.log(log_level_of(error), "the costs of switches can't be learned: %s", error)
            await asyncio.sleep(SWITCH_COSTS_SECONDS)

    async def learn(self) -> None:
        """Tells of runs that ended here, and reads what all control planes have told."""
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

    def _heard(self, payload: str) -> None:
        told = json.loads(payload)
        if told["from"] == self._name:
            return
        self._wake_here(Counter({QueueLane(*lane): jobs for *lane, jobs in told.get("lanes", ())}))
        self._wake_bound_here(told.get("affinities", ()))
        self.heartbeat_waiters.push(told.get("pushed", ()))
        if "dismissed" in told:
            self.dismiss(told["dismissed"])

    async def _tell_others(self) -> None:
        """Once per batch, and only of jobs that nobody here has taken, or that are bound."""
        untold, self._untold = Counter(self._untold.values()), {}
        affinities, self._untold_affinities = self._untold_affinities, set()
        orders, self._untold_orders = self._untold_orders, []
        if untold or affinities:
            await self._hints.send(_wake_payload(self._name, untold, affinities))
        for order in orders:
            await self._hints.send(_order_payload(self._name, order))

    # Enqueues, heartbeats and completes

    async def _enqueue(
        self, said: Sequence[Sequence[NewDispatch]]
    ) -> Sequence[list[Dispatch] | Exception]:
        try:
            added = await self._hot.enqueue(
                [each for new in said for each in new], now=self._clock()
            )
        except FleetError:
            raise
        except Exception as error:  # noqa: BLE001 — told to the one whom it concerns
            if len(said) == 1:
                return [error]
            # One of them can't be added; the others must not suffer for it.
            return [answer for new in said for answer in await self._enqueue([new])]
        self.arrived(added)
        found = {(each.tenant_id, each.job_id): each for each in added}
        keys = [[(each.tenant_id, each.job_id) for each in new] for new in said]
        return [[found[key] for key in mine if key in found] for mine in keys]

    async def _complete(self, said: Sequence[Completion]) -> Sequence[Exception | None]:
        ended = await self._hot.complete(said)
        if len(ended) == len(said):
            return [None] * len(said)
        done = set(ended)
        missing = {each.dispatch_id for each in said if each[:2] not in done}
        if missing:
            done |= await self._completed_before(missing)
        return [None if each[:2] in done else _lease_lost(each.dispatch_id) for each in said]

    async def _completed_before(self, dispatch_ids: Collection[int]) -> set[HeldLease]:
        async with self._db.read() as tx:
            return {
                (row.id, row.lease_token)
                for row in await reads.get_many(tx, dispatch_ids)
                if row.status is DispatchStatus.COMPLETED and row.lease_token
            }

    async def _extend(self, said: Sequence[Extension]) -> Sequence[ExtendedLease | Exception]:
        seconds = self._settings.lease_seconds
        longer = await self._hot.extend(said, seconds=seconds)
        return [longer.get(each[:2]) or _lease_lost(each.dispatch_id) for each in said]


def _lease_lost(dispatch_id: int) -> LeaseLost:
    return LeaseLost(
        f"the lease of dispatch {dispatch_id} is no longer held", dispatch_id=dispatch_id
    )


def _wake_payload(name: str, lanes: Counter[QueueLane], affinities: Iterable[str]) -> str:
    """What doesn't fit is left to the others' own looks."""
    told = [[*lane, jobs] for lane, jobs in lanes.items()]
    bound = sorted(affinities)
    while len(payload := _wake_json(name, told, bound)) > PAYLOAD_BYTES_MAX:
        told, bound = told[: len(told) // 2], bound[: len(bound) // 2]
    return payload


def _order_payload(name: str, order: dict[str, Any]) -> str:
    """One that names too many is for all, or is left to their next heartbeats."""
    payload = json.dumps({"from": name, **order})
    if len(payload) <= PAYLOAD_BYTES_MAX:
        return payload
    return json.dumps({"from": name, **({"dismissed": None} if "dismissed" in order else {})})


def _wake_json(name: str, lanes: list[list[Any]], affinities: list[str]) -> str:
    return json.dumps({"from": name, "lanes": lanes, "affinities": affinities})
