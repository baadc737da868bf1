"""`comfyfleet db`: the schemas of the databases."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import App, Parameter

from comfyfleet.cli.listing import Listing
from comfyfleet.cli.serve import DATA, keep_private
from comfyfleet.cli.world import InWorld, World
from comfyfleet.db import Database, open_database
from comfyfleet.db.migrating import History, newest, require_newest, revision
from comfyfleet.db.migrating import upgrade as upgrade_database
from comfyfleet.kernel.clock import utc_now
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.kernel.settings import read_settings
from comfyfleet.plane.alone import alone
from comfyfleet.plane.places import Place, Places, places_of
from comfyfleet.plane.secrets import replace_admin_key, replace_url_secret, replace_webhook_key

T = TypeVar("T")
app = App(name="db", help="Bring the databases to the newest schema, or see which they have.")
Data = Annotated[
    Path, Parameter(metavar="DIR", help="Folder of the embedded databases, where no URL is set.")
]


@app.command
def upgrade(*, data: Data = DATA, world: InWorld) -> None:
    """Bring the central database and every tenant pool to the newest schema.

    Safe to repeat. On PostgreSQL several may try at once; on SQLite stop the control plane first.
    """
    places = places_of(read_settings(world.environ), data)
    keep_private(data, world)
    with alone(places.sqlite_files()):
        asyncio.run(_upgrade(places, world))


@app.command
def current(*, data: Data = DATA, world: InWorld) -> None:
    """Show which schema each database has, and which is the newest."""
    places = places_of(read_settings(world.environ), data)
    listing = Listing(("database", "schema", "newest"))
    for name, found, wanted in asyncio.run(_current(places)):
        listing.add(name, found or "none", wanted)
    listing.print_on(world.out)


@app.command
def new_admin_key(*, data: Data = DATA, world: InWorld) -> None:
    """Make a new admin key in place of a lost one, and print it.

    The one before is void, for each control plane from its next start on: on SQLite stop it first, on
    PostgreSQL restart those that run. Where `COMFYFLEET_ADMIN_KEY` is set, that is the key.
    """
    settings = read_settings(world.environ)
    if settings.admin_key:
        raise InvalidInput(
            "COMFYFLEET_ADMIN_KEY is set, so it is the key", hint="Change it there, and restart."
        )
    places = places_of(settings, data)
    _require_central(places, data)
    with alone(places.sqlite_files()):
        world.print_line(asyncio.run(_on_central(places.central, replace_admin_key)))
    world.say("the admin key, shown this once: export COMFYFLEET_KEY=…")


@app.command
def new_url_secret(*, data: Data = DATA, world: InWorld) -> None:
    """Make all signed URLs void that were ever handed out by a control plane that keeps files in a folder.

    From the next start of each control plane on: on SQLite stop it first, on PostgreSQL restart those that
    run. Running jobs get new URLs with their next heartbeat. URLs to a bucket end by themselves, or
    with the credentials that signed them.
    """
    places = places_of(read_settings(world.environ), data)
    _require_central(places, data)
    with alone(places.sqlite_files()):
        asyncio.run(_on_central(places.central, replace_url_secret))
    world.say("all URLs to files are void from the next start on")


@app.command
def new_webhook_key(*, data: Data = DATA, world: InWorld) -> None:
    """Replace the key from which the secrets of all webhooks are made.

    From the next start of each control plane on, deliveries are signed with new secrets: on SQLite stop it
    first, on PostgreSQL restart those that run. Users read theirs with `POST /api/webhooks/ID/secret`.
    """
    places = places_of(read_settings(world.environ), data)
    _require_central(places, data)
    with alone(places.sqlite_files()):
        asyncio.run(_on_central(places.central, replace_webhook_key))
    world.say("webhooks have new secrets from the next start on")


def _require_central(places: Places, data: Path) -> None:
    if places.central.file is not None and not places.central.file.exists():
        raise InvalidInput(f"no control plane has its data in {data}", hint="Name it: --data DIR")


async def _on_central(place: Place, change: Callable[[Database, datetime], Awaitable[T]]) -> T:
    database = open_database(place.url)
    try:
        await require_newest(database, "central")
        return await change(database, utc_now())
    finally:
        await database.close()


def _databases(places: Places) -> Iterator[tuple[str, Place, History]]:
    yield "central", places.central, "central"
    for name, place in places.pools.items():
        yield f"pool {name}", place, "tenant"


async def _upgrade(places: Places, world: World) -> None:
    for name, place, history in _databases(places):
        database = open_database(place.url)
        try:
            before = await revision(database, history)
            await upgrade_database(database, history)
            after = await revision(database, history)
        finally:
            await database.close()
        world.say(f"{name}: {after}" + ("" if before == after else f" (was {before or 'empty'})"))


async def _current(places: Places) -> list[tuple[str, str | None, str]]:
    found: list[tuple[str, str | None, str]] = []
    for name, place, history in _databases(places):
        # SQLite would make an empty file of one that is only looked for.
        if place.file is not None and not place.file.exists():
            found.append((name, None, newest(history)))
            continue
        database = open_database(place.url)
        try:
            found.append((name, await revision(database, history), newest(history)))
        finally:
            await database.close()
    return found
