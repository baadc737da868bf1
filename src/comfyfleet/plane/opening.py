"""Puts the control plane together from settings, and takes it apart again."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from comfyfleet.db import Database, Pools, open_database
from comfyfleet.db.migrating import History, require_newest, upgrade
from comfyfleet.db.turns import Turns
from comfyfleet.kernel.clock import Clock
from comfyfleet.kernel.settings import Settings
from comfyfleet.plane.alone import alone
from comfyfleet.plane.model import Plane
from comfyfleet.plane.places import Place, places_of
from comfyfleet.plane.secrets import admin_key


@asynccontextmanager
async def open_plane(settings: Settings, data: Path, clock: Clock) -> AsyncIterator[Plane]:
    """Refuses to start beside another process on SQLite, or on a schema of another version."""
    places = places_of(settings, data)
    async with AsyncExitStack() as stack:
        stack.enter_context(alone(places.sqlite_files()))
        central = await _ready(places.central, "central", stack)
        pools = Pools(await _ready_pools(places.pools, stack))
        turns = Turns(central)
        stack.push_async_callback(turns.close)
        yield Plane(
            settings=settings,
            clock=clock,
            central=central,
            pools=pools,
            admin_key=await admin_key(central, settings),
            turns=turns,
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
