"""What happened in a run: read by those who follow it, and told to the audit log.

An event is written in the transaction of the act itself. The audit log is in another database, so it
is told afterwards; if that is cut off, the sweep does it.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.audit import service as audit
from comfyfleet.db import Database, Tx
from comfyfleet.jobs.sides import Sides
from comfyfleet.pipelines.model import PipelineEvent, StoredRun
from comfyfleet.pipelines.store import acts

# What the loop does by itself all day long fills no audit log.
ROUTINE = frozenset({"submitted", "candidates", "job_failed"})
TOLD_AT_ONCE_MAX = 200
SWEEP = "sweep"


async def record(
    tx: Tx,
    stored: StoredRun,
    kind: str,
    data: Mapping[str, Any] | None = None,
    *,
    actor: str = SWEEP,
    now: datetime,
) -> None:
    row = {
        "tenant_id": stored.tenant_id,
        "run_id": stored.id,
        "kind": kind,
        "actor": actor,
        "data": dict(data or {}),
        "is_audited": kind in ROUTINE,
        "created_at": now,
    }
    await acts.add_event(tx, row)


async def after(tx: Tx, run_id: UUID, *, after_id: int, limit: int) -> list[PipelineEvent]:
    return await acts.events_after(tx, run_id, after_id=after_id, limit=limit)


async def tell_audit(sides: Sides, pool: Database) -> bool:
    """True: there is more. Told twice if it is cut off in between; the event's id shows it."""
    async with pool.look() as tx:
        untold = await acts.untold(tx, limit=TOLD_AT_ONCE_MAX)
    if not untold:
        return False
    async with sides.central.begin() as tx:
        for each in untold:
            await audit.record(
                tx,
                actor=each.actor,
                action=f"pipeline_{each.kind}",
                subject=f"pipeline_run:{each.run_id}",
                now=each.created_at,
                tenant_id=each.tenant_id,
                details={**each.data, "event_id": each.id},
            )
    async with pool.begin() as tx:
        await acts.note_told(tx, [each.id for each in untold])
    return len(untold) == TOLD_AT_ONCE_MAX
