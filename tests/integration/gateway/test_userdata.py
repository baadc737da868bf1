"""What an editor stores on its server: settings and files, each user's own."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.gateway import GatewayClients, clients_of

from comfyfleet.server.gateway import userdata


@pytest.fixture
async def clients(databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayClients]:
    async with plane_on(databases, tmp_path) as plane, clients_of(plane) as clients:
        yield clients


@pytest.fixture
async def editor(clients: GatewayClients) -> httpx.AsyncClient:
    return await clients.new_client()


async def save(editor: httpx.AsyncClient, path: str, data: bytes, **query: str) -> httpx.Response:
    return await editor.post(f"/userdata/{path}", content=data, params=query)


async def test_a_new_user_has_no_settings(editor: httpx.AsyncClient) -> None:
    assert (await editor.get("/users")).json() == {"storage": "server", "migrated": False}
    assert (await editor.get("/settings")).json() == {}
    assert (await editor.get("/settings/Comfy.Locale")).json() is None


async def test_settings_are_merged_and_kept(editor: httpx.AsyncClient) -> None:
    assert (await editor.post("/api/settings", json={"a": 1, "b": [2]})).status_code == 200
    assert (await editor.post("/api/settings/a", json="other")).status_code == 200
    assert (await editor.get("/settings")).json() == {"a": "other", "b": [2]}
    assert (await editor.get("/settings/b")).json() == [2]
    assert (await editor.get("/users")).json()["migrated"] is True


async def test_settings_that_are_changed_at_once_are_all_kept(editor: httpx.AsyncClient) -> None:
    await asyncio.gather(*(editor.post(f"/settings/s{n}", json=n) for n in range(10)))
    assert (await editor.get("/settings")).json() == {f"s{n}": n for n in range(10)}


@pytest.mark.parametrize("body", [b"[]", b"nonsense", b"5"])
async def test_settings_that_are_no_object_are_refused(
    editor: httpx.AsyncClient, body: bytes
) -> None:
    assert (await editor.post("/settings", content=body)).status_code == 500
    assert (await editor.get("/settings")).json() == {}


async def test_a_file_is_stored_as_it_is_and_replaced(editor: httpx.AsyncClient) -> None:
    saved = await save(editor, "workflows%2Fone.json", b'{"v": 1}')
    assert saved.json() == "workflows/one.json"
    await save(editor, "workflows%2Fone.json", b'{"v": 2}', overwrite="true")
    found = await editor.get("/api/userdata/workflows%2Fone.json")
    assert found.json() == {"v": 2}
    assert found.headers["content-disposition"] == "attachment"


async def test_a_file_is_read_in_parts_and_by_its_etag(editor: httpx.AsyncClient) -> None:
    await save(editor, "a.txt", b"0123456789")
    part = await editor.get("/userdata/a.txt", headers={"Range": "bytes=2-4"})
    assert (part.status_code, part.content) == (206, b"234")
    known = {"If-None-Match": part.headers["etag"]}
    assert (await editor.get("/userdata/a.txt", headers=known)).status_code == 304
    assert (await editor.head("/userdata/a.txt")).content == b""


async def test_a_file_is_not_overwritten_where_that_is_not_wanted(
    editor: httpx.AsyncClient,
) -> None:
    await save(editor, "a.json", b"1")
    refused = await save(editor, "a.json", b"2", overwrite="false")
    assert (refused.status_code, refused.text) == (409, "File already exists")
    assert (await editor.get("/userdata/a.json")).content == b"1"


async def test_of_two_that_create_a_file_at_once_one_is_refused(
    editor: httpx.AsyncClient,
) -> None:
    answers = await asyncio.gather(
        *(save(editor, "a.json", b"%d" % n, overwrite="false") for n in range(8))
    )
    assert sorted(each.status_code for each in answers) == [200, *[409] * 7]
    winner = next(n for n, each in enumerate(answers) if each.status_code == 200)
    assert (await editor.get("/userdata/a.json")).content == b"%d" % winner


async def test_lists_have_the_forms_that_editors_ask_for(editor: httpx.AsyncClient) -> None:
    for path in ("workflows/b.json", "workflows/sub/a.json", "workflows/B.json", "other.txt"):
        await save(editor, path, b"12")

    async def listed(**query: str) -> object:
        return (await editor.get("/userdata", params={"dir": "workflows", **query})).json()

    assert await listed() == ["B.json", "b.json"]
    assert await listed(recurse="true") == ["B.json", "b.json", "sub/a.json"]
    assert await listed(recurse="true", split="true") == [
        ["B.json", "B.json"],
        ["b.json", "b.json"],
        ["sub/a.json", "sub", "a.json"],
    ]
    described = await listed(full_info="true")
    assert isinstance(described, list)
    assert [each["path"] for each in described] == ["B.json", "b.json"]
    assert described[0]["size"] == 2
    assert described[0]["modified"] >= described[0]["created"] > 1e12


async def test_the_whole_tree_has_folders_first(editor: httpx.AsyncClient) -> None:
    assert (await editor.get("/v2/userdata")).json() == []
    for path in ("workflows/b.json", "workflows/sub/a.json", "Z.txt"):
        await save(editor, path, b"12")
    found = (await editor.get("/v2/userdata")).json()
    assert [(each["type"], each["path"]) for each in found] == [
        ("directory", "workflows/sub"),
        ("directory", "workflows"),
        ("file", "workflows/sub/a.json"),
        ("file", "workflows/b.json"),
        ("file", "Z.txt"),
    ]
    below = (await editor.get("/v2/userdata", params={"path": "workflows"})).json()
    assert [each["path"] for each in below] == [
        "workflows/sub",
        "workflows/sub/a.json",
        "workflows/b.json",
    ]


@pytest.mark.parametrize(
    ("path", "query", "status", "text"),
    [
        ("/userdata", {}, 400, "Directory not provided"),
        ("/userdata", {"dir": "../x"}, 403, "Invalid directory"),
        ("/userdata", {"dir": "nope"}, 404, "Directory not found"),
        ("/userdata", {"dir": "WORKFLOWS"}, 404, "Directory not found"),
        ("/userdata", {"dir": "work%"}, 404, "Directory not found"),
        ("/v2/userdata", {"path": "/etc"}, 400, "Invalid path requested"),
        ("/v2/userdata", {"path": "nope"}, 404, "Requested path not found"),
        ("/v2/userdata", {"path": "workflows/a"}, 400, "Requested path is not a directory"),
        ("/userdata/nope", {}, 404, ""),
        ("/userdata/%2e%2e%2fnope", {}, 403, ""),
        ("/userdata/a%00b", {}, 404, ""),
    ],
)
async def test_what_is_not_there_is_refused_as_by_comfyui(
    editor: httpx.AsyncClient, path: str, query: dict[str, str], status: int, text: str
) -> None:
    await save(editor, "workflows/a", b"1")
    answer = await editor.get(path, params=query)
    assert (answer.status_code, answer.text) == (status, text)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("..%2fa", 403),
        ("%252e%252e%252fa", 403),
        ("%2fetc%2fpasswd", 403),
        ("a%00b", 404),
        ("x" * 501, 400),
        ("workflows", 400),
        ("workflows/a/b", 400),
    ],
)
async def test_a_path_that_can_not_be_is_refused(
    editor: httpx.AsyncClient, path: str, status: int
) -> None:
    await save(editor, "workflows/a", b"1")
    assert (await save(editor, path, b"2")).status_code == status


async def test_a_file_is_moved_and_deleted(editor: httpx.AsyncClient) -> None:
    await save(editor, "a.json", b"1")
    await save(editor, "b.json", b"2")
    refused = await editor.post("/userdata/a.json/move/b.json", params={"overwrite": "false"})
    assert refused.status_code == 409
    assert (await editor.get("/userdata/a.json")).content == b"1"
    moved = await editor.post("/userdata/a.json/move/sub%2Fc.json", params={"full_info": "true"})
    assert moved.json()["path"] == "sub/c.json"
    assert (await editor.get("/userdata/a.json")).status_code == 404
    assert (await editor.post("/userdata/nope/move/x")).status_code == 404
    assert (await editor.post("/userdata/b.json/move/..%2fx")).status_code == 403
    assert (await editor.delete("/userdata/sub%2Fc.json")).status_code == 204
    assert (await editor.delete("/userdata/sub%2Fc.json")).status_code == 404


async def test_a_file_that_is_moved_to_itself_stays(editor: httpx.AsyncClient) -> None:
    await save(editor, "a.json", b"1")
    assert (await editor.post("/userdata/a.json/move/a.json")).status_code == 200
    assert (await editor.get("/userdata/a.json")).content == b"1"


async def test_another_users_files_and_settings_are_not_there(clients: GatewayClients) -> None:
    ada = await clients.new_client()
    colleague = await clients.new_client(of_tenant_of=ada)
    stranger = await clients.new_client()
    await save(ada, "workflows/a.json", b"secret")
    await ada.post("/settings", json={"a": 1})
    for other in (colleague, stranger):
        assert (await other.get("/settings")).json() == {}
        assert (await other.get("/users")).json()["migrated"] is False
        assert (await other.get("/userdata/workflows%2Fa.json")).status_code == 404
        assert (await other.delete("/userdata/workflows%2Fa.json")).status_code == 404
        assert (await other.get("/userdata", params={"dir": "workflows"})).status_code == 404
        assert (await other.get("/v2/userdata")).json() == []
        assert (
            await save(other, "workflows/a.json", b"mine", overwrite="false")
        ).status_code == 200
    assert (await ada.get("/userdata/workflows%2Fa.json")).content == b"secret"


async def test_size_and_count_are_limited(
    editor: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(userdata, "FILE_BYTES_MAX", 10)
    monkeypatch.setattr(userdata, "SETTINGS_BYTES_MAX", 10)
    monkeypatch.setattr(userdata, "FILES_MAX", 2)
    assert (await save(editor, "a", b"x" * 11)).status_code == 413
    assert (await editor.post("/settings", json={"a": "x" * 11})).status_code == 413
    for name in ("a", "b"):
        assert (await save(editor, name, b"1")).status_code == 200
    refused = await save(editor, "c", b"1")
    assert refused.status_code in (413, 422, 507)
    assert json.loads(refused.content)["error"]["type"] == "storage_full"
    assert (await save(editor, "b", b"2")).status_code == 200
