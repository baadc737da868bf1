"""Column types and statements that differ between SQLite and PostgreSQL. The queue has its own
statements for its hot path.
"""

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
    """Converts a time to the integer that SQLite stores, which can be compared without parsing."""
    return (moment - EPOCH) // MICROSECOND


def from_micros(micros_since_epoch: int) -> datetime:
    return EPOCH + micros_since_epoch * MICROSECOND


class Moment(TypeDecorator[datetime]):
    """A column type for times, which are always timezone-aware and in UTC."""

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


# SQLite numbers rows automatically only in a column with exactly the type INTEGER.
RowId = BigInteger().with_variant(Integer, "sqlite")
# Unlike JSONB, this type keeps the order of keys, so that a prompt is sent in its original order.
Document = JSON(none_as_null=True)
Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def partial_index(name: str, *columns: Any, where: str, unique: bool = False) -> Index:
    """Returns an index that only contains the rows for which the condition `where` is true."""
    condition = text(where)
    return Index(name, *columns, unique=unique, postgresql_where=condition, sqlite_where=condition)


def is_sqlite(tx: AsyncConnection | Connection) -> bool:
    return tx.dialect.name == "sqlite"


def insert_if_new(
    tx: AsyncConnection | Connection, table: Table, rows: Sequence[Mapping[str, Any]] | None = None
) -> Any:
    """Builds `INSERT … ON CONFLICT DO NOTHING`. Add `.returning(…)` to get only the new rows.

    If `rows` is None, the values are bound when the statement is executed.
    """
    dialect = sqlite if is_sqlite(tx) else postgresql
    if rows is None:
        return dialect.insert(table).on_conflict_do_nothing()
    # SQLAlchemy caches the compiled statement for one row, but compiles a list every time.
    inserted = dict(rows[0]) if len(rows) == 1 else list(rows)
    return dialect.insert(table).values(inserted).on_conflict_do_nothing()


def upsert(tx: AsyncConnection, table: Table, row: Mapping[str, Any], *, key: Sequence[str]) -> Any:
    """Builds `INSERT … ON CONFLICT (key) DO UPDATE` for all columns outside the key."""
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
    """Builds an upsert that is executed with a list of complete rows.

    Its SQL text is constant. SQLAlchemy would compile an insert of a list of values each time.
    """
    dialect = sqlite if is_sqlite(tx) else postgresql
    insert = dialect.insert(table)
    names = [column.name for column in table.c if column.name not in key]
    changed = {name: insert.excluded[name] for name in names}
    return insert.on_conflict_do_update(index_elements=list(key), set_=changed)


def upsert_sum_each(tx: AsyncConnection, table: Table, *, key: Sequence[str]) -> Any:
    """Builds an upsert like `upsert_each` that adds each row's values to the other columns."""
    dialect = sqlite if is_sqlite(tx) else postgresql
    insert = dialect.insert(table)
    names = [column.name for column in table.c if column.name not in key]
    grown = {name: table.c[name] + insert.excluded[name] for name in names}
    return insert.on_conflict_do_update(index_elements=list(key), set_=grown)


def seconds_between(
    tx: AsyncConnection, begin: ColumnElement[Any], end: ColumnElement[Any]
) -> ColumnElement[float]:
    """Returns an expression for the seconds between two times in the database."""
    if is_sqlite(tx):
        micros = type_coerce(end, BigInteger) - type_coerce(begin, BigInteger)
        return type_coerce(micros / 1_000_000.0, Float)
    between = type_coerce(end, DateTime) - type_coerce(begin, DateTime)
    return type_coerce(func.extract("epoch", between), Float)


def db_now(tx: AsyncConnection, now: datetime) -> ColumnElement[Any]:
    """Returns the current time as an expression. On PostgreSQL, this is the database's clock, which
    all control planes share. On SQLite, it is `now`.
    """
    return literal(now, Moment()) if is_sqlite(tx) else func.clock_timestamp(type_=Moment())


def for_update(
    tx: AsyncConnection, query: Select[Any], *, skip_locked: bool = False, of: Table | None = None
) -> Select[Any]:
    """Makes a query lock its rows. With `of`, only the rows of this table are locked.

    SQLite has no row locks. They aren't needed there, because `BEGIN IMMEDIATE` excludes other
    writers.
    """
    if is_sqlite(tx):
        return query
    return query.with_for_update(skip_locked=skip_locked, of=of)


def without_index(tx: AsyncConnection, column: Column[Any]) -> ColumnElement[Any]:
    """Wraps a column that is used in a WHERE or ORDER BY clause, so that SQLite doesn't use the
    column's index.

    SQLite doesn't know how many rows match. It would use this index to read the whole table,
    instead of a smaller index that contains only a few rows.
    """
    if not is_sqlite(tx):
        return column
    return literal_column(f"+{column.table.name}.{column.name}", column.type)


def is_one_of(
    tx: AsyncConnection, column: Column[Any], values: Iterable[Any]
) -> ColumnElement[bool]:
    """Builds `column IN values` with the same SQL text for any number of values.

    On PostgreSQL, each connection caches its prepared statements. With `IN`, 1 to 100 values would
    need a hundred different statements per connection.
    """
    if is_sqlite(tx):
        return column.in_(list(values))
    array = bindparam(None, list(values), postgresql.ARRAY(column.type), unique=True)
    return column == any_(array)


def pairs_in(
    tx: AsyncConnection,
    columns: tuple[ColumnElement[UUID], ColumnElement[UUID]],
    pairs: Sequence[tuple[UUID, UUID]],
) -> ColumnElement[bool]:
    """Builds `(a, b) IN pairs`. On PostgreSQL, the pairs are sent as two arrays, because the
    planner would otherwise handle each pair separately.

    On SQLite, the pairs come from a SELECT. Otherwise, SQLite wouldn't use the index on both
    columns.
    """
    names = column("a", Uuid), column("b", Uuid)
    if is_sqlite(tx):
        listed = values(*names, name="wanted").data(pairs).cte("wanted")
        return tuple_(*columns).in_(select(listed.c.a, listed.c.b))
    firsts, seconds = ([pair[place] for pair in pairs] for place in (0, 1))
    unnested = (
        func.unnest(
            bindparam(None, firsts, postgresql.ARRAY(Uuid), unique=True),
            bindparam(None, seconds, postgresql.ARRAY(Uuid), unique=True),
        )
        .table_valued(*names, name="wanted")
        .render_derived()
    )
    return tuple_(*columns).in_(select(unnested.c.a, unnested.c.b))
