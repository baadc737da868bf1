"""Faults that operators and customers' servers cause: keys that change, drains, notices, dead receivers."""

import asyncio
import random
import time
from typing import Any

import httpx
from tests.chaos.faults import (
    FAULTS,
    STOP_SECONDS_MAX,
    Fault,
    Skipped,
    fault,
    hold,
    restart_worker,
)
from tests.chaos.receiver import Mood
from tests.chaos.world import FLEET, World
from tests.support.server.deployment import ADMIN_KEY
from tests.support.workers.metadata_server import serving_metadata

REVOKED_EXIT = 77
ASK_SECONDS_MAX, LOOK_SECONDS = 120.0, 0.5
NOTICE_SECONDS = 15.0
WORKERS, SECRET = "/api/admin/workers", f"/api/admin/fleets/{FLEET}/production/rotate-secret"


async def _ask(world: World, method: str, path: str, body: Any = None) -> Any:
    """Calls the admin API as an operator's script does: it retries what can be retried."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    deadline = time.monotonic() + ASK_SECONDS_MAX
    while True:
        problem = ""
        try:
            async with httpx.AsyncClient(base_url=world.url, headers=headers, timeout=10) as http:
                answer = await http.request(method, path, json=body)
            if answer.is_success:
                return answer.json()
            problem = f"{answer.status_code} {answer.text[:300]}"
            if answer.status_code == 500:
                world.operator_errors.append(f"{method} {path}: {problem}")
        except httpx.TransportError as error:
            problem = repr(error)
        if time.monotonic() > deadline:
            raise AssertionError(f"{method} {path}: {problem}")
        await asyncio.sleep(LOOK_SECONDS)


@fault("worker drain")
async def drain_worker(world: World, chance: random.Random) -> None:
    path = f"{WORKERS}/{chance.choice(world.workers).name}"
    await _ask(world, "POST", f"{path}/drain")
    await hold(chance)
    await _ask(world, "POST", f"{path}/undrain")


@fault("worker revoke")
async def revoke_worker(world: World, chance: random.Random) -> None:
    worker = chance.choice(world.workers)
    try:
        await _ask(world, "POST", f"{WORKERS}/{worker.name}/revoke")
    except AssertionError as error:
        if "worker_offline" in str(error):
            raise Skipped("the worker had not recovered from an earlier fault") from error
        raise
    code = await asyncio.to_thread(worker.running.wait, STOP_SECONDS_MAX)
    assert code == REVOKED_EXIT, f"a revoked worker ended with {code}"
    await _ask(world, "POST", f"{WORKERS}/{worker.name}/approve")
    await restart_worker(world, worker)


@fault("worker key")
async def rotate_worker_key(world: World, chance: random.Random) -> None:
    """Half of the time, the old key is invalid at once, and the worker has to join again."""
    path = f"{WORKERS}/{chance.choice(world.workers).name}/rotate-token"
    await _ask(world, "POST", path, {"now": chance.random() < 0.5})


@fault("fleet secret")
async def rotate_fleet_secret(world: World, chance: random.Random) -> None:
    world.fleet_secret = (await _ask(world, "POST", SECRET))["secret"]


@fault("user key")
async def rotate_user_key(world: World, chance: random.Random) -> None:
    """A customer changes to a new key, and the old one is revoked while requests with it are open."""
    customer = chance.choice(world.customers)
    path = f"/api/admin/tenants/{customer.tenant_id}/users/{customer.user_id}/keys"
    old = [key["id"] for key in (await _ask(world, "GET", path))["keys"] if not key["revoked_at"]]
    answer = await _ask(world, "POST", path, {"name": "chaos"})
    customer.change_key(answer["key"])
    for key_id in old:
        await _ask(world, "POST", f"{path}/{key_id}/revoke")


@fault("spot notice")
async def notify_worker(world: World, chance: random.Random) -> None:
    """The worker's machine is announced to end: the worker hands its jobs over and exits, and a new one starts."""
    worker = chance.choice(world.workers)
    worker.running.terminate()
    await asyncio.to_thread(worker.running.wait, STOP_SECONDS_MAX)
    with serving_metadata() as metadata:
        service = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url}
        await restart_worker(world, worker, AWS_EC2_METADATA_DISABLED="false", **service)
        await hold(chance)
        metadata.announce_spot(seconds=NOTICE_SECONDS)
        await asyncio.to_thread(worker.running.wait, STOP_SECONDS_MAX)
    await restart_worker(world, worker)


def _with_receiver(mood: Mood) -> Fault:
    async def change_mood(world: World, chance: random.Random) -> None:
        world.receiver.mood = mood
        await hold(chance)
        world.receiver.mood = Mood.ACCEPTING

    return change_mood


FAULTS |= {
    f"receiver {mood.name.lower()}": _with_receiver(mood)
    for mood in Mood
    if mood is not Mood.ACCEPTING
}
