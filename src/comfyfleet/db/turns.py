"""Whose turn it is, among several control planes on one PostgreSQL. A courtesy, never a guarantee:
what is done in a turn must also be right when two do it at once."""

import asyncio
import hashlib

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from comfyfleet.db.engine import Database, driver_of
from comfyfleet.db.losses import is_loss
from comfyfleet.kernel.errors import Unavailable

TURNS_LOCK = 0x7475726E  # keeps our locks apart from those of others on the same server
# Sent by the driver: there are two for each pass, also while there is nothing to do.
_TAKE = "SELECT pg_try_advisory_lock($1::int, $2::int)"
_GIVE = "SELECT pg_advisory_unlock($1::int, $2::int)"


class Turns:
    """Locks of one connection: they go when it goes, so nothing is blocked by a dead process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: AsyncConnection | None = None
        self._one_at_a_time = asyncio.Lock()

    async def take(self, name: str) -> bool:
        """On SQLite there is only us."""
        return self._database.is_sqlite or await self._ask(_TAKE, name)

    async def give(self, name: str) -> None:
        if not self._database.is_sqlite:
            await self._ask(_GIVE, name)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            # Invalid, not only returned: the locks belong to the session, which must end.
            await connection.invalidate()
            await connection.close()

    async def _ask(self, statement: str, name: str) -> bool:
        async with self._one_at_a_time:
            with self._database.outages.watched():
                return await self._answer(statement, _number(name))

    async def _answer(self, statement: str, number: int) -> bool:
        try:
            driver = driver_of(self._connection or await self._connect())
            return bool(await driver.fetchval(statement, TURNS_LOCK, number))
        except Exception as error:
            # Whatever has happened to it, the connection may hold locks that nobody knows of.
            await self.close()
            if is_loss(error) or isinstance(error, DBAPIError):
                raise Unavailable(f"no turn can be taken: {error}") from error
            raise

    async def _connect(self) -> AsyncConnection:
        connection = await self._database.engine.connect()
        # No transaction stays open between the questions: that would hold back vacuum.
        self._connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
        return self._connection


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big", signed=True)
