"""What a submit says to PostgreSQL, written down to be said again without us.

Statements, values and the ends of transactions are taken where SQLAlchemy hands them to asyncpg.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import event
from sqlalchemy.engine import Engine

BEGIN, COMMIT, ROLLBACK = "BEGIN", "COMMIT", "ROLLBACK"
Side = Literal["central", "tenant"]


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
        return sum(each.text not in (BEGIN, COMMIT, ROLLBACK) for each in self.said)

    def ends(self, how: str) -> int:
        return sum(each.text == how for each in self.said)


@contextmanager
def recording(central: Engine, tenant: Engine) -> Iterator[Record]:
    record = Record()
    with ExitStack() as stack:
        stack.enter_context(_heard(central, "central", record))
        stack.enter_context(_heard(tenant, "tenant", record))
        yield record


@contextmanager
def _heard(engine: Engine, side: Side, record: Record) -> Iterator[None]:
    def after(_connection: Any, cursor: Any, text: str, values: Any, *_: Any) -> None:
        assert not isinstance(values, list), "a statement for many rows is sent as one here"
        rows = tuple(tuple(row) for row in (getattr(cursor, "_rows", None) or ()))
        record.said.append(Said(side, text, tuple(values), rows))

    def ended(how: str) -> Any:
        return lambda _connection: record.said.append(Said(side, how))

    heard: Sequence[tuple[str, Any]] = (
        ("after_cursor_execute", after),
        ("begin", ended(BEGIN)),
        ("commit", ended(COMMIT)),
        ("rollback", ended(ROLLBACK)),
    )
    for name, listener in heard:
        event.listen(engine, name, listener)
    try:
        yield
    finally:
        for name, listener in heard:
            event.remove(engine, name, listener)
