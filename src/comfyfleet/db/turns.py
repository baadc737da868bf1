"""Whose turn it is, among several control planes on one PostgreSQL. A courtesy, never a guarantee:
what is done in a turn must also be right when two do it at once."""

import asyncio
import hashlib

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from comfyfleet.db.engine import Database
from comfyfleet.kernel.errors import Unavailable

TURNS_LOCK = 0x7475726E  # keeps our locks apart from those of others on the same server
_TAKE = text("SELECT pg_try_advisory_lock(:kind, :name)")
_GIVE = text("SELECT pg_advisory_unlock(:kind, :name)")


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

    async def _ask(self, statement: object, name: str) -> bool:
        values = {"kind": TURNS_LOCK, "name": _number(name)}
        async with self._one_at_a_time:
            with self._database.outages.watched():
                return await self._answer(statement, values)

    async def _answer(self, statement: object, values: dict[str, int]) -> bool:
        try:
            connection = self._connection or await self._connect()
            return bool((await connection.execute(statement, values)).scalar_one())  # type: ignore[call-overload]
        except (DBAPIError, OSError) as error:
            await self.close()
            raise Unavailable(f"no turn can be taken: {error}") from error

    async def _connect(self) -> AsyncConnection:
        connection = await self._database.engine.connect()
        # No transaction stays open between the questions: that would hold back vacuum.
        self._connection = await connection.execution_options(isolation_level="AUTOCOMMIT")
        return self._connection


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big", signed=True)
