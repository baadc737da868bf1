"""Files that were announced as media, and are none; uploads that change after they were looked at."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import httpx
import pytest
from tests.security.test_picture_bombs import bomb
from tests.support.server.control_plane import ADMIN_KEY, client_of
from tests.support.server.customers import Customer, EffectSetup, png

from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File

PLAYLIST = b"#EXTM3U\n#EXTINF:1,\n../output/video/inverted_00001_.mp4\n#EXT-X-ENDLIST\n"
GRAPH: dict[str, Any] = {
    "name": "given",
    "nodes": [
        {"id": "photo", "type": "input", "value_type": "image"},
        {"id": "run", "type": "workflow", "workflow": "invert"},
        {"id": "out", "type": "output"},
    ],
    "connections": [
        {"from": "photo.value", "to": "run.input"},
        {"from": "run.output", "to": "out.value"},
    ],
}


async def row_of(effect_setup: EffectSetup, customer: Customer, file_id: str) -> File:
    pool = await effect_setup.plane.context.pool_of(customer.tenant_id)
    async with pool.read() as tx:
        return await media.get_file(tx, customer.tenant_id, UUID(file_id))


async def run_with(customer: Customer, value: Any, kind: str = "image") -> httpx.Response:
    node, *rest = GRAPH["nodes"]
    document = {**GRAPH, "nodes": [{**node, "value_type": kind}, *rest]}
    if kind != "image":
        document |= {"nodes": [{**node, "value_type": kind}, rest[1]]}
        document |= {"connections": [{"from": "photo.value", "to": "out.value"}]}
    graph = await customer.client.post("/api/graphs", json=document)
    assert graph.is_success, graph.text
    path = f"/api/graphs/{graph.json()['id']}/runs"
    return await customer.client.post(path, json={"inputs": {"photo": value}})


async def test_a_playlist_that_was_never_linked_is_no_input_of_a_graph(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    file_id = await ada.upload(PLAYLIST, filename="x.m3u8", content_type="video/mp4")
    refused = await run_with(ada, {"file_id": file_id}, "video")
    assert refused.status_code == 422, refused.text
    assert "an unknown type" in refused.text
    assert (await row_of(effect_setup, ada, file_id)).is_announced


async def test_nor_of_a_job_of_an_operator_or_a_customer_nor_media(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    file_id = await ada.upload(PLAYLIST, filename="x.m3u8", content_type="image/png")
    async with client_of(effect_setup.plane, ADMIN_KEY) as operator:
        for named in ("files", "properties"):
            body = {"workflow_slug": "invert", named: {"input": file_id}}
            refused = await operator.post(
                "/api/admin/jobs", json={**body, "tenant_id": str(ada.tenant_id)}
            )
            assert refused.status_code == 422, refused.text
    linked = await ada.client.post("/api/videos", json={"file_id": file_id})
    assert linked.status_code == 422
    items = [{"properties": {}, "video_id": file_id}]
    batch = {"effect_id": str(effect_setup.invert.id), "items": items}
    assert (await ada.client.post("/api/ai-jobs/batches", json=batch)).status_code in (404, 422)
    assert (await ada.submit(effect_setup.invert, video_id=file_id)).status_code == 404
    assert (await row_of(effect_setup, ada, file_id)).is_announced


async def test_a_file_that_is_not_linked_but_good_is_taken_under_its_true_ending(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    file_id = await ada.upload(png(), filename="x.m3u8")
    started = await run_with(ada, {"file_id": file_id})
    assert started.status_code == 201, started.text
    row = await row_of(effect_setup, ada, file_id)
    assert (row.mime_type, row.content_hash is not None) == ("image/png", True)
    assert row.path.endswith(".png")
    assert row.filename == "x.m3u8"
    async with effect_setup.fleet_setup.worker("w") as worker:
        (asset,) = (await worker.job())["assets"]
    assert asset["filename"] == "x.png"


async def test_a_picture_bomb_is_refused_at_every_door(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    file_id = await ada.upload(bomb(10_000))
    linked = await ada.client.post("/api/videos", json={"file_id": file_id})
    assert (linked.status_code, linked.json()["error"]["code"]) == (413, "limit_exceeded")
    assert "10000x10000" in linked.text
    assert (await run_with(ada, {"file_id": file_id})).status_code == 422


async def test_an_upload_url_writes_nothing_any_more_once_the_file_is_linked(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    data = png()
    body = {"filename": "cat.png", "content_type": "image/png", "size": len(data)}
    announced = (await ada.client.post("/api/videos/uploads", json=body)).json()
    slot = announced["upload"]
    await ada.client.put(slot["url"], content=data, headers=slot["headers"])
    video = await ada.client.post("/api/videos", json={"file_id": announced["file_id"]})
    page = b"<html>".ljust(len(data))
    await ada.client.put(slot["url"], content=page, headers=slot["headers"])
    assert (await ada.client.get(video.json()["original_file_url"])).content == data
    again = await ada.client.post("/api/videos", json={"file_id": announced["file_id"]})
    assert (await ada.client.get(again.json()["original_file_url"])).content == data


async def test_the_same_content_of_two_users_is_two_files_under_their_own_names(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    colleague = await effect_setup.customer(ada.tenant_id)
    mine, theirs = await ada.upload(filename="a.png"), await colleague.upload(filename="b.png")
    for customer, file_id in ((ada, mine), (colleague, theirs)):
        linked = await customer.client.post("/api/videos", json={"file_id": file_id})
        assert linked.status_code == 201
    rows = [await row_of(effect_setup, ada, mine), await row_of(effect_setup, ada, theirs)]
    assert [each.filename for each in rows] == ["a.png", "b.png"]
    assert rows[0].path != rows[1].path


async def test_a_file_taken_by_two_doors_at_once_is_one_file(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    file_id = await ada.upload()
    link = ada.client.post("/api/videos", json={"file_id": file_id})
    runs = [run_with(ada, {"file_id": file_id}) for _ in range(3)]
    answers = await asyncio.gather(link, *runs)
    assert [each.status_code for each in answers] == [201] * 4
    await effect_setup.plane.context.deferred.flush()
    kept = [key async for key in effect_setup.plane.store.keys(f"tenants/{ada.tenant_id}/")]
    assert kept == [(await row_of(effect_setup, ada, file_id)).path]


@pytest.mark.parametrize("kind", ["text", "choice"])
async def test_no_text_of_a_customer_names_a_file_of_the_backend(
    effect_setup: EffectSetup, kind: str
) -> None:
    document = {
        "1": {"class_type": "LoadImage", "inputs": {"image": "a.png"}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "x"}},
    }
    named: dict[str, Any] = {"name": "picture", "type": kind, "binding": "1.image"}
    if kind == "choice":
        named |= {"choices": ["a.png", "softened_00001_.png [output]"]}
    made = await effect_setup.fleet_setup.register_workflow(
        "open", document=document, properties=[named]
    )
    assert made.status_code == 422, made.text
    assert "names a file" in made.text
    placed = {"name": "picture", "type": "text", "placeholder": "a.png"}
    made = await effect_setup.fleet_setup.register_workflow(
        "open", document=document, properties=[placed]
    )
    assert made.status_code == 422, made.text


async def test_an_upload_in_chunks_is_read_no_further_than_its_told_length(ada: Customer) -> None:
    said = {"filename": "cat.png", "content_type": "image/png", "size": 4}
    announced = await ada.client.post("/api/videos/uploads", json=said)
    slot, sent = announced.json()["upload"], 0

    async def without_an_end() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield b"more"

    # Chunks decide where a body ends, whatever length is told besides.
    headers = {**slot["headers"], "Content-Length": "4", "Transfer-Encoding": "chunked"}
    refused = await ada.client.put(slot["url"], content=without_an_end(), headers=headers)
    assert refused.status_code == 400
    assert "Content-Length is 4" in refused.text
    assert sent < 10
