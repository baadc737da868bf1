"""Uploads in parts: what has arrived is not lost with the connection. On a folder and on S3."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.databases.s3 import RunningS3, running_s3
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on, png

from comfyfleet.client import Client
from comfyfleet.server import ingest

SMALL_PART = 16


@pytest.fixture(scope="module")
def s3() -> Iterator[RunningS3]:
    with running_s3() as running:
        yield running


@pytest.fixture(params=["folder", "s3"])
async def effect_setup(
    request: pytest.FixtureRequest,
    sqlite_databases: Databases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[EffectSetup]:
    monkeypatch.setattr(ingest, "PART_BYTES_USUAL", SMALL_PART)
    settings: dict[str, Any] = {}
    if request.param == "s3":
        running: RunningS3 = request.getfixturevalue("s3")
        for name, value in running.env.items():
            monkeypatch.setitem(os.environ, name, value)
        settings["storage_url"] = running.url_of(tmp_path.name)
    async with (
        plane_on(sqlite_databases, tmp_path, **settings) as plane,
        effect_setup_on(plane) as effect_setup,
    ):
        yield effect_setup


async def announce(ada: Customer, data: bytes, **changes: Any) -> dict[str, Any]:
    body = {"filename": "parts", "content_type": "image/png", "size": len(data), "in_parts": True}
    answer = await ada.client.post("/api/videos/uploads", json={**body, **changes})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def put(ada: Customer, part: dict[str, Any], data: bytes) -> int:
    """Sends a part to the folder through the control plane, to S3 by itself."""
    slot, piece = part["upload"], data[part["start"] : part["start"] + part["size"]]
    if slot["url"].startswith(str(ada.client.base_url)):
        return (
            await ada.client.put(slot["url"], content=piece, headers=slot["headers"])
        ).status_code
    async with httpx.AsyncClient() as store:
        return (await store.put(slot["url"], content=piece, headers=slot["headers"])).status_code


async def test_an_upload_goes_on_after_a_break(effect_setup: EffectSetup, ada: Customer) -> None:
    data = png(width=40)
    announced = await announce(ada, data)
    parts = announced["parts"]
    assert [each["number"] for each in parts] == list(range(1, len(parts) + 1))
    assert sum(each["size"] for each in parts) == len(data)
    assert len(parts) > 2
    for each in (parts[-1], parts[0]):
        assert await put(ada, each, data) == 200
    path = f"videos/uploads/{announced['file_id']}"
    state = await ada.get(path)
    assert (state["is_whole"], state["size"]) == (False, len(data))
    assert state["received_bytes"] == parts[0]["size"] + parts[-1]["size"]
    missing = [each for each in state["parts"] if each["upload"]]
    assert [each["number"] for each in missing] == [each["number"] for each in parts[1:-1]]
    early = await ada.client.post("/api/videos", json={"file_id": announced["file_id"]})
    assert early.status_code == 422, early.text
    for each in missing:
        assert await put(ada, each, data) == 200
    assert (await ada.get(path))["is_whole"]
    linked = await ada.client.post("/api/videos", json={"file_id": announced["file_id"]})
    assert linked.status_code == 201, linked.text
    original = linked.json()["original_file_url"]
    assert await downloaded(ada, original) == data
    await effect_setup.plane.context.deferred.flush()
    prefix = f"tenants/{ada.tenant_id}/uploads/"
    assert [each async for each in effect_setup.plane.store.keys(prefix)] == []
    again = await ada.client.post("/api/videos", json={"file_id": announced["file_id"]})
    assert (again.status_code, again.json()["id"]) == (200, linked.json()["id"])


async def downloaded(ada: Customer, url: str) -> bytes:
    if url.startswith(str(ada.client.base_url)):
        return (await ada.client.get(url)).content
    async with httpx.AsyncClient() as store:
        return (await store.get(url)).content


async def test_a_part_has_its_size_and_an_upload_its_owner(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    data = png()
    announced = await announce(ada, data)
    assert await put(ada, {**announced["parts"][0], "size": 3}, data) >= 400
    other = await effect_setup.customer(ada.tenant_id)
    path = f"/api/videos/uploads/{announced['file_id']}"
    assert (await other.client.get(path)).status_code == 404


async def test_a_key_that_may_only_read_gets_no_url_to_write_to(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    path = f"/api/videos/uploads/{(await announce(ada, png()))['file_id']}"
    key, _ = await effect_setup.key(ada.tenant_id, ada.user_id, scopes=["read"])
    answer = await ada.client.get(path, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 403, answer.text
    assert "signature" not in answer.text


async def test_a_large_file_has_few_parts() -> None:
    size = 2 * 1024**3
    assert -(-size // ingest.part_bytes_for(size)) <= ingest.PARTS_MAX


async def test_a_whole_upload_is_known_to_be_whole(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    file_id = (await announce(ada, png(), in_parts=False))["file_id"]
    state = await ada.get(f"videos/uploads/{file_id}")
    assert (state["is_whole"], state["received_bytes"], state["parts"]) == (False, 0, [])


async def test_the_client_sends_large_files_in_parts(
    effect_setup: EffectSetup, ada: Customer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if effect_setup.plane.store.disk == "s3":
        pytest.skip("the client's transport of this test reaches the control plane only")
    monkeypatch.setattr("comfyfleet.client.client.IN_PARTS_BYTES", SMALL_PART)
    picture, told = tmp_path / "cat.png", []
    picture.write_bytes(png(width=40))
    base = str(ada.client.base_url)
    async with Client(base, ada.key, transport=ada.client._transport) as client:
        media = await client.upload(picture, progress=lambda sent, _: told.append(sent))
        by_bytes = await client.upload(png(width=41), filename="dog.png")
    assert told == sorted(told)
    assert told[-1] == len(png(width=40))
    assert await downloaded(ada, media.original_file_url or "") == png(width=40)
    assert await downloaded(ada, by_bytes.original_file_url or "") == png(width=41)
