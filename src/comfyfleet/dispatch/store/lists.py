"""Lists for operators: the newest first, each part along an index made for it."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, TextClause, select, text

from comfyfleet.db import Tx
from comfyfleet.db.central import IS_ENDED, IS_RARE, QUEUED
from comfyfleet.db.central import dispatches as d
from comfyfleet.db.dialect import is_sqlite, without_index
from comfyfleet.dispatch.model import Dispatch, Status
from comfyfleet.dispatch.store.rows import WHOLE, found

# Word for word as the indexes say it: values that are bound would hide that they fit.
_LEASED, _POISONED = "status = 'leased'", "is_poisoned"
_ACTIVE = (QUEUED, _LEASED)


async def page(
    tx: Tx, wanted: Mapping[str, Any], *, before_id: int | None, limit: int
) -> list[Dispatch]:
    """`wanted`: values by column; what is None is not asked for."""
    rows: list[Dispatch] = []
    for part in _parts(tx, wanted.get("status")):
        place = without_index(tx, d.c.id) if part[0] in _ACTIVE else d.c.id
        query = select(*WHOLE).where(*map(text, part), *_conditions(tx, wanted, part))
        if before_id is not None:
            query = query.where(place < before_id)
        rows += await found(tx, query.order_by(place.desc()).limit(limit))
    return sorted(rows, key=lambda row: row.id, reverse=True)[:limit]


def _parts(tx: Tx, status: Status | None) -> list[tuple[str, ...]]:
    """Conditions of selects that each go along an index."""
    if status is None:
        return [(QUEUED,), (_LEASED,), (IS_ENDED,)]
    own = f"status = '{status.value}'"
    if own in _ACTIVE:
        return [(own,)]
    if status is Status.COMPLETED:
        return [(own, IS_ENDED)]
    # PostgreSQL knows that one follows from the other, and would count both as unlikely.
    return [(own, IS_RARE, IS_ENDED)] if is_sqlite(tx) else [(own, IS_ENDED)]


def _conditions(
    tx: Tx, wanted: Mapping[str, Any], part: tuple[str, ...]
) -> list[ColumnElement[bool] | TextClause]:
    conditions: list[ColumnElement[bool] | TextClause] = [
        # Few are leased, and their indexes are by other columns.
        (without_index(tx, d.c[name]) if _LEASED in part else d.c[name]) == value
        for name, value in wanted.items()
        if value is not None and name not in ("is_poisoned", "status")
    ]
    if wanted.get("is_poisoned") is not None:
        conditions.append(text(_POISONED if wanted["is_poisoned"] else f"NOT {_POISONED}"))
    return conditions
