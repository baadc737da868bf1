"""The routes that must not slow down with the number of ended jobs: the routes for a job, and all
lists."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from tests.support.databases.copies import copy_job
from tests.support.databases.factory import Databases
from tests.support.databases.reads import Read, Reads, SqliteTrace
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on
from tests.support.server.fleet import PICTURE, WorkerClient

from comfyfleet.server.maintenance import store as upkeep

PAGE = 10
TOKENS = 100_000_000
Route = Callable[[], Awaitable[Any]]
Noted = Callable[[str, Route], Awaitable[Any]]


@dataclass
class FilledControlPlane:
    """A control plane with one tenant that has had many jobs."""

    effect_setup: EffectSetup
    customer: Customer
    worker: WorkerClient
    video_id: str
    job_id: str  # has ended
    reads: Reads

    @property
    def admin(self) -> httpx.AsyncClient:
        return self.effect_setup.fleet_setup.admin

    async def submit(self) -> str:
        return await self.customer.job(self.effect_setup.draw)

    async def lease(self) -> dict[str, Any]:
        return await self.worker.job(max_wait_seconds=5)

    async def finish(self, job: dict[str, Any]) -> None:
        done = await self.worker.deliver(job, PICTURE)
        assert done.status_code == 200, done.text

    async def announce(self) -> None:
        upload = {"filename": "a.png", "content_type": "image/png", "size": 1}
        answer = await self.customer.client.post("/api/videos/uploads", json=upload)
        assert answer.status_code == 201, answer.text

    async def nothing(self) -> None:
        assert (await self.admin.get("/healthz")).status_code == 200

    async def each_route(self, noted: Noted) -> None:
        """Takes a job through its life, then calls every list."""
        self.reads.plane.context.caches.queue_depth.forget()
        await noted("POST ai-jobs", self.submit)
        job = await noted("POST worker/poll", self.lease)
        await noted("POST worker/heartbeat", lambda: self.worker.call_for(job, "heartbeat"))
        await noted("POST worker/complete", lambda: self.finish(job))
        await noted("POST worker/poll, idle", self.worker.poll)
        await noted("POST videos/uploads", self.announce)
        for name, route in (self.lists() | self.sweeps()).items():
            await noted(name, route)

    def sweeps(self) -> dict[str, Route]:
        tenant_id, pool = self.customer.tenant_id, self.effect_setup.plane.pools["main"]

        async def active() -> None:
            async with pool.read() as tx:
                await upkeep.active_jobs(tx, tenant_id, limit=PAGE)

        async def named() -> None:
            async with pool.read() as tx:
                await upkeep.named_by_active_jobs(tx, tenant_id)

        return {"sweep: active jobs": active, "sweep: files of active jobs": named}

    async def read_by_route(self) -> dict[str, list[Read]]:
        """What is read for each route, once caches are filled and connections open."""
        found: dict[str, list[Read]] = {}

        async def noted(name: str, act: Route) -> Any:
            with self.reads.recording():
                answer = await act()
            found[name] = await self.reads.read()
            return answer

        await self.finish_one()
        await self.each_route(noted)
        return found

    async def finish_one(self) -> None:
        await self.submit()
        await self.finish(await self.lease())

    def lists(self) -> dict[str, Route]:
        """All routes that only read, by name."""
        tenant, user = self.customer.tenant_id, self.customer.user_id
        ours = {
            "GET ai-jobs": "ai-jobs",
            **{f"GET ai-jobs?status={each}": f"ai-jobs?status={each}" for each in JOB_STATUSES},
            "GET ai-jobs?before": f"ai-jobs?before={self.job_id}",
            "GET ai-jobs/{id}": f"ai-jobs/{self.job_id}",
            "GET ai-jobs/{id}/why": f"ai-jobs/{self.job_id}/why",
            "GET ai-jobs/{id}/progress": f"ai-jobs/{self.job_id}/progress",
            "GET ai-jobs/{id}/again": f"ai-jobs/{self.job_id}/again",
            "GET account": "account",
            "GET account/progress": "account/progress",
            "GET shares": "shares",
            "GET videos/{id}/progress": f"videos/{self.video_id}/progress",
            "GET videos": "videos",
            "GET videos/{id}": f"videos/{self.video_id}",
            "GET wallet": "wallet",
            "GET wallet/transactions": "wallet/transactions",
            "GET effects": "effects",
            "GET webhooks": "webhooks",
            "GET keys": "keys",
            "GET graph-runs": "graph-runs",
            "GET pipeline-runs": "pipeline-runs",
        }
        theirs = {
            "GET admin/jobs": "jobs",
            **{f"GET admin/jobs?status={each}": f"jobs?status={each}" for each in JOB_STATUSES},
            "GET admin/jobs?tenant": f"jobs?tenant={tenant}",
            "GET admin/jobs?workflow": "jobs?workflow=invert",
            "GET admin/jobs?workflow, rare": "jobs?workflow=draw",
            "GET admin/jobs?worker, none": "jobs?worker=w2",
            "GET admin/jobs?status&tenant": f"jobs?status=failed&tenant={tenant}",
            "GET admin/jobs?status&workflow": "jobs?status=failed&workflow=draw",
            "GET admin/jobs?worker": "jobs?worker=w1",
            "GET admin/jobs?effect": "jobs?effect=invert",
            "GET admin/jobs?effect, rare": "jobs?effect=draw",
            "GET admin/jobs?effect&status": "jobs?effect=draw&status=failed",
            "GET admin/jobs?until": "jobs?until=2100-01-01T00:00:00Z",
            "GET admin/jobs/{id}/details": f"jobs/{self.job_id}/details",
            "GET admin/jobs?since": "jobs?since=2020-01-01T00:00:00Z",
            "GET admin/jobs/{id}": f"jobs/{self.job_id}",
            "GET admin/jobs/{id}/attempts": f"jobs/{self.job_id}/attempts",
            "GET admin/dispatches": "dispatches",
            **{
                f"GET admin/dispatches?status={each}": f"dispatches?status={each}"
                for each in STATUSES
            },
            "GET admin/dispatches?tenant": f"dispatches?tenant={tenant}",
            "GET admin/dispatches?worker": "dispatches?worker=w1",
            "GET admin/dispatches?workflow": "dispatches?workflow=invert",
            "GET admin/dispatches?workflow, rare": "dispatches?workflow=draw",
            "GET admin/dispatches?tenant&status": f"dispatches?tenant={tenant}&status=failed",
            "GET admin/dispatches?tenant&status=queued": f"dispatches?tenant={tenant}&status=queued",
            "GET admin/dispatches?poisoned": "dispatches?poisoned=true",
            "GET admin/dispatches/{id}": "dispatches/1",
            "GET admin/audit": "audit",
            "GET admin/audit?actor": "audit?actor=worker:w1",
            "GET admin/audit?action": "audit?action=lease",
            "GET admin/audit?subject": "audit?subject=dispatch:1",
            "GET admin/audit?tenant": f"audit?tenant={tenant}",
            "GET admin/workers": "workers",
            "GET admin/workers/{id}": "workers/w1",
            "GET admin/fleets": "fleets",
            "GET admin/workflows": "workflows",
            "GET admin/effects": "effects",
            "GET admin/tenants": "tenants",
            "GET admin/storage": f"tenants/{tenant}/storage",
            "GET admin/users": f"tenants/{tenant}/users",
            "GET admin/wallet": f"tenants/{tenant}/wallets/{user}",
            "GET admin/wallet/transactions": f"tenants/{tenant}/wallets/{user}/transactions",
        }
        found = {
            name: self._getting(self.customer.client, f"/api/{path}") for name, path in ours.items()
        }
        return found | {
            name: self._getting(self.admin, f"/api/admin/{path}") for name, path in theirs.items()
        }

    def _getting(self, client: httpx.AsyncClient, path: str) -> Route:
        if path.rpartition("/")[2].partition("?")[0] in PAGED:
            path += f"{'&' if '?' in path else '?'}limit={PAGE}"

        async def get() -> None:
            answer = await client.get(path)
            assert answer.status_code == 200, f"{path}: {answer.text}"

        return get


PAGED = ("ai-jobs", "videos", "transactions", "jobs", "dispatches", "audit", "workers", "users")
JOB_STATUSES = ("queued", "processing", "completed", "failed", "cancelled")
STATUSES = ("queued", "leased", "completed", "failed", "cancelled")


@asynccontextmanager
async def control_plane_with_jobs(
    databases: Databases, folder: Path, jobs: int
) -> AsyncIterator[FilledControlPlane]:
    trace = SqliteTrace()
    settings: dict[str, Any] = {"calls_per_second": 1_000_000, "calls_at_once": 1_000_000}
    async with AsyncExitStack() as stack:
        with trace.watching():
            plane = await stack.enter_async_context(plane_on(databases, folder, **settings))
            effect_setup = await stack.enter_async_context(effect_setup_on(plane))
            customer = await effect_setup.customer(tokens=TOKENS)
            worker = await stack.enter_async_context(effect_setup.fleet_setup.worker("w1"))
            video_id = await customer.video()
            job_id = await customer.job(effect_setup.invert, video_id=video_id)
            filled = FilledControlPlane(
                effect_setup, customer, worker, video_id, job_id, Reads(plane, trace)
            )
            await filled.finish(await filled.lease())
            await copy_job(plane, UUID(job_id), jobs)
            yield filled
