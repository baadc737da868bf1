"""What one fleet's workers say of their backends changes nothing for another fleet."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on

from comfyfleet.api.worker import object_info_hash
from comfyfleet.server.fleets import object_info
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet
from comfyfleet.server.maintenance.sweeps import sync_object_infos

TRUE = json.dumps({"Invert": {"input": {}}}).encode()
FORGED = json.dumps({"Other2": {"input": {}}}).encode()
HASH = object_info_hash(json.loads(TRUE))


@pytest.fixture
async def fleet_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[FleetSetup]:
    """With a fleet `gpu` whose object_info is known, and a fleet `rogue`."""
    async with plane_on(databases, tmp_path) as plane, fleet_setup_on(plane) as fleet_setup:
        slot = await slot_for(fleet_setup, "w1", HASH)
        assert (await put(fleet_setup, slot, TRUE)).is_success
        await sync_object_infos(plane)
        assert await known(fleet_setup) == json.loads(TRUE)
        made = await fleet_setup.admin.post("/api/admin/fleets", json={"slug": "rogue"})
        fleet_setup.secret = made.json()["secret"]
        yield fleet_setup


async def slot_for(
    fleet_setup: FleetSetup, worker_id: str, content_hash: str, **more: Any
) -> dict[str, Any]:
    backend = {"object_info_hash": content_hash, "object_info_size": len(TRUE)}
    joined = await fleet_setup.register(worker_id, backend=backend, **more)
    assert joined.status_code == 200, joined.text
    slot: dict[str, Any] = joined.json()["object_info_upload"]
    return slot


async def put(fleet_setup: FleetSetup, slot: dict[str, Any], data: bytes) -> httpx.Response:
    return await fleet_setup.admin.put(slot["url"], content=data, headers=slot["headers"])


async def fleet_of(fleet_setup: FleetSetup, slug: str = "gpu") -> Fleet:
    async with fleet_setup.plane.central.read() as tx:
        return await fleets.get_fleet(tx, slug, "production")


async def known(fleet_setup: FleetSetup) -> dict[str, Any] | None:
    return await object_info.read_object_info(fleet_setup.plane.store, await fleet_of(fleet_setup))


async def test_a_forged_object_info_reaches_no_other_fleet(fleet_setup: FleetSetup) -> None:
    # What is known under its hash is not asked for again, so there is no place for another.
    assert await slot_for(fleet_setup, "thief", HASH, fleet_slug="rogue") is None
    await sync_object_infos(fleet_setup.plane)
    assert await known(fleet_setup) == json.loads(TRUE)


async def test_a_forged_object_info_is_not_believed_of_its_own_fleet_either(
    fleet_setup: FleetSetup,
) -> None:
    wanted = "0" * 64
    slot = await slot_for(fleet_setup, "thief", wanted, fleet_slug="rogue")
    assert (await put(fleet_setup, slot, FORGED)).is_success
    await sync_object_infos(fleet_setup.plane)
    rogue = await fleet_of(fleet_setup, "rogue")
    assert rogue.object_info_hash is None
    assert await fleet_setup.plane.store.head(object_info.incoming_key(rogue, wanted)) is None


@pytest.mark.parametrize(
    "content_hash", ["a/b/c", "..", "x" * 64, "A" * 64, "0" * 63, "", "0" * 65]
)
async def test_a_hash_that_is_none_is_refused(fleet_setup: FleetSetup, content_hash: str) -> None:
    backend = {"object_info_hash": content_hash, "object_info_size": 2}
    joined = await fleet_setup.register("thief", fleet_slug="rogue", backend=backend)
    assert joined.status_code == 422
    assert "object_info_hash" in joined.text


async def test_the_url_takes_the_announced_size_only(fleet_setup: FleetSetup) -> None:
    slot = await slot_for(fleet_setup, "thief", "1" * 64, fleet_slug="rogue")
    assert (await put(fleet_setup, slot, TRUE + b" ")).status_code >= 400
    large = {"object_info_hash": "1" * 64, "object_info_size": 65 * 1024**2}
    assert (await fleet_setup.register("t2", fleet_slug="rogue", backend=large)).status_code == 422
    unsized = {"object_info_hash": "1" * 64}
    joined = await fleet_setup.register("t3", fleet_slug="rogue", backend=unsized)
    assert joined.json()["object_info_upload"] is None


async def test_what_was_changed_in_the_store_is_not_read(fleet_setup: FleetSetup) -> None:
    await fleet_setup.plane.store.put(
        object_info.object_info_key(HASH), FORGED, object_info.JSON_TYPE
    )
    assert await known(fleet_setup) is None
