"""What the workers' machines were like: a time series, thin and bounded."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import bindparam, delete, insert, select

from comfyfleet.db import Tx
from comfyfleet.db.central import worker_readings
from comfyfleet.db.statement import Call, Statement
from comfyfleet.db.types import Json, Moment
from comfyfleet.fleets.model import StoredReading
from comfyfleet.wire.messages import Reading


def _add_if_due() -> Any:
    worker_id = bindparam("of_worker", type_=worker_readings.c.worker_id.type)
    newer = select(worker_readings.c.id).where(
        worker_readings.c.worker_id == worker_id,
        worker_readings.c.at > bindparam("none_since", type_=Moment()),
    )
    row = select(
        worker_id, bindparam("at_now", type_=Moment()), bindparam("with_reading", type_=Json)
    ).where(~newer.exists())
    columns = ["worker_id", "at", "reading"]
    return insert(worker_readings).from_select(columns, row).returning(worker_readings.c.id)


_ADD_IF_DUE = Statement(lambda tx: _add_if_due())


def due(worker_id: str, reading: Mapping[str, Any], *, now: datetime, none_since: datetime) -> Call:
    """To be sent: adds a reading if the worker has none after `none_since`."""
    values = {"of_worker": worker_id, "with_reading": dict(reading)}
    return _ADD_IF_DUE, {**values, "at_now": now, "none_since": none_since}


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
