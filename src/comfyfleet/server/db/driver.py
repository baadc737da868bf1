"""Prepared statements of the hot path, compiled once for each database and sent by its driver without SQLAlchemy."""

import asyncio
import math
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

from sqlalchemy import Column, Float, Table, any_, bindparam
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError

from comfyfleet.errors import Refused, Unavailable
from comfyfleet.server.db.database import (
    CONNECT_SECONDS_MAX,
    INSTRUCTIONS_BETWEEN_LOOKS,
    Database,
    Tx,
    driver_of,
    dsn,
    open_sqlite,
)
from comfyfleet.server.db.dialect import Moment, insert_if_new, is_sqlite
from comfyfleet.server.db.errors import is_disconnect, to_sqlalchemy_error
from comfyfleet.server.db.liveness import SESSION_SETTINGS, keep_alive
from comfyfleet.server.db.pooler import DIRECT_SETTINGS, shares_connections
from comfyfleet.server.db.wal import BUSY_MS

T = TypeVar("T")
STATEMENT_SECONDS_MAX = 60
# Every statement has its index. Statistics that are old (or none, after a bulk load) would make the
# planner believe that reading the table is cheaper, and with a million rows it never is.
PLANNING = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
}


NOTHING: Mapping[str, Any] = {}
_LOCAL_PLANNING = [f"SET LOCAL {name} = {value}" for name, value in PLANNING.items()]


class PostgresDriver:
    """A few asyncpg connections; each statement is a transaction."""

    def __init__(self, database: Database) -> None:
        self._dsn = dsn(database.url)
        self._is_pooled = database.is_pooled
        self._outages = database.outages
        self._idle: list[Any] = []

    async def fetch(self, sql: str, *values: Any, locks: Sequence[int] = ()) -> list[Any]:
        """Executes a statement. `locks` are taken before it, in the same transaction."""
        with self._outages.watched():
            return await self._fetch(sql, values, locks)

    async def _fetch(self, sql: str, values: Sequence[Any], locks: Sequence[int]) -> list[Any]:
        connection = await self._take()
        begin = self._begin(locks)
        try:
            if begin:
                await connection.execute(begin, timeout=STATEMENT_SECONDS_MAX)
            rows: list[Any] = await connection.fetch(sql, *values, timeout=STATEMENT_SECONDS_MAX)
            if begin:
                await connection.execute("COMMIT", timeout=STATEMENT_SECONDS_MAX)
        except BaseException as error:
            # After any error, this connection must not be used for the next statement.
            is_lost = connection.is_closed() or is_disconnect(error)
            connection.terminate()
            if is_lost and isinstance(error, Exception):
                raise Unavailable("the connection to the database was lost") from error
            raise
        self._idle.append(connection)
        return rows

    async def _take(self) -> Any:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        return await connect(self._dsn, PLANNING, is_pooled=self._is_pooled)

    def _begin(self, locks: Sequence[int]) -> str:
        """Returns the SQL that begins a transaction and takes the locks, or an empty string if
        neither is needed.

        Without parameters, it takes one round trip. The locks are not part of the statement that
        follows, because a statement that waited for a lock itself would not see what was committed
        in the meantime.
        """
        if not locks and not self._is_pooled:
            return ""
        parts = ["BEGIN", *(_LOCAL_PLANNING if self._is_pooled else ())]
        if locks:
            keys = ", ".join(map(str, map(int, locks)))
            array = f"ARRAY[{keys}]::bigint[]"
            parts.append(f"SELECT pg_advisory_xact_lock(key) FROM unnest({array}) AS key")  # noqa: S608
        return "; ".join(parts)

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()


# A batch that takes longer on the event loop is rolled back and repeated in the thread.
LOOP_SECONDS_MAX = 0.01
LOOP_CALLS_MAX = 16


class SqliteDriver:
    """A single connection. Each batch is one transaction and one commit. A small batch runs on the
    event loop, a large one in the connection's thread.

    A caller that relies on the commit awaits the database's `persist`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._path = make_url(database.url).database or ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="comfyfleet-queue")
        self._connection: sqlite3.Connection | None = None
        self._in_thread: Future[Any] | None = None  # continues when its caller is cancelled
        self._deadline = math.inf  # of the batch on the event loop

    async def run(self, act: Callable[[sqlite3.Connection], T], *, calls: int) -> T:
        """Runs a batch that answers this many calls. `act` may be called twice: the first time is rolled back
        if it takes too long.
        """
        async with self._database.turn:
            result = await self._run(act, is_small=calls <= LOOP_CALLS_MAX)
            self._database.wal.note_commit()
        return result

    async def _run(self, act: Callable[[sqlite3.Connection], T], *, is_small: bool) -> T:
        is_free = self._in_thread is not None and self._in_thread.done()
        if is_small and is_free and self._connection and not self._database.wal.starts_anew:
            self._deadline = time.perf_counter() + LOOP_SECONDS_MAX
            try:
                return self._in_transaction(act, self._connection)
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode == sqlite3.SQLITE_BUSY  # another process writes
                if not is_busy and not self._is_late():
                    raise
            finally:
                self._deadline = math.inf
        running = self._in_thread = self._thread.submit(self._run_patiently, act)
        return await asyncio.wrap_future(running)

    def _is_late(self) -> bool:
        return time.perf_counter() > self._deadline

    def _run_patiently(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """Runs in the thread, where it can wait for another process that writes."""
        if self._connection is None:
            self._connection = open_sqlite(self._path)
            self._connection.set_progress_handler(self._is_late, INSTRUCTIONS_BETWEEN_LOOKS)
        self._connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        try:
            return self._in_transaction(act, self._connection)
        finally:
            self._connection.execute("PRAGMA busy_timeout = 0")

    def _in_transaction(
        self, act: Callable[[sqlite3.Connection], T], connection: sqlite3.Connection
    ) -> T:
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = act(connection)
        except BaseException:
            if connection.in_transaction:  # SQLite itself rolls back an interrupted write
                connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        return result

    async def close(self) -> None:
        def close() -> None:
            if self._connection is not None:
                self._connection.close()

        await asyncio.get_running_loop().run_in_executor(self._thread, close)
        self._thread.shutdown()


async def connect(
    dsn: str, session_settings: Mapping[str, str] = NOTHING, *, is_pooled: bool = False
) -> Any:
    """Connects without SQLAlchemy. Settings are sent with SET, because poolers refuse most startup
    parameters.

    With `is_pooled`, no settings are sent at all, because the next transaction may get another
    server connection.
    """
    import asyncpg  # optional: only whoever uses PostgreSQL has it

    try:
        options = {"statement_cache_size": 0} if is_pooled else {}
        connection = await asyncpg.connect(dsn, timeout=CONNECT_SECONDS_MAX, **options)
        await _prepare_session(connection, None if is_pooled else session_settings)
    except Exception as error:
        if is_disconnect(error):
            raise Unavailable(f"the database can't be reached: {error}") from error
        raise
    return connection


async def _prepare_session(connection: Any, settings: Mapping[str, str] | None) -> None:
    """Prepares a new connection. Closes it if that fails or is cancelled, because no caller has it
    yet.
    """
    try:
        keep_alive(connection)
        if settings is not None:
            more = (f"SET {name} = {value}" for name, value in settings.items())
            text = "; ".join([SESSION_SETTINGS, *more])
            await connection.execute(text, timeout=CONNECT_SECONDS_MAX)
    except BaseException:
        connection.terminate()
        raise


async def require_own_connections(database: Database, history: str) -> None:
    """Raises Refused if the database is behind a transaction pooler and no direct URL is set."""
    if database.is_sqlite or database.is_pooled:
        return
    import asyncpg  # optional: only a control plane on PostgreSQL needs it

    with database.outages.watched():
        try:
            is_shared = await shares_connections(dsn(database.url))
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise Unavailable(f"the database can't be opened: {error}") from error
    if is_shared:
        setting = DIRECT_SETTINGS[history]
        raise Refused(
            f"the {history} database is behind a pooler in transaction mode, and {setting} is not set",
            hint=f"Set {setting} to the address of PostgreSQL itself: LISTEN and locks need it",
        )


# On SQLite a statement costs no round trip.
ONE_BY_ONE_MAX = 64
ANY_SIZE_MAX, ROWS_AT_ONCE_MAX = 16, 128
# Few, because each kind of request always sends the same statements together.
JOINED_KEPT_MAX = 200
# Characters of a JSON value. Larger values take milliseconds to convert.
PIECE_CHARACTERS_MAX = 64 * 1024
Values = Mapping[str, Any]
_PLACEHOLDER = re.compile(r"\$(\d+)")
Convert = Callable[[Any], Any]


class _Compiled(NamedTuple):
    text: str
    names: Sequence[str]  # in the order of the placeholders in the text
    constants: Mapping[str, Any]  # values that the builder has set
    binds: Sequence[tuple[str, Convert]]  # conversions for values that the driver doesn't accept
    columns: Sequence[str]
    # conversions for values that the driver returns in another type
    reads: Sequence[tuple[int, Convert]]

    async def bound(self, values: Values) -> list[Any]:
        given = {**self.constants, **values}
        for name, convert in self.binds:
            given[name] = convert(given[name])
            if is_large_text(given[name]):
                await asyncio.sleep(0)
        return [given[name] for name in self.names]

    async def read(self, rows: list[Any]) -> list[Sequence[Any]]:
        if not self.reads:
            return rows
        read: list[Sequence[Any]] = []
        for row in rows:
            cells = list(row)
            for index, convert in self.reads:
                stored = cells[index]
                cells[index] = convert(stored)
                if is_large_text(stored):
                    await asyncio.sleep(0)
            read.append(cells)
        return read


def is_large_text(value: Any) -> bool:
    """Whether converting this JSON text takes so long that other tasks should run before the next
    one.
    """
    return isinstance(value, str) and len(value) > PIECE_CHARACTERS_MAX


class PreparedStatement:
    """A statement with a fixed text, compiled once for each database."""

    def __init__(self, build: Callable[[Tx], Any], *, columns: Iterable[str] | None = None) -> None:
        self._build = build
        self._columns = None if columns is None else list(columns)
        self._compiled: dict[str, _Compiled] = {}

    async def tuples(self, tx: Tx, values: Values = NOTHING) -> list[Sequence[Any]]:
        """Returns all rows, with values in the order of the columns."""
        compiled = self.compiled(tx)
        rows = await _send(tx, compiled.text, await compiled.bound(values))
        return await compiled.read(rows)

    async def rows(self, tx: Tx, values: Values = NOTHING) -> list[dict[str, Any]]:
        """Returns all rows as dicts by column name."""
        columns = self.compiled(tx).columns
        return [dict(zip(columns, row, strict=True)) for row in await self.tuples(tx, values)]

    async def first(self, tx: Tx, values: Values = NOTHING) -> dict[str, Any] | None:
        rows = await self.rows(tx, values)
        return rows[0] if rows else None

    def compiled(self, tx: Tx) -> _Compiled:
        name = tx.dialect.name
        found = self._compiled.get(name)
        if found is None:
            found = self._compiled[name] = _compile(self._build(tx), tx.dialect, self._columns)
        return found


class PreparedInsert(PreparedStatement):
    """`INSERT … ON CONFLICT DO NOTHING RETURNING`, of one row or several."""

    def __init__(
        self, table: Table, columns: Iterable[str], *, returning: Sequence[Column[Any]]
    ) -> None:
        super().__init__(lambda tx: insert_if_new(tx, table).returning(*returning), columns=columns)

    async def add(self, tx: Tx, new: Sequence[Values]) -> list[dict[str, Any]]:
        """Inserts the rows and returns the chosen columns of those that are new."""
        if len(new) == 1 or (is_sqlite(tx) and len(new) <= ONE_BY_ONE_MAX):
            return [row for each in new for row in await self.rows(tx, each)]
        found: list[dict[str, Any]] = []
        for part in _split_by_usual_sizes(new):
            added = await tx.execute(self._build(tx), [dict(each) for each in part])
            found += [dict(row._mapping) for row in added]
        return found


def _split_by_usual_sizes(new: Sequence[Values]) -> Iterator[Sequence[Values]]:
    """Splits rows into parts of up to 16, or of 32, 64 or 128 rows.

    Each size is another text, and connections keep what they have prepared. That of 900 rows has
    30,000 parameters.
    """
    start = 0
    while left := len(new) - start:
        size = left if left <= ANY_SIZE_MAX else min(1 << left.bit_length() - 1, ROWS_AT_ONCE_MAX)
        yield new[start : start + size]
        start += size


class PreparedForIds(PreparedStatement):
    """A statement for rows by several ids: `build` gets the condition that a column has one of
    them.

    One round trip on PostgreSQL. On SQLite, where there is none, it is sent for each id, because a
    list has no fixed text.
    """

    def __init__(self, column: Column[Any], build: Callable[[Tx, Any], Any]) -> None:
        super().__init__(lambda tx: build(tx, _is_one_of(tx, column)))

    async def of(self, tx: Tx, ids: Iterable[Any], values: Values = NOTHING) -> list[Any]:
        """Returns the rows as dicts by column name, in no order."""
        if is_sqlite(tx):
            return [row for each in ids for row in await self.rows(tx, {**values, _IDS: each})]
        return await self.rows(tx, {**values, _IDS: list(ids)})


_IDS = "of_ids"


def in_parts(row: Sequence[Any], *columns: Sequence[str]) -> list[dict[str, Any]]:
    """Splits a row of several tables into a dict for each, by the names of their columns."""
    cells = iter(row)
    return [dict(zip(names, cells, strict=False)) for names in columns]


def _is_one_of(tx: Tx, column: Column[Any]) -> Any:
    if is_sqlite(tx):
        return column == bindparam(_IDS)
    return column == any_(bindparam(_IDS, type_=ARRAY(column.type)))


StatementCall: TypeAlias = tuple[PreparedStatement, Values]


async def execute_together(tx: Tx, *calls: StatementCall) -> list[Sequence[Any]]:
    """Executes writes that don't depend on each other; returns the rows of the last one.

    On PostgreSQL they are parts of one statement, and so none sees what another has written.
    """
    if is_sqlite(tx):
        for statement, values in calls[:-1]:
            await statement.tuples(tx, values)
        return await calls[-1][0].tuples(tx, calls[-1][1])
    parts: list[tuple[str, int]] = []
    bound: list[Any] = []
    for statement, values in calls:
        compiled = statement.compiled(tx)
        parts.append((compiled.text, len(bound)))
        bound += await compiled.bound(values)
    return await compiled.read(await _send(tx, _join_texts(*parts), bound))


def _renumber(text: str, offset: int) -> str:
    return (
        _PLACEHOLDER.sub(lambda placeholder: f"${int(placeholder[1]) + offset}", text)
        if offset
        else text
    )


@lru_cache(maxsize=JOINED_KEPT_MAX)
def _join_texts(*texts_and_offsets: tuple[str, int]) -> str:
    """Joins texts to one statement; each comes with the number of placeholders before its own."""
    texts = [_renumber(text, offset) for text, offset in texts_and_offsets]
    if len(texts) == 1:
        return texts[0]
    parts = ", ".join(f"part{number} AS ({text})" for number, text in enumerate(texts))
    return f"WITH {parts} SELECT * FROM part{len(texts) - 1}"  # noqa: S608 — texts of ours


def _compile(built: Any, dialect: Any, columns: list[str] | None) -> _Compiled:
    compiled = built.compile(dialect=dialect, column_keys=columns)
    if compiled.post_compile_params or compiled.insert_prefetch or compiled.update_prefetch:
        raise TypeError(f"the text or the values of this are not fixed: {compiled}")
    binds = compiled.binds
    returned = list(getattr(built, "exported_columns", ()))
    return _Compiled(
        text=str(compiled),
        names=list(compiled.positiontup),
        constants={name: each.value for name, each in binds.items() if not each.required},
        binds=[
            (name, convert)
            for name, each in binds.items()
            if (convert := _bind(each.type, dialect)) is not None
        ],
        columns=[each.name for each in returned],
        reads=[
            (index, convert)
            for index, each in enumerate(returned)
            if (convert := _result(each.type, dialect)) is not None
        ],
    )


def _bind(kind: Any, dialect: Any) -> Convert | None:
    if _is_native(kind, dialect):
        return None
    convert: Convert | None = kind.dialect_impl(dialect).bind_processor(dialect)
    return convert


def _result(kind: Any, dialect: Any) -> Convert | None:
    if _is_native(kind, dialect):
        return None
    convert: Convert | None = kind.dialect_impl(dialect).result_processor(dialect, None)
    return convert


def _is_native(kind: Any, dialect: Any) -> bool:
    """Whether the driver converts the type itself: PostgreSQL's does so for moments and floats, and
    faster.
    """
    return isinstance(kind, Moment | Float) and dialect.name != "sqlite"


async def _send(tx: Tx, text: str, bound: Sequence[Any]) -> list[Any]:
    driver = driver_of(tx)
    try:
        if is_sqlite(tx):
            rows: list[Any] = await driver.fetch(text, bound)
        else:
            rows = await driver.fetch(text, *bound)
    except sqlite3.Error as error:
        raise to_sqlalchemy_error(error, text) from error
    except Exception as error:
        # Class 23 of SQLSTATE: a constraint. Its callers know it by SQLAlchemy's name.
        if str(getattr(error, "sqlstate", "")).startswith("23"):
            raise IntegrityError(text, None, error) from error
        raise
    return rows
