"""Records what a submit sends to PostgreSQL, to be replayed without our code.

Statements, values and the ends of transactions are recorded when they are passed to asyncpg,
regardless of the caller.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from asyncpg import Connection
from asyncpg.prepared_stmt import PreparedStatement

BEGIN, COMMIT, ROLLBACK = "BEGIN;", "COMMIT;", "ROLLBACK;"
# The queue's own connection sends these itself; a lock is sent in one message with BEGIN.
PLAIN_COMMIT = "COMMIT"
ENDS = (COMMIT, ROLLBACK, PLAIN_COMMIT)
Side = str


@dataclass(frozen=True)
class RecordedStatement:
    side: Side
    text: str
    values: tuple[Any, ...] = ()
    answered: tuple[tuple[Any, ...], ...] = ()


@dataclass
class Record:
    said: list[RecordedStatement] = field(default_factory=list)

    def statements(self) -> int:
        return sum(each.text not in (BEGIN, *ENDS) for each in self.said)

    def ends(self, how: str) -> int:
        return sum(each.text.rstrip(";") == how.rstrip(";") for each in self.said)


@contextmanager
def recording(context: Mapping[str, Side]) -> Iterator[Record]:
    """`sides` by the names of their databases."""
    record = Record()
    fetch, execute = Connection.fetch, Connection.execute
    fetch_prepared = PreparedStatement.fetch

    def note(connection: Any, text: str, values: tuple[Any, ...], rows: Any = ()) -> None:
        side = context[connection._params.database]
        record.said.append(RecordedStatement(side, text, values, tuple(tuple(row) for row in rows)))

    async def recorded_fetch(self: Any, text: str, *values: Any, **more: Any) -> Any:
        rows = await fetch(self, text, *values, **more)
        note(self, text, values, rows)
        return rows

    async def recorded_prepared(self: Any, *values: Any, **more: Any) -> Any:
        rows = await fetch_prepared(self, *values, **more)
        note(self._connection, self.get_query(), values, rows)
        return rows

    async def recorded_execute(self: Any, text: str, *values: Any, **more: Any) -> Any:
        status = await execute(self, text, *values, **more)
        note(self, text, values)
        return status

    with (
        mock.patch.object(Connection, "fetch", recorded_fetch),
        mock.patch.object(Connection, "execute", recorded_execute),
        mock.patch.object(PreparedStatement, "fetch", recorded_prepared),
    ):
        yield record
