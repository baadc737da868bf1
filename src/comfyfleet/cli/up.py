"""`comfyfleet up`: everything by one command, on one machine, with no services."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from comfyfleet.agent import registering
from comfyfleet.agent.assembling import open_worker
from comfyfleet.agent.naming import default_worker_id
from comfyfleet.agent.settings import WorkerSettings, concurrency_of, heartbeat_seconds_of
from comfyfleet.agent.surveying import surveying
from comfyfleet.agent.worker import Worker
from comfyfleet.cli.engine import Port, require_engine
from comfyfleet.cli.engine_process import engine_process
from comfyfleet.cli.logs import LogLevel, set_up_logs
from comfyfleet.cli.serve import DATA, Data, Host, greet, prepare, serve_plane, settings_at
from comfyfleet.cli.servers import base_url, shown
from comfyfleet.cli.world import InWorld, World
from comfyfleet.http.serving import listen, stopped_by_signals, url_of
from comfyfleet.kernel.clock import utc_now
from comfyfleet.kernel.errors import InvalidInput, WorkerRevoked
from comfyfleet.loops.all import sweeps_of
from comfyfleet.loops.assigning import Assigning
from comfyfleet.loops.sweeping import Sweep, Sweeps, running
from comfyfleet.plane import Plane, open_plane
from comfyfleet.plane.embedded import FLEET, STAGE, own_fleet_secret

BUILT_IN = "built-in"
ENGINE_FOLDER = "engine"
ASSIGN_SECONDS = 1.0
# A job that runs at Ctrl-C may end if it does so soon; else it waits for the next start.
GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Crew:
    """Which backends are put to work: those named, else the built-in engine."""

    backend: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="URL",
            help="A ComfyUI to put to work, instead of the built-in engine. Repeatable.",
        ),
    ] = ()
    no_worker: Annotated[
        bool, Parameter(help="The control plane only; workers join from elsewhere.")
    ] = False


THE_ENGINE = Crew()


def up(
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    data: Data = DATA,
    crew: Annotated[Crew, Parameter(name="*")] = THE_ENGINE,
    log_level: LogLevel = "warning",
    world: InWorld,
) -> None:
    """See helps.UP."""
    if crew.no_worker and crew.backend:
        raise InvalidInput("--no-worker puts no backend to work, so leave out --backend")
    urls = tuple(dict.fromkeys(map(base_url, crew.backend)))
    with_engine = not urls and not crew.no_worker
    if with_engine:
        require_engine(". Or name a ComfyUI with --backend URL, or start without any: --no-worker")
    prepare(host, data, world)
    with listen(host, port) as listener:
        set_up_logs(log_level, world.err)
        # It would tell that nothing is assigned to its fleet; here that is done a moment later.
        logging.getLogger(registering.__name__).setLevel(logging.ERROR)
        everything = _Everything(host, data, listener, urls, world)
        asyncio.run(everything.run(with_engine=with_engine))
    world.say("Stopped")


@dataclass(frozen=True)
class _Everything:
    host: str
    data: Path
    listener: socket.socket
    backends: Sequence[str]
    world: World

    async def run(self, *, with_engine: bool) -> None:
        settings = settings_at(self.listener, self.host, self.world)
        async with AsyncExitStack() as stack:
            stop = stack.enter_context(stopped_by_signals())
            plane = await stack.enter_async_context(open_plane(settings, self.data, utc_now))
            # First of all: a key that was made is shown this once, whatever goes wrong after.
            greet(plane, url_of(self.listener), self.world)
            secret = await own_fleet_secret(plane, self.data)
            backends = [
                (default_worker_id(socket.gethostname(), url), url) for url in self.backends
            ]
            if with_engine:
                engine = engine_process(self.world.environ, self.data / ENGINE_FOLDER)
                backends.append((BUILT_IN, stack.enter_context(engine)))
            workers = [await self._hired(name, url, secret, stack) for name, url in backends]
            await stack.enter_async_context(running(_sweeps(plane)))
            self._tell_next(backends)
            await self._work(plane, workers, stop)

    async def _hired(self, name: str, url: str, secret: str, stack: AsyncExitStack) -> Worker:
        environ = self.world.environ
        folder = self.data / ENGINE_FOLDER if name == BUILT_IN else None
        settings = WorkerSettings(
            control_url=url_of(self.listener),
            fleet_slug=FLEET,
            stage=STAGE,
            worker_id=name,
            is_default_id=True,
            state=(self.data / "workers" / name).resolve(),
            backend_url=url,
            backend_folder=folder.resolve() if folder else None,
            secret=secret,
            max_concurrency=concurrency_of(environ),
            heartbeat_seconds=heartbeat_seconds_of(environ),
            grace_seconds=GRACE_SECONDS,
        )
        surveys = await stack.enter_async_context(surveying(settings, environ))
        return await stack.enter_async_context(open_worker(settings, environ, surveys))

    async def _work(self, plane: Plane, workers: Sequence[Worker], stop: asyncio.Event) -> None:
        """The workers leave while the control plane still listens to them."""
        closing = asyncio.Event()
        serving = asyncio.create_task(serve_plane(plane, self.listener, closing))
        working = [asyncio.create_task(self._employ(worker, stop)) for worker in workers]
        asked = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({asked, serving, *working}, return_when=asyncio.FIRST_COMPLETED)
            for worker in workers:
                worker.stop.ask("shutdown", GRACE_SECONDS)
            ended = await asyncio.gather(*working, return_exceptions=True)
        finally:
            asked.cancel()
            closing.set()
            await serving
        for problem in (each for each in ended if isinstance(each, BaseException)):
            raise problem

    async def _employ(self, worker: Worker, stop: asyncio.Event) -> None:
        """One that an operator has sent away is no reason for the others, and for us, to stop."""
        try:
            await worker.work()
        except WorkerRevoked as error:
            self.world.warn(error.message)
            await stop.wait()

    def _tell_next(self, backends: Sequence[tuple[str, str]]) -> None:
        for name, url in backends:
            kind = "the built-in engine" if name == BUILT_IN else "ComfyUI"
            self.world.say(f"Worker {name} in fleet {FLEET}/{STAGE} on {kind} at {shown(url)}")
        self.world.say(f"Everything is kept in {self.data.resolve()}; Ctrl-C stops it")
        self.world.say("Next: comfyfleet admin workflows register NAME FILE")
        self.world.say("      comfyfleet admin submit NAME --wait")


def _sweeps(plane: Plane) -> Sweeps:
    own = Sweep("assign", Assigning(plane, FLEET, STAGE), ASSIGN_SECONDS)
    return Sweeps([*sweeps_of(plane), own], plane.turns, plane.meters, plane.clock)
