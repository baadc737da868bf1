"""The audit log's only SQL: lines are added and read, and go when they are old; none is changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row, delete, insert, select

from comfyfleet.audit.model import Entry
from comfyfleet.db import Tx
from comfyfleet.db.central import audit_log
from comfyfleet.kernel.texts import is_storable


@dataclass(frozen=True, slots=True)
class Filter:
    """What is not given is not asked for."""

    action: str | None = None
    subject: str | None = None
    actor: str | None = None
    tenant_id: UUID | None = None
    since: datetime | None = None
    until: datetime | None = None


async def add(tx: Tx, row: Mapping[str, Any]) -> None:
    await tx.execute(insert(audit_log).values(dict(row)))


async def newest(tx: Tx, wanted: Filter, *, before_id: int | None, limit: int) -> list[Entry]:
    if not all(is_storable(each) for each in (wanted.action, wanted.subject, wanted.actor) if each):
        return []
    query = select(audit_log).order_by(audit_log.c.id.desc()).limit(limit)
    for name in ("action", "subject", "actor", "tenant_id"):
        value = getattr(wanted, name)
        if value is not None:
            query = query.where(audit_log.c[name] == value)
    if wanted.since is not None:
        query = query.where(audit_log.c.at >= wanted.since)
    if wanted.until is not None:
        query = query.where(audit_log.c.at < wanted.until)
    if before_id is not None:
        query = query.where(audit_log.c.id < before_id)
    return [_entry(row) for row in await tx.execute(query)]


async def prune(tx: Tx, *, before: datetime, limit: int) -> int:
    """The oldest of those from before then, by their ids: they were given in the order of time."""
    first = select(audit_log.c.id, audit_log.c.at).order_by(audit_log.c.id).limit(limit).subquery()
    old = select(first.c.id).where(first.c.at < before)
    gone = await tx.execute(delete(audit_log).where(audit_log.c.id.in_(old)))
    return int(gone.rowcount)


def _entry(row: Row[Any]) -> Entry:
    return Entry(**row._mapping)
