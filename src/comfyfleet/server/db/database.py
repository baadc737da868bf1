"""Opens databases, and manages their connections, transactions, group commits and tenant pools."""

import asyncio
import functools
import logging
import sqlite3
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias, TypeVar

import aiosqlite
from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from comfyfleet.errors import InvalidInput, NotFound, StoreFull, Unavailable, missing_extra
from comfyfleet.server.db.errors import (
    is_caused_by_bad_value,
    is_caused_by_disconnect,
    is_caused_by_full_disk,
    to_sqlalchemy_error,
)
from comfyfleet.server.db.liveness import (
    SILENT,
    Liveness,
    LivenessLimits,
    ask_server,
    set_limits,
)
from comfyfleet.server.db.outages import OutageLog, log_failure
from comfyfleet.server.db.pooler import end_setup, pooled_arguments
from comfyfleet.server.db.wal import BUSY_MS, WalSync, open_sqlite

Tx: TypeAlias = AsyncConnection
T = TypeVar("T")
# Maximum number of idle connections. More than about eight make the queue slower, not faster.
KEPT_MAX = 8
OVERFLOW_MAX = 4
# Prepared statements per PostgreSQL connection. SQLAlchemy may cache up to 50% more.
STATEMENTS_MAX = 50
# The remaining two connections are for long-term use: advisory locks, and the writer on SQLite.
LENT_MAX = KEPT_MAX + OVERFLOW_MAX - 2
WAIT_SECONDS_MAX = 30
CONNECT_SECONDS_MAX = 10
ALL_IN_USE = "all connections to the database are in use"


class ConnectionPool:
    def __init__(self, engine: AsyncEngine, limits: LivenessLimits | None = None) -> None:
        self._engine = engine
        self._is_sqlite = engine.dialect.name == "sqlite"
        self._liveness: Liveness | None = None
        if not self._is_sqlite:
            url = engine.url.render_as_string(hide_password=False)
            self._liveness = Liveness(partial(ask_server, dsn(url)), limits)
        self._idle: list[Tx] = []
        self._room = asyncio.Semaphore(LENT_MAX)
        self._is_closed = False
        self._closing: set[asyncio.Task[None]] = set()

    async def take(self) -> Tx:
        await self._wait_for_room()
        try:
            if self._liveness is None:
                return await self._connection()
            self._liveness.require_answers()
            tx = await self._connection()
            self._liveness.began(id(tx), driver_of(tx))
        except BaseException:
            self._room.release()
            raise
        return tx

    async def _connection(self) -> Tx:
        while self._idle:
            tx = self._idle.pop()
            if is_usable(tx):
                return tx
            await tx.close()
        if self._liveness is None:
            return await open_connection(self._engine)
        with self._liveness.opening():
            return await open_connection(self._engine)

    async def give(self, tx: Tx, *, is_well: bool) -> None:
        if self._liveness is not None:
            self._liveness.ended(id(tx))
        try:
            if is_well and not self._is_closed and len(self._idle) < KEPT_MAX and is_usable(tx):
                await reset_transaction(tx)
                self._idle.append(tx)
            elif self._is_sqlite:
                await asyncio.shield(self._close_in_background(tx))
            else:
                # Closing sends nothing to the server, so it can't be interrupted.
                await self._close_one(tx)
        finally:
            self._room.release()

    async def close(self) -> None:
        self._is_closed = True
        if self._liveness is not None:
            await self._liveness.close()
        while self._idle:
            await self._idle.pop().close()
        if self._closing:
            await asyncio.wait(self._closing)

    async def _wait_for_room(self) -> None:
        if not self._room.locked():
            await self._room.acquire()
            return
        try:
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                await self._room.acquire()
        except TimeoutError:
            raise Unavailable(ALL_IN_USE) from None

    def _close_in_background(self, tx: Tx) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(self._close_one(tx))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _close_one(self, tx: Tx) -> None:
        if self._is_closed:
            # SQLAlchemy's own pool is already closed, and would keep the connection open forever.
            await tx.invalidate()
        await tx.close()


def dsn(url: str) -> str:
    """Converts a URL from SQLAlchemy's format to asyncpg's format."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def driver_of(tx: Tx) -> Any:
    """Returns the driver's connection, which is in the same transaction."""
    connection = tx.sync_connection
    return None if connection is None else connection.connection.driver_connection


def is_usable(tx: Tx) -> bool:
    """Checks whether the connection is open and in no transaction. This takes no round trip."""
    if tx.closed or tx.invalidated:
        return False
    driver = driver_of(tx)
    if tx.dialect.name == "sqlite":
        return not driver.in_transaction
    return not driver.is_closed() and not driver.is_in_transaction()


async def reset_transaction(tx: Tx) -> None:
    """Ends the transaction that SQLAlchemy assumes after a Core statement. There is no real one."""
    if tx.in_transaction():
        await tx.rollback()


async def open_connection(engine: AsyncEngine) -> Tx:
    """Opens a connection. Raises Unavailable if the database can't be reached or refuses it."""
    try:
        return await engine.connect()
    except TimeoutError as error:
        raise Unavailable(SILENT) from error
    except OSError as error:  # The socket can't be opened, or the host is unknown.
        raise Unavailable(f"the database can't be reached: {error}") from error
    except DBAPIError as error:  # The database refuses the connection.
        raise Unavailable(f"the database can't be opened: {error.orig}") from error
    except PoolTimeout as error:
        raise Unavailable(ALL_IN_USE) from error
    except Exception as error:
        # If the connection is lost during its setup, the driver's error isn't wrapped yet.
        if not is_caused_by_disconnect(error):
            raise
        raise Unavailable(f"the database can't be reached: {error}") from error


# A read that takes longer than this many seconds on the event loop is repeated in the thread.
READ_SECONDS_MAX = 0.003
INSTRUCTIONS_BETWEEN_LOOKS = 1_000
READS = ("SELECT",)
SHORT = ("INSERT", "UPDATE", "DELETE", "SAVEPO", "RELEAS", "ROLLBA")
PARAMETERS_MAX = 1_000
# Without IMMEDIATE, a transaction that reads before it writes could fail because of other writers.
BEGIN = "BEGIN IMMEDIATE"


async def connect(path: str) -> "SqliteConnection":
    connection = SqliteConnection(functools.partial(open_sqlite, path), iter_chunk_size=64)
    connection._thread.daemon = True
    await _open_to_end(connection)
    connection._conn.set_progress_handler(connection.is_late, INSTRUCTIONS_BETWEEN_LOOKS)
    return connection


async def _open_to_end(connection: "SqliteConnection") -> None:
    """Opens the file. If the caller is cancelled, waits until the thread has opened the file, and
    closes it. Otherwise, the thread would never end."""
    opening = asyncio.ensure_future(connection)
    try:
        await asyncio.shield(opening)
    except asyncio.CancelledError:
        await opening
        await connection.close()
        raise


class SqliteConnection(aiosqlite.Connection):
    """A connection that runs short statements on the event loop and long ones in its thread.

    SQLAlchemy never makes concurrent calls on it."""

    _submitted = 0  # Number of calls submitted to the thread. The event loop counts them.
    _finished = 0  # Number of calls that the thread has finished. The thread counts them.
    _read_deadline: float | None = None
    _is_writing = False

    def is_late(self) -> bool:
        """Checks whether the current read takes too long. If it does, SQLite interrupts it."""
        return self._read_deadline is not None and time.perf_counter() > self._read_deadline

    def cursor(self) -> "SqliteCursor":  # type: ignore[override]
        return SqliteCursor(self, self._conn.cursor())

    async def commit(self, *, waits_for_disk: bool = True) -> None:
        try:
            self._require_transaction()
            waits = self._is_writing and waits_for_disk
            await (self.in_thread if waits else self.at_once)(self._conn.commit)
        finally:
            self._is_writing = False

    async def rollback(self) -> None:
        await self.at_once(self._conn.rollback)
        self._is_writing = False

    def _require_transaction(self) -> None:
        """Raises OperationalError if SQLite has rolled back the transaction, as on a full disk."""
        if self._is_writing and not self._conn.in_transaction:
            raise sqlite3.OperationalError("the transaction was rolled back by SQLite")

    async def run(self, act: Callable[[], Any], sql: str, parameters: Sequence[Any]) -> Any:
        self._require_transaction()
        verb = sql.lstrip()[:6].upper()
        if verb in READS:
            return await self._read(act)
        if verb in SHORT and len(parameters) <= PARAMETERS_MAX:
            return await self.at_once(act)
        if sql != BEGIN:
            return await self.in_thread(act)
        result = await self._begin(act)
        self._is_writing = True
        return result

    @property
    def in_transaction(self) -> bool:
        return self._conn.in_transaction

    async def fetch(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        """Executes a statement in the current transaction, but bypasses SQLAlchemy."""
        act = functools.partial(_fetch_all, self._conn, sql, parameters)
        rows: list[Any] = await self.run(act, sql, parameters)
        return rows

    async def _begin(self, act: Callable[[], Any]) -> Any:
        try:
            return await self.at_once(functools.partial(self._run_without_waiting, act))
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
        return await self.in_thread(act)

    def _run_without_waiting(self, act: Callable[[], Any]) -> Any:
        self._conn.execute("PRAGMA busy_timeout = 0")
        try:
            return act()
        finally:
            self._conn.execute(f"PRAGMA busy_timeout = {BUSY_MS}")

    async def _read(self, act: Callable[[], Any]) -> Any:
        self._read_deadline = time.perf_counter() + READ_SECONDS_MAX
        try:
            return await self.at_once(act)
        except sqlite3.OperationalError:
            if not self.is_late():
                raise
        finally:
            self._read_deadline = None
        return await self.in_thread(act)

    async def at_once(self, act: Callable[[], Any]) -> Any:
        """Runs a call on the event loop. If the thread is busy, runs it in the thread instead."""
        return act() if self.is_free else await self.in_thread(act)

    @property
    def is_free(self) -> bool:
        return self._submitted == self._finished

    async def in_thread(self, act: Callable[[], Any]) -> Any:
        self._submitted += 1
        return await self._execute(self._run_counted, act)  # type: ignore[no-untyped-call]

    def _run_counted(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        finally:
            self._finished += 1


def _fetch_all(connection: sqlite3.Connection, sql: str, parameters: Sequence[Any]) -> list[Any]:
    return connection.execute(sql, parameters).fetchall()


class SqliteCursor:
    """A cursor that executes a statement and fetches all of its rows in a single call."""

    def __init__(self, connection: SqliteConnection, cursor: sqlite3.Cursor) -> None:
        self._connection = connection
        self._cursor = cursor
        self._rows: list[Any] = []
        self.arraysize = 1

    async def __aenter__(self) -> "SqliteCursor":
        return self

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> "SqliteCursor":
        act = functools.partial(self._execute, sql, parameters)
        self._rows = await self._connection.run(act, sql, parameters)
        return self

    def _execute(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        return self._cursor.execute(sql, parameters).fetchall()

    async def executemany(self, sql: str, parameters: Sequence[Sequence[Any]]) -> "SqliteCursor":
        act = functools.partial(self._cursor.executemany, sql, parameters)
        count = sum(map(len, parameters))
        connection = self._connection
        await (connection.at_once if count <= PARAMETERS_MAX else connection.in_thread)(act)
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


COMMIT, ROLLBACK = "COMMIT", "ROLLBACK"


class _Group:
    def __init__(self, tx: AsyncConnection) -> None:
        self.tx = tx
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


@asynccontextmanager
async def _savepoint(tx: AsyncConnection) -> AsyncIterator[None]:
    await _execute(tx, "SAVEPOINT mine")
    try:
        yield
    except BaseException:
        # SQLite may have rolled back the whole transaction, including the savepoint.
        if driver_of(tx).in_transaction:
            await _execute(tx, "ROLLBACK TO mine")
            await _execute(tx, "RELEASE mine")
        raise
    await _execute(tx, "RELEASE mine")


async def _execute(tx: AsyncConnection, sql: str, *, waits_for_disk: bool = False) -> None:
    driver = driver_of(tx)
    try:
        if sql == COMMIT:
            await driver.commit(waits_for_disk=waits_for_disk)
        elif sql == ROLLBACK:
            await driver.rollback()
        else:
            await driver.fetch(sql, ())
    except sqlite3.Error as error:
        raise to_sqlalchemy_error(error, sql) from error


class GroupCommit:
    """Commits concurrent transactions together. The write lock is held while a group is open."""

    def __init__(self, engine: AsyncEngine, turn: asyncio.Lock, wal: WalSync) -> None:
        self._engine = engine
        self._turn = turn
        self._wal = wal
        self._group_lock = asyncio.Lock()
        self._waiting = 0
        self._open: _Group | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._kept: AsyncConnection | None = None
        self._is_closed = False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        async with self._serialised():
            group = self._open
            if group is None:
                group = await self._begin_group()
                async with self._run_first(group) as tx:
                    yield tx
            else:
                async with _savepoint(group.tx):
                    yield group.tx
        await asyncio.shield(group.ended)

    @asynccontextmanager
    async def _serialised(self) -> AsyncIterator[None]:
        self._waiting += 1
        try:
            await self._group_lock.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._group_lock.release()

    @asynccontextmanager
    async def _run_first(self, group: _Group) -> AsyncIterator[AsyncConnection]:
        """Runs the first transaction of a group, which is still alone and needs no savepoint."""
        try:
            yield group.tx
        except BaseException:
            await self._run_to_end(self._end(group, keep=False))
            raise
        if self._waiting:
            self._open = group
            # Only the transactions that are waiting now join the group, so it can't grow forever.
            self._run_in_background(self._close(group))
        elif self._ends_at_once(group):
            await self._end(group)
        else:
            await self._run_to_end(self._end(group))

    def _ends_at_once(self, group: _Group) -> bool:
        """Checks whether a group can end without waiting, so that its end can't be interrupted."""
        waits = self._wal.starts_anew or self._kept is not None or self._is_closed
        return driver_of(group.tx).is_free and not waits

    async def _begin_group(self) -> _Group:
        await self._turn.acquire()
        try:
            tx, self._kept = self._kept or await self._engine.connect(), None
            try:
                await _execute(tx, BEGIN)
            except BaseException:
                await self._run_to_end(tx.close())
                raise
        except BaseException:
            self._turn.release()
            raise
        return _Group(tx)

    async def _close(self, group: _Group) -> None:
        async with self._group_lock:
            self._open = None
            await self._end(group)

    async def _end(self, group: _Group, *, keep: bool = True) -> None:
        try:
            is_well = False
            try:
                end = COMMIT if keep else ROLLBACK
                await _execute(group.tx, end, waits_for_disk=self._wal.starts_anew)
                self._wal.note_commit()
                is_well = True
            finally:
                await self._give_back(group.tx, is_well=is_well)
        except Exception as error:  # noqa: BLE001 — raised in every transaction of the group
            group.ended.set_exception(error)
            group.ended.exception()  # Retrieves it, because a cancelled caller never would.
        else:
            group.ended.set_result(None)
        finally:
            self._turn.release()

    async def _give_back(self, tx: AsyncConnection, *, is_well: bool) -> None:
        """Keeps the connection for the next group, unless it failed."""
        if is_well and not self._is_closed and self._kept is None and is_usable(tx):
            await reset_transaction(tx)
            self._kept = tx
        else:
            await tx.close()

    async def close(self) -> None:
        self._is_closed = True
        if self._background:
            await asyncio.wait(self._background)
        tx, self._kept = self._kept, None
        if tx is not None:
            await tx.close()

    async def _run_to_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Finishes the work even if the caller is cancelled."""
        await asyncio.shield(self._run_in_background(work))

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


BAD_VALUE = "a number is too large or a text has characters that the database can't store"
DISCONNECTED = "the connection to the database was lost"
DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
logger = logging.getLogger(__name__)


class Database:
    """A database. Use `transaction` to write, `read` to read, `execute_one` for a single write."""

    def __init__(
        self,
        url: str,
        engine: AsyncEngine,
        limits: LivenessLimits | None = None,
        *,
        direct_url: str | None = None,
    ) -> None:
        self.url = url
        # For LISTEN and session locks, which a transaction pooler doesn't support.
        self.direct_url = direct_url or url
        self.is_pooled = direct_url is not None
        self.engine = engine
        self.is_sqlite = engine.dialect.name == "sqlite"
        # The lock for SQLite's only writer. Waiting writers queue here instead of polling the file.
        self.turn = asyncio.Lock()
        self.name = engine.url.render_as_string(hide_password=True)  # The name in the log.
        self.outages = OutageLog(self.name)
        self.wal = WalSync((engine.url.database or "") if self.is_sqlite else "", self.turn)
        self._writing = GroupCommit(engine, self.turn, self.wal)
        self._connections = ConnectionPool(engine, limits)

    def persist_soon(self, within_seconds: float = 0.0) -> None:
        """Starts `persist` in the background, after at most `within_seconds`."""
        self.wal.begin(within_seconds)

    async def persist(self) -> None:
        """Waits until all commits before this call are on the disk.

        On PostgreSQL, each commit has already waited for this."""
        with self.outages.watched():
            await self.wal.sync()

    @asynccontextmanager
    async def transaction(self, *, persists: bool = True) -> AsyncIterator[Tx]:
        """Opens a writing transaction.

        With `persists=False`, the caller must await `persist` before anything relies on the commit.
        """
        if self.is_sqlite:
            with self.outages.watched(), _translate_errors():
                async with self._writing.transaction() as tx:
                    yield tx
                if persists:
                    await self.wal.sync()
        else:
            async with self._connection() as tx, _transaction(driver_of(tx)):
                yield tx

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Tx]:
        """Opens a connection for reading. On PostgreSQL, this doesn't begin a transaction.

        In our transactions, each statement sees the latest commits anyway, so a transaction would
        only add two round trips. Behind a pooler, a transaction is required for each statement.
        """
        if self.is_pooled:
            async with self.transaction() as tx:
                yield tx
        else:
            async with self._connection() as tx:
                yield tx

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Tx]:
        with self.outages.watched(), _translate_errors():
            tx = await self._connections.take()
            is_well = False
            try:
                yield tx
                is_well = True
            finally:
                await self._connections.give(tx, is_well=is_well)

    @asynccontextmanager
    async def execute_one(self, *, persists: bool = True) -> AsyncIterator[Tx]:
        """Opens a connection for a single writing statement, which needs no explicit transaction on
        PostgreSQL. See `transaction` for `persists`."""
        async with self.transaction(persists=persists) if self.is_sqlite else self.read() as tx:
            yield tx

    async def close(self) -> None:
        await self._writing.close()
        await self.wal.close()
        await self._connections.close()
        await self.engine.dispose()
        self.outages.close()


@asynccontextmanager
async def _transaction(driver: Any) -> AsyncIterator[None]:
    transaction = driver.transaction()
    try:
        await transaction.start()
    except BaseException:
        # After a cancelled BEGIN, the driver would treat the next transaction as a nested one.
        driver.terminate()
        raise
    try:
        try:
            yield
        except BaseException:
            # A cancelled statement closes the connection. That doesn't mean an outage.
            if not driver.is_closed():
                await transaction.rollback()
            raise
        await transaction.commit()
    finally:
        # After a cancelled COMMIT, the connection must not be reused with an open transaction.
        if not driver.is_closed() and driver.is_in_transaction():
            driver.terminate()


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (ConnectionError, TimeoutError) as error:
        raise Unavailable(f"the database can't be reached: {error}") from error
    except OverflowError as error:
        if "SQLite INTEGER" in str(error):  # The driver's message for a number beyond 64 bits.
            raise InvalidInput(BAD_VALUE) from error
        raise
    except Exception as error:
        if is_caused_by_disconnect(error):
            raise Unavailable(DISCONNECTED) from error
        if is_caused_by_full_disk(error):
            raise StoreFull("its disk is full") from error
        if is_caused_by_bad_value(error):
            raise InvalidInput(BAD_VALUE) from error
        raise


def open_database(
    url: str, limits: LivenessLimits | None = None, *, direct_url: str | None = None
) -> Database:
    """Opens a database by its URL. It connects when it is used for the first time.

    If `direct_url` is set, `url` must be the address of a transaction pooler."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise InvalidInput(
            "a database URL must look like sqlite:///file or postgresql://…"
        ) from None
    kind = parsed.get_backend_name()
    if kind == "postgres" or kind not in DRIVERS:
        raise InvalidInput(f"{kind} isn't supported; use sqlite:///file or postgresql://…")
    target = parsed.set(drivername=DRIVERS[kind])
    options: dict[str, Any] = {"pool_size": KEPT_MAX, "max_overflow": OVERFLOW_MAX}
    if kind == "sqlite":
        options["async_creator"] = partial(connect, parsed.database or ":memory:")
    else:
        # Prevents SQLAlchemy from beginning its own transactions around reads.
        options["isolation_level"] = "AUTOCOMMIT"
        pooled = pooled_arguments() if direct_url else {}
        options["connect_args"] = {
            "timeout": CONNECT_SECONDS_MAX,
            "prepared_statement_cache_size": STATEMENTS_MAX,
            **pooled,
        }
    try:
        engine = create_async_engine(target, **options)
    except ModuleNotFoundError as error:
        if error.name != "asyncpg":
            raise
        raise missing_extra("PostgreSQL", error.name, "postgres") from error
    if kind == "postgresql":
        event.listen(engine.sync_engine, "connect", end_setup if direct_url else set_limits)
        event.listen(engine.sync_engine, "checkout", _require_open)
        event.listen(engine.sync_engine, "close", _forget_statements)
    return Database(url, engine, limits, direct_url=direct_url)


def _require_open(connection: Any, _record: Any, _proxy: Any) -> None:
    """Makes the pool replace this connection if it is closed. This takes no round trip."""
    if connection.driver_connection.is_closed():
        raise DisconnectionError("the server has closed the connection")


def _forget_statements(connection: Any, _record: Any) -> None:
    """Frees a closed connection's prepared statements. The connection is in a reference cycle, so
    they could otherwise stay for up to an hour, until frozen objects are collected."""
    statements = connection._prepared_statement_cache
    if statements is not None:
        statements.clear()


class Pools:
    def __init__(self, databases: Mapping[str, Database]) -> None:
        self._databases = dict(databases)
        for name, database in databases.items():
            database.outages.part = f"the database of pool {name}"

    def __getitem__(self, name: str) -> Database:
        try:
            return self._databases[name]
        except KeyError:
            raise NotFound(
                f"pool {name!r} was not found; COMFYFLEET_TENANT_DATABASE_URLS lists all pools"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._databases)

    def items(self) -> Iterator[tuple[str, Database]]:
        return iter(self._databases.items())

    async def close(self) -> None:
        for database in self._databases.values():
            await database.close()


_failed_pools: ContextVar[set[str] | None] = ContextVar("failed_pools", default=None)


@contextmanager
def count_failed_pools() -> Iterator[set[str]]:
    """Yields a set that collects the names of the pools for which `for_each_pool` fails."""
    failures: set[str] = set()
    token = _failed_pools.set(failures)
    try:
        yield failures
    finally:
        _failed_pools.reset(token)


async def for_each_pool(
    pools: Pools, act: Callable[[Database], Awaitable[T]], failed: str, *, at_once: bool = False
) -> dict[str, T]:
    """Calls `act` for each pool and returns the results by pool name. Leaves out failed pools.

    `failed` is the log message for a failure. A sweep counts failures with `count_failed_pools`."""
    done: dict[str, T] = {}

    async def act_on(name: str, pool: Database) -> None:
        try:
            done[name] = await act(pool)
        except Exception as error:  # noqa: BLE001 — one pool must not block the others
            log_failure(logger, error, "pool %s: %s", name, failed)
        else:
            return
        if (failures := _failed_pools.get()) is not None:
            failures.add(name)

    if at_once:
        await asyncio.gather(*(act_on(name, pool) for name, pool in pools.items()))
    else:
        for name, pool in pools.items():
            await act_on(name, pool)
    return done


__all__ = ["Database", "Tx", "driver_of", "dsn", "open_database", "open_sqlite"]
