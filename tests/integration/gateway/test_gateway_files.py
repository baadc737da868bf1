"""Uploads and views of the gateway: names, ranges, previews, masks, and what is refused."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, MutableMapping
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import PIL.Image
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.gateway import GatewayClients, clients_of

from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.gateway import files as routes
from comfyfleet.server.tenants import service as tenants


def png(color: tuple[int, ...] = (255, 0, 0), mode: str = "RGB") -> bytes:
    buffer = BytesIO()
    PIL.Image.new(mode, (8, 6), color).save(buffer, "PNG")
    return buffer.getvalue()


def opened(response: httpx.Response) -> PIL.Image.Image:
    assert response.status_code == 200, response.text
    return PIL.Image.open(BytesIO(response.content))


@pytest.fixture
async def clients(databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayClients]:
    opened_plane = plane_on(databases, tmp_path, max_picture_pixels=10_000)
    async with opened_plane as plane, clients_of(plane) as clients:
        yield clients


@pytest.fixture
async def sqlite_clients(
    sqlite_databases: Databases, tmp_path: Path
) -> AsyncIterator[GatewayClients]:
    """For what does not depend on the database."""
    opened_plane = plane_on(sqlite_databases, tmp_path, max_picture_pixels=10_000)
    async with opened_plane as plane, clients_of(plane) as clients:
        yield clients


@pytest.fixture
async def ada(sqlite_clients: GatewayClients) -> httpx.AsyncClient:
    return await sqlite_clients.new_client()


async def upload(
    client: httpx.AsyncClient, name: str, content: bytes, **fields: str
) -> httpx.Response:
    files = {"image": (name, content, "image/png")}
    return await client.post("/upload/image", files=files, data=fields)


async def view(
    client: httpx.AsyncClient, name: str, headers: dict[str, str] | None = None, **query: str
) -> httpx.Response:
    params = {"filename": name, "type": "input", **query}
    return await client.get("/view", params=params, headers=headers)


async def objects_of(plane: ControlPlane) -> list[str]:
    return sorted([key async for key in plane.store.keys("tenants/")])


async def test_the_same_bytes_keep_their_name_and_others_get_a_number(
    clients: GatewayClients,
) -> None:
    client = await clients.new_client()
    names = [
        (await upload(client, "a.png", content)).json()["name"]
        for content in (b"1", b"1", b"2", b"2", b"3", b"1")
    ]
    assert names == ["a.png", "a.png", "a (1).png", "a (1).png", "a (2).png", "a.png"]
    assert len(await objects_of(clients.plane)) == 3
    assert (await view(client, "a (2).png")).content == b"3"


async def test_names_differ_by_case_and_signs_of_patterns_mean_themselves(
    clients: GatewayClients,
) -> None:
    client = await clients.new_client()
    names = [
        (await upload(client, name, content)).json()["name"]
        for name, content in (("a_%.png", b"1"), ("A_%.png", b"2"), ("ab%.png", b"3"))
    ]
    assert names == ["a_%.png", "A_%.png", "ab%.png"]


async def test_uploads_of_one_name_at_once_get_names_of_their_own(
    clients: GatewayClients,
) -> None:
    client = await clients.new_client()
    contents = [b"%d" % number for number in range(6)] * 2
    answers = await asyncio.gather(*(upload(client, "a.png", each) for each in contents))
    names = [each.json()["name"] for each in answers]
    assert names[:6] == names[6:]
    assert sorted(names[:6]) == ["a (1).png", "a (2).png", "a (3).png", "a (4).png", "a (5).png", "a.png"]  # fmt: skip
    for name, content in zip(names, contents, strict=True):
        assert (await view(client, name)).content == content
    assert len(await objects_of(clients.plane)) == 6


@pytest.mark.parametrize(
    ("overwrite", "name"), [("true", "a.png"), ("1", "a.png"), ("no", "a (1).png")]
)
async def test_overwriting_must_be_asked_for(
    clients: GatewayClients, overwrite: str, name: str
) -> None:
    client = await clients.new_client()
    await upload(client, "a.png", b"1")
    assert (await upload(client, "a.png", b"2", overwrite=overwrite)).json()["name"] == name
    assert (await view(client, name)).content == b"2"


async def test_an_upload_goes_into_the_folder_that_is_named(ada: httpx.AsyncClient) -> None:
    answer = await upload(ada, "a.txt", b"x", type="output", subfolder="deep/er")
    assert answer.json() == {"name": "a.txt", "subfolder": "deep/er", "type": "output"}
    assert (await view(ada, "a.txt", type="output", subfolder="deep/er")).content == b"x"
    assert (await view(ada, "a.txt [output]", subfolder="deep/er")).content == b"x"
    assert (await view(ada, "a.txt", type="output")).status_code == 404


@pytest.mark.parametrize(
    ("name", "fields", "status"),
    [
        ("../a.png", {}, 400),
        ("/etc/passwd", {}, 400),
        ("a.png", {"subfolder": "../.."}, 400),
        ("a.png", {"subfolder": "/etc"}, 400),
        ("a.png", {"type": "nope"}, 500),
        ("nope/a.png", {}, 500),
        ("x" * 300 + ".png", {}, 400),
        ("a.png", {"subfolder": "x" * 600}, 400),
        ("a.png", {"subfolder": "a\0b"}, 400),
    ],
)
async def test_an_upload_that_can_not_be_stored_is_refused(
    ada: httpx.AsyncClient,
    sqlite_clients: GatewayClients,
    name: str,
    fields: dict[str, str],
    status: int,
) -> None:
    assert (await upload(ada, name, b"x", **fields)).status_code == status
    assert await objects_of(sqlite_clients.plane) == []


async def test_a_form_without_a_file_is_refused(ada: httpx.AsyncClient) -> None:
    nothing: dict[str, Any] = {"other": ("a", b"x")}
    assert (await ada.post("/upload/image", files=nothing)).status_code == 400
    assert (await ada.post("/upload/image", data={"image": "text"})).status_code == 500
    assert (await ada.post("/upload/image", content=b"nonsense")).status_code in (400, 500)


async def test_a_name_may_have_a_folder_that_is_there(ada: httpx.AsyncClient) -> None:
    await upload(ada, "a.png", b"1", subfolder="sub")
    answer = await upload(ada, "sub/a.png", b"2")
    assert answer.json() == {"name": "sub/a (1).png", "subfolder": "", "type": "input"}
    assert (await view(ada, "a (1).png", subfolder="sub")).content == b"2"


async def test_an_upload_that_is_too_large_leaves_nothing(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    opened_plane = plane_on(sqlite_databases, tmp_path, max_upload_bytes=1000)
    async with opened_plane as plane, clients_of(plane) as clients:
        client = await clients.new_client()
        assert (await upload(client, "a.bin", b"x" * 1001)).status_code == 413
        assert (await upload(client, "a.bin", b"x" * 1000)).status_code == 200
        assert (await client.get("/features")).json()["max_upload_size"] == 1000
        assert len(await objects_of(plane)) == 1


async def test_a_tenants_quota_holds_and_a_refused_upload_leaves_nothing(
    clients: GatewayClients,
) -> None:
    client = await clients.new_client()
    tenant_id, _ = clients.users[client]
    async with clients.plane.central.transaction() as tx:
        await tenants.set_quota(tx, tenant_id, 10)
    assert (await upload(client, "a.bin", b"123456")).status_code == 200
    refused = await upload(client, "b.bin", b"123456")
    assert refused.json()["error"]["type"] == "storage_full"
    assert (await upload(client, "a.bin", b"123456")).status_code == 200  # known already
    assert len(await objects_of(clients.plane)) == 1
    assert (await view(client, "b.bin")).status_code == 404


async def test_an_upload_whose_client_goes_away_leaves_nothing(
    ada: httpx.AsyncClient, sqlite_clients: GatewayClients
) -> None:
    form = httpx.Request("POST", "http://x/upload/image", files={"image": ("a.png", b"x" * 1000)})
    body = form.read()
    app = create_app(sqlite_clients.plane)
    headers = {**form.headers, "authorization": ada.headers["authorization"], "host": "x"}
    for size in (0, 60, 500, len(body) - 5):
        sent: list[dict[str, Any]] = [
            {"type": "http.request", "body": body[:size], "more_body": True},
            {"type": "http.disconnect"},
        ]
        messages = iter(sent)

        async def receive(messages: Iterator[dict[str, Any]] = messages) -> dict[str, Any]:
            return next(messages)

        async def send(message: MutableMapping[str, Any]) -> None:
            assert message.get("status", 400) >= 400

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/upload/image",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("192.0.2.1", 1),
        }
        await app(scope, receive, send)
    assert await objects_of(sqlite_clients.plane) == []
    assert (await ada.get("/internal/files/input")).json() == []


async def test_a_picture_with_too_many_pixels_is_refused(ada: httpx.AsyncClient) -> None:
    buffer = BytesIO()
    PIL.Image.new("1", (200, 200)).save(buffer, "PNG")
    assert (await upload(ada, "a.png", buffer.getvalue())).status_code == 413


async def test_a_file_is_sent_in_parts_and_by_its_stamp(ada: httpx.AsyncClient) -> None:
    await upload(ada, "a.txt", b"0123456789")
    whole = await view(ada, "a.txt")
    assert whole.content == b"0123456789"
    assert whole.headers["content-type"] == "text/plain"
    assert whole.headers["content-disposition"] == 'filename="a.txt"'
    assert whole.headers["accept-ranges"] == "bytes"
    for wanted, status, content in (
        ("bytes=2-4", 206, b"234"),
        ("bytes=-3", 206, b"789"),
        ("bytes=8-", 206, b"89"),
        ("bytes=99-", 416, b""),
        ("nonsense", 416, b""),
    ):
        part = await view(ada, "a.txt", {"Range": wanted})
        assert (part.status_code, part.content) == (status, content)
    for name, value in (
        ("If-None-Match", whole.headers["etag"]),
        ("If-Modified-Since", whole.headers["last-modified"]),
    ):
        assert (await view(ada, "a.txt", {name: value})).status_code == 304
    head = await ada.head("/view", params={"filename": "a.txt", "type": "input"})
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "10")


async def test_an_empty_file_is_stored_and_sent(ada: httpx.AsyncClient) -> None:
    assert (await upload(ada, "empty.bin", b"")).status_code == 200
    found = await view(ada, "empty.bin")
    assert (found.status_code, found.content) == (200, b"")


@pytest.mark.parametrize("name", ["x.html", "x.svg", "x.js", "x.css", "x.xml", "x.xhtml"])
async def test_what_a_browser_would_run_is_downloaded(ada: httpx.AsyncClient, name: str) -> None:
    await upload(ada, name, b"<script>alert(1)</script>")
    found = await view(ada, name)
    assert found.headers["content-type"] == "application/octet-stream"
    assert found.headers["content-disposition"] == f'attachment; filename="{name}"'
    assert found.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("query", [{}, {"preview": "webp;90"}, {"channel": "rgb"}])
async def test_no_file_acts_as_a_page_whatever_a_browser_takes_it_for(
    ada: httpx.AsyncClient, query: dict[str, str]
) -> None:
    await upload(ada, "x.png", png())
    seen = await ada.get("/view", params={"filename": "x.png", "type": "input", **query})
    await ada.post("/userdata/x.json", content=b"{}")
    for found in (seen, await ada.get("/userdata/x.json")):
        assert found.status_code == 200
        assert found.headers["content-security-policy"] == "sandbox; default-src 'none'"


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({}, 404),
        ({"filename": ""}, 400),
        ({"filename": "nope.png"}, 404),
        ({"filename": "../a.png"}, 400),
        ({"filename": "/etc/passwd"}, 400),
        ({"filename": "a..png"}, 400),
        ({"filename": "a.png", "type": "nope"}, 400),
        ({"filename": "a.png", "subfolder": "../.."}, 403),
        ({"filename": "a.png", "subfolder": "/etc"}, 403),
        ({"filename": "a.png", "subfolder": "nope"}, 404),
        ({"filename": "a\0.png"}, 404),
        ({"filename": "x" * 5000}, 404),
        ({"filename": "sub/a.png"}, 200),
        ({"filename": "a.png", "subfolder": "sub/.."}, 200),
    ],
)
async def test_a_view_is_refused_as_by_comfyui(
    ada: httpx.AsyncClient, query: dict[str, str], status: int
) -> None:
    await upload(ada, "a.png", png(), type="output")
    assert (await ada.get("/view", params=query)).status_code == status


async def test_previews_and_channels_are_those_of_comfyui(ada: httpx.AsyncClient) -> None:
    await upload(ada, "a.png", png((1, 2, 3, 64), "RGBA"))
    assert opened(await view(ada, "a.png", preview="webp;90")).format == "WEBP"
    assert opened(await view(ada, "a.png", preview="jpeg;50")).format == "JPEG"
    assert opened(await view(ada, "a.png", preview="nonsense")).format == "WEBP"
    assert opened(await view(ada, "a.png", channel="rgb")).mode == "RGB"
    assert opened(await view(ada, "a.png", channel="a")).getpixel((0, 0)) == (0, 0, 0, 64)
    assert (await view(ada, "a.png", channel="rgba")).content == png((1, 2, 3, 64), "RGBA")
    await upload(ada, "b.png", b"no picture")
    assert (await view(ada, "b.png", preview="webp")).status_code == 500
    assert (await view(ada, "b.png", channel="a")).status_code == 500


async def test_without_pillow_a_preview_is_the_file_and_a_channel_is_not_there(
    ada: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await upload(ada, "a.png", png())
    monkeypatch.setattr(routes, "has_pillow", lambda: False)
    assert (await view(ada, "a.png", preview="webp")).content == png()
    assert (await view(ada, "a.png", channel="a")).status_code == 501
    mask = await ada.post("/upload/mask", files={"image": ("m.png", png())}, data=original("a.png"))
    assert mask.status_code == 501


async def test_a_client_that_asks_is_sent_to_the_store(ada: httpx.AsyncClient) -> None:
    await upload(ada, "a.html", b"<script>")
    sent = await view(ada, "a.html", redirect="true")
    assert sent.status_code == 302
    found = await ada.get(sent.headers["location"], headers={"Authorization": ""})
    assert found.content == b"<script>"
    assert found.headers["content-disposition"].startswith("attachment")


def original(name: str, **more: str) -> dict[str, str]:
    return {"original_ref": json.dumps({"filename": name, "type": "input", **more})}


async def test_a_mask_is_put_into_a_copy_of_the_original(ada: httpx.AsyncClient) -> None:
    await upload(ada, "a.png", png((9, 8, 7)))
    mask = {"image": ("m.png", png((0, 0, 0, 77), "RGBA"))}
    stored = await ada.post("/upload/mask", files=mask, data=original("a.png"))
    assert stored.json() == {"name": "m.png", "subfolder": "", "type": "input"}
    assert opened(await view(ada, "m.png")).getpixel((0, 0)) == (9, 8, 7, 77)
    assert opened(await view(ada, "a.png")).mode == "RGB"


async def test_a_mask_without_its_original_is_answered_and_not_stored(
    ada: httpx.AsyncClient,
) -> None:
    mask = {"image": ("m.png", png((0, 0, 0, 77), "RGBA"))}
    for reference in (original("nope.png"), original("../a.png"), original("a", subfolder="../..")):
        stored = await ada.post("/upload/mask", files=mask, data=reference)
        assert (stored.status_code, stored.json()["name"]) == (200, "m.png")
    assert (await view(ada, "m.png")).status_code == 404
    assert (await ada.post("/upload/mask", files=mask)).status_code == 500


async def test_another_users_files_are_not_there(clients: GatewayClients) -> None:
    owner = await clients.new_client()
    await upload(owner, "a.png", png())
    for other in (await clients.new_client(of_tenant_of=owner), await clients.new_client()):
        assert (await view(other, "a.png")).status_code == 404
        mask = {"image": ("m.png", png((0, 0, 0, 77), "RGBA"))}
        await other.post("/upload/mask", files=mask, data=original("a.png"))
        assert (await view(other, "m.png")).status_code == 404
        assert (await upload(other, "a.png", b"other")).json()["name"] == "a.png"
    assert (await view(owner, "a.png")).content == png()


async def test_a_file_whose_object_is_gone_is_not_found(
    ada: httpx.AsyncClient, sqlite_clients: GatewayClients
) -> None:
    await upload(ada, "a.png", png())
    await sqlite_clients.plane.store.delete(*await objects_of(sqlite_clients.plane))
    assert (await view(ada, "a.png")).status_code == 404
    assert (await view(ada, "a.png", preview="webp")).status_code == 404
