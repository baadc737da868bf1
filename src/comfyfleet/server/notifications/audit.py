"""The audit log: who did what to which subject, written in the transaction of the act."""

from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.server.db import Tx
from comfyfleet.server.notifications import store
from comfyfleet.server.notifications.model import (
    AuditEntry,
    without_secrets,
)
from comfyfleet.server.notifications.store import AuditFilter


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
    """Who did what to what, and when.

    `actor` is "admin", "operator:NAME", "worker:ID", "tenant:UUID", "sweep" or "system"; `subject` "kind:name".
    """
    row = {"at": now, "actor": actor, "action": action, "subject": subject, "tenant_id": tenant_id}
    await store.add_entry(tx, {**row, "details": without_secrets(details)})


async def find_audit_entries(
    tx: Tx, *, before_id: int | None = None, limit: int, **wanted: Any
) -> list[AuditEntry]:
    """The newest first; go on with `before_id` = the last one's id. `wanted` is of `Filter`."""
    return await store.newest_entries(tx, AuditFilter(**wanted), before_id=before_id, limit=limit)


async def prune_audit(tx: Tx, *, before: datetime, limit: int) -> int:
    """How many of the oldest lines went."""
    return await store.prune_entries(tx, before=before, limit=limit)
