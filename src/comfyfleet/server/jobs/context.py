"""Defines JobContext: the databases, the queue and the in-process services that jobs need.

It also reads and writes the state that all control planes share in the central database:
maintenance mode, sweep positions and the last outage.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeAlias, TypeVar
from uuid import UUID

from comfyfleet.clock import Clock
from comfyfleet.errors import LOGGED, FleetError, NotFound, Unavailable
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.counters import RunMetrics
from comfyfleet.server.db import Database, Pools, Tx
from comfyfleet.server.db.coordination import MAINTENANCE, read_state, write_state
from comfyfleet.server.db.outages import log_failure
from comfyfleet.server.fleets.model import WorkflowRequirements
from comfyfleet.server.jobs import store
from comfyfleet.server.jobs.caches import ActiveJobLimits, JobCaches, PollLimits
from comfyfleet.server.jobs.model import Job, JobAttempt
from comfyfleet.server.jobs.partner_keys import PartnerKeys
from comfyfleet.server.jobs.progress import ALL_CHANGED, Previews, UserChange
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import Dispatch
from comfyfleet.server.queue.queue import DispatchQueue
from comfyfleet.server.storage.model import ObjectStore
from comfyfleet.server.tenants import service as tenants
from comfyfleet.settings import Settings

T = TypeVar("T")


class JobNotifier:
    """Wakes tasks in this process that wait for a job to change. A wake-up is only a hint: the
    tasks then read the job from the database.
    """

    def __init__(self) -> None:
        self._following: defaultdict[UUID, set[asyncio.Event]] = defaultdict(set)
        self._listeners: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)
        self._of_users: defaultdict[UUID, list[Callable[[], None]]] = defaultdict(list)
        # called to notify other control planes that a user's prompts have changed
        self.on_user: Callable[[UUID, UserChange], None] | None = None
        # called to drop a user's cached values
        self.on_change: list[Callable[[UUID], None]] = []
        # called to drop all cached values, because notifications may have been lost
        self.on_missed: list[Callable[[], None]] = []
        self.hears: Callable[[], bool] = lambda: True
        self.is_stopping = False  # if true, new waits return immediately

    def tell(self, job_id: UUID) -> None:
        for event in self._following.get(job_id, ()):
            event.set()

    def hears_others(self) -> bool:
        """Whether this process currently receives notifications from other control planes."""
        return self.hears()

    def forget_user(self, user_id: UUID) -> None:
        """Invalidates the cached values of the user's prompts."""
        for forget in self.on_change:
            forget(user_id)

    def forget_all(self) -> None:
        for forget in self.on_missed:
            forget()

    def tell_user(self, user_id: UUID, change: UserChange = ALL_CHANGED) -> None:
        """Notifies listeners here and at other control planes that one of the user's gateway
        prompts has changed or that its run has logged a message.
        """
        self.wake_user(user_id, change)
        if self.on_user is not None:
            self.on_user(user_id, change)

    def wake_user(self, user_id: UUID, change: UserChange = ALL_CHANGED) -> None:
        """Invalidates this process's caches of the user's prompts and wakes the listeners."""
        if change.in_lists:
            self.forget_user(user_id)
        if change.in_messages:
            for listener in self._of_users.get(user_id, ()):
                listener()

    def subscribe_user(self, user_id: UUID, listener: Callable[[], None]) -> Callable[[], None]:
        """Adds a listener and returns the function that removes it."""
        self._of_users[user_id].append(listener)

        def unsubscribe() -> None:
            self._of_users[user_id].remove(listener)
            if not self._of_users[user_id]:
                del self._of_users[user_id]

        return unsubscribe

    def stop(self) -> None:
        """Ends all waits for changes. Later waits return immediately."""
        self.is_stopping = True
        for events in self._following.values():
            for event in events:
                event.set()

    def notify_run(self, kind: str) -> None:
        """Wakes the listeners for a kind of run. This is called when a job of such a run has ended
        and its outbox row has been added.
        """
        for listener in self._listeners.get(kind, ()):
            listener()

    def subscribe_runs(self, kind: str, listener: Callable[[], None]) -> None:
        self._listeners[kind].append(listener)

    async def changed(self, job_id: UUID, seconds: float) -> bool:
        """Waits until the job changes. Returns False after a timeout."""
        return await self.any_changed([job_id], seconds)

    async def any_changed(self, ids: Iterable[UUID], seconds: float) -> bool:
        """Waits until one of these jobs, or any job of these users, changes. Returns False after a
        timeout.
        """
        if self.is_stopping:
            return False
        event, followed = asyncio.Event(), set(ids)
        for followed_id in followed:
            self._following[followed_id].add(event)
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return False
        else:
            return True
        finally:
            for followed_id in followed:
                self._following[followed_id].discard(event)
                if not self._following[followed_id]:
                    del self._following[followed_id]


log = logging.getLogger(__name__)
# Seconds during which deferred writes are collected before they are written together.
DELAY_SECONDS = 0.25
# Attempts by job and lease number. Only the first report of a lease is stored.
Attempts: TypeAlias = dict[tuple[UUID, int], JobAttempt]


class DeferredWrites:
    """Collects writes that no caller waits for, and writes them together `DELAY_SECONDS` after the
    first one. Writes to the same tenants' database share a transaction.
    """

    def __init__(self) -> None:
        self._outbox_ids: defaultdict[Database, list[int]] = defaultdict(list)
        # central databases to which the outbox rows were delivered
        self._delivered_to: set[Database] = set()
        self._attempts: defaultdict[Database, Attempts] = defaultdict(dict)
        self._durations: defaultdict[tuple[Database, UUID], list[float]] = defaultdict(list)
        self._objects: defaultdict[ObjectStore, list[str]] = defaultdict(list)
        self._timer: asyncio.TimerHandle | None = None
        self._writing: set[asyncio.Task[None]] = set()

    def delete_outbox(self, pool: Database, outbox_ids: Sequence[int], central: Database) -> None:
        """Deletes delivered outbox rows once their changes in the central database are on disk."""
        if outbox_ids:
            self._outbox_ids[pool] += outbox_ids
            self._delivered_to.add(central)
            self._start()

    def note_attempt(self, pool: Database, attempt: JobAttempt) -> None:
        """Records the prompt that was sent to a backend. Only the first report of a lease is
        stored.
        """
        self._attempts[pool].setdefault((attempt.job_id, attempt.lease_number), attempt)
        self._start()

    def note_duration(self, central: Database, effect_id: UUID, seconds: float) -> None:
        self._durations[central, effect_id].append(seconds)
        self._start()

    def delete_objects(self, objects: ObjectStore, keys: Sequence[str]) -> None:
        """Deletes objects that no row refers to."""
        if keys:
            self._objects[objects] += keys
            self._start()

    async def flush(self) -> None:
        """Writes all collected data and returns when it is stored."""
        if self._timer is not None:
            self._timer.cancel()
            self._begin()
        while self._writing:
            await asyncio.wait(self._writing)

    def _start(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(DELAY_SECONDS, self._begin)

    def _begin(self) -> None:
        self._timer = None
        writing = asyncio.get_running_loop().create_task(self._write())
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)

    async def _write(self) -> None:
        outbox_ids, self._outbox_ids = self._outbox_ids, defaultdict(list)
        attempts, self._attempts = self._attempts, defaultdict(dict)
        durations, self._durations = self._durations, defaultdict(list)
        objects, self._objects = self._objects, defaultdict(list)
        delivered_to, self._delivered_to = self._delivered_to, set()
        for pool in dict.fromkeys([*outbox_ids, *attempts]):
            delivered, noted = outbox_ids.get(pool, []), [*attempts.get(pool, {}).values()]
            with _logged(
                f"{len(delivered)} outbox rows are left to the sweep, "
                f"and {len(noted)} attempts were not recorded"
            ):
                await asyncio.gather(*(database.persist() for database in delivered_to))
                await _write_to(pool, delivered, noted)
        # Sorted by effect, so that two control planes never wait for each other's rows.
        for (central, effect_id), seconds in sorted(durations.items(), key=lambda item: item[0][1]):
            with _logged(f"durations of effect {effect_id} were not recorded"):
                async with central.transaction() as tx:
                    await catalog.note_durations(tx, effect_id, seconds)
        for object_store, keys in objects.items():
            with _logged(f"{len(keys)} objects are left to the sweep of leftover files"):
                await object_store.delete(*keys)


async def _write_to(
    pool: Database, outbox_ids: Sequence[int], attempts: Sequence[JobAttempt]
) -> None:
    if not attempts:
        async with pool.execute_one() as tx:
            await store.delete_outbox(tx, outbox_ids)
        return
    async with pool.transaction() as tx:
        await store.add_attempts(tx, attempts)
        if outbox_ids:
            await store.delete_outbox(tx, outbox_ids)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """Logs and suppresses an exception, so that one failed write doesn't stop the others."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 — any error is logged
        log_failure(log, error, "%s", what)


# Maximum time in seconds that a worker waits for a job's payload. Reads only take longer if the
# database hangs or is overloaded.
PAYLOAD_SECONDS_MAX = 2.0


class PayloadReads:
    """Limits how long workers wait for tenants' databases. While a read from a pool takes too long,
    no other jobs are read from that pool, so a pool that hangs blocks at most one worker.
    """

    def __init__(self) -> None:
        self._slow: set[Database] = set()
        self._reading: Counter[Database] = Counter()

    async def run(self, pool: Database, read: Coroutine[Any, Any, T]) -> T:
        """Returns the result of a read, or raises Unavailable if it takes too long. In that case,
        the read continues in the background, because a canceled read would look like a lost
        connection. The pool counts as slow until that read finishes.
        """
        if pool.is_sqlite:  # a local file can't hang like a server
            return await read
        if pool in self._slow and self._reading[pool]:
            read.close()
            raise _slow_pool("another worker is already waiting for the tenant's slow database")
        self._reading[pool] += 1
        reading = asyncio.create_task(read)
        reading.add_done_callback(partial(self._ended, pool))
        # The wait is split in two. If this process was suspended or busy, the first wait may time
        # out before the event loop has handled responses that have already arrived.
        for _ in range(2):
            if not reading.done():
                await asyncio.wait({reading}, timeout=PAYLOAD_SECONDS_MAX / 2)
        if reading.done():
            return reading.result()
        if pool not in self._slow:
            self._slow.add(pool)
            log.warning("database %s is slow, so its jobs are delayed", pool.name)
        raise _slow_pool(f"the tenant's database did not respond in {PAYLOAD_SECONDS_MAX:g} s")

    def _ended(self, pool: Database, reading: "asyncio.Task[Any]") -> None:
        self._reading[pool] -= 1
        if reading.cancelled() or isinstance(reading.exception(), Unavailable):
            return
        if pool in self._slow:
            self._slow.discard(pool)
            log.warning("database %s responds again", pool.name)


def _slow_pool(message: str) -> Unavailable:
    error = Unavailable(message)
    error.add_note(LOGGED)
    return error


@dataclass(frozen=True)
class JobContext:
    """The databases and services that operations on jobs need. No transaction spans two databases
    or a network call.
    """

    central: Database
    pools: Pools
    store: ObjectStore
    queue: DispatchQueue
    settings: Settings
    clock: Clock
    new_id: Callable[[], UUID]
    notifier: JobNotifier = field(default_factory=JobNotifier)
    previews: Previews = field(default_factory=Previews)
    deferred: DeferredWrites = field(default_factory=DeferredWrites)
    run_metrics: RunMetrics = field(default_factory=RunMetrics)
    caches: JobCaches = field(default_factory=JobCaches)
    polls: PollLimits = field(default_factory=PollLimits)
    payload_reads: PayloadReads = field(default_factory=PayloadReads)
    # Pool names by tenant. A tenant never moves to another pool, so each is looked up only once.
    _pool_names: dict[UUID, str] = field(default_factory=dict)
    partner_keys: PartnerKeys = field(init=False)

    def __post_init__(self) -> None:
        self.queue.model_sets.find = self._needs_of
        keys = PartnerKeys(self.queue.announce, has_others=not self.central.is_sqlite)
        object.__setattr__(self, "partner_keys", keys)
        self.queue.hearers.append(keys.heard)

    async def _needs_of(self, dispatch_id: int) -> WorkflowRequirements | None:
        """Reads the requirements of a job that another process enqueued, or that was enqueued
        before this process started.

        Raises Unavailable if the database can't be read.
        """
        try:
            async with self.central.read() as tx:
                row = await dispatch.get(tx, dispatch_id)
            pool = await self.pool_of(row.tenant_id)
            job = await self.payload_reads.run(pool, _read_job(pool, row))
        except Unavailable:
            raise
        except FleetError as error:
            log.warning(
                "the requirements of dispatch %d could not be read: %s", dispatch_id, error.message
            )
            return None
        return None if job is None else job.spec.needs

    @property
    def active_max(self) -> ActiveJobLimits:
        return ActiveJobLimits(
            self.settings.max_active_jobs_per_user, self.settings.max_active_jobs_per_tenant
        )

    @asynccontextmanager
    async def tenant(self, tenant_id: UUID) -> AsyncIterator[Tx]:
        """Opens a connection for reading from the tenant's database. See `Database.read`."""
        async with (await self.pool_of(tenant_id)).read() as tx:
            yield tx

    @asynccontextmanager
    async def tenant_transaction(self, tenant_id: UUID) -> AsyncIterator[Tx]:
        async with (await self.pool_of(tenant_id)).transaction() as tx:
            yield tx

    async def audit(
        self, actor: str, action: str, subject: str, tenant_id: UUID | None, **details: object
    ) -> None:
        """Writes an audit entry in a separate transaction."""
        async with self.central.transaction() as tx:
            await record_audit(tx, actor, action, subject, self.clock(), tenant_id, **details)

    async def pool_of(self, tenant_id: UUID) -> Database:
        return self.pools[await self._pool_name(tenant_id)]

    async def pool_name_of(self, tenant_id: UUID) -> str | None:
        """Returns the name of a tenant's pool, or None if the tenant doesn't exist."""
        try:
            return await self._pool_name(tenant_id)
        except NotFound:
            return None

    async def _pool_name(self, tenant_id: UUID) -> str:
        name = self._pool_names.get(tenant_id)
        if name is None:
            async with self.central.read() as tx:
                name = (await tenants.get_tenant(tx, tenant_id)).pool
            self._pool_names[tenant_id] = name
        return name


async def _read_job(pool: Database, row: Dispatch) -> Job | None:
    async with pool.read() as tx:
        return await store.get(tx, row.tenant_id, row.job_id)


LAST_EXPIRY, RECONCILED = "last_expiry", "reconciled"
RECOVERING_UNTIL, LAST_OUTAGE = "settling_until", "last_outage"


async def in_maintenance(tx: Tx) -> bool:
    return bool(await read_state(tx, MAINTENANCE))


async def set_maintenance(tx: Tx, *, is_on: bool) -> None:
    await write_state(tx, MAINTENANCE, is_on)


async def last_expiry(tx: Tx) -> datetime | None:
    """Returns when a control plane last checked for expired leases."""
    stored = await read_state(tx, LAST_EXPIRY)
    return datetime.fromisoformat(stored) if stored else None


async def set_last_expiry(tx: Tx, now: datetime) -> None:
    await write_state(tx, LAST_EXPIRY, now.isoformat())


async def reconcile_cursor(tx: Tx) -> str | None:
    """Returns the cursor from which the next pass of the reconcile sweep continues, whichever
    control plane runs it.
    """
    return await read_state(tx, RECONCILED) or None


async def set_reconcile_cursor(tx: Tx, place: str | None) -> None:
    """Stores the cursor; None means that the next pass starts from the beginning."""
    await write_state(tx, RECONCILED, place or "")


async def is_recovering(tx: Tx, now: datetime) -> bool:
    """Whether an outage of the control plane has just ended. Workers may not have had time to
    reconnect.
    """
    until = await read_state(tx, RECOVERING_UNTIL)
    return bool(until) and now < datetime.fromisoformat(until)


async def recover_until(tx: Tx, moment: datetime) -> None:
    await write_state(tx, RECOVERING_UNTIL, moment.isoformat())


def is_outage(last_pass: datetime, now: datetime, settings: Settings) -> bool:
    """Whether the sweep of expired leases was paused for so long that workers couldn't send
    heartbeats.
    """
    pause = (now - last_pass).total_seconds()
    return pause > min(settings.outage_seconds, settings.sweep_seconds + settings.heartbeat_seconds)


async def note_outage(tx: Tx, began: datetime, ended: datetime) -> None:
    """Stores the start and end of the last outage of all control planes."""
    await write_state(tx, LAST_OUTAGE, f"{began.isoformat()} {ended.isoformat()}")


async def online_since(tx: Tx, now: datetime, settings: Settings) -> datetime:
    """Returns the time since which a worker must have been seen to count as online.

    After an outage of the control plane, workers that were online when it began get time to
    reconnect.
    """
    usual = timedelta(seconds=settings.offline_after_seconds)
    last_pass = await last_expiry(tx)
    if last_pass and is_outage(last_pass, now, settings):
        return last_pass - usual  # the sweep hasn't recorded this outage yet
    noted = await read_state(tx, LAST_OUTAGE)
    if noted:
        began, ended = map(datetime.fromisoformat, noted.split())
        if now - ended < usual:
            return began - usual
    return now - usual
