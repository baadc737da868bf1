"""Opens and closes the control plane, with its databases, object store, queue and services."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeVar
from uuid import uuid4

from comfyfleet.clock import Clock
from comfyfleet.errors import Unavailable
from comfyfleet.server.counters import ProcessMetrics, SiblingProcesses
from comfyfleet.server.data_folder import DatabaseLocation, locations_from, single_process_lock
from comfyfleet.server.db import Database, Pools, open_database
from comfyfleet.server.db.coordination import AdvisoryLocks, NotifyChannel
from comfyfleet.server.db.driver import require_own_connections
from comfyfleet.server.db.outages import log_failure
from comfyfleet.server.db.schema import History, require_newest_schema, upgrade_schema
from comfyfleet.server.fleets.route_calls import RouteCalls
from comfyfleet.server.graphs.apply import GraphContext
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.poll import WaitingWorkerRefresher
from comfyfleet.server.jobs.progress import (
    CHANNEL,
    PREVIEW_CHANNEL,
    USER_CHANNEL,
    PreviewRelay,
    ProgressRelay,
    UserRelay,
)
from comfyfleet.server.loop_watchdog import LoopWatchdog
from comfyfleet.server.media.picture_processes import PictureProcesses
from comfyfleet.server.media.small_pictures import SmallPictures
from comfyfleet.server.queue.queue import DispatchQueue
from comfyfleet.server.run_log.cursors import ClientCursors
from comfyfleet.server.secrets import AdminKey, admin_key, url_secret, webhook_key
from comfyfleet.server.storage import LocalStore, ObjectStore, open_store
from comfyfleet.server.storage.outage import ScratchFolder, StoreOutage
from comfyfleet.server.tenants import identities
from comfyfleet.server.tenants import service as tenants
from comfyfleet.settings import Settings, parse_private_hosts
from comfyfleet.transport.fetch import PublicHttpClient


@dataclass(frozen=True)
class ControlPlane:
    settings: Settings
    clock: Clock
    central: Database
    pools: Pools
    context: JobContext  # shared services for submitting and running jobs
    admin_key: AdminKey
    turns: AdvisoryLocks  # ensures that only one control plane at a time runs a sweep
    routes: RouteCalls  # forwards calls to custom nodes' routes to backends
    cursors: ClientCursors  # positions of gateway clients in the run log
    outward: PublicHttpClient  # sends requests to URLs from customers
    webhook_key: str  # the key from which webhook secrets are derived
    small: SmallPictures  # thumbnails for lists and galleries
    pictures: PictureProcesses  # processes that decode untrusted images
    arriving: ScratchFolder  # the folder for uploads that are being received
    meters: ProcessMetrics = field(default_factory=ProcessMetrics)
    siblings: SiblingProcesses | None = None  # set only if several processes serve one port
    stopping: asyncio.Event = field(default_factory=asyncio.Event)  # set when the process stops

    def __post_init__(self) -> None:
        self.store.outage.on_change = self._meter_store

    def _meter_store(self) -> None:
        self.meters.store_full.set(self.store.outage.is_full)
        self.meters.store_not_writable.set(self.store.outage.rejects_writes)

    @cached_property
    def graphs(self) -> GraphContext:
        return GraphContext(self.context)

    @property
    def store(self) -> ObjectStore:
        return self.context.store

    @property
    def queue(self) -> DispatchQueue:
        return self.context.queue

    def end_waits(self) -> None:
        """Ends all waiting requests because this process is stopping.

        Polls return no job, requests with `?wait=` return the current state, and event streams end.
        """
        self.stopping.set()
        self.context.notifier.stop()
        self.queue.dismiss()
        self.routes.dismiss()


logger = logging.getLogger(__name__)
# Seconds until failed background work is restarted.
RESTART_SECONDS = 1.0


@asynccontextmanager
async def open_control_plane(
    settings: Settings, data: Path, clock: Clock, siblings: SiblingProcesses | None = None
) -> AsyncIterator[ControlPlane]:
    """Opens the control plane. Fails if a SQLite file is in use or a schema is out of date."""
    places = locations_from(settings, data)
    rules = identities.rules_from(settings)
    meters = ProcessMetrics()
    async with AsyncExitStack() as stack:
        stack.enter_context(single_process_lock(places.sqlite_files()))
        await _started(LoopWatchdog(meters.loop_stall_seconds.observe), stack)
        central = await _ready(places.central, "central", stack)
        pools = Pools(await _ready_pools(places.pools, stack))
        outward, turns = _outward(settings), AdvisoryLocks(central)
        stack.push_async_callback(outward.aclose)
        stack.push_async_callback(turns.close)
        await _prepare_tenants(central, pools, rules, clock())
        queue = DispatchQueue(central, settings=settings, clock=clock, new_token=uuid4)
        await _started(queue, stack)
        store, pictures, small = await _store(places.storage_url, settings, central, clock, stack)
        context = JobContext(
            central=central,
            pools=pools,
            store=store,
            queue=queue,
            settings=settings,
            clock=clock,
            new_id=uuid4,
        )
        stack.push_async_callback(context.deferred.flush)
        name = uuid4().hex
        await _start_relays(context, name, stack)
        await _started(WaitingWorkerRefresher(context), stack)
        yield ControlPlane(
            settings=settings,
            clock=clock,
            central=central,
            pools=pools,
            context=context,
            admin_key=await admin_key(central, settings),
            turns=turns,
            routes=await _started(RouteCalls(central, clock), stack),
            cursors=await _started_cursors(central, name, stack),
            outward=outward,
            siblings=siblings,
            webhook_key=await webhook_key(central),
            small=small,
            pictures=pictures,
            arriving=_arriving_folder(store, data),
            meters=meters,
        )


async def _prepare_tenants(
    central: Database, pools: Iterable[str], rules: identities.IdentityRules, now: datetime
) -> None:
    async with central.transaction() as tx:
        await tenants.ensure_default(tx, pools=pools, now=now)
        await identities.warn_of_unknown_tenants(tx, rules)


async def _start_relays(context: JobContext, name: str, stack: AsyncExitStack) -> None:
    """Starts relays that exchange progress, previews and user changes between control planes."""
    hints = NotifyChannel(context.central, CHANNEL)
    await _started(ProgressRelay(context.caches.progress, hints, name), stack)
    pictures = NotifyChannel(context.central, PREVIEW_CHANNEL)
    relay = PreviewRelay(context.previews, context.pool_of, pictures, name, context.clock)
    await _started(relay, stack)
    notifier, channel = context.notifier, NotifyChannel(context.central, USER_CHANNEL)
    users = UserRelay(notifier.wake_user, notifier.forget_all, channel, name)
    notifier.on_user = users.note
    notifier.hears = lambda: users.hears_others
    await _started(users, stack)


async def _started_cursors(central: Database, name: str, stack: AsyncExitStack) -> ClientCursors:
    cursors = await _started(ClientCursors(central, name), stack)
    await cursors.wait_until_listening()
    return cursors


async def _ready_pools(
    places: Mapping[str, DatabaseLocation], stack: AsyncExitStack
) -> dict[str, Database]:
    """Opens the tenant databases (pools). If one is down, the control plane still starts, and only
    the tenants in that pool are affected."""
    pools: dict[str, Database] = {}
    for name, place in places.items():
        pools[name] = _opened(place, stack)
        try:
            await _require_ready(pools[name], place, "tenant")
        except Unavailable as error:
            logger.warning(
                "pool %s is unavailable, so its tenants can't be served: %s", name, error.message
            )
    return pools


def _outward(settings: Settings) -> PublicHttpClient:
    return PublicHttpClient(private_hosts=parse_private_hosts(settings.webhook_private_hosts))


async def _ready(place: DatabaseLocation, history: History, stack: AsyncExitStack) -> Database:
    database = _opened(place, stack)
    database.outages.part = f"the {history} database"
    await _require_ready(database, place, history)
    return database


def _opened(place: DatabaseLocation, stack: AsyncExitStack) -> Database:
    database = open_database(place.url, direct_url=place.direct_url)
    stack.push_async_callback(database.close)
    return database


async def _require_ready(database: Database, place: DatabaseLocation, history: History) -> None:
    await require_own_connections(database, history)
    if place.is_embedded:
        await upgrade_schema(database, history)
    else:
        await require_newest_schema(database, history)


async def _store(
    url: str, settings: Settings, central: Database, clock: Clock, stack: AsyncExitStack
) -> tuple[ObjectStore, PictureProcesses, SmallPictures]:
    secret = bytes.fromhex(await url_secret(central))
    store = open_store(url, public_url=settings.public_url, secret=secret, clock=clock)
    stack.push_async_callback(store.aclose)
    pictures = PictureProcesses()
    small = SmallPictures(
        store,
        public_url=settings.public_url,
        secret=secret,
        pixels_max=settings.max_picture_pixels,
        processes=pictures,
        clock=clock,
    )
    stack.push_async_callback(small.aclose)
    return store, pictures, small


ARRIVING = "arriving"


def _arriving_folder(store: ObjectStore, data: Path) -> ScratchFolder:
    """Returns the folder for uploads that are being received. It is next to the objects if the
    store is local, and otherwise in the data folder.

    The system's temporary folder isn't used, because it may be in memory and too small.
    """
    if isinstance(store, LocalStore):
        return ScratchFolder(store.root / ARRIVING, store.outage)
    folder = data / ARRIVING
    return ScratchFolder(folder, StoreOutage(f"the upload folder {folder}"))


class BackgroundWork(Protocol):
    """Background work that runs while the control plane is open."""

    async def run(self) -> None: ...

    async def close(self) -> None: ...


W = TypeVar("W", bound=BackgroundWork)


async def _started(works: W, stack: AsyncExitStack) -> W:
    """Runs the background work until the stack is closed."""
    await stack.enter_async_context(_running(works))
    return works


@asynccontextmanager
async def _running(works: BackgroundWork) -> AsyncIterator[None]:
    work = asyncio.create_task(_run_forever(works), name=type(works).__name__)
    try:
        yield
    finally:
        # If part of the work fails while it is being canceled, the error can hide the cancellation.
        # The task is therefore canceled repeatedly until it has finished.
        while not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=RESTART_SECONDS)
        await works.close()


async def _run_forever(works: BackgroundWork) -> None:
    """Runs the work, and restarts it after errors.

    Background work such as hints only reduces latency, so its failure must not stop the control
    plane.
    """
    while True:
        try:
            await works.run()
        except Exception as error:  # noqa: BLE001 — any error is logged, and the work restarted
            log_failure(logger, error, "%s failed and is being restarted", type(works).__name__)
        await asyncio.sleep(RESTART_SECONDS)


__all__ = ["ControlPlane", "ProcessMetrics", "open_control_plane"]
