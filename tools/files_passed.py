"""Prints the source files that each call of a warm job runs through, in order.

The control plane runs in this process with SQLite, and gets the same calls as from customers and
workers. Usage: `python tools/files_passed.py [submit|poll|complete|read]`
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from comfyfleet.clock import utc_now
from comfyfleet.server.app import open_control_plane
from comfyfleet.server.http.app import create_app
from comfyfleet.settings import Settings

ROOT = Path(__file__).parents[1] / "src"
URL = "http://control.test"
ADMIN_KEY = "key-of-files-passed"
WARM_JOBS = 5
DOCUMENT = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "color": 0}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "made"}},
}
PROPERTIES = [{"name": "width", "type": "integer", "binding": "1.width"}]


@dataclass
class Caller:
    """Calls the API with one key. An error response ends the program."""

    client: httpx.AsyncClient
    key: str

    async def call(self, method: str, path: str, **options: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.key}", **options.pop("headers", {})}
        answer = await self.client.request(method, path, headers=headers, **options)
        answer.raise_for_status()
        return answer.json() if answer.content else None


@dataclass
class WarmJob:
    """The calls for one job, one after the other."""

    customer: Caller
    worker: Caller
    effect_id: str

    async def submit(self) -> Any:
        body = {"effect_id": self.effect_id}
        return await self.customer.call("POST", "/api/ai-jobs", json=body)

    async def poll(self) -> Any:
        answer = await self.worker.call("POST", "/api/worker/poll", json={"worker_id": "w1"})
        return answer["job"]

    async def upload(self, job: Any) -> None:
        slot = job["outputs"][0]
        await self.worker.client.put(slot["url"], content=b"made", headers=slot["headers"])

    async def complete(self, job: Any) -> Any:
        lease = {name: job[name] for name in ("dispatch_id", "lease_token")}
        outputs = [{"name": job["outputs"][0]["name"], "size": 4}]
        body = {**lease, "outputs": outputs}
        return await self.worker.call("POST", "/api/worker/complete", json=body)

    async def read(self, job_id: str) -> Any:
        return await self.customer.call("GET", f"/api/ai-jobs/{job_id}")


@asynccontextmanager
async def warm_job() -> AsyncIterator[WarmJob]:
    settings = Settings(admin_key=ADMIN_KEY, public_url=URL)
    with tempfile.TemporaryDirectory() as folder:
        async with open_control_plane(settings, Path(folder), utc_now) as plane:
            transport = httpx.ASGITransport(create_app(plane))
            async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
                yield await _set_up(client)


async def _set_up(client: httpx.AsyncClient) -> WarmJob:
    admin = Caller(client, ADMIN_KEY)
    workflow = {"slug": "draw", "document": DOCUMENT, "properties": PROPERTIES}
    await admin.call("POST", "/api/admin/workflows", json=workflow)
    fleet = await admin.call("POST", "/api/admin/fleets", json={"slug": "g", "stage": "production"})
    await admin.call(
        "PUT", "/api/admin/fleets/g/production/workflows", json={"workflow_slugs": ["draw"]}
    )
    effect = {"slug": "draw", "workflow_slug": "draw", "price_tokens": 1}
    effect_id = (await admin.call("POST", "/api/admin/effects", json=effect))["id"]
    await admin.call("POST", "/api/admin/effects/draw/publish")
    tenant = await admin.call("POST", "/api/admin/tenants", json={"name": "Ada"})
    wallet = f"/api/admin/tenants/{tenant['id']}/wallets/{tenant['user_id']}/credits"
    payment = {"amount": 100, "provider_transaction_id": "p"}
    await admin.call("POST", wallet, json=payment)
    joined = await admin.call(
        "POST",
        "/api/worker/register",
        json={
            "worker_id": "w1",
            "fleet_slug": "g",
            "stage": "production",
            "max_concurrency": 1,
            "capabilities": [],
            "protocol_version": 1,
        },
        headers={"X-Fleet-Secret": fleet["secret"]},
    )
    return WarmJob(Caller(client, tenant["key"]), Caller(client, joined["token"]), effect_id)


async def traced(call: Callable[[], Awaitable[Any]]) -> tuple[Any, list[str]]:
    """Returns the result of a call, and the source files that it uses, in order of first use."""
    files: dict[str, None] = {}
    prefix = f"{ROOT}/"

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(prefix):
            files[name.removeprefix(prefix)] = None

    sys.setprofile(note)
    try:
        answer = await call()
    finally:
        sys.setprofile(None)
    return answer, list(files)


async def files_passed() -> dict[str, list[str]]:
    async with warm_job() as warm:
        runs = []
        for _ in range(WARM_JOBS):
            files: dict[str, list[str]] = {}
            submitted, files["submit"] = await traced(warm.submit)
            job, files["poll"] = await traced(warm.poll)
            await warm.upload(job)
            _, files["complete"] = await traced(partial(warm.complete, job))
            _, files["read"] = await traced(partial(warm.read, submitted["id"]))
            runs.append(files)
        # The shortest list counts, because on a busy machine some runs also renew expired caches or
        # run background tasks.
        return {call: min((files[call] for files in runs), key=len) for call in runs[0]}


def main() -> None:
    selected_calls = sys.argv[1:]
    for call, files in asyncio.run(files_passed()).items():
        if not selected_calls or call in selected_calls:
            print(f"{call}: {len(files)} files", *files, sep="\n  ")  # noqa: T201


if __name__ == "__main__":
    main()
