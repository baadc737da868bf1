"""Walking and thinning the queue's table by sets, along indexes that it has anyway."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import delete, literal, select, text, tuple_

from comfyfleet.db import Tx
from comfyfleet.db.central import IS_ENDED, QUEUED
from comfyfleet.db.central import dispatches as d
from comfyfleet.db.dialect import among, is_one_of
from comfyfleet.db.types import Moment
from comfyfleet.dispatch.model import ActiveRow, EndedRow

LEASED = "status = 'leased'"
_ROW: Any = select(d.c.id, d.c.tenant_id, d.c.tenant_job_id, d.c.cancel_requested)
# The columns of the index `share`, then the id, as several rows may have the same rank.
_SHARE = ("tenant_id", "workflow_id", "stage", "provider", "priority", "rank", "id")


async def leased(tx: Tx, after_id: int, *, before: datetime, limit: int) -> list[ActiveRow]:
    """By their ids, those that were made before then."""
    query = _ROW.where(text(LEASED), d.c.id > after_id, d.c.created_at < before)
    return [ActiveRow(*row) for row in await tx.execute(query.order_by(d.c.id).limit(limit))]


async def queued(
    tx: Tx, after: Sequence[Any] | None, *, before: datetime, limit: int
) -> tuple[list[ActiveRow], list[Any] | None]:
    """Those that were made before then, and where to go on; None: that was all."""
    query = select(
        d.c.id,
        d.c.tenant_id,
        d.c.tenant_job_id,
        d.c.cancel_requested,
        *(d.c[name] for name in _SHARE[1:-1]),
    ).where(text(QUEUED), d.c.created_at < before)
    if after is not None:
        place = tuple_(*(d.c[name] for name in _SHARE))
        values = [literal(value, d.c[name].type) for name, value in zip(_SHARE, after, strict=True)]
        # The first condition is what the index can be entered by.
        query = query.where(d.c.tenant_id >= values[0], place > tuple_(*values))
    found = (await tx.execute(query.order_by(*(d.c[name] for name in _SHARE)).limit(limit))).all()
    rows = [ActiveRow(*row[:4]) for row in found]
    if len(found) < limit:
        return rows, None
    last = found[-1]
    return rows, [last.tenant_id, *last[4:], last.id]


async def have_ended(tx: Tx, pairs: Sequence[tuple[UUID, UUID]]) -> dict[UUID, bool]:
    """Of those (tenant, job) that have a dispatch, whether it has ended; by job."""
    query = select(d.c.tenant_job_id, d.c.ended_at).where(
        among(tx, (d.c.tenant_id, d.c.tenant_job_id), pairs)
    )
    return {row.tenant_job_id: row.ended_at is not None for row in await tx.execute(query)}


async def ended_before(
    tx: Tx, before: datetime, *, after: EndedRow | None, limit: int
) -> list[EndedRow]:
    """The longest ended first, on from the last one of the page before."""
    query = select(d.c.ended_at, d.c.id, d.c.tenant_id, d.c.tenant_job_id).where(
        text(IS_ENDED), d.c.ended_at < before
    )
    if after is not None:
        place = tuple_(d.c.ended_at, d.c.id)
        query = query.where(
            d.c.ended_at >= after.ended_at,
            place > tuple_(literal(after.ended_at, Moment()), after.id),
        )
    found = await tx.execute(query.order_by(d.c.ended_at, d.c.id).limit(limit))
    return [EndedRow(*row) for row in found]


async def remove(tx: Tx, dispatch_ids: Sequence[int]) -> int:
    """Those of them that have ended."""
    gone = await tx.execute(delete(d).where(is_one_of(tx, d.c.id, dispatch_ids), text(IS_ENDED)))
    return int(gone.rowcount)
