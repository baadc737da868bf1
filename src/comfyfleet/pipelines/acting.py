"""One act on a run: under its lock, written down, and then known to the loop and the audit log."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.jobs import service as jobs
from comfyfleet.jobs.model import Job
from comfyfleet.jobs.settling import deliver
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import NotFound
from comfyfleet.pipelines import journal
from comfyfleet.pipelines.model import JobState, StoredRun
from comfyfleet.pipelines.store import jobs as job_rows
from comfyfleet.pipelines.store import runs

RUN_KIND = "pipeline"


@dataclass
class Act:
    sides: Sides
    tx: Tx
    stored: StoredRun
    now: datetime
    changes: dict[str, Any] = field(default_factory=dict)
    ended: list[Job] = field(default_factory=list)
    words: list[int] = field(default_factory=list)

    async def record(self, kind: str, **data: Any) -> None:
        who = {"user_id": str(self.stored.user_id)}
        actor = f"tenant:{self.stored.tenant_id}"
        await journal.record(self.tx, self.stored, kind, {**who, **data}, actor=actor, now=self.now)

    async def cancel_job(self, job_id: UUID) -> None:
        """Its place is free at once: the word of its end finds nothing left to do."""
        job, words = await jobs.cancel(
            self.tx, self.stored.tenant_id, job_id, new_id=self.sides.new_id, now=self.now
        )
        await job_rows.end(self.tx, job_id, JobState.CANCELLED, now=self.now, is_refunded=True)
        self.ended.append(job)
        self.words += words


@asynccontextmanager
async def acting(sides: Sides, tenant_id: UUID, user_id: UUID, run_id: UUID) -> AsyncIterator[Act]:
    """The run is due when the act is done: whatever it was, it may have made room for work."""
    pool = await sides.pool_of(tenant_id)
    async with pool.begin() as tx:
        stored = await own_run(tx, tenant_id, user_id, run_id, is_locked=True)
        act = Act(sides, tx, stored, sides.clock())
        yield act
        touched: Mapping[str, Any] = {"look_at": act.now, "changed_at": act.now}
        await runs.change_run(tx, run_id, {**touched, **act.changes})
    sides.tallies.pipeline_jobs.labels(JobState.CANCELLED).inc(len(act.ended))
    if act.words:
        await deliver(sides, pool, act.ended, act.words)
    sides.news.tell(run_id)
    sides.news.tell_run(RUN_KIND)
    await journal.tell_audit(sides, pool)


async def own_run(
    tx: Tx, tenant_id: UUID, user_id: UUID, run_id: UUID, *, is_locked: bool = False
) -> StoredRun:
    found = await runs.run(tx, tenant_id, run_id, is_locked=is_locked)
    if found is None or found.user_id != user_id:
        raise NotFound(f"there is no pipeline run {run_id}")
    return found
