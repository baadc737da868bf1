"""Column types that mean the same on both databases."""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Integer
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.types import TypeDecorator, TypeEngine

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def micros(moment: datetime) -> int:
    """How SQLite keeps a moment: an integer sorts and compares without any parsing."""
    return (moment - EPOCH) // MICROSECOND


def moment(micros_since_epoch: int) -> datetime:
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
        return micros(value) if value is not None and dialect.name == "sqlite" else value

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        return moment(value) if value is not None and dialect.name == "sqlite" else value


# SQLite numbers rows by itself only in a column of exactly this type.
RowId = BigInteger().with_variant(Integer, "sqlite")
# Keeps the order of keys, which JSONB does not: a prompt is sent as it was made.
Document = JSON(none_as_null=True)
Json = JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
