"""One budget for each user and tenant, whatever the door and the key."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import func, select
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ManualClock, asked, give_tokens, job_context_on
from tests.support.server.control_plane import client_of, plane_on

from comfyfleet.errors import TooManyActive
from comfyfleet.server.db.central_tables import dispatches
from comfyfleet.server.jobs import service, submit
from comfyfleet.server.jobs.batches import admit_all
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.outbox import flush


class Till:
    def __init__(self, context: JobContext, tenant_id: UUID, user_id: UUID) -> None:
        self.context, self.tenant_id, self.user_id = context, tenant_id, user_id
        self.run_id = uuid4()

    async def apply(self, user_id: UUID | None = None) -> UUID:
        wanted = asked(user_id=user_id or self.user_id)
        return (await submit.submit(self.context, self.tenant_id, wanted))[0].id

    async def run(self, count: int, kind: str = "graph") -> list[UUID]:
        """As graphs and pipelines submit."""
        changes: dict[str, Any] = {"run_kind": kind, "run_id": self.run_id}
        wanted = {uuid4(): asked(user_id=self.user_id, **changes) for _ in range(count)}
        pool = self.context.pools["main"]
        async with pool.transaction() as tx:
            jobs, words = await service.submit(
                tx,
                self.tenant_id,
                wanted,
                now=self.context.clock(),
                active_max=self.context.active_max,
            )
        await flush(self.context, pool, jobs, words)
        return list(wanted)

    async def queued(self) -> int:
        async with self.context.central.read() as tx:
            some = select(func.count()).where(dispatches.c.status == "queued")
            return int(await tx.scalar(some) or 0)


@pytest.fixture
async def till(databases: Databases, tmp_path: Path) -> AsyncIterator[Till]:
    limits = {"max_active_jobs_per_user": 5, "max_active_jobs_per_tenant": 7}
    async with job_context_on(databases, tmp_path, ManualClock(), **limits) as (context, tenant_id):
        yield Till(context, tenant_id, await give_tokens(context, tenant_id, 100))


@pytest.mark.parametrize("kind", ["graph", "pipeline"])
async def test_jobs_of_runs_count_with_those_of_effects_and_wait(till: Till, kind: str) -> None:
    await till.apply()
    jobs = await till.run(17, kind)
    assert await till.queued() == 5, "the rest is held, and the run has not failed"
    with pytest.raises(TooManyActive, match="a user may have at most 5 active jobs"):
        await till.apply()
    await submit.cancel_job(till.context, till.tenant_id, jobs[0])
    await admit_all(till.context)
    assert await till.queued() == 5, "as one ends, another goes on"
    for _ in range(20):
        for job_id in jobs:
            await submit.cancel_job(till.context, till.tenant_id, job_id)
    await admit_all(till.context)
    assert await till.queued() == 1


async def test_a_tenant_has_a_cap_over_all_its_users(till: Till) -> None:
    await till.run(5)
    other = await give_tokens(till.context, till.tenant_id, 100)
    await till.apply(other)
    await till.apply(other)
    with pytest.raises(TooManyActive, match="a tenant may have at most 7 active jobs"):
        await till.apply(other)
    await till.run(3)
    assert await till.queued() == 7


async def test_all_keys_of_a_user_share_one_rate(databases: Databases, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"calls_per_second": 0.001, "calls_at_once": 10}
    async with plane_on(databases, tmp_path, **settings) as plane, client_of(plane) as admin:
        made = (await admin.post("/api/admin/tenants", json={"name": "one"})).json()
        keys = f"/api/admin/tenants/{made['id']}/users/{made['user_id']}/keys"
        second = (await admin.post(keys, json={"name": "second"})).json()["key"]
        answers = [
            (
                await admin.get("/api/effects", headers={"Authorization": f"Bearer {key}"})
            ).status_code
            for key in [made["key"]] * 10 + [second] * 3
        ]
    assert answers == [200] * 10 + [429] * 3


async def test_all_users_of_a_tenant_share_one_rate(databases: Databases, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tenant_calls_per_second": 0.001, "tenant_calls_at_once": 4}
    async with plane_on(databases, tmp_path, **settings) as plane, client_of(plane) as admin:
        made = (await admin.post("/api/admin/tenants", json={"name": "one"})).json()
        users = f"/api/admin/tenants/{made['id']}/users"
        user = (await admin.post(users, json={"email": "b@example.com"})).json()["id"]
        key = (await admin.post(f"{users}/{user}/keys", json={"name": "k"})).json()["key"]
        answers = [
            (
                await admin.get("/api/effects", headers={"Authorization": f"Bearer {each}"})
            ).status_code
            for each in [made["key"]] * 3 + [key] * 3
        ]
    assert answers == [200] * 4 + [429] * 2


async def test_announced_uploads_count_towards_the_quota(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        plane_on(databases, tmp_path, max_storage_bytes_per_tenant=1000) as plane,
        client_of(plane) as admin,
    ):
        made = (await admin.post("/api/admin/tenants", json={"name": "one"})).json()
        mine = {"Authorization": f"Bearer {made['key']}"}
        upload = {"filename": "a.png", "content_type": "image/png", "size": 400}
        answers = [
            await admin.post("/api/videos/uploads", json=upload, headers=mine) for _ in range(3)
        ]
        assert [each.status_code for each in answers] == [201, 201, 422]
        error = answers[2].json()["error"]
        assert error["code"] == "storage_full"
        assert (error["details"]["quota_bytes"], error["details"]["used_bytes"]) == (1000, 800)
        path = f"/api/admin/tenants/{made['id']}"
        await admin.put(f"{path}/quota", json={"max_storage_bytes": 1200})
        again = await admin.post("/api/videos/uploads", json=upload, headers=mine)
        assert again.status_code == 201, again.text
        storage = (await admin.get(f"{path}/storage")).json()
        assert (storage["used_bytes"], storage["max_storage_bytes"]) == (1200, 1200)
