"""Lists for operators: the newest first, each part along an index made for it."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, TextClause, select, text

from comfyfleet.db import Tx
from comfyfleet.db.central import IS_ENDED, IS_RARE, QUEUED
from comfyfleet.db.central import dispatches as d
from comfyfleet.dispatch.model import Dispatch, Status
from comfyfleet.dispatch.store.rows import WHOLE, found

# Word for word as the indexes say it: values that are bound would hide that they fit.
_LEASED, _POISONED = "status = 'leased'", "is_poisoned"
_PARTS: Mapping[Status, tuple[str, ...]] = {
    Status.QUEUED: (QUEUED,),
    Status.LEASED: (_LEASED,),
    Status.COMPLETED: (IS_ENDED,),
    Status.FAILED: (IS_RARE, IS_ENDED),
    Status.CANCELLED: (IS_RARE, IS_ENDED),
}


async def page(
    tx: Tx, wanted: Mapping[str, Any], *, before_id: int | None, limit: int
) -> list[Dispatch]:
    """`wanted`: values by column; what is None is not asked for."""
    conditions = _conditions(wanted)
    if before_id is not None:
        conditions.append(d.c.id < before_id)
    status: Status | None = wanted.get("status")
    parts = [_PARTS[status]] if status else [(QUEUED,), (_LEASED,), (IS_ENDED,)]
    rows: list[Dispatch] = []
    for part in parts:
        query = select(*WHOLE).where(*map(text, part), *conditions)
        rows += await found(tx, query.order_by(d.c.id.desc()).limit(limit))
    return sorted(rows, key=lambda row: row.id, reverse=True)[:limit]


def _conditions(wanted: Mapping[str, Any]) -> list[ColumnElement[bool] | TextClause]:
    conditions: list[ColumnElement[bool] | TextClause] = [
        d.c[name] == value
        for name, value in wanted.items()
        if value is not None and name != "is_poisoned"
    ]
    if wanted.get("is_poisoned") is not None:
        conditions.append(text(_POISONED if wanted["is_poisoned"] else f"NOT {_POISONED}"))
    return conditions
