"""SQLite without a change of threads for every call, which costs more than the call itself.

aiosqlite hands each call to a thread: four for a statement, a tenth of a millisecond each, and several
milliseconds each once the interpreter is busy. Here only that goes there which may have to wait, for the
disk or for another process, or is long: the commit of a transaction that writes, its beginning while
somebody else writes, many rows at once, and a read that turns out to take its time. The rest takes
microseconds and is done at once.
"""

import functools
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiosqlite

# A read that takes longer is made anew in the thread: nobody else is served meanwhile.
READ_SECONDS_MAX = 0.003
INSTRUCTIONS_BETWEEN_LOOKS = 1_000
READS = ("SELECT",)
SHORT = ("INSERT", "UPDATE", "DELETE", "SAVEPO", "RELEAS", "ROLLBA")
PARAMETERS_MAX = 1_000
# At once: a transaction that reads first and writes later fails when another wrote.
BEGIN = "BEGIN IMMEDIATE"
# How long somebody else may write before we give up.
BUSY_MS = 30_000


async def connect(path: str) -> "Connection":
    opened = functools.partial(sqlite3.connect, path, check_same_thread=False)
    connection = Connection(opened, iter_chunk_size=64)
    connection._thread.daemon = True
    await connection
    connection._conn.set_progress_handler(connection.is_late, INSTRUCTIONS_BETWEEN_LOOKS)
    return connection


class Connection(aiosqlite.Connection):
    """As SQLAlchemy uses one: one call after another."""

    _asked = 0  # of the thread; counted here
    _done = 0  # counted there
    _late_at: float | None = None
    _writes = False

    def is_late(self) -> bool:
        """Asked by SQLite while it works; true makes it stop."""
        return self._late_at is not None and time.perf_counter() > self._late_at

    def cursor(self) -> "Cursor":  # type: ignore[override]
        return Cursor(self, self._conn.cursor())

    async def commit(self) -> None:
        try:
            self._require_transaction()
            await (self.aside if self._writes else self.at_once)(self._conn.commit)
        finally:
            self._writes = False

    async def rollback(self) -> None:
        await self.at_once(self._conn.rollback)
        self._writes = False

    def _require_transaction(self) -> None:
        """On a full disk, say, SQLite gives up all of it, not only the statement that failed."""
        if self._writes and not self._conn.in_transaction:
            raise sqlite3.OperationalError("the transaction was rolled back by SQLite")

    async def run(self, act: Callable[[], Any], sql: str, parameters: Sequence[Any]) -> Any:
        self._require_transaction()
        word = sql.lstrip()[:6].upper()
        if word in READS:
            return await self._read(act)
        if word in SHORT and len(parameters) <= PARAMETERS_MAX:
            return await self.at_once(act)
        if sql != BEGIN:
            return await self.aside(act)
        answer = await self._begin(act)
        self._writes = True
        return answer

    @property
    def in_transaction(self) -> bool:
        return self._conn.in_transaction

    async def fetch(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        """A statement without SQLAlchemy, inside of the same transaction."""
        act = functools.partial(_fetched, self._conn, sql, parameters)
        rows: list[Any] = await self.run(act, sql, parameters)
        return rows

    async def _begin(self, act: Callable[[], Any]) -> Any:
        try:
            return await self.at_once(functools.partial(self._without_waiting, act))
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
        return await self.aside(act)

    def _without_waiting(self, act: Callable[[], Any]) -> Any:
        self._conn.execute("PRAGMA busy_timeout = 0")
        try:
            return act()
        finally:
            self._conn.execute(f"PRAGMA busy_timeout = {BUSY_MS}")

    async def _read(self, act: Callable[[], Any]) -> Any:
        self._late_at = time.perf_counter() + READ_SECONDS_MAX
        try:
            return await self.at_once(act)
        except sqlite3.OperationalError:
            if not self.is_late():
                raise
        finally:
            self._late_at = None
        return await self.aside(act)

    async def at_once(self, act: Callable[[], Any]) -> Any:
        """Unless the thread is still at something: who waited for it was cancelled."""
        if self._asked != self._done:
            return await self.aside(act)
        return act()

    async def aside(self, act: Callable[[], Any]) -> Any:
        self._asked += 1
        return await self._execute(self._counted, act)  # type: ignore[no-untyped-call]

    def _counted(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        finally:
            self._done += 1


def _fetched(connection: sqlite3.Connection, sql: str, parameters: Sequence[Any]) -> list[Any]:
    return connection.execute(sql, parameters).fetchall()


class Cursor:
    """Rows are fetched with their statement."""

    def __init__(self, connection: Connection, cursor: sqlite3.Cursor) -> None:
        self._connection = connection
        self._cursor = cursor
        self._rows: list[Any] = []
        self.arraysize = 1

    async def __aenter__(self) -> "Cursor":
        return self

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> "Cursor":
        act = functools.partial(self._execute, sql, parameters)
        self._rows = await self._connection.run(act, sql, parameters)
        return self

    def _execute(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        return self._cursor.execute(sql, parameters).fetchall()

    async def executemany(self, sql: str, parameters: Sequence[Sequence[Any]]) -> "Cursor":
        act = functools.partial(self._cursor.executemany, sql, parameters)
        count = sum(map(len, parameters))
        connection = self._connection
        await (connection.at_once if count <= PARAMETERS_MAX else connection.aside)(act)
        return self

    async def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows, []
        return rows

    async def close(self) -> None:
        await self._connection.at_once(self._cursor.close)

    @property
    def description(self) -> Any:
        return self._cursor.description

    @property
    def rowcount(self) -> int:
        return self._cursor.rowcount

    @property
    def lastrowid(self) -> int | None:
        return self._cursor.lastrowid
