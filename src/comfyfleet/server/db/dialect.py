"""Column types and statements that differ between SQLite and PostgreSQL, except the hot path of the queue."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Dialect,
    Float,
    Index,
    Integer,
    Select,
    Table,
    Uuid,
    any_,
    bindparam,
    column,
    func,
    literal,
    literal_column,
    select,
    text,
    tuple_,
    type_coerce,
    values,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import TypeDecorator, TypeEngine

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def to_micros(moment: datetime) -> int:
    """Converts a moment to what SQLite stores: an integer sorts and compares without any parsing."""
    return (moment - EPOCH) // MICROSECOND


def from_micros(micros_since_epoch: int) -> datetime:
    return EPOCH + micros_since_epoch * MICROSECOND


class Moment(TypeDecorator[datetime]):
    """A point in time, always UTC and aware."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "sqlite":
            return dialect.type_descriptor(BigInteger())
        return dialect.type_descriptor(DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        return to_micros(value) if value is not None and dialect.name == "sqlite" else value

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        return from_micros(value) if value is not None and dialect.name == "sqlite" else value


# SQLite numbers rows automatically only in a column of exactly this type.
RowId = BigInteger().with_variant(Integer, "sqlite")
# Keeps the order of keys, which JSONB does not: a prompt is sent as it was made.
Document = JSON(none_as_null=True)
Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def partial_index(name: str, *columns: Any, where: str, unique: bool = False) -> Index:
    """An index of the rows for which `where` is true."""
    condition = text(where)
    return Index(name, *columns, unique=unique, postgresql_where=condition, sqlite_where=condition)


def is_sqlite(tx: AsyncConnection | Connection) -> bool:
    return tx.dialect.name == "sqlite"


def insert_if_new(
    tx: AsyncConnection | Connection, table: Table, rows: Sequence[Mapping[str, Any]] | None = None
) -> Any:
    """`INSERT … ON CONFLICT DO NOTHING`; add `.returning(…)` to learn which rows are new.

    Without rows, for values that are bound when it is executed.
    """
    dialect = sqlite if is_sqlite(tx) else postgresql
    if rows is None:
        return dialect.insert(table).on_conflict_do_nothing()
    # SQLAlchemy caches the compiled statement for one row, but compiles a list every time.
    given = dict(rows[0]) if len(rows) == 1 else list(rows)
    return dialect.insert(table).values(given).on_conflict_do_nothing()


def upsert(tx: AsyncConnection, table: Table, row: Mapping[str, Any], *, key: Sequence[str]) -> Any:
    """`INSERT … ON CONFLICT (key) DO UPDATE` of all other columns."""
    dialect = sqlite if is_sqlite(tx) else postgresql
    insert = dialect.insert(table).values(dict(row))
    changed = {name: insert.excluded[name] for name in row if name not in key}
    return insert.on_conflict_do_update(index_elements=list(key), set_=changed)


def upsert_sum(
    tx: AsyncConnection, table: Table, row: Mapping[str, Any], *, key: Sequence[str]
) -> Any:
    """Builds an upsert that adds the row's values to all columns outside the key."""
    dialect = sqlite if is_sqlite(tx) else postgresql
    insert = dialect.insert(table).values(dict(row))
    grown = {name: table.c[name] + insert.excluded[name] for name in row if name not in key}
    return insert.on_conflict_do_update(index_elements=list(key), set_=grown)


def upsert_each(tx: AsyncConnection, table: Table, *, key: Sequence[str]) -> Any:
    """Builds an upsert to be executed with a list of rows that have all columns.

    Its text is always the same: that of a list of values would be compiled anew each time.
    """
    dialect = sqlite if is_sqlite(tx) else postgresql
    insert = dialect.insert(table)
    changed = {each.name: insert.excluded[each.name] for each in table.c if each.name not in key}
    return insert.on_conflict_do_update(index_elements=list(key), set_=changed)


def upsert_sum_each(tx: AsyncConnection, table: Table, *, key: Sequence[str]) -> Any:
    """Builds an upsert like `upsert_each` that adds each row's values to the other columns."""
    dialect = sqlite if is_sqlite(tx) else postgresql
    insert = dialect.insert(table)
    grown = {
        each.name: each + insert.excluded[each.name] for each in table.c if each.name not in key
    }
    return insert.on_conflict_do_update(index_elements=list(key), set_=grown)


def seconds_between(
    tx: AsyncConnection, begin: ColumnElement[Any], end: ColumnElement[Any]
) -> ColumnElement[float]:
    """Returns the seconds from one moment to another, both of the database."""
    if is_sqlite(tx):
        micros = type_coerce(end, BigInteger) - type_coerce(begin, BigInteger)
        return type_coerce(micros / 1_000_000.0, Float)
    between = type_coerce(end, DateTime) - type_coerce(begin, DateTime)
    return type_coerce(func.extract("epoch", between), Float)


def db_now(tx: AsyncConnection, now: datetime) -> ColumnElement[Any]:
    """Returns the database's clock on PostgreSQL, which several control planes share; else `now`."""
    return literal(now, Moment()) if is_sqlite(tx) else func.clock_timestamp(type_=Moment())


def for_update(
    tx: AsyncConnection, query: Select[Any], *, skip_locked: bool = False, of: Table | None = None
) -> Select[Any]:
    """Locks the rows of a query; `of` locks those of one table only.

    SQLite has no row locks: `BEGIN IMMEDIATE` has made us the only writer.
    """
    if is_sqlite(tx):
        return query
    return query.with_for_update(skip_locked=skip_locked, of=of)


def without_index(tx: AsyncConnection, column: Column[Any]) -> ColumnElement[Any]:
    """Wraps a column for conditions and orders so that SQLite does not use its index.

    SQLite, which doesn't count rows, would rather walk the whole table along this index than read
    the few rows of a smaller one.
    """
    if not is_sqlite(tx):
        return column
    return literal_column(f"+{column.table.name}.{column.name}", column.type)


def is_one_of(
    tx: AsyncConnection, column: Column[Any], values: Iterable[Any]
) -> ColumnElement[bool]:
    """`column IN values`, by a text that is the same for any number of them.

    On PostgreSQL each connection keeps the statements that it has prepared: with `IN`, those of 1 to 100
    values would be a hundred statements for each connection, on both sides.
    """
    if is_sqlite(tx):
        return column.in_(list(values))
    wanted = bindparam(None, list(values), postgresql.ARRAY(column.type), unique=True)
    return column == any_(wanted)


def pairs_in(
    tx: AsyncConnection,
    columns: tuple[ColumnElement[UUID], ColumnElement[UUID]],
    pairs: Sequence[tuple[UUID, UUID]],
) -> ColumnElement[bool]:
    """`(a, b) IN pairs`. PostgreSQL would plan each pair on its own, so it gets two arrays.

    SQLite uses the index of both columns only for pairs out of a SELECT.
    """
    names = column("a", Uuid), column("b", Uuid)
    if is_sqlite(tx):
        listed = values(*names, name="wanted").data(pairs).cte("wanted")
        return tuple_(*columns).in_(select(listed.c.a, listed.c.b))
    firsts, seconds = ([pair[place] for pair in pairs] for place in (0, 1))
    wanted = (
        func.unnest(
            bindparam(None, firsts, postgresql.ARRAY(Uuid), unique=True),
            bindparam(None, seconds, postgresql.ARRAY(Uuid), unique=True),
        )
        .table_valued(*names, name="wanted")
        .render_derived()
    )
    return tuple_(*columns).in_(select(wanted.c.a, wanted.c.b))
