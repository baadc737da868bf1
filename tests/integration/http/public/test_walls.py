"""The walls between tenants, between users, and between the faces of the API.

Every route of the API's document is tried, so that a new one stands behind the same walls or fails here.
"""

import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest
from tests.planekit import ADMIN_KEY, client_of
from tests.planekit.customers import Customer, Shop, png

from comfyfleet.http.app import create_app
from comfyfleet.kernel.clock import utc_now
from comfyfleet.tenants.keys import service as keys

FACES = ("/api/admin/", "/api/worker/")
# Graphs are their tenant's, not one user's, and runs need more to be owned: their own tests try
# strangers on them (test_public_graphs.py, test_public_pipelines.py). Keys are tried on them here, too.
RUNS = ("/api/graph", "/api/pipeline")
NOBODYS = str(UUID(int=1))
# What all customers see: there is nothing of anybody's behind it.
EVERYBODYS = {"effect_id"}


@dataclass(frozen=True)
class Route:
    method: str
    path: str

    @property
    def names(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.path)

    def filled(self, ids: dict[str, str]) -> str:
        return self.path.format(**ids)


def routes_of(shop: Shop) -> Iterator[Route]:
    for path, methods in create_app(shop.plane).openapi()["paths"].items():
        for method in methods:
            if path.startswith("/api/"):
                yield Route(method.upper(), path)


def customers_routes(shop: Shop, *, but: tuple[str, ...] = RUNS) -> list[Route]:
    return [each for each in routes_of(shop) if not each.path.startswith((*FACES, *but))]


@dataclass
class Estate:
    """All that a customer can own, one of each."""

    owner: Customer
    ids: dict[str, str]
    file_id: str
    delivery_id: str

    async def seen(self) -> list[Any]:
        """What nobody else may change."""
        job = await self.owner.get(f"ai-jobs/{self.ids['job_id']}")
        batch = await self.owner.get(f"ai-jobs/batches/{self.ids['batch_id']}")
        keys_ = (await self.owner.get("keys"))["keys"]
        return [
            (job["status"], batch["counts"], await self.owner.balance()),
            [(each["id"], each["revoked_at"]) for each in keys_],
            (await self.owner.get("webhooks"))["webhooks"],
            [each["id"] for each in (await self.owner.get("ai-jobs"))["jobs"]],
        ]


@pytest.fixture
async def estate(shop: Shop, ada: Customer) -> Estate:
    hook = await ada.client.post("/api/webhooks", json={"url": "https://shop.example/hook"})
    hook_id = hook.json()["id"]
    await ada.client.delete(f"/api/ai-jobs/{await ada.job(shop.draw)}")
    (delivery,) = (await ada.get(f"webhooks/{hook_id}/deliveries"))["deliveries"]
    video_id = await ada.video()
    batch = await ada.client.post(
        "/api/ai-jobs/batches", json={"effect_id": str(shop.draw.id), "items": [{}]}
    )
    key = await ada.client.post("/api/keys", json={"name": "second"})
    ids = {
        "video_id": video_id,
        "job_id": await ada.job(shop.invert, video_id=video_id),
        "batch_id": batch.json()["id"],
        "webhook_id": hook_id,
        "key_id": key.json()["id"],
        "effect_id": str(shop.draw.id),
    }
    return Estate(ada, ids, await ada.upload(png(colour=9)), delivery["id"])


async def test_every_id_is_its_owners_alone(shop: Shop, estate: Estate) -> None:
    before = await estate.seen()
    others = [await shop.customer(), await shop.customer(estate.owner.tenant_id)]
    with_ids = [
        each for each in customers_routes(shop) if each.names and set(each.names) - EVERYBODYS
    ]
    assert len(with_ids) >= 10
    for route in with_ids:
        assert set(route.names) <= estate.ids.keys(), f"{route}: own one of these in the test"
        for other in others:
            answer = await other.client.request(route.method, route.filled(estate.ids))
            assert answer.status_code == 404, (route, answer.text)
            assert answer.json()["error"]["code"] == "not_found"
    assert await estate.seen() == before


async def test_ids_in_bodies_and_cursors_are_their_owners_alone(shop: Shop, estate: Estate) -> None:
    ids, effect_id = estate.ids, str(shop.invert.id)
    before = await estate.seen()
    styled = await shop_with_two_pictures(shop)
    for other in (await shop.customer(), await shop.customer(estate.owner.tenant_id)):
        own = await other.video(png(colour=3))
        calls: list[tuple[str, dict[str, Any]]] = [
            ("/api/videos", {"file_id": estate.file_id}),
            ("/api/ai-jobs", {"effect_id": effect_id, "video_id": ids["video_id"]}),
            (
                "/api/ai-jobs/batches",
                {"effect_id": effect_id, "items": [{"video_id": ids["video_id"]}]},
            ),
            (
                "/api/ai-jobs",
                {
                    "effect_id": styled,
                    "video_id": own,
                    "properties": {"style": ids["video_id"]},
                },
            ),
        ]
        for path, body in calls:
            answer = await other.client.post(path, json=body)
            assert answer.status_code == 404, (path, body, answer.text)
        for path, cursor in (
            ("/api/videos", ids["video_id"]),
            ("/api/ai-jobs", ids["job_id"]),
        ):
            answer = await other.client.get(path, params={"before": cursor})
            assert answer.status_code == 404, (path, answer.text)
        ours = {"effect_id": styled, "video_id": own, "properties": {"style": own}}
        assert (await other.client.post("/api/ai-jobs", json=ours)).status_code == 201
        listed = (await other.get("videos"))["videos"]
        assert [each["id"] for each in listed] == [own]
    assert await estate.seen() == before


async def shop_with_two_pictures(shop: Shop) -> str:
    """An effect that takes a second picture, as a property."""
    document = {
        "1": {"class_type": "LoadImage", "inputs": {"image": "a.png"}},
        "2": {"class_type": "LoadImage", "inputs": {"image": "b.png"}},
        "3": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    }
    properties = [
        {"name": "input", "type": "image", "binding": "1.image"},
        {"name": "style", "type": "image", "binding": "2.image"},
    ]
    made = await shop.yard.register_workflow("styled", document=document, properties=properties)
    assert made.status_code == 201, made.text
    return str((await shop.publish("styled")).id)


async def test_only_a_good_key_of_a_customer_opens_a_customers_route(
    shop: Shop, estate: Estate
) -> None:
    owner = estate.owner
    soon = utc_now() + timedelta(seconds=0.01)
    expired, _ = await shop.key(owner.tenant_id, owner.user_id, expires_at=soon)
    revoked, key = await shop.key(owner.tenant_id, owner.user_id)
    async with shop.plane.central.begin() as tx:
        await keys.revoke(tx, owner.tenant_id, owner.user_id, key.id, now=utc_now())
    of_worker = (await shop.yard.register("w1")).json()["token"]
    before = await estate.seen()
    wanted = [(None, 401), ("cf_nonsense", 401), (expired, 401), (revoked, 401)]
    wanted += [(ADMIN_KEY, 403), (of_worker, 403)]
    async with AsyncExitStack() as stack:
        for text, status in wanted:
            client = await stack.enter_async_context(client_of(shop.plane, text))
            for route in customers_routes(shop, but=()):
                ids = {name: estate.ids.get(name, NOBODYS) for name in route.names}
                answer = await client.request(route.method, route.filled(ids))
                assert answer.status_code == status, (route, text, answer.text)
    assert await estate.seen() == before


async def test_a_customers_key_opens_nothing_of_operators_or_workers(
    shop: Shop, estate: Estate
) -> None:
    for route in routes_of(shop):
        if not route.path.startswith(FACES) or route.path.endswith("/register"):
            continue
        ids = dict.fromkeys(route.names, "1")
        bodies: tuple[dict[str, Any] | None, ...] = (None, {})
        for body in bodies:
            answer = await estate.owner.client.request(route.method, route.filled(ids), json=body)
            assert answer.status_code in (401, 403), (route, answer.text)


async def test_a_key_without_the_scope_is_told_so(shop: Shop, estate: Estate) -> None:
    owner = estate.owner
    text, _ = await shop.key(owner.tenant_id, owner.user_id, scopes=["read"])
    async with client_of(shop.plane, text) as reader:
        for route in customers_routes(shop):
            if route.method == "GET" and not route.path.endswith(("/keys", "/events")):
                answer = await reader.get(route.filled(estate.ids))
                assert answer.status_code == 200, (route, answer.text)
            elif route.method != "GET":
                answer = await reader.request(route.method, route.filled(estate.ids))
                assert answer.status_code == 403, (route, answer.text)


async def test_what_is_one_tenants_reaches_no_other_in_answers(shop: Shop, estate: Estate) -> None:
    """Whatever a stranger can list, nothing of the estate is in it."""
    stranger = await shop.customer()
    private = {each for name, each in estate.ids.items() if name not in EVERYBODYS}
    private |= {estate.file_id, estate.delivery_id, str(estate.owner.user_id)}
    for route in customers_routes(shop):
        if route.method == "GET" and not route.names:
            answer: httpx.Response = await stranger.client.get(route.path)
            assert answer.status_code == 200
            assert not [each for each in private if each in answer.text], route
