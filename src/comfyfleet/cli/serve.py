"""`comfyfleet serve`: the control plane alone."""

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from comfyfleet.cli.engine import Port
from comfyfleet.cli.logs import LogLevel, set_up_logs
from comfyfleet.cli.processes import (
    READY,
    Child,
    check_processes,
    serve_in_processes,
    told_by_parent,
)
from comfyfleet.cli.world import InWorld, World
from comfyfleet.http.app import create_app
from comfyfleet.http.connections import with_limits
from comfyfleet.http.serving import ANYWHERE, Shared, listen, listen_at, stopped_by_signals, url_of
from comfyfleet.http.serving import serve as serve_app
from comfyfleet.kernel.clock import utc_now
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.kernel.settings import Settings, misspelt, read_settings
from comfyfleet.kernel.tracing import bound
from comfyfleet.loops.all import sweeps_of
from comfyfleet.loops.sweeping import Sweeps, running
from comfyfleet.malloc import keep_giving_back
from comfyfleet.plane import Plane, open_plane
from comfyfleet.plane.meters import Siblings, count_as

DATA = Path("comfyfleet-data")
PRIVATE = 0o077
NOTE_SECONDS = 1.0
KEY_CHARACTERS_MIN = 16
LOOPBACK = ("127.0.0.1", "::1", "localhost")
ANOTHER_KEY = "if it is lost, stop this and run: comfyfleet db new-admin-key"
Host = Annotated[str, Parameter(help="Address to listen on.")]
Data = Annotated[
    Path,
    Parameter(metavar="DIR", help="Folder for the embedded databases and files, made if missing."),
]


def serve(
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    data: Data = DATA,
    no_loops: Annotated[
        bool, Parameter(help="Serve without sweeps; another control plane must run them.")
    ] = False,
    processes: Annotated[
        int,
        Parameter(help="So many behind the one port, on PostgreSQL; SIGHUP restarts them in turn."),
    ] = 1,
    log_level: LogLevel = "info",
    child: Annotated[str, Parameter(show=False)] = "",
    world: InWorld,
) -> None:
    """See helps.SERVE."""
    if child:
        _serve_as(Child.parsed(child), host, data, log_level, with_loops=not no_loops, world=world)
        return
    check_processes(processes, read_settings(world.environ), data)
    prepare(host, data, world)
    with listen(host, port) as listener:
        set_up_logs(log_level, world.err)
        settings = settings_at(listener, host, world)
        if processes == 1:
            asyncio.run(_serve(settings, data, listener, world, with_loops=not no_loops))
        else:
            arguments = ["serve", "--host", host, "--data", str(data), "--log-level", log_level]
            arguments += ["--no-loops"] if no_loops else []
            asyncio.run(serve_in_processes(processes, arguments, listener))
    world.say("Stopped")


async def _serve(
    settings: Settings, data: Path, listener: socket.socket, world: World, *, with_loops: bool
) -> None:
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(stopped_by_signals())
        plane = await stack.enter_async_context(open_plane(settings, data, utc_now))
        # First of all: a key that was made is shown this once, whatever goes wrong after.
        greet(plane, url_of(listener), world)
        if with_loops:
            await stack.enter_async_context(running(sweeps_in(plane)))
        await serve_plane(plane, listener, stop)


def _serve_as(
    child: Child, host: str, data: Path, log_level: str, *, with_loops: bool, world: World
) -> None:
    """One of several processes: its parent has listened, and warned of what there is to warn of."""
    count_as(child.number)
    os.umask(PRIVATE)
    with socket.socket(fileno=child.listener) as listener, bound(process=child.number):
        set_up_logs(log_level, world.err)
        settings = read_settings(world.environ)
        if "COMFYFLEET_PUBLIC_URL" not in world.environ:
            settings = replace(settings, public_url=url_of(listener))
        asyncio.run(_serve_beside(child, settings, data, listener, world, with_loops=with_loops))


async def _serve_beside(
    child: Child,
    settings: Settings,
    data: Path,
    listener: socket.socket,
    world: World,
    *,
    with_loops: bool,
) -> None:
    siblings = Siblings(Path(child.folder), is_first=child.is_first)
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(stopped_by_signals())
        hand_over = await stack.enter_async_context(told_by_parent(child, stop))
        plane = await stack.enter_async_context(open_plane(settings, data, utc_now, siblings))
        if child.greets:
            greet(plane, url_of(listener), world)
        if with_loops:
            await stack.enter_async_context(running(sweeps_in(plane)))
        noting = asyncio.create_task(_note_waiting(plane))
        stack.callback(noting.cancel)
        more = [listen_at(siblings.first)] if child.is_first else []
        shared = Shared(partial(os.write, child.parent, READY), hand_over, more)
        await serve_plane(plane, listener, stop, shared)


async def _note_waiting(plane: Plane) -> None:
    """Whichever process is asked for metrics, it tells those of all."""
    while True:
        plane.meters.waiting_polls.set(plane.queue.waiting())
        await asyncio.sleep(NOTE_SECONDS)


async def serve_plane(
    plane: Plane,
    listener: socket.socket,
    stop: asyncio.Event,
    shared: Shared | None = None,
) -> None:
    """Its API, until it is told to stop; then polls that wait are answered at once."""
    giving_back = asyncio.create_task(keep_giving_back())
    try:
        await serve_app(
            create_app(plane),
            listener,
            stop,
            at_stop=plane.queue.dismiss,
            connection=with_limits(connections_max=plane.settings.max_connections),
            shared=shared,
        )
    finally:
        giving_back.cancel()


def settings_at(listener: socket.socket, host: str, world: World) -> Settings:
    """Without a public URL, files are reached where we listen."""
    settings = read_settings(world.environ)
    if "COMFYFLEET_PUBLIC_URL" in world.environ:
        return settings
    if host in ANYWHERE:
        world.warn(
            f"files are handed out under {url_of(listener)}, which other machines can't reach: "
            "set COMFYFLEET_PUBLIC_URL"
        )
    return replace(settings, public_url=url_of(listener))


def prepare(host: str, data: Path, world: World) -> None:
    """Before anything is opened: what the environment misspells, gives away or leaves open."""
    warn_of_misspelt(world)
    key = world.environ.get("COMFYFLEET_ADMIN_KEY", "")
    if 0 < len(key) < KEY_CHARACTERS_MIN:
        message = f"COMFYFLEET_ADMIN_KEY has less than {KEY_CHARACTERS_MIN} characters"
        if host not in LOOPBACK:
            raise InvalidInput(
                f"{message}, and {host} can be reached by others",
                hint="Choose a longer one: openssl rand -hex 32",
            )
        world.warn(message)
    keep_private(data, world)


def warn_of_misspelt(world: World) -> None:
    for name, meant in misspelt(world.environ).items():
        world.warn(f"{name} is read by nobody; did you mean {meant}?")


def keep_private(data: Path, world: World) -> None:
    """Databases and files are for this user only: they hold customers' data, and what signs URLs."""
    os.umask(PRIVATE)
    if data.is_dir() and data.stat().st_mode & 0o007:
        world.warn(f"{data} is open to other users of this machine: chmod 700 {data}")


def sweeps_in(plane: Plane) -> Sweeps:
    return Sweeps(sweeps_of(plane), plane.turns, plane.meters, plane.clock)


def greet(plane: Plane, url: str, world: World) -> None:
    world.say(f"Control plane at {url} (the API is described at {url}/docs)")
    if plane.admin_key.just_made:
        world.say("Its admin key, shown this once:")
        world.say(f"  export COMFYFLEET_URL={url} COMFYFLEET_KEY={plane.admin_key.just_made}")
    elif not plane.settings.admin_key:
        world.say(f"Its admin key was shown at the first start; {ANOTHER_KEY}")
