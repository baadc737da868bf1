"""Both sides are compared by sets, page by page, and a pass goes on where another has ended."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import delete, func, select, update
from tests.support.databases.factory import Databases
from tests.support.jobs.bulk import counting, queue_many
from tests.support.jobs.context import ManualClock, job_context_on

from comfyfleet.errors import InvalidInput
from comfyfleet.server.db.central_tables import dispatches, tenants
from comfyfleet.server.db.tenant_tables import ai_jobs
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.reconcile import PAGE, Repairs, reconcile

MANY = 2 * PAGE + 200


class Scene:
    def __init__(self, context: JobContext, tenant_id: UUID, job_ids: list[UUID]) -> None:
        self.context, self.tenant_id, self.job_ids = context, tenant_id, job_ids

    async def orphan(self, *job_ids: UUID) -> None:
        async with self.context.pools["main"].transaction() as tx:
            await tx.execute(delete(ai_jobs).where(ai_jobs.c.id.in_(job_ids)))

    async def forget(self, *job_ids: UUID) -> None:
        async with self.context.central.transaction() as tx:
            await tx.execute(delete(dispatches).where(dispatches.c.tenant_job_id.in_(job_ids)))

    async def count(self, status: str) -> int:
        async with self.context.central.read() as tx:
            query = select(func.count()).select_from(dispatches)
            return int(await tx.scalar(query.where(dispatches.c.status == status)) or 0)


@pytest.fixture
async def scene(databases: Databases, tmp_path: Path) -> AsyncIterator[Scene]:
    clock = ManualClock()
    async with job_context_on(databases, tmp_path, clock) as (context, tenant_id):
        job_ids = await queue_many(context, tenant_id, MANY)
        clock.advance(minutes=5)
        yield Scene(context, tenant_id, job_ids)


async def test_a_pass_asks_for_pages_and_not_for_rows(scene: Scene) -> None:
    databases = scene.context.central, scene.context.pools["main"]
    with counting(*databases) as sent:
        repairs = await reconcile(scene.context)
    assert repairs == Repairs(rows_read=2 * MANY)
    assert len(sent) < 20, "four or so for each page of both sides"


async def test_whatever_the_page_an_orphan_is_ended_and_a_forgotten_job_is_queued(
    scene: Scene,
) -> None:
    orphans, forgotten = scene.job_ids[::300], scene.job_ids[7::300]
    await scene.orphan(*orphans)
    await scene.forget(*forgotten)
    repairs = await reconcile(scene.context)
    assert (repairs.dispatches_ended, repairs.dispatches_made) == (len(orphans), len(forgotten))
    assert await scene.count("failed") == len(orphans)
    assert await scene.count("queued") == MANY - len(orphans)
    assert (await reconcile(scene.context)).dispatches_ended == 0


async def test_passes_that_read_a_part_each_read_all_in_the_end(scene: Scene) -> None:
    orphans, forgotten = scene.job_ids[::300], scene.job_ids[7::300]
    await scene.orphan(*orphans)
    await scene.forget(*forgotten)
    repairs, parts = await reconcile(scene.context, rows_max=PAGE), 1
    ended, made, read = repairs.dispatches_ended, repairs.dispatches_made, repairs.rows_read
    while repairs.next is not None:
        repairs = await reconcile(scene.context, after=repairs.next, rows_max=PAGE)
        assert repairs.rows_read <= 2 * PAGE
        ended, made = ended + repairs.dispatches_ended, made + repairs.dispatches_made
        read, parts = read + repairs.rows_read, parts + 1
        assert parts < 20
    assert (ended, made) == (len(orphans), len(forgotten))
    assert read >= 2 * (MANY - len(orphans) - len(forgotten))


async def test_leased_dispatches_are_compared_too(scene: Scene) -> None:
    async with scene.context.central.transaction() as tx:
        held = dispatches.c.tenant_job_id.in_(scene.job_ids[:3])
        await tx.execute(update(dispatches).where(held).values(status="leased", worker_id="w1"))
    await scene.orphan(scene.job_ids[0])
    assert (await reconcile(scene.context)).dispatches_ended == 1
    assert await scene.count("leased") == 2


async def test_a_dispatch_of_a_tenant_that_is_gone_is_ended(scene: Scene) -> None:
    async with scene.context.central.transaction() as tx:
        one = dispatches.c.tenant_job_id == scene.job_ids[0]
        await tx.execute(update(dispatches).where(one).values(tenant_id=uuid4()))
    repairs = await reconcile(scene.context)
    assert (repairs.dispatches_ended, repairs.dispatches_made) == (1, 1)


async def test_dispatches_of_a_pool_that_this_control_plane_lacks_are_left(scene: Scene) -> None:
    async with scene.context.central.transaction() as tx:
        await tx.execute(update(tenants).values(pool="elsewhere"))
    assert (await reconcile(scene.context)).dispatches_ended == 0
    assert await scene.count("queued") == MANY


@pytest.mark.parametrize("place", ["x", "[]", '["queued", "", 1]', '["leased", "", "x"]', "null"])
async def test_a_place_that_no_pass_has_told_is_refused(scene: Any, place: str) -> None:
    with pytest.raises(InvalidInput):
        await reconcile(scene.context, after=place)
