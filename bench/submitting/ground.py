"""A control plane on PostgreSQL with one effect and many users, each with a wallet."""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from comfyfleet.effects import service as workflows
from comfyfleet.effects.catalogue import service as catalogue
from comfyfleet.effects.catalogue.model import Face
from comfyfleet.jobs.customers import Application, apply
from comfyfleet.jobs.model import Job
from comfyfleet.kernel.clock import utc_now
from comfyfleet.ledger import service as ledger
from comfyfleet.plane import Plane
from comfyfleet.tenants.model import DEFAULT_TENANT

sys.path.append(str(Path(__file__).parents[2]))
from tests.dbkit.databases import Databases
from tests.planekit import client_of, plane_on

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "examples" / "workflows" / "negative.json"
TENANT = DEFAULT_TENANT
PRICE_TOKENS = 1
# Each user has so many active jobs at most, as in production; a wallet is locked by one submit at a time.
JOBS_PER_USER = 4


@dataclass(frozen=True)
class Ground:
    plane: Plane
    effect_id: UUID

    async def users(self, count: int) -> list[UUID]:
        ids = [uuid4() for _ in range(count)]
        async with self.plane.pools["main"].begin() as tx:
            for each in ids:
                await ledger.credit(tx, TENANT, each, 1_000, f"paid-{each}", now=utc_now())
        return ids

    async def submit(self, user_id: UUID, key: str, **changes: Any) -> Job:
        wanted = Application(
            effect_id=self.effect_id,
            properties={"width": 256, **changes},
            idempotency_key=key,
        )
        job, is_new = await apply(self.plane.sides, TENANT, user_id, wanted)
        assert is_new
        return job


@asynccontextmanager
async def ground_on(databases: Databases, folder: Path) -> AsyncIterator[Ground]:
    settings: dict[str, Any] = {"max_queued_per_tenant": 10_000_000, "max_queued_total": 10_000_000}
    async with plane_on(databases, folder, **settings) as plane:
        await _register(plane)
        async with plane.central.begin() as tx:
            workflow = await workflows.by_slug(tx, "negative")
            effect = await catalogue.create(
                tx,
                effect_id=uuid4(),
                slug="negative",
                workflow=workflow,
                face=Face(price_tokens=PRICE_TOKENS, is_published=True),
                now=utc_now(),
            )
        yield Ground(plane, effect.id)


async def _register(plane: Plane) -> None:
    body = {
        "slug": "negative",
        "document": json.loads(WORKFLOW.read_text()),
        "properties": [{"name": "width", "type": "integer", "binding": "2.width"}],
    }
    async with client_of(plane) as admin:
        made = await admin.post("/api/admin/workflows", json=body)
    assert made.status_code == 201, made.text
