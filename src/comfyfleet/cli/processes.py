"""`comfyfleet serve --processes N`: a parent that keeps so many control planes behind one port.

They share the parent's listening socket, so a connection that nobody has accepted yet is lost by no restart.
A child that dies is started again; SIGHUP replaces all of them, one after another, each only when the new
one is ready. The first of them runs the sweeps that none but one needs to run.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic

from comfyfleet.http.serving import stopped_by_signals
from comfyfleet.kernel.errors import InvalidInput, ServerUnavailable
from comfyfleet.kernel.settings import Settings
from comfyfleet.plane.meters import forget_process, shared_environ
from comfyfleet.plane.places import places_of

logger = logging.getLogger(__name__)
PROCESSES_MAX = 64
READY_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
# One that lived for so long did not fail at its start: it is started again at once.
STEADY_SECONDS = 30.0
BACK_OFF_SECONDS_MAX = 30.0
READY = b"r"


@dataclass(frozen=True)
class Child:
    """What a process is told by its parent: as JSON, in an option that nobody else uses."""

    number: int  # none that lives has the same
    listener: int  # file descriptors
    parent: int  # it says that it is ready; its end says that the parent is gone
    folder: str
    is_first: bool
    greets: bool

    @classmethod
    def parsed(cls, text: str) -> "Child":
        return cls(**json.loads(text))


def check_processes(processes: int, settings: Settings, data: Path) -> None:
    if not 1 <= processes <= PROCESSES_MAX:
        raise InvalidInput(f"--processes must be from 1 to {PROCESSES_MAX}, not {processes}")
    if processes == 1:
        return
    if files := places_of(settings, data).sqlite_files():
        raise InvalidInput(
            f"--processes {processes} needs PostgreSQL: {files[0]} is SQLite, which one process serves",
            hint="Set COMFYFLEET_CENTRAL_DATABASE_URL and COMFYFLEET_TENANT_DATABASE_URLS, or leave "
            "--processes out.",
        )
    if sys.platform == "win32":
        raise InvalidInput("--processes needs a system that can hand sockets to other processes")


@asynccontextmanager
async def told_by_parent(child: Child, stop: asyncio.Event) -> AsyncIterator[asyncio.Event]:
    """In the child: set when it is to hand over to another. The parent's end stops it, too."""
    loop, hand_over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(child.parent, stop.set)
    loop.add_signal_handler(signal.SIGHUP, hand_over.set)
    try:
        yield hand_over
    finally:
        loop.remove_reader(child.parent)
        loop.remove_signal_handler(signal.SIGHUP)


@dataclass(eq=False)
class _Running:
    number: int
    process: asyncio.subprocess.Process
    line: socket.socket
    began: float = field(default_factory=monotonic)

    async def is_ready(self) -> bool:
        loop = asyncio.get_running_loop()
        try:
            said = await asyncio.wait_for(loop.sock_recv(self.line, 1), READY_SECONDS_MAX)
        except (TimeoutError, ConnectionError):
            return False
        return said == READY

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def ended(self) -> None:
        """It has been asked to; what doesn't is killed."""
        try:
            await asyncio.wait_for(self.process.wait(), STOP_SECONDS_MAX)
        except TimeoutError:
            logger.warning("process %d does not end: it is killed", self.number)
            self.signal(signal.SIGKILL)
            await self.process.wait()


class Processes:
    """`arguments` are those of the command, without what a child is told by us."""

    def __init__(
        self, count: int, arguments: Sequence[str], listener: socket.socket, folder: Path
    ) -> None:
        self._arguments = arguments
        self._listener = listener
        self._folder = folder
        self._count = count
        self._places: dict[int, _Running] = {}
        self._living: dict[int, _Running] = {}  # by number; also those that take or hand over
        self._numbers: set[int] = set()  # of those, and of what is being started
        self._stop = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    async def run(self, stop: asyncio.Event, again: asyncio.Event) -> None:
        """Until `stop`. Whenever `again` is set, all are replaced."""
        self._stop = stop
        keepers: list[asyncio.Task[None]] = []
        try:
            await self._begin()
            keepers = [asyncio.create_task(self._keep(each)) for each in range(self._count)]
            keepers.append(asyncio.create_task(self._replace_when(again)))
            await stop.wait()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._end()

    async def _begin(self) -> None:
        """The first alone: what is wrong with the settings is told once."""
        await self._first_start(0)
        await asyncio.gather(*map(self._first_start, range(1, self._count)))
        logger.info("%d processes serve", self._count)

    async def _first_start(self, place: int) -> None:
        running = self._places[place] = await self._started(place, greets=place == 0)
        if not await running.is_ready() and not self._stop.is_set():
            raise ServerUnavailable(f"process {running.number} did not get ready")

    async def _started(self, place: int, *, greets: bool = False) -> _Running:
        number = next(each for each in range(PROCESSES_MAX * 2) if each not in self._numbers)
        self._numbers.add(number)
        try:
            running = await self._started_as(number, place, greets=greets)
        except OSError:
            self._numbers.discard(number)
            raise
        self._living[number] = running
        return running

    async def _started_as(self, number: int, place: int, *, greets: bool) -> _Running:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        child = Child(
            number=number,
            listener=self._listener.fileno(),
            parent=theirs.fileno(),
            folder=str(self._folder),
            is_first=place == 0,
            greets=greets,
        )
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "comfyfleet", *self._arguments),
                    *("--child", json.dumps(asdict(child))),
                    pass_fds=(child.listener, child.parent),
                    env={**os.environ, **shared_environ(self._folder)},
                )
        except OSError:
            ours.close()
            raise
        logger.info("process %d has the pid %d", number, process.pid)
        return _Running(number, process, ours)

    def _forget(self, running: _Running) -> None:
        """Another may have its number, and goes on with its counters."""
        running.line.close()
        forget_process(self._folder, running.number)
        self._living.pop(running.number, None)
        self._numbers.discard(running.number)

    async def _keep(self, place: int) -> None:
        failures = 0
        while not self._stop.is_set():
            running = self._places[place]
            code = await running.process.wait()
            self._forget(running)
            if self._places[place] is not running:
                continue  # it was replaced
            failures = 1 if monotonic() - running.began > STEADY_SECONDS else failures + 1
            delay = min(2.0 ** (failures - 1) - 1, BACK_OFF_SECONDS_MAX)
            logger.error(
                "process %d ended with %d; another is started in %g s", running.number, code, delay
            )
            await self._start_instead_of(running, place, delay)

    async def _start_instead_of(self, ended: _Running, place: int, delay: float) -> None:
        """Unless it is replaced meanwhile. A machine that can start no process now may later."""
        while self._places[place] is ended:
            await asyncio.sleep(delay)
            async with self._one_at_a_time:
                if self._places[place] is ended and (new := await self._started_if_possible(place)):
                    self._places[place] = new
            delay = BACK_OFF_SECONDS_MAX

    async def _started_if_possible(self, place: int) -> _Running | None:
        try:
            return await self._started(place)
        except OSError as error:
            logger.warning("no process can be started: %s", error)
            return None

    async def _replace_when(self, again: asyncio.Event) -> None:
        while True:
            await again.wait()
            again.clear()
            for place in range(self._count):
                async with self._one_at_a_time:
                    if not await self._replace(place):
                        break

    async def _replace(self, place: int) -> bool:
        """The new one serves before the old one stops; if it never does, the old one stays."""
        old, new = self._places[place], await self._started_if_possible(place)
        if new is None:
            return False
        if not await new.is_ready():
            logger.error("process %d did not get ready: the restart is given up", new.number)
            new.signal(signal.SIGTERM)
            await new.ended()
            self._forget(new)
            return False
        self._places[place] = new
        if old.process.returncode is None:
            old.signal(signal.SIGHUP)
            await old.ended()
        logger.info("process %d has taken over", new.number)
        return True

    async def _end(self) -> None:
        living = list(self._living.values())
        for each in living:
            each.signal(signal.SIGTERM)
        await asyncio.gather(*(each.ended() for each in living))
        for each in living:
            self._forget(each)


async def serve_in_processes(count: int, arguments: Sequence[str], listener: socket.socket) -> None:
    again = asyncio.Event()
    with (
        stopped_by_signals() as stop,
        tempfile.TemporaryDirectory(prefix="comfyfleet-") as folder,
    ):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, again.set)
        await Processes(count, arguments, listener, Path(folder)).run(stop, again)
