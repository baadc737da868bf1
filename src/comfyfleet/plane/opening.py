"""Puts the control plane together from settings, and takes it apart again."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from uuid import uuid4

from comfyfleet.db import Database, Pools, open_database
from comfyfleet.db.migrating import History, require_newest, upgrade
from comfyfleet.db.turns import Turns
from comfyfleet.dispatch.queue import Queue
from comfyfleet.fetching.outward import Outward
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.clock import Clock
from comfyfleet.kernel.settings import Settings
from comfyfleet.plane.alone import alone
from comfyfleet.plane.model import Plane
from comfyfleet.plane.places import Place, places_of
from comfyfleet.plane.secrets import admin_key, url_secret
from comfyfleet.storage import ObjectStore, open_store
from comfyfleet.tenants import service as tenants

logger = logging.getLogger(__name__)
QUEUE_AGAIN_SECONDS = 1.0


@asynccontextmanager
async def open_plane(settings: Settings, data: Path, clock: Clock) -> AsyncIterator[Plane]:
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
        sides = Sides(
            central=central,
            pools=pools,
            store=await _store(places.storage_url, settings, central, clock, stack),
            queue=await stack.enter_async_context(_queue(central, settings, clock)),
            settings=settings,
            clock=clock,
            new_id=uuid4,
        )
        yield Plane(
            settings=settings,
            clock=clock,
            central=central,
            pools=pools,
            sides=sides,
            admin_key=await admin_key(central, settings),
            turns=turns,
            outward=outward,
        )


async def _ready_pools(places: Mapping[str, Place], stack: AsyncExitStack) -> dict[str, Database]:
    return {name: await _ready(place, "tenant", stack) for name, place in places.items()}


async def _ready(place: Place, history: History, stack: AsyncExitStack) -> Database:
    database = open_database(place.url)
    stack.push_async_callback(database.close)
    if place.is_embedded:
        await upgrade(database, history)
    else:
        await require_newest(database, history)
    return database


async def _store(
    url: str, settings: Settings, central: Database, clock: Clock, stack: AsyncExitStack
) -> ObjectStore:
    secret = bytes.fromhex(await url_secret(central))
    store = open_store(url, public_url=settings.public_url, secret=secret, clock=clock)
    stack.push_async_callback(store.aclose)
    return store


@asynccontextmanager
async def _queue(central: Database, settings: Settings, clock: Clock) -> AsyncIterator[Queue]:
    queue = Queue(central, settings=settings, clock=clock, new_token=uuid4)
    work = asyncio.create_task(_kept_running(queue), name="queue")
    try:
        yield queue
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await queue.close()


async def _kept_running(queue: Queue) -> None:
    """Its hints and re-checks only make things faster: what breaks them must not end the rest."""
    while True:
        try:
            await queue.run()
        except Exception:
            logger.exception("the queue's hints broke off; they begin again")
        await asyncio.sleep(QUEUE_AGAIN_SECONDS)
