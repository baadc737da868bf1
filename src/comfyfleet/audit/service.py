"""Who did what: written in the transaction of the act itself, so that neither is without the other."""

from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.audit import store
from comfyfleet.audit.model import Entry, without_secrets
from comfyfleet.audit.store import Filter
from comfyfleet.db import Tx

EXPORT_PAGE = 500


async def record(
    tx: Tx,
    *,
    actor: str,
    action: str,
    subject: str,
    now: datetime,
    tenant_id: UUID | None = None,
    details: Mapping[str, Any] | None = None,
) -> None:
    """`actor` is "admin", "worker:ID", "tenant:UUID", "sweep" or "system"; `subject` "kind:name"."""
    row = {"at": now, "actor": actor, "action": action, "subject": subject, "tenant_id": tenant_id}
    await store.add(tx, {**row, "details": without_secrets(details or {})})


async def find(
    tx: Tx,
    *,
    action: str | None = None,
    subject: str | None = None,
    actor: str | None = None,
    before_id: int | None = None,
    limit: int,
) -> list[Entry]:
    """The newest first; go on with `before_id` = the last one's id."""
    wanted = Filter(action=action, subject=subject, actor=actor)
    return await store.newest(tx, wanted, before_id=before_id, limit=limit)


async def export(
    tx: Tx,
    *,
    action: str | None = None,
    subject: str | None = None,
    actor: str | None = None,
    before_id: int | None = None,
) -> AsyncIterator[Entry]:
    """All that fit, the newest first, a page at a time."""
    wanted = Filter(action=action, subject=subject, actor=actor)
    while page := await store.newest(tx, wanted, before_id=before_id, limit=EXPORT_PAGE):
        for entry in page:
            yield entry
        before_id = page[-1].id
