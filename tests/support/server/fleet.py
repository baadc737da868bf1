"""A fleet with a workflow and workers, set up through the API."""

from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
from tests.support.server.control_plane import URL, client_of

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.app import create_app

PROMPT = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "photo.png"}},
    "2": {"class_type": "ImageInvert", "inputs": {"image": ["1", 0]}},
    "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "PREFIX"}},
}
PROPERTIES = [
    {"name": "input", "type": "image", "binding": "1.image"},
    {"name": "prefix", "type": "text", "placeholder": "PREFIX", "default": "made"},
]

# One black pixel, as PNG.
PICTURE = b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)


@dataclass
class WorkerClient:
    """Calls the worker API like a worker."""

    client: httpx.AsyncClient
    worker_id: str

    async def call(self, endpoint: str, **body: Any) -> httpx.Response:
        return await self.client.post(f"/api/worker/{endpoint}", json=body)

    async def poll(self, **body: Any) -> dict[str, Any]:
        answer = await self.call("poll", **{"worker_id": self.worker_id, **body})
        assert answer.status_code == 200, answer.text
        polled: dict[str, Any] = answer.json()
        return polled

    async def job(self, **body: Any) -> dict[str, Any]:
        polled = await self.poll(**body)
        assert polled["job"], polled["reason"]
        job: dict[str, Any] = polled["job"]
        return job

    async def call_for(self, job: dict[str, Any], endpoint: str, **body: Any) -> httpx.Response:
        lease = {name: job[name] for name in ("dispatch_id", "lease_token")}
        return await self.call(endpoint, **lease, **body)

    async def deliver(self, job: dict[str, Any], data: bytes = b"made") -> httpx.Response:
        slot = job["outputs"][0]
        if slot["url"].startswith(str(self.client.base_url)):
            put = await self.client.put(slot["url"], content=data, headers=slot["headers"])
        else:
            async with httpx.AsyncClient() as direct:
                put = await direct.put(slot["url"], content=data, headers=slot["headers"])
        assert put.status_code in (200, 201), put.text
        return await self.call_for(
            job, "complete", outputs=[{"name": slot["name"], "size": len(data)}]
        )


@dataclass
class FleetSetup:
    plane: ControlPlane
    admin: httpx.AsyncClient
    secret: str = ""

    async def set_up(self, **fleet: Any) -> None:
        made = await self.admin.post(
            "/api/admin/fleets", json={"slug": "gpu", "stage": "production", **fleet}
        )
        assert made.status_code == 201, made.text
        self.secret = made.json()["secret"]
        await self.register_workflow("invert")
        await self.assign("invert")

    async def register_workflow(self, slug: str, **changes: Any) -> httpx.Response:
        """Free in graphs and pipelines, and done without files, unless `changes` say otherwise."""
        usual = {
            "document": PROMPT,
            "properties": PROPERTIES,
            "price_tokens": 0,
            "output": "optional",
        }
        body = {"slug": slug, **usual, **changes}
        return await self.admin.post("/api/admin/workflows", json=body)

    async def assign(self, *slugs: str) -> httpx.Response:
        return await self.admin.put(
            "/api/admin/fleets/gpu/production/workflows", json={"workflow_slugs": list(slugs)}
        )

    async def register(self, worker_id: str = "w1", **changes: Any) -> httpx.Response:
        secret = changes.pop("secret", self.secret)
        body = {
            "worker_id": worker_id,
            "fleet_slug": "gpu",
            "stage": "production",
            "max_concurrency": 1,
            "capabilities": [],
            "protocol_version": 1,
            **changes,
        }
        headers = {"X-Fleet-Secret": secret}
        return await self.admin.post("/api/worker/register", json=body, headers=headers)

    @asynccontextmanager
    async def worker(self, worker_id: str = "w1", **changes: Any) -> AsyncIterator[WorkerClient]:
        joined = await self.register(worker_id, **changes)
        assert joined.status_code == 200, joined.text
        headers = {"Authorization": f"Bearer {joined.json()['token']}"}
        transport = httpx.ASGITransport(create_app(self.plane))
        async with httpx.AsyncClient(transport=transport, base_url=URL, headers=headers) as client:
            yield WorkerClient(client, worker_id)

    async def upload(self, data: bytes = PICTURE) -> str:
        announced = await self.admin.post(
            "/api/admin/uploads",
            json={"filename": "photo.png", "content_type": "image/png", "size": len(data)},
        )
        assert announced.status_code == 201, announced.text
        slot = announced.json()["upload"]
        put = await self.admin.put(slot["url"], content=data, headers=slot["headers"])
        assert put.status_code in (200, 201), put.text
        file_id: str = announced.json()["file_id"]
        return file_id

    async def submit(self, slug: str = "invert", **changes: Any) -> UUID:
        file_id = changes.pop("file_id", None) or await self.upload()
        body = {"workflow_slug": slug, "files": {"input": file_id}, **changes}
        made = await self.admin.post("/api/admin/jobs", json=body)
        assert made.status_code == 201, made.text
        return UUID(made.json()["ids"][0])

    async def job(self, job_id: UUID) -> dict[str, Any]:
        found: dict[str, Any] = (await self.admin.get(f"/api/admin/jobs/{job_id}")).json()
        return found

    async def act(self, path: str, **body: Any) -> dict[str, Any]:
        done = await self.admin.post(f"/api/admin/{path}", json=body or None)
        assert done.status_code < 300, done.text
        answer: dict[str, Any] = done.json()
        return answer

    async def audited(self, action: str) -> list[dict[str, Any]]:
        found = await self.admin.get("/api/admin/audit", params={"action": action})
        entries: list[dict[str, Any]] = found.json()["entries"]
        return entries


@asynccontextmanager
async def fleet_setup_on(plane: ControlPlane, **fleet: Any) -> AsyncIterator[FleetSetup]:
    async with client_of(plane) as admin:
        fleet_setup = FleetSetup(plane, admin)
        await fleet_setup.set_up(**fleet)
        yield fleet_setup
