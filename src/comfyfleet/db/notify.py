"""Hints from one control plane to the others. The table stays the truth: a lost hint costs latency."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from comfyfleet.db.direct import connect, dsn
from comfyfleet.db.engine import Database
from comfyfleet.kernel.errors import Unavailable

RETRY_SECONDS_MIN = 0.2
RETRY_SECONDS_MAX = 5.0
# Without traffic, a connection whose other end has silently gone is noticed by nothing else.
CHECK_SECONDS = 15.0
PAYLOAD_BYTES_MAX = 7_900  # PostgreSQL takes 8,000
logger = logging.getLogger(__name__)


class Hints:
    """LISTEN/NOTIFY on PostgreSQL. On SQLite there is one process, and nobody to tell."""

    def __init__(self, database: Database, channel: str) -> None:
        self._dsn = None if database.is_sqlite else dsn(database.url)
        self._channel = channel
        self._sender: Any = None

    @property
    def reach_others(self) -> bool:
        return self._dsn is not None

    async def send(self, payload: str) -> None:
        if self._dsn is None:
            return
        if self._sender is None or self._sender.is_closed():
            self._sender = await connect(self._dsn, {})
        try:
            await self._sender.execute("SELECT pg_notify($1, $2)", self._channel, payload)
        except BaseException:
            self._sender.terminate()
            raise

    async def listen(self, heard: Callable[[str], None], anew: Callable[[], None]) -> None:
        """For ever. `anew` is called whenever hints may have been missed: at first, and after a loss."""
        delay = RETRY_SECONDS_MIN
        while self._dsn is not None:
            try:
                connection = await connect(self._dsn, {})
                delay = RETRY_SECONDS_MIN
                await self._follow(connection, heard, anew)
            except (Unavailable, OSError, TimeoutError) as error:
                logger.debug("not listening for hints: %s", error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, RETRY_SECONDS_MAX)

    async def _follow(
        self, connection: Any, heard: Callable[[str], None], anew: Callable[[], None]
    ) -> None:
        lost = asyncio.Event()
        connection.add_termination_listener(lambda *_: lost.set())
        try:
            await connection.add_listener(self._channel, lambda *told: heard(told[3]))
            anew()
            while not lost.is_set():
                try:
                    await asyncio.wait_for(lost.wait(), CHECK_SECONDS)
                except TimeoutError:
                    await connection.execute("SELECT 1", timeout=CHECK_SECONDS)
        finally:
            connection.terminate()

    async def close(self) -> None:
        if self._sender is not None and not self._sender.is_closed():
            await self._sender.close()
