"""The audit log (who did what, written in the same transaction as the action) and job events."""

from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.server.db import Database, Tx
from comfyfleet.server.notifications import store
from comfyfleet.server.notifications.model import AuditEntry, StoredJobEvent, without_secrets
from comfyfleet.server.notifications.store import AuditFilter

EVENTS_PER_PAGE_MAX = 500
NOTES_PER_PASS_MAX, STOPS_PER_PASS_MAX = 200, 10


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

    `actor` is "admin", "operator:NAME", "worker:ID", "tenant:UUID", "sweep" or "system". `subject`
    is "kind:name"."""
    row = {"at": now, "actor": actor, "action": action, "subject": subject, "tenant_id": tenant_id}
    await store.add_audit_entry(tx, {**row, "details": without_secrets(details)})


class PendingAudit(NamedTuple):
    actor: str
    action: str
    subject: str
    tenant_id: UUID
    at: datetime


async def copy_audit(tx: Tx, source: str, entry: PendingAudit, details: Any) -> None:
    """Writes the audit entry for a row in a tenant's database, exactly once, even if several
    processes do it.

    `source` identifies the row, among all rows that have ever existed."""
    row = {**entry._asdict(), "details": without_secrets(details)}
    await store.copy_audit_entry(tx, source, row)


async def note_audit(tx: Tx, subject_id: UUID, entry: PendingAudit, /, **details: object) -> None:
    """Stores an audit entry in the transaction of an action in a tenant's database, so that neither
    exists without the other. `flush_audits` copies it to the audit log."""
    payload = {
        "actor": entry.actor,
        "action": entry.action,
        "subject": entry.subject,
        "details": without_secrets(details),
    }
    await store.add_note(tx, store.AUDIT, entry.tenant_id, subject_id, payload, now=entry.at)


async def flush_audits(central: Database, pool: Database) -> bool:
    """Copies stored entries to the audit log, each exactly once. Returns whether there are more."""
    async with pool.read() as tx:
        noted = await store.notes(tx, store.AUDIT, limit=NOTES_PER_PASS_MAX)
    if not noted:
        return False
    async with central.transaction() as tx:
        for note in noted:
            row = {**note.payload, "at": note.created_at, "tenant_id": note.tenant_id}
            row["details"] = {**row["details"], "note": note.id}
            # SQLite reuses the ids of deleted notes.
            source = f"note:{note.tenant_id}:{note.id}:{note.created_at.isoformat()}"
            await store.copy_audit_entry(tx, source, row)
    async with pool.transaction() as tx:
        await store.delete_notes(tx, [note.id for note in noted])
    return len(noted) == NOTES_PER_PASS_MAX


class PendingStop(NamedTuple):
    """A deactivated user whose work may not have been stopped yet."""

    id: int
    tenant_id: UUID
    user_id: UUID


async def note_stop(tx: Tx, tenant_id: UUID, user_id: UUID, *, now: datetime) -> None:
    await store.add_note(tx, store.STOP, tenant_id, user_id, {}, now=now)


async def pending_stops(tx: Tx) -> list[PendingStop]:
    noted = await store.notes(tx, store.STOP, limit=STOPS_PER_PASS_MAX)
    return [PendingStop(note.id, note.tenant_id, note.subject_id) for note in noted]


async def end_stop(tx: Tx, stop_id: int) -> None:
    await store.delete_notes(tx, [stop_id])


async def find_audit_entries(
    tx: Tx, *, before_id: int | None = None, limit: int, **filters: Any
) -> list[AuditEntry]:
    """Returns a page of audit entries, newest first. `before_id` is the last id of the previous
    page. `filters` are fields of `AuditFilter`."""
    return await store.newest_audit_entries(
        tx, AuditFilter(**filters), before_id=before_id, limit=limit
    )


async def prune_audit(tx: Tx, *, before: datetime, limit: int) -> int:
    """Deletes the oldest entries. Returns their number."""
    return await store.prune_audit_entries(tx, before=before, limit=limit)


async def events_after(
    tx: Tx, tenant_id: UUID, job_id: UUID, *, after_id: int = 0, limit: int = EVENTS_PER_PAGE_MAX
) -> list[StoredJobEvent]:
    """Returns events, oldest first. `after_id` is a reader's Last-Event-ID."""
    return await store.events_after(
        tx, tenant_id, job_id, after_id=after_id, limit=min(limit, EVENTS_PER_PAGE_MAX)
    )


async def prune_events(tx: Tx, *, before: datetime, limit: int) -> int:
    return await store.prune_events(tx, before=before, limit=limit)
