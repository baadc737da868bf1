"""Measures how much a database reads for a route: its statements are recorded and executed again to be
counted.

On PostgreSQL the figures are the rows that scans touched, and pages; on SQLite the steps of its
virtual machine.
"""

import asyncio
import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import asyncpg
from sqlalchemy.engine import make_url
from tests.support.databases.recorder import recording

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Database

SPOKEN = ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")


class Read(NamedTuple):
    """The amount of data that a statement reads."""

    statement: str
    rows: int  # steps on SQLite
    pages: int = 0
    plan: str = ""


@dataclass
class SqliteTrace:
    """Records the statements, with values, of connections that are opened inside the block."""

    opened: list[tuple[str, sqlite3.Connection]] = field(default_factory=list)
    said: list[tuple[str, str]] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        connect = sqlite3.connect

        def opened(path: str, **more: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = connect(path, **more)
            self.opened.append((str(path), connection))
            return connection

        with mock.patch.object(sqlite3, "connect", opened):
            yield

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.said.clear()
        self._tell(True)
        try:
            yield
        finally:
            self._tell(False)

    def _tell(self, is_on: bool) -> None:
        for path, connection in self.opened:
            note = partial(self._note, path) if is_on else None
            with suppress(sqlite3.ProgrammingError):  # it has been closed
                connection.set_trace_callback(note)

    def _note(self, path: str, text: str) -> None:
        self.said.append((path, text))


@dataclass
class Reads:
    """The data that is read while a route is served, on either kind of database."""

    plane: ControlPlane
    trace: SqliteTrace
    taken: list[tuple[str, str, tuple[Any, ...]]] = field(
        default_factory=list
    )  # where, text, values

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.taken.clear()
        if self.plane.central.is_sqlite:
            with self.trace.recording():
                yield
            self.taken += [(path, text, ()) for path, text in self.trace.said]
            return
        context = {_name(each): each.url for each in self._databases()}
        with recording(context) as record:
            yield
        self.taken += [(each.side, each.text, each.values) for each in record.said]

    def _databases(self) -> list[Database]:
        return [self.plane.central, self.plane.pools["main"]]

    def statements(self) -> int:
        return len(self.taken)

    async def read(self) -> list[Read]:
        spoken = [each for each in self.taken if each[1].lstrip()[:6].strip().upper() in SPOKEN]
        if self.plane.central.is_sqlite:
            # In a thread: a transaction of the control plane's must be able to end meanwhile.
            return [await asyncio.to_thread(_steps, path, text) for path, text, _ in spoken]
        return await _rows(spoken)


def _name(database: Database) -> str:
    return make_url(database.url).database or ""


def _steps(path: str, text: str) -> Read:
    connection = sqlite3.connect(path, timeout=30, isolation_level=None)
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    try:
        connection.execute(
            "BEGIN IMMEDIATE"
        )  # otherwise it fails if another connection writes meanwhile
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {text}")]
        connection.set_progress_handler(step, 1)
        with suppress(sqlite3.IntegrityError):  # it was executed before
            connection.execute(text).fetchall()
        connection.set_progress_handler(None, 0)
        connection.execute("ROLLBACK")
    finally:
        connection.close()
    return Read(text, steps, plan="; ".join(plan))


async def _rows(spoken: Iterable[tuple[str, str, tuple[Any, ...]]]) -> list[Read]:
    connections: dict[str, asyncpg.Connection] = {}
    found = []
    try:
        for url, text, values in spoken:
            if url not in connections:
                connections[url] = await asyncpg.connect(url)
            found.append(await _explained(connections[url], text, values))
    finally:
        for connection in connections.values():
            await connection.close()
    return found


async def _explained(connection: asyncpg.Connection, text: str, values: tuple[Any, ...]) -> Read:
    transaction = connection.transaction()
    await transaction.start()
    try:
        told = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {text}", *values)
    except asyncpg.IntegrityConstraintViolationError:
        return Read(text, 0)  # it was executed before
    finally:
        await transaction.rollback()
    plan = json.loads(told)[0]["Plan"]
    pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return Read(text, int(_touched(plan)), pages, json.dumps(plan))


def _touched(plan: dict[str, Any]) -> float:
    """Rows that scans returned, or read and filtered out."""
    own = 0.0
    if "Scan" in plan["Node Type"] and "Relation Name" in plan:
        left_out = sum(each for name, each in plan.items() if name.startswith("Rows Removed"))
        own = (plan["Actual Rows"] + left_out) * plan["Actual Loops"]
    return own + sum(_touched(each) for each in plan.get("Plans", ()))
