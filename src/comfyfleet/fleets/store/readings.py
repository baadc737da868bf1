"""What the workers' machines were like: a time series, thin and bounded."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import delete, insert, literal, select

from comfyfleet.db import Tx
from comfyfleet.db.central import worker_readings
from comfyfleet.db.types import Json, Moment
from comfyfleet.fleets.model import StoredReading
from comfyfleet.wire.messages import Reading


async def add_if_due(
    tx: Tx, worker_id: str, reading: Mapping[str, Any], *, now: datetime, none_since: datetime
) -> bool:
    """Only if the worker has none after `none_since`."""
    newer = select(worker_readings.c.id).where(
        worker_readings.c.worker_id == worker_id, worker_readings.c.at > none_since
    )
    row = select(
        literal(worker_id, worker_readings.c.worker_id.type),
        literal(now, Moment()),
        literal(dict(reading), Json),
    ).where(~newer.exists())
    statement = insert(worker_readings).from_select(["worker_id", "at", "reading"], row)
    return (await tx.execute(statement)).rowcount == 1


async def newest(tx: Tx, worker_id: str, *, since: datetime, limit: int) -> list[StoredReading]:
    query = (
        select(worker_readings.c.at, worker_readings.c.reading)
        .where(worker_readings.c.worker_id == worker_id, worker_readings.c.at >= since)
        .order_by(worker_readings.c.at.desc())
        .limit(limit)
    )
    rows = await tx.execute(query)
    return [StoredReading(row.at, Reading.model_validate(row.reading)) for row in rows]


async def delete_before(tx: Tx, before: datetime, *, limit: int) -> int:
    old = (
        select(worker_readings.c.id)
        .where(worker_readings.c.at < before)
        .order_by(worker_readings.c.at)
        .limit(limit)
    )
    statement = delete(worker_readings).where(worker_readings.c.id.in_(old.scalar_subquery()))
    return (await tx.execute(statement)).rowcount
