"""Puts the control plane together from settings, and takes it apart again."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from comfyfleet.db import Database, Pools, open_database
from comfyfleet.db.migrating import History, require_newest, upgrade
from comfyfleet.db.notify import Hints
from comfyfleet.db.turns import Turns
from comfyfleet.dispatch.queue import Queue
from comfyfleet.fetching.outward import Outward
from comfyfleet.jobs.elsewhere import CHANNEL, Elsewhere
from comfyfleet.jobs.sides import Sides
from comfyfleet.jobs.waiting_workers import WaitingWorkers
from comfyfleet.kernel.clock import Clock
from comfyfleet.kernel.errors import Unavailable
from comfyfleet.kernel.settings import Settings
from comfyfleet.plane.alone import alone
from comfyfleet.plane.meters import Siblings
from comfyfleet.plane.model import Plane
from comfyfleet.plane.places import Place, places_of
from comfyfleet.plane.secrets import admin_key, url_secret, webhook_key
from comfyfleet.storage import ObjectStore, open_store
from comfyfleet.tenants import service as tenants

logger = logging.getLogger(__name__)
AGAIN_SECONDS = 1.0


@asynccontextmanager
async def open_plane(
    settings: Settings, data: Path, clock: Clock, siblings: Siblings | None = None
) -> AsyncIterator[Plane]:
    """Refuses to start beside another process on SQLite, or on a schema of another version."""
    places = places_of(settings, data)
    async with AsyncExitStack() as stack:
        stack.enter_context(alone(places.sqlite_files()))
        central = await _ready(places.central, "central", stack)
        pools = Pools(await _ready_pools(places.pools, stack))
        outward = Outward()
        stack.push_async_callback(outward.aclose)
        turns = Turns(central)
        stack.push_async_callback(turns.close)
        async with central.begin() as tx:
            await tenants.ensure_default(tx, pools=pools, now=clock())
        queue = Queue(central, settings=settings, clock=clock, new_token=uuid4)
        await stack.enter_async_context(_kept_running(queue))
        sides = Sides(
            central=central,
            pools=pools,
            store=await _store(places.storage_url, settings, central, clock, stack),
            queue=queue,
            settings=settings,
            clock=clock,
            new_id=uuid4,
        )
        stack.push_async_callback(sides.deferred.flush)
        others = Elsewhere(sides.progresses, Hints(central, CHANNEL), uuid4().hex)
        await stack.enter_async_context(_kept_running(others))
        await stack.enter_async_context(_kept_running(WaitingWorkers(sides)))
        yield Plane(
            settings=settings,
            clock=clock,
            central=central,
            pools=pools,
            sides=sides,
            admin_key=await admin_key(central, settings),
            turns=turns,
            outward=outward,
            siblings=siblings,
            webhook_key=await webhook_key(central),
        )


async def _ready_pools(places: Mapping[str, Place], stack: AsyncExitStack) -> dict[str, Database]:
    """A pool that is down holds up its own tenants, and no start of a control plane."""
    pools: dict[str, Database] = {}
    for name, place in places.items():
        pools[name] = _opened(place, stack)
        try:
            await _require_ready(pools[name], place, "tenant")
        except Unavailable as error:
            logger.warning("pool %s is not there yet, its tenants wait: %s", name, error.message)
    return pools


async def _ready(place: Place, history: History, stack: AsyncExitStack) -> Database:
    database = _opened(place, stack)
    await _require_ready(database, place, history)
    return database


def _opened(place: Place, stack: AsyncExitStack) -> Database:
    database = open_database(place.url)
    stack.push_async_callback(database.close)
    return database


async def _require_ready(database: Database, place: Place, history: History) -> None:
    if place.is_embedded:
        await upgrade(database, history)
    else:
        await require_newest(database, history)


async def _store(
    url: str, settings: Settings, central: Database, clock: Clock, stack: AsyncExitStack
) -> ObjectStore:
    secret = bytes.fromhex(await url_secret(central))
    store = open_store(url, public_url=settings.public_url, secret=secret, clock=clock)
    stack.push_async_callback(store.aclose)
    return store


class Works(Protocol):
    """Something that runs beside all else for as long as the control plane is open."""

    async def run(self) -> None: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def _kept_running(works: Works) -> AsyncIterator[None]:
    work = asyncio.create_task(_again_and_again(works), name=type(works).__name__)
    try:
        yield
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await works.close()


async def _again_and_again(works: Works) -> None:
    """Hints and re-checks only make things faster: what breaks them must not end the rest."""
    while True:
        try:
            await works.run()
        except Exception:
            logger.exception("%s broke off, and begins again", type(works).__name__)
        await asyncio.sleep(AGAIN_SECONDS)
