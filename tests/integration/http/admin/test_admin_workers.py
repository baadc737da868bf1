"""Workers, tenants and the audit log through the operators' API."""

import asyncio
import csv
import io
import json
from uuid import UUID, uuid4

import httpx
import pytest
from tests.support.jobs.dispatches import parked
from tests.support.jobs.fleets import a_fleet, a_worker, a_workflow, key_of

from comfyfleet.api.worker import BackendFacts, Reading
from comfyfleet.errors import Unauthenticated
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Sighting
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import NewDispatch, QueueLane, Waiter
from comfyfleet.server.tenants.model import DEFAULT_TENANT


async def join(plane: ControlPlane, *worker_ids: str) -> None:
    async with plane.central.transaction() as tx:
        fleet = await a_fleet(tx)
        for worker_id in worker_ids:
            facts = BackendFacts(kind="ComfyUI", gpu="A GPU")
            await a_worker(tx, fleet, worker_id, backend=facts, now=plane.clock())


async def act(client: httpx.AsyncClient, worker_id: str, what: str) -> httpx.Response:
    return await client.post(f"/api/admin/workers/{worker_id}/{what}")


async def authenticated(plane: ControlPlane, key: str) -> bool:
    async with plane.central.read() as tx:
        try:
            await fleets.authenticate_worker(tx, key)
        except Unauthenticated:
            return False
    return True


async def test_workers_are_listed_in_pages_and_by_fleet(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    await join(plane, "a", "b", "c")
    first = (await client.get("/api/admin/workers?limit=2")).json()
    assert [each["worker_id"] for each in first["workers"]] == ["a", "b"]
    rest = (await client.get(f"/api/admin/workers?after={first['next']}")).json()
    assert ([each["worker_id"] for each in rest["workers"]], rest["next"]) == (["c"], None)
    assert first["workers"][0]["state"] == "online"
    assert first["workers"][0]["registration_source"] == "fleet"
    of_fleet = await client.get("/api/admin/workers", params={"fleet": "gpus/production"})
    assert len(of_fleet.json()["workers"]) == 3
    assert (await client.get("/api/admin/workers?fleet=gpus/other")).status_code == 404
    assert (await client.get("/api/admin/workers?fleet=gpus")).status_code == 422


async def test_a_worker_is_shown_with_its_backend_and_its_readings(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    await join(plane, "gpu-7")
    async with plane.central.transaction() as tx:
        worker = await fleets.get_worker(tx, "gpu-7")
        sighting = Sighting(
            capabilities=frozenset({"video"}), reading=Reading(gpu_load_percent=97.5)
        )
        await fleets.record_sighting(tx, worker, sighting, now=plane.clock())
    shown = (await client.get("/api/admin/workers/gpu-7")).json()
    assert (shown["backend"]["gpu"], shown["reading"]["gpu_load_percent"]) == ("A GPU", 97.5)
    found = (await client.get("/api/admin/workers/gpu-7/readings")).json()["readings"]
    assert [each["reading"]["gpu_load_percent"] for each in found] == [97.5]
    assert (await client.get("/api/admin/workers/nobody")).status_code == 404
    assert "key" not in shown
    assert "key_hash" not in shown


async def test_a_worker_is_drained_and_let_go(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    await join(plane, "gpu-7")
    assert (await act(client, "gpu-7", "drain")).json()["state"] == "draining"
    assert (await act(client, "gpu-7", "undrain")).json()["state"] == "online"
    entries = (await client.get("/api/admin/audit?subject=worker:gpu-7")).json()["entries"]
    assert [entry["action"] for entry in entries] == ["undrain", "drain"]


async def test_a_drain_with_a_body_does_what_the_body_says(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    await join(plane, "gpu-7")
    path = "/api/admin/workers/gpu-7/drain"
    states = [
        (await client.post(path, json={"is_draining": is_draining})).json()["state"]
        for is_draining in (True, False)
    ]
    assert states == ["draining", "online"]
    assert (await client.post(path, json={"draining": False})).status_code == 422


async def test_a_revoked_worker_is_out_at_once_and_its_jobs_are_queued_again(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    await join(plane, "gpu-7")
    async with plane.central.transaction() as tx:
        lane = QueueLane(await a_workflow(tx), "production", "self_hosted")
        new = NewDispatch(DEFAULT_TENANT, uuid4(), lane)
        await dispatch.enqueue(tx, [new], now=plane.clock())
    lease = await plane.queue.lease(Waiter("gpu-7", frozenset({lane})), wait_seconds=5)
    assert lease is not None
    answer = (await act(client, "gpu-7", "revoke")).json()
    assert (answer["state"], answer["requeued"]) == ("revoked", 1)
    assert not await authenticated(plane, key_of("gpu-7"))
    async with plane.central.read() as tx:
        row = await dispatch.get(tx, lease.dispatch_id)
    assert (row.status, row.attempts, row.last_error) == ("queued", 0, "Requeued: revoked")
    await act(client, "gpu-7", "approve")
    assert await authenticated(plane, key_of("gpu-7"))


async def test_a_worker_that_waits_asks_anew_when_something_was_decided_about_it(
    client: httpx.AsyncClient, plane: ControlPlane
) -> None:
    await join(plane, "gpu-7")
    lanes = frozenset({QueueLane(1, "production", "self_hosted")})
    waiting = asyncio.create_task(plane.queue.lease(Waiter("gpu-7", lanes), wait_seconds=60))
    await parked(plane.queue, 1)
    await act(client, "gpu-7", "drain")
    assert await asyncio.wait_for(waiting, 5) is None


async def test_a_rotated_key_is_shown_once(client: httpx.AsyncClient, plane: ControlPlane) -> None:
    await join(plane, "gpu-7")
    rotated = await client.post("/api/admin/workers/gpu-7/rotate-token", json={"now": True})
    answer = rotated.json()
    assert len(answer["token"]) == 64
    assert await authenticated(plane, answer["token"])
    assert not await authenticated(plane, key_of("gpu-7"))
    assert answer["token"] not in (await client.get("/api/admin/audit")).text


async def test_what_cannot_be_done_to_a_worker_is_not_found(client: httpx.AsyncClient) -> None:
    assert (await act(client, "nobody", "drain")).status_code == 404
    assert (await client.post("/api/admin/workers", json={})).status_code == 405


async def test_a_tenant_is_made_and_kept_within_limits(client: httpx.AsyncClient) -> None:
    answer = await client.post("/api/admin/tenants", json={"name": "Ada"})
    assert answer.status_code == 201
    made = answer.json()
    assert UUID(made["id"])
    assert made["pool"] == "main"
    limits = {"min_priority": 0, "max_priority": 5, "max_queued": 7}
    path = f"/api/admin/tenants/{made['id']}"
    changed = (await client.put(f"{path}/limits", json=limits)).json()
    assert {name: changed[name] for name in limits} == limits
    assert (await client.get(path)).json() == changed
    assert changed in (await client.get("/api/admin/tenants")).json()["tenants"]
    assert (await client.get(f"/api/admin/tenants/{uuid4()}")).status_code == 404
    assert (await client.post("/api/admin/tenants", json={"name": " "})).status_code == 422


@pytest.fixture
async def audited(plane: ControlPlane) -> None:
    async with plane.central.transaction() as tx:
        for number in range(5):
            await notifications.record_audit(
                tx, "sweep", "expire", f"dispatch:{number}", plane.clock(), number=number
            )


@pytest.mark.usefixtures("audited")
async def test_the_audit_log_is_filtered_and_goes_on_by_a_cursor(
    client: httpx.AsyncClient,
) -> None:
    first = (await client.get("/api/admin/audit?action=expire&limit=2")).json()
    assert [each["details"]["number"] for each in first["entries"]] == [4, 3]
    rest = (await client.get(f"/api/admin/audit?before={first['next']}&limit=50")).json()
    assert [each["details"]["number"] for each in rest["entries"]] == [2, 1, 0]
    assert rest["next"] is None
    one = (await client.get("/api/admin/audit?subject=dispatch:3")).json()["entries"]
    assert [each["subject"] for each in one] == ["dispatch:3"]


@pytest.mark.usefixtures("audited")
async def test_the_audit_log_is_exported_line_by_line(client: httpx.AsyncClient) -> None:
    answer = await client.get("/api/admin/audit/export?actor=sweep")
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["details"]["number"] for line in lines] == [4, 3, 2, 1, 0]


@pytest.mark.usefixtures("audited")
async def test_the_audit_log_is_exported_as_a_table_without_formulas(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    async with plane.central.transaction() as tx:
        await notifications.record_audit(tx, "sweep", "expire", "=1+1", plane.clock(), why='a, "b"')
    answer = await client.get("/api/admin/audit/export?actor=sweep&format=csv")
    assert answer.headers["content-type"].startswith("text/csv")
    assert answer.headers["content-disposition"] == 'attachment; filename="audit.csv"'
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["subject"] for row in rows[:2]] == ["'=1+1", "dispatch:4"]
    assert json.loads(rows[0]["details"]) == {"why": 'a, "b"'}
    assert rows[0]["tenant_id"] == ""
    assert (await client.get("/api/admin/audit/export?format=xls")).status_code == 422
