"""Creates rows like the services, with defaults for fields that are irrelevant to a test."""

from collections.abc import Iterable
from datetime import UTC, datetime

from sqlalchemy import insert

from comfyfleet.api.worker import BackendFacts
from comfyfleet.server.db import Tx
from comfyfleet.server.db.central_tables import workflows
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet, FleetWorker, WorkerRegistration
from comfyfleet.server.secrets import hash_key

NOW = datetime(2026, 11, 15, 8, 30, tzinfo=UTC)
SECRET = "the fleet's secret"


async def a_fleet(
    tx: Tx, slug: str = "gpus", stage: str = "production", *, max_workers: int | None = None
) -> Fleet:
    return await fleets.create_fleet(
        tx, slug=slug, stage=stage, secret_hash=hash_key(SECRET), max_workers=max_workers, now=NOW
    )


async def a_worker(
    tx: Tx,
    fleet: Fleet,
    worker_id: str = "gpu-1",
    *,
    capabilities: Iterable[str] = (),
    workflow_slugs: tuple[str, ...] | None = None,
    backend: BackendFacts | None = None,
    now: datetime = NOW,
) -> FleetWorker:
    registration = WorkerRegistration(
        worker_id=worker_id,
        capabilities=frozenset(capabilities),
        workflow_slugs=workflow_slugs,
        backend=backend,
    )
    return await fleets.register_worker(
        tx, fleet, registration, hash_key(key_of(worker_id)), cap=50, now=now
    )


def key_of(worker_id: str) -> str:
    return f"the key of {worker_id}"


async def a_workflow(
    tx: Tx,
    slug: str = "upscale",
    *,
    required_capabilities: Iterable[str] = (),
    is_active: bool = True,
    is_paused: bool = False,
) -> int:
    """Only the row that the queue reads, without any version."""
    row = {
        "slug": slug,
        "version": 1,
        "required_capabilities": sorted(required_capabilities),
        "is_active": is_active,
        "is_paused": is_paused,
        "created_at": NOW,
        "output": "optional",
    }
    made: int | None = await tx.scalar(insert(workflows).values(row).returning(workflows.c.id))
    assert made is not None
    return made
