"""The audit log (who did what to which subject, written in the transaction of the act), and events of jobs."""

from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.server.db import Tx
from comfyfleet.server.notifications import store
from comfyfleet.server.notifications.model import AuditEntry, StoredJobEvent, without_secrets
from comfyfleet.server.notifications.store import AuditFilter

EVENTS_PER_PAGE_MAX = 500


async def record_audit(
    tx: Tx,
    actor: str,
    action: str,
    subject: str,
    now: datetime,
    tenant_id: UUID | None = None,
    /,
    **details: object,
) -> None:
    """Writes an audit entry.

    `actor` is "admin", "operator:NAME", "worker:ID", "tenant:UUID", "sweep" or "system"; `subject`
    is "kind:name".
    """
    row = {"at": now, "actor": actor, "action": action, "subject": subject, "tenant_id": tenant_id}
    await store.add_audit_entry(tx, {**row, "details": without_secrets(details)})


async def find_audit_entries(
    tx: Tx, *, before_id: int | None = None, limit: int, **wanted: Any
) -> list[AuditEntry]:
    """Returns a page, the newest first; `before_id` is the last page's last. `wanted` are fields of
    `AuditFilter`."""
    return await store.newest_audit_entries(
        tx, AuditFilter(**wanted), before_id=before_id, limit=limit
    )


async def prune_audit(tx: Tx, *, before: datetime, limit: int) -> int:
    """Deletes the oldest entries; returns how many."""
    return await store.prune_audit_entries(tx, before=before, limit=limit)


async def events_after(
    tx: Tx, tenant_id: UUID, job_id: UUID, *, after_id: int = 0, limit: int = EVENTS_PER_PAGE_MAX
) -> list[StoredJobEvent]:
    """Returns events, the oldest first; `after_id` is a reader's Last-Event-ID."""
    return await store.events_after(
        tx, tenant_id, job_id, after_id=after_id, limit=min(limit, EVENTS_PER_PAGE_MAX)
    )


async def prune_events(tx: Tx, *, before: datetime, limit: int) -> int:
    return await store.prune_events(tx, before=before, limit=limit)
