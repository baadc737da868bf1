"""Effects as operators make them, and what a new version of a workflow may not do to them."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.support.server.fleet import PROPERTIES, Yard, yard_on

from comfyfleet.server.app import ControlPlane

EFFECT = {
    "slug": "negative",
    "workflow_slug": "invert",
    "price_tokens": 7,
    "overrides": {"prefix": "negative"},
    "published": True,
}


@pytest.fixture
async def yard(plane: ControlPlane) -> AsyncIterator[Yard]:
    async with yard_on(plane) as yard:
        yield yard


async def make(yard: Yard, **changes: Any) -> httpx.Response:
    return await yard.admin.post("/api/admin/effects", json={**EFFECT, **changes})


async def seen(yard: Yard) -> dict[str, Any]:
    found: dict[str, Any] = (await yard.admin.get("/api/admin/effects/negative")).json()
    return found


async def test_an_effect_is_made_from_a_workflow(yard: Yard) -> None:
    answer = await make(yard, title="Negative", media_types=["image/png"])
    assert answer.status_code == 201
    assert answer.json().keys() == {"id", "slug"}
    shown = await seen(yard)
    assert shown["id"] == answer.json()["id"]
    wanted = {**EFFECT, "title": "Negative", "media_types": ["image/png"], "stage": "production"}
    assert {name: shown[name] for name in wanted} == wanted
    assert (await yard.admin.get("/api/admin/effects")).json()["effects"] == [shown]
    assert (await yard.audited("create_effect"))[0]["subject"] == "effect:negative"


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"workflow_slug": "nothing"}, 422),
        ({"slug": "No Slug"}, 422),
        ({"price_tokens": -1}, 422),
        ({"overrides": {"nothing": 1}}, 422),
        ({"overrides": {"prefix": 5}}, 422),
        ({"overrides": {"prefix": "a\0b"}}, 422),
        ({"media_types": ["video/mp4"]}, 422),
        ({"preview_url": "javascript:alert(1)"}, 422),
        ({"title": "a\0b"}, 422),
        ({"provider": "local"}, 422),
    ],
    ids=str,
)
async def test_an_effect_that_does_not_fit_its_workflow_is_refused(
    yard: Yard, changes: dict[str, Any], status: int
) -> None:
    answer = await make(yard, **changes)
    assert answer.status_code == status, answer.text
    assert (await yard.admin.get("/api/admin/effects")).json()["effects"] == []


async def test_a_slug_is_taken_once(yard: Yard) -> None:
    await make(yard)
    assert (await make(yard)).status_code == 409


async def test_only_what_is_named_is_changed(yard: Yard) -> None:
    await make(yard, max_upload_bytes=1000)
    path = "/api/admin/effects/negative"
    changed = (await yard.admin.patch(path, json={"price_tokens": 9})).json()
    assert (changed["price_tokens"], changed["published"]) == (9, True)
    assert changed["overrides"] == EFFECT["overrides"]
    assert changed["max_upload_bytes"] == 1000
    freed = (await yard.admin.patch(path, json={"max_upload_bytes": None})).json()
    assert freed["max_upload_bytes"] is None
    assert (await yard.admin.patch(path, json={"overrides": {"x": 1}})).status_code == 422


async def test_an_effect_is_withdrawn_and_published(yard: Yard) -> None:
    await make(yard)
    path = "/api/admin/effects/negative"
    assert (await yard.admin.post(f"{path}/withdraw")).json()["published"] is False
    assert (await yard.admin.post(f"{path}/publish")).json()["published"] is True
    assert (await yard.admin.post("/api/admin/effects/nothing/publish")).status_code == 404
    assert (await yard.admin.get("/api/admin/effects/a%00b")).status_code == 404
    assert await yard.audited("withdraw")


async def test_a_version_that_breaks_a_published_effect_is_refused(yard: Yard) -> None:
    await make(yard)
    without = [each for each in PROPERTIES if each["name"] != "prefix"]
    refused = await yard.register_workflow("invert", properties=without)
    assert refused.status_code == 409
    assert refused.json()["error"]["details"]["effects"] == ["negative"]
    assert (await yard.admin.get("/api/admin/workflows/invert")).json()["version"] == 1
    forced = await yard.register_workflow("invert", properties=without, break_effects=True)
    assert forced.status_code == 201
    assert any("negative" in each for each in forced.json()["warnings"])
    assert (await yard.admin.post("/api/admin/effects/negative/publish")).status_code == 422


@pytest.mark.parametrize(
    ("face", "why"),
    [
        ({"overrides": {}, "locked": ["prefix"]}, "'prefix', which it locks"),
        ({"overrides": {}}, "'prefix', which customers may set"),
    ],
)
async def test_a_property_that_an_effect_locks_or_shows_can_not_be_dropped(
    yard: Yard, face: dict[str, Any], why: str
) -> None:
    await make(yard, **face)
    without = [each for each in PROPERTIES if each["name"] != "prefix"]
    refused = await yard.register_workflow("invert", properties=without)
    assert refused.status_code == 409
    assert why in refused.json()["error"]["message"]
    assert refused.json()["error"]["details"]["effects"] == ["negative"]
    forced = await yard.register_workflow("invert", properties=without, break_effects=True)
    assert (forced.status_code, why in str(forced.json()["warnings"])) == (201, True)


async def test_a_version_may_break_what_nobody_is_offered(yard: Yard) -> None:
    await make(yard, published=False)
    without = [each for each in PROPERTIES if each["name"] != "prefix"]
    assert (await yard.register_workflow("invert", properties=without)).status_code == 201
    fine = await yard.admin.post("/api/admin/workflows/invert/activate", json={"version": 1})
    assert fine.status_code == 200
    await yard.admin.post("/api/admin/effects/negative/publish")
    back = await yard.admin.post("/api/admin/workflows/invert/activate", json={"version": 2})
    assert back.status_code == 409
