"""Who did what: written in the transaction of the act itself, so that neither is without the other."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.audit import store
from comfyfleet.audit.model import Entry, without_secrets
from comfyfleet.audit.store import Filter
from comfyfleet.db import Tx


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
    """`actor` is "admin", "operator:NAME", "worker:ID", "tenant:UUID", "sweep" or "system"; `subject` "kind:name"."""
    row = {"at": now, "actor": actor, "action": action, "subject": subject, "tenant_id": tenant_id}
    await store.add(tx, {**row, "details": without_secrets(details or {})})


async def find(tx: Tx, *, before_id: int | None = None, limit: int, **wanted: Any) -> list[Entry]:
    """The newest first; go on with `before_id` = the last one's id. `wanted` is of `Filter`."""
    return await store.newest(tx, Filter(**wanted), before_id=before_id, limit=limit)


async def prune(tx: Tx, *, before: datetime, limit: int) -> int:
    """How many of the oldest lines went."""
    return await store.prune(tx, before=before, limit=limit)
