"""`comfyfleet serve` and `comfyfleet db`: the control plane, in one process or in several behind
one port, and its databases."""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import App, Parameter

from comfyfleet.cli.context import CliContext, InjectedContext
from comfyfleet.cli.engine import Port
from comfyfleet.cli.logs import LogLevel, set_up_logs
from comfyfleet.cli.processes import (
    ChildOptions,
    check_processes,
    connected_parent,
    serve_in_processes,
)
from comfyfleet.cli.tables import TextTable
from comfyfleet.clock import utc_now
from comfyfleet.errors import InvalidInput
from comfyfleet.garbage import keep_collecting, limit_collections
from comfyfleet.log_context import bind_ids
from comfyfleet.malloc import keep_giving_back, use_one_arena
from comfyfleet.server.app import ControlPlane, open_control_plane
from comfyfleet.server.counters import (
    SiblingProcesses,
    use_process_number,
)
from comfyfleet.server.data_folder import (
    DatabaseLocation,
    DataLocations,
    locations_from,
    single_process_lock,
)
from comfyfleet.server.db import Database, open_database
from comfyfleet.server.db.schema import (
    History,
    newest_revision,
    require_newest_schema,
    schema_revision,
)
from comfyfleet.server.db.schema import upgrade_schema as upgrade_database
from comfyfleet.server.http.acceptor import divide_files, raise_files_limit
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.connections import with_limits
from comfyfleet.server.http.listener import (
    ANYWHERE,
    SharedPort,
    listen,
    listen_on_path,
    listener_url,
    stop_on_signals,
)
from comfyfleet.server.http.listener import serve as serve_app
from comfyfleet.server.http.local_access import LocalAccess
from comfyfleet.server.http.tallies import limit_transfers
from comfyfleet.server.maintenance.runner import SweepRunner, run_sweeps
from comfyfleet.server.maintenance.sweeps import all_sweeps
from comfyfleet.server.secrets import replace_admin_key, replace_url_secret, replace_webhook_key
from comfyfleet.settings import Settings, misspelt, read_settings

logger = logging.getLogger(__name__)
DATA = Path("comfyfleet-data")
PRIVATE = 0o077
NOTE_SECONDS = 1.0
KEY_CHARACTERS_MIN = 16
LOOPBACK = ("127.0.0.1", "::1", "localhost")
NEW_KEY_HINT = "if it is lost, stop the control plane and run: comfyfleet db new-admin-key"
Host = Annotated[str, Parameter(help="Address to listen on.")]
Data = Annotated[
    Path,
    Parameter(
        metavar="DIR", help="Folder for the embedded databases and files. It is created if missing."
    ),
]


def serve(
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    data: Data = DATA,
    no_loops: Annotated[
        bool, Parameter(help="Don't run sweeps. Another control plane must run them.")
    ] = False,
    processes: Annotated[
        int,
        Parameter(
            help="Number of processes behind the port. Requires PostgreSQL. SIGHUP restarts them one by one."
        ),
    ] = 1,
    log_level: LogLevel = "info",
    child: Annotated[str, Parameter(show=False)] = "",
    context: InjectedContext,
) -> None:
    """See help_texts.SERVE."""
    if child:
        _serve_as(
            ChildOptions.parsed(child),
            host,
            data,
            log_level,
            with_loops=not no_loops,
            context=context,
        )
        return
    check_processes(processes, read_settings(context.environ), data)
    check_environment(host, data, context)
    with listen(host, port) as listener:
        use_one_arena()
        set_up_logs(log_level, context.err)
        settings = settings_for_listener(listener, host, context)
        if processes == 1:
            asyncio.run(_serve(settings, data, listener, context, with_loops=not no_loops))
        else:
            arguments = ["serve", "--host", host, "--data", str(data), "--log-level", log_level]
            arguments += ["--no-loops"] if no_loops else []
            url = listener_url(listener)
            asyncio.run(serve_in_processes(processes, arguments, listener, url))
    logger.info("stopped")


async def _serve(
    settings: Settings,
    data: Path,
    listener: socket.socket,
    context: CliContext,
    *,
    with_loops: bool,
) -> None:
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        plane = await stack.enter_async_context(open_control_plane(settings, data, utc_now))
        # Must come first: a new key is shown only once, even if something fails later.
        print_greeting(plane, listener_url(listener), data, context)
        if with_loops:
            await stack.enter_async_context(run_sweeps(build_sweeps(plane)))
        await serve_plane(plane, listener, stop)


def _serve_as(
    child: ChildOptions,
    host: str,
    data: Path,
    log_level: str,
    *,
    with_loops: bool,
    context: CliContext,
) -> None:
    """Serves as one of several processes. The parent already listens, and has already printed the
    warnings."""
    use_process_number(child.number)
    os.umask(PRIVATE)
    with bind_ids(process=child.number):
        use_one_arena()
        set_up_logs(log_level, context.err)
        settings = read_settings(context.environ)
        if "COMFYFLEET_PUBLIC_URL" not in context.environ:
            settings = replace(settings, public_url=child.url)
        asyncio.run(_serve_beside(child, settings, data, context, with_loops=with_loops))


async def _serve_beside(
    child: ChildOptions,
    settings: Settings,
    data: Path,
    context: CliContext,
    *,
    with_loops: bool,
) -> None:
    siblings = SiblingProcesses(Path(child.folder), is_first=child.is_first)
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        line = await stack.enter_async_context(connected_parent(child, stop))
        plane = await stack.enter_async_context(
            open_control_plane(settings, data, utc_now, siblings)
        )
        if child.greets:
            print_greeting(plane, child.url, data, context)
        if with_loops:
            await stack.enter_async_context(run_sweeps(build_sweeps(plane)))
        noting = asyncio.create_task(_note_waiting(plane))
        stack.callback(noting.cancel)
        more = [listen_on_path(siblings.first)] if child.is_first else []
        await serve_plane(plane, None, stop, SharedPort(line, more))


async def _note_waiting(plane: ControlPlane) -> None:
    """Updates the shared metrics, because any of the processes may report the metrics of all."""
    while True:
        plane.meters.waiting_polls.set(plane.queue.waiting())
        await asyncio.sleep(NOTE_SECONDS)


async def serve_plane(
    plane: ControlPlane,
    listener: socket.socket | None,
    stop: asyncio.Event,
    shared: SharedPort | None = None,
    *,
    local: LocalAccess | None = None,
    backends: Mapping[str, str] | None = None,
) -> None:
    """Serves the API until it is stopped. Then all waiting requests are answered immediately."""
    limit_collections()
    collecting = asyncio.create_task(keep_collecting())
    giving_back = asyncio.create_task(keep_giving_back())
    app = create_app(plane, local, backends)
    app.state.stop = stop  # for /readyz
    shares = divide_files(raise_files_limit(), plane.settings.max_connections)
    limit_transfers(app, downloads=shares.downloads, uploads=shares.uploads)
    try:
        await serve_app(
            app,
            listener,
            stop,
            at_stop=plane.end_waits,
            connection=with_limits(connections_max=shares.connections),
            shared=shared,
        )
    finally:
        giving_back.cancel()
        collecting.cancel()


def settings_for_listener(listener: socket.socket, host: str, context: CliContext) -> Settings:
    """Returns the settings. If no public URL is set, uses the listener's address for file URLs."""
    settings = read_settings(context.environ)
    if "COMFYFLEET_PUBLIC_URL" in context.environ:
        return settings
    if host in ANYWHERE:
        context.warn(
            f"file URLs begin with {listener_url(listener)}, which other machines can't reach; "
            "set COMFYFLEET_PUBLIC_URL"
        )
    return replace(settings, public_url=listener_url(listener))


def check_environment(host: str, data: Path, context: CliContext) -> None:
    """Checks the environment before anything is opened: misspelled settings, a weak admin key and
    open permissions."""
    warn_misspelt_settings(context)
    key = context.environ.get("COMFYFLEET_ADMIN_KEY", "")
    if 0 < len(key) < KEY_CHARACTERS_MIN:
        message = f"COMFYFLEET_ADMIN_KEY has fewer than {KEY_CHARACTERS_MIN} characters"
        if host not in LOOPBACK:
            raise InvalidInput(
                f"{message}, and {host} can be reached by others",
                hint="Choose a longer one: openssl rand -hex 32",
            )
        context.warn(message)
    restrict_permissions(data, context)


def warn_misspelt_settings(context: CliContext) -> None:
    for name, suggestion in misspelt(context.environ).items():
        context.warn(f"{name} is not a known setting; did you mean {suggestion}?")


def restrict_permissions(data: Path, context: CliContext) -> None:
    """Restricts databases and files to this user, because they contain customers' data and the key
    that signs URLs."""
    os.umask(PRIVATE)
    # Windows doesn't have these permissions, so every folder would appear to be open.
    if sys.platform != "win32" and data.is_dir() and data.stat().st_mode & 0o007:
        context.warn(
            f"other users of this machine can access {data}; restrict it with: chmod 700 {data}"
        )


def build_sweeps(plane: ControlPlane) -> SweepRunner:
    return SweepRunner(all_sweeps(plane), plane.turns, plane.meters, plane.clock)


def print_greeting(plane: ControlPlane, url: str, data: Path, context: CliContext) -> None:
    context.say(f"Control plane at {url} (the API is described at {url}/docs)")
    if plane.admin_key.just_made:
        context.say("Its admin key, shown only once:")
        context.say(f"  export COMFYFLEET_URL={url} COMFYFLEET_KEY={plane.admin_key.just_made}")
    elif not plane.settings.admin_key:
        folder = "" if data == DATA else f" --data {data}"
        context.say(f"Its admin key was shown at the first start; {NEW_KEY_HINT}{folder}")


T = TypeVar("T")
db_app = App(
    name="db",
    help="Upgrade the databases to the newest schema, show their schema, or replace secrets.",
)
ExistingData = Annotated[
    Path, Parameter(metavar="DIR", help="Folder of the embedded databases, if no URL is set.")
]


@db_app.command
def upgrade(*, data: ExistingData = DATA, context: InjectedContext) -> None:
    """Upgrade the central database and every tenant pool to the newest schema.

    Safe to repeat. On PostgreSQL, several upgrades can run concurrently. On SQLite, stop the
    control plane first."""
    places = locations_from(read_settings(context.environ), data)
    restrict_permissions(data, context)
    with single_process_lock(places.sqlite_files()):
        asyncio.run(_upgrade(places, context))


@db_app.command
def current(*, data: ExistingData = DATA, context: InjectedContext) -> None:
    """Show the current and the newest schema of each database."""
    places = locations_from(read_settings(context.environ), data)
    listing = TextTable(("database", "schema", "newest"))
    for name, current_schema, newest in asyncio.run(_current(places)):
        listing.add(name, current_schema or "none", newest)
    listing.print_on(context.out)


@db_app.command
def new_admin_key(*, data: ExistingData = DATA, context: InjectedContext) -> None:
    """Replace a lost admin key and print the new one.

    The old key becomes invalid when each control plane is next started. On SQLite, stop it first.
    On PostgreSQL, restart all running control planes. If `COMFYFLEET_ADMIN_KEY` is set, it remains
    the key."""
    settings = read_settings(context.environ)
    if settings.admin_key:
        raise InvalidInput(
            "the admin key comes from COMFYFLEET_ADMIN_KEY, so no new key was created",
            hint="Change the variable, and restart.",
        )
    places = locations_from(settings, data)
    _require_central(places, data)
    with single_process_lock(places.sqlite_files()):
        context.print_line(asyncio.run(_on_central(places.central, replace_admin_key)))
    context.say("the admin key, shown only once: export COMFYFLEET_KEY=…")


@db_app.command
def new_url_secret(*, data: ExistingData = DATA, context: InjectedContext) -> None:
    """Invalidate all signed URLs of a control plane that stores files in a folder.

    This takes effect when each control plane is next started. On SQLite, stop it first. On
    PostgreSQL, restart all running control planes. Running jobs get new URLs with their next
    heartbeat. URLs to a bucket expire on their own, or with the credentials that signed them."""
    places = locations_from(read_settings(context.environ), data)
    _require_central(places, data)
    with single_process_lock(places.sqlite_files()):
        asyncio.run(_on_central(places.central, replace_url_secret))
    context.say("all file URLs become invalid at the next start")


@db_app.command
def new_webhook_key(*, data: ExistingData = DATA, context: InjectedContext) -> None:
    """Replace the key from which the secrets of all webhooks are derived.

    Deliveries are signed with new secrets after each control plane is next started. On SQLite, stop
    it first. On PostgreSQL, restart all running control planes. Users get their new secret from
    `POST /api/webhooks/ID/secret`."""
    places = locations_from(read_settings(context.environ), data)
    _require_central(places, data)
    with single_process_lock(places.sqlite_files()):
        asyncio.run(_on_central(places.central, replace_webhook_key))
    context.say("webhooks get new secrets at the next start")


def _require_central(places: DataLocations, data: Path) -> None:
    if places.central.file is not None and not places.central.file.exists():
        raise InvalidInput(
            f"{data} contains no control plane data", hint="Specify the folder: --data DIR"
        )


async def _on_central(
    place: DatabaseLocation, change: Callable[[Database, datetime], Awaitable[T]]
) -> T:
    database = open_database(place.url, direct_url=place.direct_url)
    try:
        await require_newest_schema(database, "central")
        return await change(database, utc_now())
    finally:
        await database.close()


def _databases(places: DataLocations) -> Iterator[tuple[str, DatabaseLocation, History]]:
    yield "central", places.central, "central"
    for name, place in places.pools.items():
        yield f"pool {name}", place, "tenant"


async def _upgrade(places: DataLocations, context: CliContext) -> None:
    for name, place, history in _databases(places):
        database = open_database(place.url, direct_url=place.direct_url)
        try:
            before = await schema_revision(database, history)
            await upgrade_database(database, history)
            after = await schema_revision(database, history)
        finally:
            await database.close()
        context.say(f"{name}: {after}" + ("" if before == after else f" (was {before or 'empty'})"))


async def _current(places: DataLocations) -> list[tuple[str, str | None, str]]:
    listed: list[tuple[str, str | None, str]] = []
    for name, place, history in _databases(places):
        # SQLite would create an empty file when opening a missing one.
        if place.file is not None and not place.file.exists():
            listed.append((name, None, newest_revision(history)))
            continue
        database = open_database(place.url, direct_url=place.direct_url)
        try:
            listed.append(
                (name, await schema_revision(database, history), newest_revision(history))
            )
        finally:
            await database.close()
    return listed
