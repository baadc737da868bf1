"""Many prompts of one user: others are served meanwhile, and what the queue has no room for is told."""

from pathlib import Path
from typing import Any

from tests.support.databases.factory import Databases
from tests.support.server.gateway import (
    PROMPT,
    GatewayInProcess,
    GatewayUser,
    gateway_on,
    history_entry,
    until,
)

from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.model import Job
from comfyfleet.server.tenants import service as tenants

MANY = 24
MINE = "00000000-0000-4000-8000-000000000001"


def slow(color: int) -> dict[str, Any]:
    picture = {"width": 1, "height": 1, "batch_size": 1, "color": color}
    steps = {"steps": 1, "step_ms": 150, "previews": False, "image": ["1", 0]}
    return {
        "1": {"class_type": "EmptyImage", "inputs": picture},
        "2": {"class_type": "ComfyfleetSteps", "inputs": steps},
    }


async def active(server: GatewayInProcess, user: GatewayUser) -> int:
    async with server.plane.context.tenant(user.tenant_id) as tx:
        return len(await jobs.active_prompt_ids(tx, user.tenant_id, user.user_id))


async def test_a_flood_of_one_tenant_does_not_starve_another(
    databases: Databases, tmp_path: Path
) -> None:
    async with gateway_on(databases, tmp_path) as server:
        flood, other = await server.new_user(), await server.new_user()
        async with flood.http_async() as http:
            for number in range(MANY):
                answer = await http.post("/prompt", json={"prompt": slow(number)})
                assert answer.status_code == 200, answer.text
        async with other.http_async() as http:
            answer = await http.post("/prompt", json={"prompt": slow(1000)})
            assert answer.status_code == 200
            await until(lambda: ended(server, other))
        (mine,) = await ended(server, other)
        assert mine.started_at
        before = [
            job
            for job in await ended(server, flood)
            if job.started_at and mine.submitted_at < job.started_at < mine.started_at
        ]
        # Those that the worker held already, and a few turns of the flood.
        assert len(before) <= MANY / 4
        async with flood.http_async() as http:
            await http.post("/queue", json={"clear": True})


async def ended(server: GatewayInProcess, user: GatewayUser) -> list[Job]:
    async with server.plane.context.tenant(user.tenant_id) as tx:
        ids = await jobs.ended_prompt_ids(tx, user.tenant_id, user.user_id, limit=100)
        return [*(await jobs.get_many(tx, user.tenant_id, ids)).values()]


async def test_a_full_queue_is_told_with_when_to_come_again_and_nothing_is_kept(
    databases: Databases, tmp_path: Path
) -> None:
    async with gateway_on(databases, tmp_path) as server:
        ada = await server.new_user(tokens=5)
        await limit(server, ada, 0)
        async with ada.http_async() as http:
            body = {"prompt": PROMPT, "prompt_id": MINE}
            refused = await http.post("/prompt", json=body)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "queue_full"
            assert refused.json()["node_errors"] == {}
            assert await active(server, ada) == 0
            await limit(server, ada, None)
            accepted = await http.post("/prompt", json=body)
            assert accepted.json()["prompt_id"] == MINE
            await until(lambda: history_entry(http, MINE))


async def test_an_id_that_names_another_prompt_is_refused_and_a_retry_is_not(
    databases: Databases, tmp_path: Path
) -> None:
    async with gateway_on(databases, tmp_path) as server:
        ada, bob = await server.new_user(), await server.new_user()
        first, other = (
            {"prompt": slow(1), "prompt_id": MINE},
            {"prompt": slow(2), "prompt_id": MINE},
        )
        async with ada.http_async() as http:
            for body, status in ((first, 200), (first, 200), (other, 400)):
                answer = await http.post("/prompt", json=body)
                assert answer.status_code == status, answer.text
            assert answer.json()["error"]["type"] == "prompt_id_in_use"
            await until(lambda: history_entry(http, MINE))
            entry = await history_entry(http, MINE)
            assert entry["prompt"][2]["1"]["inputs"]["color"] == 1
            # Also of one that has ended.
            assert (await http.post("/prompt", json=other)).status_code == 400
            assert (await http.post("/prompt", json=first)).status_code == 200
            assert len(await ended(server, ada)) == 1
        async with bob.http_async() as http:
            assert (await http.post("/prompt", json=other)).status_code == 200


async def limit(server: GatewayInProcess, user: GatewayUser, most: int | None) -> None:
    async with server.plane.central.transaction() as tx:
        await tenants.set_limits(
            tx, user.tenant_id, min_priority=0, max_priority=0, max_queued=most
        )
    server.plane.context.caches.queue_depth.forget()
