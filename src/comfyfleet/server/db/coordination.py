"""Coordinates several control planes through shared state values, advisory locks and NOTIFY hints.

If a hint is lost, the only effect is a delay.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy import select

from comfyfleet.errors import Unavailable
from comfyfleet.server.db.central_tables import control_state
from comfyfleet.server.db.database import Database, Tx, dsn
from comfyfleet.server.db.dialect import for_update, insert_if_new, upsert
from comfyfleet.server.db.driver import connect
from comfyfleet.server.db.errors import is_disconnect
from comfyfleet.server.db.outages import lost_as_unavailable

# The name of the value for maintenance mode. While it is true, no jobs are leased. The claim
# statement checks it as well.
MAINTENANCE = "maintenance"


async def read_state(tx: Tx, name: str) -> Any:
    """Returns a state value, or None if it was never written."""
    query = select(control_state.c.value).where(control_state.c.name == name)
    return (await tx.execute(query)).scalar_one_or_none()


async def lock_state(tx: Tx, name: str, value: Any) -> Any:
    """Locks a state value until the transaction ends, and returns it. Writes `value` first if there
    is no value yet.
    """
    await tx.execute(insert_if_new(tx, control_state, [{"name": name, "value": value}]))
    query = select(control_state.c.value).where(control_state.c.name == name)
    return (await tx.execute(for_update(tx, query))).scalar_one()


async def write_state(tx: Tx, name: str, value: Any) -> None:
    row = {"name": name, "value": value}
    await tx.execute(upsert(tx, control_state, row, key=("name",)))


async def write_state_if_new(tx: Tx, name: str, value: Any) -> Any:
    """Writes a state value unless it already exists, and returns the stored value. If several
    processes call this concurrently, all of them get the same value.
    """
    await tx.execute(insert_if_new(tx, control_state, [{"name": name, "value": value}]))
    return await read_state(tx, name)


# Separates these locks from the locks of other applications on the same server.
ADVISORY_LOCK_CLASS = 0x7475726E
# These statements bypass SQLAlchemy for speed, because each pass of a sweep executes both of them.
_TRY_LOCK = "SELECT pg_try_advisory_lock($1::int, $2::int)"
_UNLOCK = "SELECT pg_advisory_unlock($1::int, $2::int)"


class AdvisoryLocks:
    """Advisory locks that belong to a connection. If the process dies, its connection closes, and
    the locks are released.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Any = None
        self._one_at_a_time = asyncio.Lock()

    async def take(self, name: str) -> bool:
        """Tries to acquire the lock, and returns whether that succeeded. Always succeeds on SQLite,
        because only one process uses it.
        """
        return self._database.is_sqlite or await self._call(_TRY_LOCK, name)

    async def give(self, name: str) -> None:
        if not self._database.is_sqlite:
            await self._call(_UNLOCK, name)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()  # This ends the session, which releases its locks.

    async def _call(self, statement: str, name: str) -> bool:
        async with self._one_at_a_time:
            with self._database.outages.watched():
                return await self._execute(statement, _lock_number(name))

    async def _execute(self, statement: str, number: int) -> bool:
        try:
            if self._connection is None:
                self._connection = await connect(dsn(self._database.direct_url))
            connection = self._connection
            return bool(
                await connection.fetchval(
                    statement, ADVISORY_LOCK_CLASS, number, timeout=CHECK_SECONDS
                )
            )
        except Exception as error:
            # The connection is closed, because it may hold locks that were never recorded.
            await self.close()
            if is_disconnect(error):
                raise Unavailable("the connection to the database was lost") from error
            raise


def _lock_number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big", signed=True)


RETRY_SECONDS_MIN = 0.2
RETRY_SECONDS_MAX = 5.0
# Seconds between two checks of an idle connection. Without traffic, a lost connection would remain
# undetected.
CHECK_SECONDS = 15.0
# Maximum time in seconds that a caller waits for earlier messages.
CATCH_UP_SECONDS_MAX = 1.0
PAYLOAD_BYTES_MAX = 7_900  # PostgreSQL's limit is 8,000 bytes.
logger = logging.getLogger(__name__)


class NotifyChannel:
    """Sends and receives hints by LISTEN/NOTIFY on PostgreSQL. Does nothing on SQLite, because only
    one process uses it.
    """

    def __init__(self, database: Database, channel: str) -> None:
        self.reach_others = not database.is_sqlite
        self._dsn = dsn(database.direct_url) if self.reach_others else None
        self._outages = database.outages
        self._channel = channel
        self._sender: Any = None
        self._listener: Any = None
        self._one_at_a_time = asyncio.Lock()
        self._one_check_at_a_time = asyncio.Lock()
        self.is_listening = False

    async def send(self, payload: str) -> None:
        if self._dsn is None:
            return
        async with self._one_at_a_time:
            with self._outages.watched(), lost_as_unavailable():
                if self._sender is None or self._sender.is_closed():
                    self._sender = await connect(self._dsn)
                try:
                    await self._sender.execute(
                        "SELECT pg_notify($1, $2)", self._channel, payload, timeout=CHECK_SECONDS
                    )
                except BaseException:
                    self._sender.terminate()
                    raise

    async def listen(
        self, on_hint: Callable[[str], None], on_reconnect: Callable[[], None]
    ) -> None:
        """Listens until it is cancelled. Calls `on_reconnect` whenever hints may have been missed,
        which is after the first connection and after each reconnection.
        """
        delay = RETRY_SECONDS_MIN
        while self._dsn is not None:
            try:
                with self._outages.watched():
                    connection = await connect(self._dsn)
                delay = RETRY_SECONDS_MIN
                with lost_as_unavailable():
                    await self._listen_on(connection, on_hint, on_reconnect)
            except (Unavailable, OSError, TimeoutError) as error:
                logger.debug("LISTEN failed and will be retried: %s", error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, RETRY_SECONDS_MAX)

    async def _listen_on(
        self, connection: Any, on_hint: Callable[[str], None], on_reconnect: Callable[[], None]
    ) -> None:
        lost = asyncio.Event()
        connection.add_termination_listener(lambda *_: lost.set())
        try:
            await connection.add_listener(self._channel, lambda *arguments: on_hint(arguments[3]))
            self._listener, self.is_listening = connection, True
            on_reconnect()
            while not lost.is_set():
                try:
                    async with asyncio.timeout(CHECK_SECONDS):
                        await lost.wait()
                except TimeoutError:
                    await self._check(connection)
        finally:
            self.is_listening = False
            connection.terminate()

    async def _check(self, connection: Any) -> None:
        async with self._one_check_at_a_time:
            await connection.execute("SELECT 1", timeout=CHECK_SECONDS)

    async def catch_up(self) -> None:
        """Waits until all messages that were sent before this call have been received, or until a
        timeout. PostgreSQL sends them before the response to a later statement.
        """
        if self.is_listening:
            with contextlib.suppress(TimeoutError, Unavailable, OSError):
                async with asyncio.timeout(CATCH_UP_SECONDS_MAX):
                    with lost_as_unavailable():
                        await self._check(self._listener)

    async def close(self) -> None:
        if self._sender is not None and not self._sender.is_closed():
            await self._sender.close()
