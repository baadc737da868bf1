"""Detects a PostgreSQL server that no longer responds, for example because a network drops packets.

Without this check, a statement on such a connection waits until TCP gives up, which takes a quarter
of an hour.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from comfyfleet.errors import Unavailable

SILENT = "the database doesn't answer"
# TCP settings that close a connection whose packets aren't acknowledged.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
# The same for the server, whose own limit is two hours: a control plane whose machine is gone would keep its
# locks for so long. The last one is for a control plane that hangs: no transaction of ours waits for anything else.
SESSION_SETTINGS = (
    "SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3; "
    "SET idle_in_transaction_session_timeout = '5min'"
)


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    # Seconds of use after which the server is checked.
    use_seconds: float = 5.0
    # Seconds that connecting and one statement may take, even under load.
    answer_seconds: float = 10.0
    # Seconds between retries while the server doesn't respond.
    retry_seconds: float = 1.0


class Liveness:
    """Asks a server that keeps somebody waiting for an answer, by a new connection.

    If it gives none, the connections in use are cut, so that nobody waits for them any longer, and
    new calls are refused at once until it answers again. A slow statement of a server that answers is
    left alone, however long it takes.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[object]], limits: LivenessLimits | None = None
    ) -> None:
        self._ask = ask
        self._limits = limits or LivenessLimits()
        # The start of each use, and the driver's connection, which is None while it is opened.
        self._in_use: dict[int, tuple[float, Any]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._is_silent = False

    def require_answers(self) -> None:
        """Raises Unavailable while the server doesn't respond."""
        if self._is_silent:
            raise Unavailable(SILENT)

    def began(self, use: int, driver: Any) -> None:
        """Records that a connection is in use, until `ended` is called with the same number."""
        self._in_use[use] = asyncio.get_running_loop().time(), driver
        if self._timer is None and self._asking is None:
            self._look_in(self._limits.use_seconds)

    def ended(self, use: int) -> None:
        self._in_use.pop(use, None)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Records that a connection is being opened, which has its own time limit."""
        use = object()
        self.began(id(use), None)
        try:
            yield
        finally:
            self.ended(id(use))

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._in_use:
            return
        loop = asyncio.get_running_loop()
        longest = min(since for since, _ in self._in_use.values())
        left = longest + self._limits.use_seconds - loop.time()
        if left > 0:
            self._look_in(left)
        else:
            self._asking = loop.create_task(self._ask_until_answered())
            self._asking.add_done_callback(self._answered)

    async def _ask_until_answered(self) -> None:
        while not await self._answers():
            self._is_silent = True
            for _, driver in [*self._in_use.values()]:
                if driver is not None:
                    driver.terminate()
            await asyncio.sleep(self._limits.retry_seconds)

    async def _answers(self) -> bool:
        """Whether the server responds. An error is a response as well, because callers receive it
        without waiting.
        """
        with contextlib.suppress(Exception):
            try:
                async with asyncio.timeout(self._limits.answer_seconds):
                    await self._ask()
            except TimeoutError:
                return False
        return True

    def _answered(self, _asked: "asyncio.Task[None]") -> None:
        self._asking, self._is_silent = None, False
        if self._in_use:
            self._look_in(self._limits.use_seconds)


async def ask_server(dsn: str) -> None:
    """Connects and executes a statement."""
    import asyncpg  # optional: only whoever uses PostgreSQL has it

    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("SELECT 1")  # one message, so that any pooler supports it
    finally:
        connection.terminate()


def set_limits(connection: Any, _record: Any) -> None:
    """Prepares a connection of the pool, so that neither end waits for a lost peer."""
    keep_alive(connection.driver_connection)
    connection.run_async(lambda driver: driver.execute(SESSION_SETTINGS))


def keep_alive(driver: Any) -> None:
    """Lets the operating system detect a connection whose other end is lost although the server
    itself responds, for example after a failover or when a firewall has dropped the connection.
    """
    transport = getattr(driver, "_transport", None)
    end = transport and transport.get_extra_info("socket")
    if end is None or end.family not in (socket.AF_INET, socket.AF_INET6):
        return
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if number := getattr(socket, name, None):  # not every system supports all of them
            end.setsockopt(socket.IPPROTO_TCP, number, value)
