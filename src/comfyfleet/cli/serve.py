"""`comfyfleet serve`: the control plane alone."""

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from comfyfleet.cli.engine import Port
from comfyfleet.cli.logs import LogLevel, set_up_logs
from comfyfleet.cli.world import InWorld, World
from comfyfleet.http.app import create_app
from comfyfleet.http.connections import with_limits
from comfyfleet.http.serving import ANYWHERE, listen, stopped_by_signals, url_of
from comfyfleet.http.serving import serve as serve_app
from comfyfleet.kernel.clock import utc_now
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.kernel.settings import Settings, misspelt, read_settings
from comfyfleet.loops.all import sweeps_of
from comfyfleet.loops.sweeping import Sweeps, running
from comfyfleet.plane import Plane, open_plane

DATA = Path("comfyfleet-data")
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
    log_level: LogLevel = "info",
    world: InWorld,
) -> None:
    """See helps.SERVE."""
    prepare(host, data, world)
    with listen(host, port) as listener:
        set_up_logs(log_level, world.err)
        settings = settings_at(listener, host, world)
        asyncio.run(_serve(settings, data, listener, world, with_loops=not no_loops))
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


async def serve_plane(plane: Plane, listener: socket.socket, stop: asyncio.Event) -> None:
    """Its API, until it is told to stop; then polls that wait are answered at once."""
    await serve_app(
        create_app(plane),
        listener,
        stop,
        at_stop=plane.queue.dismiss,
        connection=with_limits(connections_max=plane.settings.max_connections),
    )


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
    os.umask(0o077)
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
