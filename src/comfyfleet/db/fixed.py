"""Statements whose text never changes, for what runs at every submit.

SQLAlchemy takes several times as long to build, look up and read such a statement as PostgreSQL's
driver takes to send it. So it compiles the text once, and the driver sends it, in the same transaction.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import JSON, Column, Table

from comfyfleet.db.dialect import insert_if_new, is_sqlite
from comfyfleet.db.engine import Tx, driver_of


class _Ready(NamedTuple):
    """For PostgreSQL."""

    text: str
    constants: Mapping[str, Any]
    names: Sequence[str]  # in the order of $1, $2 …
    # The driver takes and gives values as they are, but that it takes JSON as a text.
    texts: Mapping[str, Callable[[Any], Any]]


class Fixed:
    """Built once for each database. Values that differ are bound: by the names of `columns` in an
    INSERT, else by `bindparam`, whose names must not be those of columns."""

    def __init__(self, build: Callable[[Tx], Any], *, columns: Iterable[str] | None = None) -> None:
        self._build = build
        self._columns = None if columns is None else list(columns)
        self._for_sqlite: Any = None
        self._ready: _Ready | None = None

    async def rows(self, tx: Tx, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All that it returns, by the names of columns."""
        if is_sqlite(tx):
            return await self._on_sqlite(tx, values)
        ready = self._ready = self._ready or self._compiled(tx)
        given = {**ready.constants, **values}
        for name, as_text in ready.texts.items():
            given[name] = as_text(given[name])
        bound = [given[name] for name in ready.names]
        return [dict(row) for row in await driver_of(tx).fetch(ready.text, *bound)]

    async def first(self, tx: Tx, values: Mapping[str, Any]) -> dict[str, Any] | None:
        rows = await self.rows(tx, values)
        return rows[0] if rows else None

    async def _on_sqlite(self, tx: Tx, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self._for_sqlite is None:
            self._for_sqlite = self._build(tx)
        found = await tx.execute(self._for_sqlite, dict(values))
        return [dict(row._mapping) for row in found] if found.returns_rows else []

    def _compiled(self, tx: Tx) -> _Ready:
        dialect = tx.dialect
        compiled = self._build(tx).compile(dialect=dialect, column_keys=self._columns)
        binds = compiled.binds
        types: dict[str, Any] = {
            name: each.type.dialect_impl(dialect) for name, each in binds.items()
        }
        return _Ready(
            text=str(compiled),
            constants={name: each.value for name, each in binds.items() if not each.required},
            names=list(compiled.positiontup),
            texts={
                name: kind.bind_processor(dialect)  # type: ignore[no-untyped-call]
                for name, kind in types.items()
                if isinstance(kind, JSON)
            },
        )


class FixedInsert:
    """`INSERT … ON CONFLICT DO NOTHING RETURNING`. Mostly of one row, and then it is `Fixed`."""

    def __init__(
        self, table: Table, columns: Iterable[str], *, returning: Sequence[Column[Any]]
    ) -> None:
        self._table = table
        self._returning = returning
        self._one = Fixed(self._build, columns=columns)

    async def rows(self, tx: Tx, new: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What is returned of those that are new."""
        if len(new) == 1:
            return await self._one.rows(tx, new[0])
        if not new:
            return []
        added = await tx.execute(self._build(tx), [dict(each) for each in new])
        return [dict(row._mapping) for row in added]

    def _build(self, tx: Tx) -> Any:
        return insert_if_new(tx, self._table).returning(*self._returning)
