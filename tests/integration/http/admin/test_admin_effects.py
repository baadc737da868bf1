"""Effects as operators make them, and what a new version of a workflow may not do to them."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.support.server.fleet import PROPERTIES, FleetSetup, fleet_setup_on

from comfyfleet.server.app import ControlPlane

EFFECT = {
    "slug": "negative",
    "workflow_slug": "invert",
    "price_tokens": 7,
    "overrides": {"prefix": "negative"},
    "published": True,
}


@pytest.fixture
async def fleet_setup(plane: ControlPlane) -> AsyncIterator[FleetSetup]:
    async with fleet_setup_on(plane) as fleet_setup:
        yield fleet_setup


async def make(fleet_setup: FleetSetup, **changes: Any) -> httpx.Response:
    return await fleet_setup.admin.post("/api/admin/effects", json={**EFFECT, **changes})


async def seen(fleet_setup: FleetSetup) -> dict[str, Any]:
    found: dict[str, Any] = (await fleet_setup.admin.get("/api/admin/effects/negative")).json()
    return found


async def test_an_effect_is_made_from_a_workflow(fleet_setup: FleetSetup) -> None:
    answer = await make(fleet_setup, title="Negative", media_types=["image/png"])
    assert answer.status_code == 201
    assert answer.json().keys() == {"id", "slug"}
    shown = await seen(fleet_setup)
    assert shown["id"] == answer.json()["id"]
    wanted = {**EFFECT, "title": "Negative", "media_types": ["image/png"], "stage": "production"}
    assert {name: shown[name] for name in wanted} == wanted
    assert (await fleet_setup.admin.get("/api/admin/effects")).json()["effects"] == [shown]
    assert (await fleet_setup.audited("create_effect"))[0]["subject"] == "effect:negative"


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
    fleet_setup: FleetSetup, changes: dict[str, Any], status: int
) -> None:
    answer = await make(fleet_setup, **changes)
    assert answer.status_code == status, answer.text
    assert (await fleet_setup.admin.get("/api/admin/effects")).json()["effects"] == []


async def test_a_slug_is_taken_once(fleet_setup: FleetSetup) -> None:
    await make(fleet_setup)
    assert (await make(fleet_setup)).status_code == 409


async def test_only_what_is_named_is_changed(fleet_setup: FleetSetup) -> None:
    await make(fleet_setup, max_upload_bytes=1000)
    path = "/api/admin/effects/negative"
    changed = (await fleet_setup.admin.patch(path, json={"price_tokens": 9})).json()
    assert (changed["price_tokens"], changed["published"]) == (9, True)
    assert changed["overrides"] == EFFECT["overrides"]
    assert changed["max_upload_bytes"] == 1000
    freed = (await fleet_setup.admin.patch(path, json={"max_upload_bytes": None})).json()
    assert freed["max_upload_bytes"] is None
    assert (await fleet_setup.admin.patch(path, json={"overrides": {"x": 1}})).status_code == 422


async def test_an_effect_is_withdrawn_and_published(fleet_setup: FleetSetup) -> None:
    await make(fleet_setup)
    path = "/api/admin/effects/negative"
    assert (await fleet_setup.admin.post(f"{path}/withdraw")).json()["published"] is False
    assert (await fleet_setup.admin.post(f"{path}/publish")).json()["published"] is True
    assert (await fleet_setup.admin.post("/api/admin/effects/nothing/publish")).status_code == 404
    assert (await fleet_setup.admin.get("/api/admin/effects/a%00b")).status_code == 404
    assert await fleet_setup.audited("withdraw")


async def test_a_version_that_breaks_a_published_effect_is_refused(fleet_setup: FleetSetup) -> None:
    await make(fleet_setup)
    without = [each for each in PROPERTIES if each["name"] != "prefix"]
    refused = await fleet_setup.register_workflow("invert", properties=without)
    assert refused.status_code == 409
    assert refused.json()["error"]["details"]["effects"] == ["negative"]
    assert (await fleet_setup.admin.get("/api/admin/workflows/invert")).json()["version"] == 1
    forced = await fleet_setup.register_workflow("invert", properties=without, break_effects=True)
    assert forced.status_code == 201
    assert any("negative" in each for each in forced.json()["warnings"])
    assert (await fleet_setup.admin.post("/api/admin/effects/negative/publish")).status_code == 422


@pytest.mark.parametrize(
    ("face", "why"),
    [
        ({"overrides": {}, "locked": ["prefix"]}, "'prefix', which the effect locks"),
        ({"overrides": {}}, "'prefix', which customers can set"),
    ],
)
async def test_a_property_that_an_effect_locks_or_shows_can_not_be_dropped(
    fleet_setup: FleetSetup, face: dict[str, Any], why: str
) -> None:
    await make(fleet_setup, **face)
    without = [each for each in PROPERTIES if each["name"] != "prefix"]
    refused = await fleet_setup.register_workflow("invert", properties=without)
    assert refused.status_code == 409
    assert why in refused.json()["error"]["message"]
    assert refused.json()["error"]["details"]["effects"] == ["negative"]
    forced = await fleet_setup.register_workflow("invert", properties=without, break_effects=True)
    assert (forced.status_code, why in str(forced.json()["warnings"])) == (201, True)


async def test_a_version_may_break_what_nobody_is_offered(fleet_setup: FleetSetup) -> None:
    await make(fleet_setup, published=False)
    without = [each for each in PROPERTIES if each["name"] != "prefix"]
    assert (await fleet_setup.register_workflow("invert", properties=without)).status_code == 201
    fine = await fleet_setup.admin.post("/api/admin/workflows/invert/activate", json={"version": 1})
    assert fine.status_code == 200
    await fleet_setup.admin.post("/api/admin/effects/negative/publish")
    back = await fleet_setup.admin.post("/api/admin/workflows/invert/activate", json={"version": 2})
    assert back.status_code == 409
