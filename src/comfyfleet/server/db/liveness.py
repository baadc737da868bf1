"""Detects a PostgreSQL server that no longer responds, for example because the network drops
packets.

Without this check, a statement on a connection to such a server would wait until TCP gives up after
about 15 minutes.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from comfyfleet.errors import Unavailable

SILENT = "the database doesn't respond"
# TCP settings that close a connection whose packets aren't acknowledged.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
# The corresponding settings of the server. By default, the server would keep the locks of a
# control plane for two hours after the loss of its machine. The last setting ends the
# transactions of a control plane that hangs. Other transactions are never idle for that long.
SESSION_SETTINGS = (
    "SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3; "
    "SET idle_in_transaction_session_timeout = '5min'"
)


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    # The server is checked if a connection has been in use for this many seconds.
    use_seconds: float = 5.0
    # Maximum seconds for connecting and executing a statement, even under load.
    answer_seconds: float = 10.0
    # Seconds between retries while the server doesn't respond.
    retry_seconds: float = 1.0


class Liveness:
    """Probes a slow database over a new connection to find out whether it still responds.

    If it doesn't respond, all connections in use are closed, so that their callers stop waiting.
    New calls fail immediately until the database responds again. If it responds, a slow statement
    may take as long as it needs.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[object]], limits: LivenessLimits | None = None
    ) -> None:
        self._ask = ask
        self._limits = limits or LivenessLimits()
        # The start time and the driver's connection of each use. There is no connection yet while
        # it is being opened.
        self._in_use: dict[int, tuple[float, Any]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._is_silent = False

    def require_answers(self) -> None:
        """Raises Unavailable while the server doesn't respond."""
        if self._is_silent:
            raise Unavailable(SILENT)

    def began(self, use: int, driver: Any) -> None:
        """Records that a connection is in use until `ended` is called with the same number."""
        self._in_use[use] = asyncio.get_running_loop().time(), driver
        if self._timer is None and self._asking is None:
            self._look_in(self._limits.use_seconds)

    def ended(self, use: int) -> None:
        self._in_use.pop(use, None)

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Records that a connection is being opened."""
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
        wait_seconds = longest + self._limits.use_seconds - loop.time()
        if wait_seconds > 0:
            self._look_in(wait_seconds)
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
        """Checks whether the server responds in time. An error counts as a response, because
        callers don't have to wait for it.
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
    """Probes a server by connecting to it and executing a statement."""
    import asyncpg  # An optional dependency, which is only installed for PostgreSQL.

    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("SELECT 1")  # A single message, which every pooler supports.
    finally:
        connection.terminate()


def set_limits(connection: Any, _record: Any) -> None:
    """Configures a new connection so that both ends detect the loss of the other end."""
    keep_alive(connection.driver_connection)
    connection.run_async(lambda driver: driver.execute(SESSION_SETTINGS))


def keep_alive(driver: Any) -> None:
    """Makes the operating system detect a connection that was lost although the server responds,
    for example after a failover or because a firewall has dropped the connection.
    """
    transport = getattr(driver, "_transport", None)
    end = transport and transport.get_extra_info("socket")
    if end is None or end.family not in (socket.AF_INET, socket.AF_INET6):
        return
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if number := getattr(socket, name, None):  # Some systems don't support all options.
            end.setsockopt(socket.IPPROTO_TCP, number, value)
