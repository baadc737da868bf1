"""A control plane on PostgreSQL with one effect and many users, each with a wallet."""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from comfyfleet.clock import utc_now
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.jobs.model import Job
from comfyfleet.server.jobs.submit import JobRequest, submit_effect
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.tenants.model import DEFAULT_TENANT, Tenant

sys.path.append(str(Path(__file__).parents[2]))
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import client_of, plane_on

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / "examples" / "workflows"
TENANT = DEFAULT_TENANT
PRICE_TOKENS = 1
# The limit of active jobs per user, as in production. One submission at a time locks a user's
# wallet.
JOBS_PER_USER = 4


@dataclass(frozen=True)
class SubmitSetup:
    plane: ControlPlane
    effect_id: UUID
    soften_id: UUID

    async def users(self, count: int) -> list[UUID]:
        ids = [uuid4() for _ in range(count)]
        async with self.plane.pools["main"].transaction() as tx:
            for user_id in ids:
                await ledger.credit(tx, TENANT, user_id, 1_000, f"paid-{user_id}", now=utc_now())
        return ids

    async def tenant(self) -> Tenant:
        async with self.plane.central.read() as tx:
            return await tenants.get_tenant(tx, TENANT)

    async def submit(self, user_id: UUID, key: str, **changes: Any) -> Job:
        request = JobRequest(
            effect_id=self.effect_id,
            user_id=user_id,
            values={"width": 256, **changes},
            idempotency_key=key,
        )
        submitted = await submit_effect(self.plane.context, await self.tenant(), request)
        assert submitted.is_new
        return submitted.job


@asynccontextmanager
async def submit_setup_on(databases: Databases, folder: Path) -> AsyncIterator[SubmitSetup]:
    settings: dict[str, Any] = {
        "max_queued_per_tenant": 10_000_000,
        "max_queued_total": 10_000_000,
        "max_active_jobs_per_user": 1_000,
        "max_active_jobs_per_tenant": 10_000_000,
        "calls_per_second": 1_000_000,
        "calls_at_once": 1_000_000,
    }
    async with plane_on(databases, folder, **settings) as plane:
        yield SubmitSetup(
            plane,
            await _effect(plane, "negative", {"type": "integer", "binding": "2.width"}, "width"),
            await _effect(plane, "soften", {"type": "image", "binding": "1.image"}, "input"),
        )


async def _effect(plane: ControlPlane, slug: str, bound: dict[str, str], name: str) -> UUID:
    document = json.loads((WORKFLOWS / f"{slug}.json").read_text())
    body = {"slug": slug, "document": document, "properties": [{"name": name, **bound}]}
    async with client_of(plane) as admin:
        answer = await admin.post("/api/admin/workflows", json=body)
        assert answer.status_code == 201, answer.text
        effect = {"slug": slug, "workflow_slug": slug, "price_tokens": PRICE_TOKENS}
        answer = await admin.post("/api/admin/effects", json={**effect, "published": True})
        assert answer.status_code == 201, answer.text
    return UUID(answer.json()["id"])
