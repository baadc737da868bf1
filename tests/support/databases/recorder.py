"""What a submit says to PostgreSQL, written down to be said again without us.

Statements, values and the ends of transactions are taken where they are handed to asyncpg, by whomever.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from asyncpg import Connection
from asyncpg.prepared_stmt import PreparedStatement

BEGIN, COMMIT, ROLLBACK = "BEGIN;", "COMMIT;", "ROLLBACK;"
# The queue's own connection says these itself; a lock goes in one message with the beginning.
PLAIN_COMMIT = "COMMIT"
ENDS = (COMMIT, ROLLBACK, PLAIN_COMMIT)
Side = str


@dataclass(frozen=True)
class Said:
    side: Side
    text: str
    values: tuple[Any, ...] = ()
    answered: tuple[tuple[Any, ...], ...] = ()


@dataclass
class Record:
    said: list[Said] = field(default_factory=list)

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
        record.said.append(Said(side, text, values, tuple(tuple(row) for row in rows)))

    async def heard(self: Any, text: str, *values: Any, **more: Any) -> Any:
        rows = await fetch(self, text, *values, **more)
        note(self, text, values, rows)
        return rows

    async def heard_prepared(self: Any, *values: Any, **more: Any) -> Any:
        rows = await fetch_prepared(self, *values, **more)
        note(self._connection, self.get_query(), values, rows)
        return rows

    async def heard_execute(self: Any, text: str, *values: Any, **more: Any) -> Any:
        status = await execute(self, text, *values, **more)
        note(self, text, values)
        return status

    with (
        mock.patch.object(Connection, "fetch", heard),
        mock.patch.object(Connection, "execute", heard_execute),
        mock.patch.object(PreparedStatement, "fetch", heard_prepared),
    ):
        yield record
