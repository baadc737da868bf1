"""Ids of workers: a fleet's secret is good for ids of that fleet, and for no other's."""

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import client_of, plane_on

from comfyfleet.clock import utc_now

LONG = timedelta(seconds=300)


class Clock:
    def __init__(self) -> None:
        self.ahead = timedelta()

    def __call__(self) -> datetime:
        return utc_now() + self.ahead


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def admin(
    databases: Databases, tmp_path: Path, clock: Clock
) -> AsyncIterator[httpx.AsyncClient]:
    async with plane_on(databases, tmp_path, clock=clock) as plane, client_of(plane) as client:
        yield client


async def fleet(admin: httpx.AsyncClient, slug: str) -> str:
    made = await admin.post("/api/admin/fleets", json={"slug": slug, "stage": "production"})
    assert made.status_code == 201, made.text
    secret: str = made.json()["secret"]
    return secret


async def joined(admin: httpx.AsyncClient, slug: str, secret: str, worker_id: str) -> str:
    said = {"worker_id": worker_id, "fleet_slug": slug, "stage": "production"}
    answer = await admin.post("/api/worker/register", json=said, headers={"X-Fleet-Secret": secret})
    assert answer.status_code == 200, answer.text
    known: str = answer.json()["worker_id"]
    return known


async def test_the_names_that_a_fleet_gives_are_kept_for_its_workers(
    admin: httpx.AsyncClient,
) -> None:
    gpus, rogue = await fleet(admin, "gpus"), await fleet(admin, "rogue")
    assert await joined(admin, "rogue", rogue, "gpu-7") == "gpu-7"
    taken = await joined(admin, "rogue", rogue, "gpus.production:gpu-7")
    assert taken == "rogue.production:gpus.production:gpu-7"
    assert await joined(admin, "gpus", gpus, "gpu-7") == "gpus.production:gpu-7"
    assert await joined(admin, "rogue", rogue, "host.local:8188") == "host.local:8188"


async def test_a_silent_worker_of_another_fleet_is_not_taken_over(
    admin: httpx.AsyncClient, clock: Clock
) -> None:
    rogue = await fleet(admin, "rogue")
    # Before there was a fleet of that name.
    assert await joined(admin, "rogue", rogue, "gpus.production:gpu-7") == "gpus.production:gpu-7"
    assert await joined(admin, "rogue", rogue, "gpu-7") == "gpu-7"
    gpus = await fleet(admin, "gpus")
    clock.ahead = LONG
    said = {"worker_id": "gpu-7", "fleet_slug": "gpus", "stage": "production"}
    answer = await admin.post("/api/worker/register", json=said, headers={"X-Fleet-Secret": gpus})
    assert answer.status_code == 409, answer.text
    left = await admin.get("/api/admin/workers/gpus.production:gpu-7")
    assert left.json()["fleet"] == "rogue/production"


async def test_the_secret_alone_gets_nobody_past_approval_by_hand(
    admin: httpx.AsyncClient, clock: Clock
) -> None:
    secret = await fleet(admin, "gpus")
    approval = {"approval": "manual"}
    assert (await admin.put("/api/admin/fleets/gpus/production/approval", json=approval)).is_success
    await joined(admin, "gpus", secret, "gpu-7")
    assert (await admin.post("/api/admin/workers/gpu-7/approve")).json()["is_approved"]
    clock.ahead = LONG
    assert await joined(admin, "gpus", secret, "gpu-7") == "gpu-7"
    taken = (await admin.get("/api/admin/workers/gpu-7")).json()
    assert (taken["state"], taken["is_approved"]) == ("pending", False)
