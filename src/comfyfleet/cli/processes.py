"""The processes of `comfyfleet serve --processes N`.

The parent accepts connections and passes each one to the process with the fewest. It restarts a
process that dies. SIGHUP replaces all processes, one after another: each new process gets
connections before the old one stops. The first process runs the sweeps that must run only once."""

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

from comfyfleet.errors import InvalidInput, ServerUnavailable
from comfyfleet.server.counters import forget_process, shared_environ
from comfyfleet.server.data_folder import locations_from
from comfyfleet.server.http.acceptor import raise_files_limit
from comfyfleet.server.http.listener import stop_on_signals
from comfyfleet.server.http.shared_port import ChildLine, ConnectionDispatcher, ParentLine
from comfyfleet.server.http.strangers import AddressLimiter, trusted_proxies
from comfyfleet.settings import Settings

logger = logging.getLogger(__name__)
PROCESSES_MAX = 64
# Seconds after which a start is logged as slow. On an overloaded machine, a start may take minutes.
SLOW_START_SECONDS = 60.0
STOP_SECONDS_MAX = 30.0
# A process that has run for at least this long did not fail at startup, so it is restarted
# immediately.
STEADY_SECONDS = 30.0
BACK_OFF_SECONDS_MAX = 30.0


@dataclass(frozen=True)
class ChildOptions:
    """The options that a child process gets from its parent, as JSON in an internal option."""

    number: int  # unique among the living processes
    url: str  # the address on which the parent listens
    line: int  # file descriptor of the connection to the parent; it closes when the parent ends
    folder: str
    is_first: bool
    greets: bool

    @classmethod
    def parsed(cls, text: str) -> "ChildOptions":
        return cls(**json.loads(text))


def check_processes(processes: int, settings: Settings, data: Path) -> None:
    if not 1 <= processes <= PROCESSES_MAX:
        raise InvalidInput(f"--processes must be between 1 and {PROCESSES_MAX}, not {processes}")
    if processes == 1:
        return
    if files := locations_from(settings, data).sqlite_files():
        raise InvalidInput(
            f"--processes {processes} requires PostgreSQL: {files[0]} is SQLite, which supports only one process",
            hint="Set COMFYFLEET_CENTRAL_DATABASE_URL and COMFYFLEET_TENANT_DATABASE_URLS, or omit "
            "--processes.",
        )
    if sys.platform == "win32":
        raise InvalidInput(
            "--processes isn't supported on Windows, which can't pass sockets to other processes"
        )


@asynccontextmanager
async def connected_parent(child: ChildOptions, stop: asyncio.Event) -> AsyncIterator[ParentLine]:
    """Yields the line on which the parent passes connections to this child process. The child also
    stops when the parent ends."""
    loop = asyncio.get_running_loop()
    line = ParentLine(socket.socket(fileno=child.line), stop)
    line.start()
    loop.add_signal_handler(signal.SIGHUP, line.hand_over.set)
    try:
        yield line
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        line.close()


@dataclass(eq=False)
class _Running:
    number: int
    process: asyncio.subprocess.Process
    line: ChildLine
    began: float = field(default_factory=monotonic)

    async def is_ready(self, stop: asyncio.Event) -> bool:
        """Waits until the process is ready. Returns False if it ends first or must stop. A slow
        start is logged but never aborted, because another start would take as long."""
        waits = {
            asyncio.create_task(wait())
            for wait in (self.process.wait, self.line.ready.wait, stop.wait)
        }
        while not (
            await asyncio.wait(
                waits, timeout=SLOW_START_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
        )[0]:
            seconds = monotonic() - self.began
            logger.warning("process %d is not ready after %d s", self.number, seconds)
        for waiting in waits:
            waiting.cancel()
        return self.line.ready.is_set()

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def ended(self) -> None:
        """Waits for the process to end. Kills it if it takes too long."""
        try:
            async with asyncio.timeout(STOP_SECONDS_MAX):
                await self.process.wait()
        except TimeoutError:
            logger.warning("process %d did not end in time and is being killed", self.number)
            self.signal(signal.SIGKILL)
            await self.process.wait()


class ProcessSupervisor:
    """Runs and replaces the processes. `arguments` are the command's arguments, without those for
    children."""

    def __init__(
        self,
        count: int,
        arguments: Sequence[str],
        listener: socket.socket,
        folder: Path,
        url: str = "",
    ) -> None:
        self._arguments = arguments
        self._url = url
        limits = AddressLimiter().exempting(trusted_proxies())
        self._dispatcher = ConnectionDispatcher(listener, limits)
        self._folder = folder
        self._count = count
        self._places: dict[int, _Running] = {}
        # processes by number, including starting and replaced ones
        self._living: dict[int, _Running] = {}
        self._numbers: set[int] = set()  # numbers of living and starting processes
        self._starting: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    async def run(self, stop: asyncio.Event, again: asyncio.Event) -> None:
        """Runs until `stop` is set. Whenever `again` is set, replaces all processes."""
        self._stop = stop
        keepers: list[asyncio.Task[None]] = []
        try:
            await self._begin()
            keepers = [asyncio.create_task(self._keep(place)) for place in range(self._count)]
            keepers.append(asyncio.create_task(self._replace_when(again)))
            await stop.wait()
        finally:
            self._dispatcher.close()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._end()

    async def _begin(self) -> None:
        """Starts the first process alone, so that an error in the settings is reported only once.
        Accepts no connections before all processes are ready, because connections don't move
        between processes."""
        await self._first_start(0)
        await asyncio.gather(*map(self._first_start, range(1, self._count)))
        for running in self._places.values():
            self._dispatcher.add(running.line)
        self._dispatcher.open()
        logger.info("%d processes are serving", self._count)

    async def _first_start(self, place: int) -> None:
        running = self._places[place] = await self._started(place, greets=place == 0)
        if not await running.is_ready(self._stop) and not self._stop.is_set():
            raise ServerUnavailable(f"process {running.number} ended before it was ready")

    async def _started(self, place: int, *, greets: bool = False) -> _Running:
        number = next(
            candidate for candidate in range(PROCESSES_MAX * 2) if candidate not in self._numbers
        )
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
        child = ChildOptions(
            number=number,
            url=self._url,
            line=theirs.fileno(),
            folder=str(self._folder),
            is_first=place == 0,
            greets=greets,
        )
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    # -P prevents imports from the current folder, which may belong to someone else.
                    *(sys.executable, "-P", "-m", "comfyfleet", *self._arguments),
                    *("--child", json.dumps(asdict(child))),
                    pass_fds=(child.line,),
                    env={**os.environ, **shared_environ(self._folder)},
                )
        except OSError:
            ours.close()
            raise
        logger.info("started process %d with pid %d", number, process.pid)
        return _Running(number, process, ChildLine(ours, self._dispatcher.remove))

    def _forget(self, running: _Running) -> None:
        """Removes a process, so that another one can use its number and continue its counters."""
        running.line.drain()
        self._dispatcher.remove(running.line)
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
                continue  # it has been replaced
            failures = 1 if monotonic() - running.began > STEADY_SECONDS else failures + 1
            delay = min(2.0 ** (failures - 1) - 1, BACK_OFF_SECONDS_MAX)
            logger.error(
                "process %d ended with exit code %d; restarting in %g s",
                running.number,
                code,
                delay,
            )
            await self._start_instead_of(running, place, delay)

    async def _start_instead_of(self, ended: _Running, place: int, delay: float) -> None:
        """Restarts a process, unless it has been replaced. Retries if the machine can't start
        processes now."""
        while self._places[place] is ended:
            await asyncio.sleep(delay)
            async with self._one_at_a_time:
                if self._places[place] is ended and (new := await self._started_if_possible(place)):
                    self._places[place] = new
                    self._serving_when_ready(new)
            delay = BACK_OFF_SECONDS_MAX

    def _serving_when_ready(self, new: _Running) -> None:
        """Passes connections to the process as soon as it is ready. If it ends first, it is
        restarted."""

        async def serve_when_ready() -> None:
            if await new.is_ready(self._stop):
                self._dispatcher.add(new.line)

        starting = asyncio.create_task(serve_when_ready())
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)

    async def _started_if_possible(self, place: int) -> _Running | None:
        try:
            return await self._started(place)
        except OSError as error:
            logger.warning("a process could not be started: %s", error)
            return None

    async def _replace_when(self, again: asyncio.Event) -> None:
        while True:
            await again.wait()
            again.clear()
            logger.info("SIGHUP received: replacing %d processes one by one", self._count)
            if await self._replace_all():
                logger.info("all processes were replaced")
            else:
                logger.warning("not all processes were replaced; the remaining ones continue")

    async def _replace_all(self) -> bool:
        for place in range(self._count):
            async with self._one_at_a_time:
                if not await self._replace(place):
                    return False
        return True

    async def _replace(self, place: int) -> bool:
        """Starts a new process before stopping the old one. If the new one never becomes ready, the
        old one continues."""
        old, new = self._places[place], await self._started_if_possible(place)
        if new is None:
            return False
        if not await new.is_ready(self._stop):
            logger.error(
                "process %d ended before it was ready; the replacement is aborted", new.number
            )
            new.signal(signal.SIGTERM)
            await new.ended()
            self._forget(new)
            return False
        self._places[place] = new
        text = "process %d (pid %d) replaces process %d (pid %d)"
        logger.info(text, new.number, new.process.pid, old.number, old.process.pid)
        self._dispatcher.add(new.line)
        self._dispatcher.remove(old.line)
        if old.process.returncode is None:
            old.signal(signal.SIGHUP)
            await old.ended()
        return True

    async def _end(self) -> None:
        living = list(self._living.values())
        for process in living:
            process.signal(signal.SIGTERM)
        await asyncio.gather(*(process.ended() for process in living))
        for process in living:
            self._forget(process)


async def serve_in_processes(
    count: int, arguments: Sequence[str], listener: socket.socket, url: str
) -> None:
    raise_files_limit()
    again = asyncio.Event()
    with (
        stop_on_signals() as stop,
        tempfile.TemporaryDirectory(prefix="comfyfleet-") as folder,
    ):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, again.set)
        supervisor = ProcessSupervisor(count, arguments, listener, Path(folder), url)
        await supervisor.run(stop, again)
