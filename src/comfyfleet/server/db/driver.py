"""Prepared statements for the hot path. They are compiled once per database, and the driver sends
them without SQLAlchemy.
"""

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
# Forces the planner to use indexes, because each of these statements has a suitable one. With
# missing or outdated statistics, for example after a bulk load, it might read the whole table.
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
    """Executes statements on a few asyncpg connections. Each statement is its own transaction."""

    def __init__(self, database: Database) -> None:
        self._dsn = dsn(database.url)
        self._is_pooled = database.is_pooled
        self._outages = database.outages
        self._idle: list[Any] = []

    async def fetch(self, sql: str, *values: Any, locks: Sequence[int] = ()) -> list[Any]:
        """Executes a statement. Advisory `locks` are acquired before it in the same transaction."""
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
        """Returns the SQL that begins a transaction and acquires the locks, or an empty string if
        neither is needed.

        The SQL has no parameters, so that it takes a single round trip. The locks aren't acquired
        in the statement itself, because it wouldn't see commits made during the wait.
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


# A batch that takes longer than this many seconds on the event loop is rolled back and repeated in
# the thread.
LOOP_SECONDS_MAX = 0.01
# A batch with more calls than this runs in the thread from the start.
LOOP_CALLS_MAX = 16


class SqliteDriver:
    """Executes batches on a single connection, each in its own transaction. Small batches run on
    the event loop, and large ones in the connection's thread.

    Callers that rely on a commit must await the database's `persist`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._path = make_url(database.url).database or ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="comfyfleet-queue")
        self._connection: sqlite3.Connection | None = None
        # The batch in the thread, which continues even if its caller is cancelled.
        self._in_thread: Future[Any] | None = None
        self._deadline = math.inf  # The deadline of the batch on the event loop.

    async def run(self, act: Callable[[sqlite3.Connection], T], *, calls: int) -> T:
        """Runs a batch that handles this number of calls. `act` may be called twice, because the
        first attempt is rolled back if it takes too long.
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
                # SQLITE_BUSY means that another process is writing.
                is_busy = error.sqlite_errorcode == sqlite3.SQLITE_BUSY
                if not is_busy and not self._is_late():
                    raise
            finally:
                self._deadline = math.inf
        running = self._in_thread = self._thread.submit(self._run_patiently, act)
        return await asyncio.wrap_future(running)

    def _is_late(self) -> bool:
        return time.perf_counter() > self._deadline

    def _run_patiently(self, act: Callable[[sqlite3.Connection], T]) -> T:
        """Runs a batch in the thread, where it can wait while another process is writing."""
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
            if connection.in_transaction:  # SQLite has rolled back an interrupted write itself.
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
    """Connects without SQLAlchemy. The settings are sent with SET, because poolers refuse most
    startup parameters.

    If `is_pooled` is set, no settings are sent, because the next transaction may use a different
    server connection.
    """
    import asyncpg  # An optional dependency, which is only installed for PostgreSQL.

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
    """Configures a new connection. If this fails or is cancelled, closes the connection, because no
    caller has received it yet.
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
    import asyncpg  # An optional dependency, which is only installed for PostgreSQL.

    with database.outages.watched():
        try:
            is_shared = await shares_connections(dsn(database.url))
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise Unavailable(f"the database can't be opened: {error}") from error
    if is_shared:
        setting = DIRECT_SETTINGS[history]
        raise Refused(
            f"the {history} database is behind a pooler in transaction mode, "
            f"but {setting} is not set",
            hint=f"Set {setting} to the direct address of PostgreSQL for LISTEN and locks",
        )


# Maximum number of rows that are inserted one by one on SQLite, where statements have no round
# trip.
ONE_BY_ONE_MAX = 64
# Inserts of up to 16 rows use a statement for exactly this number of rows. Larger inserts are split
# into parts of up to 128 rows.
ANY_SIZE_MAX, ROWS_AT_ONCE_MAX = 16, 128
# Maximum number of cached combinations of statements. A few are enough, because each kind of
# request always combines the same statements.
JOINED_KEPT_MAX = 200
# Size in characters above which the conversion of a JSON value takes milliseconds.
PIECE_CHARACTERS_MAX = 64 * 1024
Values = Mapping[str, Any]
_PLACEHOLDER = re.compile(r"\$(\d+)")
Convert = Callable[[Any], Any]


class _Compiled(NamedTuple):
    text: str
    names: Sequence[str]  # Parameter names in the order of the placeholders.
    constants: Mapping[str, Any]  # Values that are part of the statement.
    binds: Sequence[tuple[str, Convert]]  # Conversions for values that the driver doesn't accept.
    columns: Sequence[str]
    # Conversions for values that the driver returns with another type.
    reads: Sequence[tuple[int, Convert]]

    async def bound(self, values: Values) -> list[Any]:
        parameters = {**self.constants, **values}
        for name, convert in self.binds:
            parameters[name] = convert(parameters[name])
            if is_large_text(parameters[name]):
                await asyncio.sleep(0)
        return [parameters[name] for name in self.names]

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
    """Checks whether a JSON text is so large that other tasks should run after its conversion."""
    return isinstance(value, str) and len(value) > PIECE_CHARACTERS_MAX


class PreparedStatement:
    """A statement with a constant text, which is compiled once per kind of database."""

    def __init__(self, build: Callable[[Tx], Any], *, columns: Iterable[str] | None = None) -> None:
        self._build = build
        self._columns = None if columns is None else list(columns)
        self._compiled: dict[str, _Compiled] = {}

    async def tuples(self, tx: Tx, values: Values = NOTHING) -> list[Sequence[Any]]:
        """Executes the statement and returns all rows as sequences in the order of the columns."""
        compiled = self.compiled(tx)
        rows = await _send(tx, compiled.text, await compiled.bound(values))
        return await compiled.read(rows)

    async def rows(self, tx: Tx, values: Values = NOTHING) -> list[dict[str, Any]]:
        """Executes the statement and returns all rows as dicts by column name."""
        columns = self.compiled(tx).columns
        return [dict(zip(columns, row, strict=True)) for row in await self.tuples(tx, values)]

    async def first(self, tx: Tx, values: Values = NOTHING) -> dict[str, Any] | None:
        rows = await self.rows(tx, values)
        return rows[0] if rows else None

    def compiled(self, tx: Tx) -> _Compiled:
        name = tx.dialect.name
        compiled = self._compiled.get(name)
        if compiled is None:
            compiled = self._compiled[name] = _compile(self._build(tx), tx.dialect, self._columns)
        return compiled


class PreparedInsert(PreparedStatement):
    """A statement `INSERT … ON CONFLICT DO NOTHING RETURNING …` for any number of rows."""

    def __init__(
        self, table: Table, columns: Iterable[str], *, returning: Sequence[Column[Any]]
    ) -> None:
        super().__init__(lambda tx: insert_if_new(tx, table).returning(*returning), columns=columns)

    async def add(self, tx: Tx, new: Sequence[Values]) -> list[dict[str, Any]]:
        """Inserts rows. Returns the columns in `returning` of the rows that are new."""
        if len(new) == 1 or (is_sqlite(tx) and len(new) <= ONE_BY_ONE_MAX):
            return [row for values in new for row in await self.rows(tx, values)]
        inserted: list[dict[str, Any]] = []
        for part in _split_by_usual_sizes(new):
            added = await tx.execute(self._build(tx), [dict(values) for values in part])
            inserted += [dict(row._mapping) for row in added]
        return inserted


def _split_by_usual_sizes(new: Sequence[Values]) -> Iterator[Sequence[Values]]:
    """Splits rows into parts of 128, 64, 32 or 16 rows, and a last part of up to 16 rows.

    Each size needs its own statement, and connections cache their prepared statements. A statement
    for 900 rows would have 30,000 parameters.
    """
    start = 0
    while rest := len(new) - start:
        size = rest if rest <= ANY_SIZE_MAX else min(1 << rest.bit_length() - 1, ROWS_AT_ONCE_MAX)
        yield new[start : start + size]
        start += size


class PreparedForIds(PreparedStatement):
    """A statement for rows with one of several ids. `build` receives the condition for the ids.

    On PostgreSQL, it takes a single round trip. On SQLite, it is executed once per id, because the
    text of a statement for a list of ids would vary.
    """

    def __init__(self, column: Column[Any], build: Callable[[Tx, Any], Any]) -> None:
        super().__init__(lambda tx: build(tx, _is_one_of(tx, column)))

    async def of(self, tx: Tx, ids: Iterable[Any], values: Values = NOTHING) -> list[Any]:
        """Returns the rows as dicts by column name, in no particular order."""
        if is_sqlite(tx):
            return [row for row_id in ids for row in await self.rows(tx, {**values, _IDS: row_id})]
        return await self.rows(tx, {**values, _IDS: list(ids)})


_IDS = "of_ids"


def in_parts(row: Sequence[Any], *columns: Sequence[str]) -> list[dict[str, Any]]:
    """Splits a row of a join into one dict per table. `columns` contains each table's column
    names.
    """
    cells = iter(row)
    return [dict(zip(names, cells, strict=False)) for names in columns]


def _is_one_of(tx: Tx, column: Column[Any]) -> Any:
    if is_sqlite(tx):
        return column == bindparam(_IDS)
    return column == any_(bindparam(_IDS, type_=ARRAY(column.type)))


StatementCall: TypeAlias = tuple[PreparedStatement, Values]


async def execute_together(tx: Tx, *calls: StatementCall) -> list[Sequence[Any]]:
    """Executes independent writes, and returns the rows of the last one.

    On PostgreSQL, they are combined into a single statement, so none of them sees the changes of
    another.
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
    """Joins SQL texts into a single statement. An offset is the number of placeholders in the
    preceding texts.
    """
    texts = [_renumber(text, offset) for text, offset in texts_and_offsets]
    if len(texts) == 1:
        return texts[0]
    parts = ", ".join(f"part{number} AS ({text})" for number, text in enumerate(texts))
    return f"WITH {parts} SELECT * FROM part{len(texts) - 1}"  # noqa: S608 — only our own SQL


def _compile(built: Any, dialect: Any, columns: list[str] | None) -> _Compiled:
    compiled = built.compile(dialect=dialect, column_keys=columns)
    if compiled.post_compile_params or compiled.insert_prefetch or compiled.update_prefetch:
        raise TypeError(f"this statement's text or values aren't constant: {compiled}")
    binds = compiled.binds
    returned = list(getattr(built, "exported_columns", ()))
    return _Compiled(
        text=str(compiled),
        names=list(compiled.positiontup),
        constants={name: bind.value for name, bind in binds.items() if not bind.required},
        binds=[
            (name, convert)
            for name, bind in binds.items()
            if (convert := _bind(bind.type, dialect)) is not None
        ],
        columns=[column.name for column in returned],
        reads=[
            (index, convert)
            for index, column in enumerate(returned)
            if (convert := _result(column.type, dialect)) is not None
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
    """Checks whether the driver converts the type itself. PostgreSQL's driver does this for times
    and floats, and is faster.
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
        # SQLSTATE class 23 is a violated constraint. Callers expect SQLAlchemy's error.
        if str(getattr(error, "sqlstate", "")).startswith("23"):
            raise IntegrityError(text, None, error) from error
        raise
    return rows
