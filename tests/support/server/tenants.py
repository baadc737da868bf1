"""Tenants with data that can be deleted: files, media, jobs, wallets."""

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import httpx

from comfyfleet.clock import utc_now
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import AssetRef
from comfyfleet.server.db import Database
from comfyfleet.server.jobs import submit
from comfyfleet.server.jobs.model import Job, JobSpec
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File, MediaItem, upload_key

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x03\0\0\0\x02\x08\x02\0\0\0"


class AdjustableClock:
    """The real time plus an offset."""

    def __init__(self) -> None:
        self.by = timedelta()

    def __call__(self) -> datetime:
        return utc_now() + self.by


@dataclass
class TenantData:
    """A tenant with its first user."""

    plane: ControlPlane
    admin: httpx.AsyncClient
    tenant_id: UUID
    user_id: UUID
    key: str

    @property
    def pool(self) -> Database:
        return self.plane.pools["main"]

    @property
    def path(self) -> str:
        return f"/api/admin/tenants/{self.tenant_id}"

    async def pays(self, amount: int) -> None:
        paid = {"amount": amount, "provider_transaction_id": uuid.uuid4().hex}
        answer = await self.admin.post(f"{self.path}/wallets/{self.user_id}/credits", json=paid)
        assert answer.status_code == 201, answer.text

    async def balance(self) -> int:
        answer = await self.admin.get(f"{self.path}/wallets/{self.user_id}")
        balance: int = answer.json()["balance"]
        return balance

    async def file(self, data: bytes | None = PNG, **changes: Any) -> File:
        """A file with its object; without data it is only announced."""
        file_id = uuid.uuid4()
        fields: dict[str, Any] = {
            "id": file_id,
            "tenant_id": self.tenant_id,
            "user_id": self.user_id,
            "disk": self.plane.store.disk,
            "path": upload_key(self.tenant_id, file_id, "cat.png"),
            "filename": "cat.png",
            "mime_type": "image/png",
            "size": None if data is None else len(data),
            "created_at": self.plane.clock(),
        }
        file = File(**(fields | changes))
        if data is not None:
            await self.plane.store.put(file.path, data, file.mime_type)
        async with self.pool.transaction() as tx:
            return await media.add_file(tx, file)

    async def media(self, file: File) -> MediaItem:
        async with self.pool.transaction() as tx:
            return await media.create_media(
                tx,
                media_id=uuid.uuid4(),
                tenant_id=self.tenant_id,
                user_id=self.user_id,
                kind="image",
                original_file_id=file.id,
                now=self.plane.clock(),
            )

    async def job(self, file: File, *, price: int = 0, **changes: Any) -> Job:
        async with self.plane.central.read() as tx:
            workflow = await catalog.workflow_by_slug(tx, "invert")
        asset = AssetRef("input", file.id, "image", binding="1.image", is_primary_input=True)
        asked = JobSpec(
            workflow_id=workflow.id,
            workflow_slug=workflow.slug,
            workflow_version=1,
            prompt={"1": {"class_type": "Secret", "inputs": {"text": "a private wish"}}},
            properties={"text": "a private wish"},
            assets=(asset,),
            user_id=self.user_id,
            price_tokens=price,
            **changes,
        )
        jobs = await submit.submit_many(self.plane.context, self.tenant_id, {uuid.uuid4(): asked})
        return jobs[0]

    async def has(self, file: File) -> tuple[bool, bool]:
        """Whether its row and its object exist, under the key in the row."""
        async with self.pool.read() as tx:
            found = await media.find_existing(tx, self.tenant_id, [file.id])
        path = found.get(file.id, file).path
        return file.id in found, await self.plane.store.head(path) is not None


async def customer_of(
    plane: ControlPlane, admin: httpx.AsyncClient, name: str = "Ada"
) -> TenantData:
    body = {"name": name, "email": f"{name.lower()}@example.com"}
    made = (await admin.post("/api/admin/tenants", json=body)).json()
    return TenantData(plane, admin, UUID(made["id"]), UUID(made["user_id"]), made["key"])
