"""Many customers at once while processes die: nothing is lost, nothing is paid twice."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.jobs.counted_jobs import FLEET, WORKFLOW, prepare
from tests.support.server.deployment import Deployment, WorkerProcess

PRICE, CREDIT = 3, 10_000
AWAY_SECONDS_MAX = 60.0
END_SECONDS_MAX = 120.0
ENDED = ("completed", "failed", "cancelled")
SETTINGS = {
    "heartbeat_seconds": "1",
    "lease_seconds": "5",
    "outage_seconds": "5",
    "max_attempts": "9",
    "sweep_seconds": "1",
}


@dataclass
class Customer:
    """A user that submits one job after another, and repeats what got no answer. All choose the same
    idempotency keys: each has its own."""

    url: str
    key: str
    effect_id: str
    name: str
    jobs: dict[str, str] = field(default_factory=dict)  # by idempotency key

    async def work(self, until: float) -> None:
        headers = {"Authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=10) as client:
            number = 0
            while time.monotonic() < until:
                number += 1
                job_id = await self.submit(client, f"order-{number}", number)
                if number % 5 == 0:
                    await self.ask(client, "DELETE", f"/api/ai-jobs/{job_id}")
                await self.ask(client, "GET", f"/api/ai-jobs/{job_id}?wait=3")

    async def submit(self, client: httpx.AsyncClient, key: str, color: int) -> str:
        body = {
            "effect_id": self.effect_id,
            "idempotency_key": key,
            "properties": {"color": color + 1000 * hash_of(self.name), "steps": 2},
        }
        found = await self.ask(client, "POST", "/api/ai-jobs", json=body)
        assert self.jobs.setdefault(key, found["id"]) == found["id"], "one key, one job"
        return str(found["id"])

    async def ask(self, client: httpx.AsyncClient, method: str, path: str, **more: Any) -> Any:
        """Again and again while the control plane is away, or says that it is busy."""
        asked_at = time.monotonic()
        while True:
            try:
                answer = await client.request(method, path, **more)
            except httpx.TransportError:
                assert time.monotonic() < asked_at + AWAY_SECONDS_MAX, "it never came back"
            else:
                if answer.is_success:
                    return answer.json()
                assert answer.status_code in (429, 500, 503), answer.text
                # With five jobs active it waits for one of them, as long as that may take.
                most = END_SECONDS_MAX if answer.status_code == 429 else AWAY_SECONDS_MAX
                assert time.monotonic() < asked_at + most, answer.text
            await asyncio.sleep(0.2)


def hash_of(name: str) -> int:
    return int(name.removeprefix("customer"))


async def storm(folder: Path, *, customers: int, seconds: float, kills: int) -> None:
    async with Deployment(folder, None, **SETTINGS) as deployment:
        secret, _ = prepare(deployment)
        effect_id = _effect(deployment)
        engines = deployment.start_engines("engine-1", "engine-2")
        workers = [
            deployment.start_worker(f"worker-{n}", engine, fleet=FLEET, secret=secret)
            for n, engine in enumerate(engines)
        ]
        tenants = [_tenant(deployment, f"tenant {n}") for n in range(4)]
        people = [
            Customer(deployment.url, _key(deployment, tenants[n % 4], n), effect_id, f"customer{n}")
            for n in range(customers)
        ]
        until = time.monotonic() + seconds
        killing = asyncio.to_thread(_kill, deployment, workers, secret, until, kills)
        await asyncio.gather(killing, *(each.work(until) for each in people))
        await asyncio.to_thread(_require_all_ended, people)
        assert sum(_require_sound(each) for each in people) > 0


def _effect(deployment: Deployment) -> str:
    body = {
        "slug": "steps",
        "workflow_slug": WORKFLOW,
        "price_tokens": PRICE,
        "overrides": {},
        "published": True,
    }
    return str(deployment.admin.ask("POST", "/api/admin/effects", json=body)["id"])


def _tenant(deployment: Deployment, name: str) -> str:
    return str(deployment.admin.ask("POST", "/api/admin/tenants", json={"name": name})["id"])


def _key(deployment: Deployment, tenant_id: str, number: int) -> str:
    """Of a new user with a full wallet."""
    path = f"/api/admin/tenants/{tenant_id}"
    user = deployment.admin.ask("POST", f"{path}/users", json={"name": f"customer {number}"})
    paid = {"amount": CREDIT, "provider_transaction_id": f"paid {user['id']}"}
    deployment.admin.ask("POST", f"{path}/wallets/{user['id']}/credits", json=paid)
    made = deployment.admin.ask("POST", f"{path}/users/{user['id']}/keys", json={"name": "storm"})
    return str(made["key"])


def _kill(
    deployment: Deployment, workers: list[WorkerProcess], secret: str, until: float, kills: int
) -> None:
    """In turn the control plane and a worker, at random moments; each comes back as itself."""
    chance = random.Random(4711)
    pause = max(1.0, (until - time.monotonic()) / (kills + 1))
    for number in range(kills):
        time.sleep(pause * chance.uniform(0.5, 1.0))
        if number % 2 == 0:
            deployment.restart_control()
            continue
        place = chance.randrange(len(workers))
        dead = workers[place]
        dead.process.kill()
        workers[place] = deployment.start_worker(
            dead.worker_id, dead.engine, fleet=FLEET, secret=secret
        )


def _require_all_ended(people: list[Customer]) -> None:
    deadline = time.monotonic() + END_SECONDS_MAX
    for customer in people:
        headers = {"Authorization": f"Bearer {customer.key}"}
        assert customer.jobs
        for job_id in customer.jobs.values():
            while True:
                found = httpx.get(f"{customer.url}/api/ai-jobs/{job_id}", headers=headers)
                if found.status_code == 200 and found.json()["status"] in ENDED:
                    break
                assert time.monotonic() < deadline, found.text
                time.sleep(0.2)


def _require_sound(customer: Customer) -> int:
    """What was paid is what was completed: nothing more, nothing less. How many that are."""
    headers = {"Authorization": f"Bearer {customer.key}"}
    with httpx.Client(base_url=customer.url, headers=headers, timeout=30) as client:
        jobs: list[dict[str, Any]] = []
        query: dict[str, Any] = {"limit": 100}
        while True:
            page = client.get("/api/ai-jobs", params=query).json()
            jobs += page["jobs"]
            if page["next"] is None:
                break
            query["before"] = page["next"]
        completed = [job["status"] for job in jobs].count("completed")
        assert {job["id"] for job in jobs} == set(customer.jobs.values())
        assert not [job for job in jobs if job["status"] == "failed"]
        assert client.get("/api/wallet").json()["balance"] == CREDIT - PRICE * completed
        return completed


async def test_customers_lose_nothing_when_processes_die(tmp_path: Path) -> None:
    await storm(tmp_path, customers=6, seconds=6, kills=2)


@pytest.mark.slow
async def test_thirty_two_customers_lose_nothing_in_two_minutes(tmp_path: Path) -> None:
    await storm(tmp_path, customers=32, seconds=120, kills=16)
