"""Customers of a control plane: tenants with users, keys, tokens, and effects to use."""

import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import httpx
from tests.support.server.control_plane import client_of
from tests.support.server.fleet import FleetSetup, fleet_setup_on

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import EffectDefinition, EffectSettings
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.tenants.model import ALL_SCOPES, ApiKey, NewApiKey, new_api_key

PRICE = 5
TOKENS = 100
DRAWN = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "color": 0}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "PREFIX"}},
}
DRAWN_PROPERTIES = [
    {"name": "prefix", "type": "text", "placeholder": "PREFIX", "default": "made"},
    {"name": "width", "type": "integer", "binding": "1.width", "minimum": 16, "maximum": 512},
    {"name": "colour", "type": "seed", "binding": "1.color"},
]


def png(width: int = 8, colour: int = 0, *, height: int = 1) -> bytes:
    """A picture; a different one for each colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes([colour]) * width) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@dataclass
class Customer:
    """A user who calls the public API with a key."""

    client: httpx.AsyncClient
    tenant_id: UUID
    user_id: UUID
    key: str

    async def upload(self, data: bytes | None = None, **changes: Any) -> str:
        data = png() if data is None else data
        body = {"filename": "cat.png", "content_type": "image/png", "size": len(data), **changes}
        announced = await self.client.post("/api/videos/uploads", json=body)
        assert announced.status_code == 201, announced.text
        slot = announced.json()["upload"]
        await put_object(self.client, slot["url"], slot["headers"], data)
        file_id: str = announced.json()["file_id"]
        return file_id

    async def video(self, data: bytes | None = None, **changes: Any) -> str:
        file_id = await self.upload(data, **changes)
        linked = await self.client.post("/api/videos", json={"file_id": file_id})
        assert linked.status_code in (200, 201), linked.text
        video_id: str = linked.json()["id"]
        return video_id

    async def submit(self, effect: EffectDefinition, **changes: Any) -> httpx.Response:
        wait = changes.pop("wait", None)
        body = {"effect_id": str(effect.id), **changes}
        return await self.client.post(
            "/api/ai-jobs", json=body, params={"wait": wait} if wait else None
        )

    async def job(self, effect: EffectDefinition, **changes: Any) -> str:
        made = await self.submit(effect, **changes)
        assert made.status_code == 201, made.text
        job_id: str = made.json()["id"]
        return job_id

    async def get(self, path: str, **params: Any) -> dict[str, Any]:
        answer = await self.client.get(f"/api/{path}", params=params)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def balance(self) -> int:
        found: int = (await self.get("wallet"))["balance"]
        return found


async def put_object(
    client: httpx.AsyncClient, url: str, headers: dict[str, str], data: bytes
) -> None:
    """Uploads to the folder through the control plane, and to S3 directly."""
    if url.startswith(str(client.base_url)):
        answer = await client.put(url, content=data, headers=headers)
    else:
        async with httpx.AsyncClient() as direct:
            answer = await direct.put(url, content=data, headers=headers)
    assert answer.status_code in (200, 201), answer.text


@dataclass
class EffectSetup:
    """A fleet with two effects: `invert` needs an image, and `draw` needs none."""

    fleet_setup: FleetSetup
    stack: AsyncExitStack
    effects: dict[str, EffectDefinition] = field(default_factory=dict)

    @property
    def plane(self) -> ControlPlane:
        return self.fleet_setup.plane

    @property
    def draw(self) -> EffectDefinition:
        return self.effects["draw"]

    @property
    def invert(self) -> EffectDefinition:
        return self.effects["invert"]

    async def set_up(self) -> None:
        made = await self.fleet_setup.register_workflow(
            "draw", document=DRAWN, properties=DRAWN_PROPERTIES
        )
        assert made.status_code == 201, made.text
        await self.fleet_setup.assign("invert", "draw")
        for slug in ("invert", "draw"):
            await self.publish(slug)

    async def publish(
        self, slug: str, workflow: str | None = None, **settings: Any
    ) -> EffectDefinition:
        given = {"price_tokens": PRICE, "is_published": True, **settings}
        async with self.plane.central.transaction() as tx:
            made = await catalog.create_effect(
                tx,
                effect_id=uuid4(),
                slug=slug,
                workflow=await catalog.workflow_by_slug(tx, workflow or slug),
                settings=EffectSettings(**given),
                now=self.plane.clock(),
            )
        self.effects[slug] = made
        return made

    async def change(self, effect: EffectDefinition, **settings: Any) -> None:
        async with self.plane.central.transaction() as tx:
            await catalog.update_effect(tx, effect, replace(effect.settings, **settings))

    async def customer(
        self, tenant_id: UUID | None = None, *, tokens: int = TOKENS, **key: Any
    ) -> Customer:
        """A new user, of a new tenant unless one is given."""
        tenant_id = tenant_id or await self._tenant()
        user_id, now = uuid4(), self.plane.clock()
        pool = await self.plane.context.pool_of(tenant_id)
        async with pool.transaction() as tx:
            await tenants.create_user(tx, user_id=user_id, tenant_id=tenant_id, now=now)
            if tokens:
                await ledger.credit(tx, tenant_id, user_id, tokens, f"pay-{user_id}", now=now)
        text, _ = await self.key(tenant_id, user_id, **key)
        client = await self.stack.enter_async_context(client_of(self.plane, text))
        return Customer(client, tenant_id, user_id, text)

    async def key(
        self,
        tenant_id: UUID,
        user_id: UUID,
        *,
        scopes: Any = ALL_SCOPES,
        expires_at: datetime | None = None,
    ) -> tuple[str, ApiKey]:
        text = new_api_key()
        new = NewApiKey(uuid4(), text, tenant_id, user_id, "test", scopes, expires_at)
        async with self.plane.central.transaction() as tx:
            return text, await tenants.create_key(tx, new, now=self.plane.clock())

    async def _tenant(self) -> UUID:
        tenant_id = uuid4()
        async with self.plane.central.transaction() as tx:
            await tenants.create_tenant(
                tx,
                tenant_id=tenant_id,
                name="Ada & Co",
                pool=await tenants.emptiest_pool(tx, self.plane.pools),
                now=self.plane.clock(),
            )
        return tenant_id

    async def work(self, data: bytes = b"made") -> None:
        """A worker leases and completes one waiting job."""
        async with self.fleet_setup.worker(f"w-{uuid4().hex[:8]}") as worker:
            job = await worker.job()
            done = await worker.deliver(job, data)
            assert done.status_code == 200, done.text

    async def fail(self, error: str = "RuntimeError: out of memory") -> None:
        async with self.fleet_setup.worker(f"w-{uuid4().hex[:8]}") as worker:
            done = await worker.call_for(await worker.job(), "fail", error=error)
            assert done.status_code == 200, done.text


@asynccontextmanager
async def effect_setup_on(plane: ControlPlane) -> AsyncIterator[EffectSetup]:
    async with fleet_setup_on(plane) as fleet_setup, AsyncExitStack() as stack:
        effect_setup = EffectSetup(fleet_setup, stack)
        await effect_setup.set_up()
        yield effect_setup
