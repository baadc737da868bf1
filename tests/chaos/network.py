"""TCP relays between the processes of a chaos run, which cut, delay, silence and repeat what passes."""

import asyncio
import contextlib
import itertools
import random
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import httpx

PIECE_BYTES = 65536
REPORTS_KEPT = 40
CHECK_SECONDS = 0.5
CHECK_SECONDS_MAX = 2.0
_REPORT = re.compile(rb"POST /api/worker/(heartbeat|complete|fail|requeue)\b")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Relay:
    """Listens on a port of its own. `choose` returns the target's port, or None to refuse a connection."""

    def __init__(self, choose: Callable[[], int | None]) -> None:
        self._choose = choose
        self._links: dict[asyncio.Task[None], tuple[int, asyncio.StreamWriter]] = {}
        self._server: asyncio.Server
        self.is_down = False
        self.is_silent = False
        self.delay_seconds = 0.0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        links = list(self._links)
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)

    def cut(self, port: int | None = None) -> None:
        """Cuts the connections to a port, or all of them."""
        for target, writer in [*self._links.values()]:
            if port in (None, target):
                writer.transport.abort()

    def heal(self) -> None:
        self.is_down = self.is_silent = False
        self.delay_seconds = 0.0

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = None if self.is_down else self._choose()
        task = asyncio.current_task()
        if port is None or task is None:
            writer.transport.abort()
            return
        self._links[task] = port, writer
        with contextlib.suppress(OSError, asyncio.CancelledError):
            back, forth = await asyncio.open_connection("127.0.0.1", port)
            try:
                await asyncio.gather(
                    self._send_requests(reader, forth, port), self._pump(back, writer)
                )
            finally:
                forth.transport.abort()
        del self._links[task]
        writer.transport.abort()

    async def _send_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        await self._pump(reader, writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                await self._pass(data, writer)
        writer.transport.abort()

    async def _pass(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        """Drops the data while the relay is silent: the connection stays open, and nothing arrives."""
        await asyncio.sleep(self.delay_seconds)
        if not self.is_silent:
            writer.write(data)
            await writer.drain()


class ReportRelay(Relay):
    """A relay in front of one worker that knows its requests, and can repeat and delay its reports."""

    def __init__(self, choose: Callable[[], int | None]) -> None:
        super().__init__(choose)
        self.reports: deque[bytes] = deque(maxlen=REPORTS_KEPT)
        self.is_doubling = False
        self.late_seconds = 0.0
        self.repeated = 0

    def heal(self) -> None:
        super().heal()
        self.is_doubling = False
        self.late_seconds = 0.0

    async def repeat(self, request: bytes) -> None:
        """Sends a report again over a new connection, like a proxy that retries."""
        port = self._choose()
        if port is None:
            return
        self.repeated += 1
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CHECK_SECONDS_MAX):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request)
                await reader.readuntil(b"\r\n\r\n")
                writer.transport.abort()

    async def _send_requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                request = head + await reader.readexactly(int(length[1]) if length else 0)
                if _REPORT.match(head):
                    self.reports.append(request)
                    await asyncio.sleep(self.late_seconds)
                    if self.is_doubling:
                        await asyncio.gather(self.repeat(request), self._pass(request, writer))
                        continue
                await self._pass(request, writer)
        writer.transport.abort()


class Balancer(Relay):
    """Spreads connections over the control planes whose /readyz answers 200."""

    def __init__(self, ports: Sequence[int]) -> None:
        super().__init__(self.next_port)
        self._ports = list(ports)
        self.ready: set[int] = set()
        self._turns = itertools.count()

    def next_port(self) -> int | None:
        ready = sorted(self.ready)
        return ready[next(self._turns) % len(ready)] if ready else None

    @contextlib.asynccontextmanager
    async def checking(self) -> AsyncIterator[None]:
        async with httpx.AsyncClient(timeout=CHECK_SECONDS_MAX) as client:
            checks = [asyncio.create_task(self._check(client, port)) for port in self._ports]
            try:
                yield
            finally:
                for check in checks:
                    check.cancel()
                await asyncio.gather(*checks, return_exceptions=True)

    async def _check(self, client: httpx.AsyncClient, port: int) -> None:
        while True:
            try:
                answer = await client.get(f"http://127.0.0.1:{port}/readyz")
                is_ready, is_there = answer.status_code == 200, True
            except httpx.HTTPError:
                is_ready = is_there = False
            if is_ready:
                self.ready.add(port)
            else:
                self.ready.discard(port)
                if not is_there:
                    self.cut(port)
            await asyncio.sleep(CHECK_SECONDS)


def jitter(chance: random.Random, seconds: float) -> float:
    return seconds * chance.uniform(0.5, 1.5)
