"""What only grows is removed when it is old, in small steps, and only what nobody needs any more."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import func, select, update
from tests.support.databases.factory import Databases
from tests.support.jobs.bulk import add_dispatches, add_jobs, dispatch_row, job_row
from tests.support.jobs.context import PROMPT, ManualClock, job_context_on

from comfyfleet.errors import Refused
from comfyfleet.server.db.central_tables import audit_log, dispatches
from comfyfleet.server.db.tenant_tables import ai_jobs
from comfyfleet.server.jobs import submit
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.reconcile import reconcile
from comfyfleet.server.maintenance import retention
from comfyfleet.server.maintenance.retention import delete_expired_rows
from comfyfleet.server.notifications import service as notifications

DAYS = (10, 40, 100, 400)
KEPT_FOR_EVER = dict.fromkeys(("audit_keep_days", "dispatch_keep_days", "prompt_keep_days"), 0)


class Scene:
    """One failed job with its dispatch and a line of the audit for each of some ages in days."""

    def __init__(self, context: JobContext, tenant_id: UUID, jobs: dict[int, UUID]) -> None:
        self.context, self.tenant_id, self.jobs = context, tenant_id, jobs

    async def count(self, table: Any) -> int:
        async with self.context.central.read() as tx:
            return int(await tx.scalar(select(func.count()).select_from(table)) or 0)

    async def prompts(self) -> list[int]:
        """The ages of those that are still there."""
        async with self.context.pools["main"].read() as tx:
            rows = await tx.execute(select(ai_jobs.c.id, ai_jobs.c.prompt))
            kept = {row.id: row.prompt for row in rows}
        assert len(kept) == len(DAYS), "the job itself stays"
        assert all(prompt in ({}, PROMPT) for prompt in kept.values())
        return [days for days, job_id in self.jobs.items() if kept[job_id] == PROMPT]


async def scene_on(context: JobContext, tenant_id: UUID) -> Scene:
    now, jobs, rows = context.clock(), {}, []
    for rank, days in enumerate(DAYS):
        at = now - timedelta(days=days)
        job = job_row(tenant_id, at, status="failed", completed_at=at)
        await add_jobs(context.pools["main"], [job])
        rows.append(dispatch_row(job, rank, status="failed", ended_at=at))
        jobs[days] = job["id"]
    await add_dispatches(context.central, rows)
    async with context.central.transaction() as tx:
        for days in sorted(DAYS, reverse=True):
            at = now - timedelta(days=days)
            await notifications.record_audit(tx, "sweep", "fail", f"x:{days}", at)
    return Scene(context, tenant_id, jobs)


@pytest.fixture
async def scene(databases: Databases, tmp_path: Path) -> AsyncIterator[Scene]:
    async with job_context_on(databases, tmp_path, ManualClock()) as (context, tenant_id):
        yield await scene_on(context, tenant_id)


async def test_each_kind_goes_at_its_own_age(scene: Scene) -> None:
    gone = await delete_expired_rows(scene.context)
    assert (gone["audit"], gone["dispatches"], gone["prompts"]) == (1, 3, 2)
    assert await scene.count(audit_log) == 3
    assert await scene.count(dispatches) == 1
    assert await scene.prompts() == [10, 40]
    again = await delete_expired_rows(scene.context)
    assert set(again.values()) == {0}


async def test_zero_keeps_for_ever(databases: Databases, tmp_path: Path) -> None:
    async with job_context_on(databases, tmp_path, ManualClock(), **KEPT_FOR_EVER) as (
        context,
        tenant_id,
    ):
        scene = await scene_on(context, tenant_id)
        await delete_expired_rows(context)
        assert await scene.count(audit_log) == await scene.count(dispatches) == len(DAYS)
        assert await scene.prompts() == list(DAYS)


async def test_a_job_whose_dispatch_was_removed_gets_no_second_one(scene: Scene) -> None:
    await delete_expired_rows(scene.context)
    repairs = await reconcile(scene.context)
    assert (repairs.dispatches_made, await scene.count(dispatches)) == (0, 1)


async def test_the_dispatch_of_a_job_that_is_active_stays_however_old(scene: Scene) -> None:
    async with scene.context.pools["main"].transaction() as tx:
        one = ai_jobs.c.id == scene.jobs[400]
        await tx.execute(update(ai_jobs).where(one).values(status="processing", completed_at=None))
    assert (await delete_expired_rows(scene.context))["dispatches"] == 2
    assert await scene.count(dispatches) == 2


async def test_a_job_without_its_prompt_is_told_of_and_not_retried(scene: Scene) -> None:
    await delete_expired_rows(scene.context)
    job = await submit.get_job(scene.context, scene.tenant_id, scene.jobs[100])
    assert job.status == "failed"
    with pytest.raises(Refused, match="prompt was deleted"):
        await submit.retry_job(scene.context, scene.tenant_id, job.id)
    again = await submit.retry_job(scene.context, scene.tenant_id, scene.jobs[40])
    assert again.spec.prompt == PROMPT


async def test_many_rows_go_in_steps(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "ROWS_PER_STEP", 1)
    gone = await delete_expired_rows(scene.context)
    assert (gone["audit"], gone["dispatches"], gone["prompts"]) == (1, 3, 2)
