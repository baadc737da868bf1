"""Uploads count while they arrive, few of them arrive at once, and their bytes lie beside the store. Pictures of
strangers are decoded in processes of their own, which know nothing of the control plane."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Hashable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import png
from tests.support.server.gateway import GatewayClients, clients_of

from comfyfleet.server.gateway import uploads
from comfyfleet.server.gateway.uploads import FORM_BYTES, UPLOADS_AT_ONCE_MAX
from comfyfleet.server.media.picture_processes import PictureProcesses, passed_environ
from comfyfleet.server.turns import FairTurns

QUOTA = 3_000_000
BOUNDARY = "boundary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
PATHS = {"/upload/image": "image", "/upload/mask": "image", "/api/v2/assets": "file"}


@pytest.fixture
async def clients(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayClients]:
    async with (
        plane_on(sqlite_databases, tmp_path, max_storage_bytes_per_tenant=QUOTA) as plane,
        clients_of(plane) as clients,
    ):
        yield clients


@pytest.fixture
async def ada(clients: GatewayClients) -> httpx.AsyncClient:
    return await clients.new_client()


def head(field: str) -> bytes:
    names = f'name="{field}"; filename="a.bin"'
    return f"--{BOUNDARY}\r\nContent-Disposition: form-data; {names}\r\n\r\n".encode()


TAIL = f"\r\n--{BOUNDARY}--\r\n".encode()


class Body:
    """A body that is sent in parts; the client waits before the last one."""

    def __init__(self, field: str, size: int) -> None:
        self.sent = 0
        self.may_end = asyncio.Event()
        self.waits = asyncio.Event()
        self._field, self._size = field, size

    async def parts(self) -> AsyncIterator[bytes]:
        yield head(self._field)
        while self.sent < self._size:
            part = b"x" * min(100_000, self._size - self.sent)
            self.sent += len(part)
            yield part
        self.waits.set()
        await self.may_end.wait()
        yield TAIL


@pytest.mark.parametrize("path", PATHS)
async def test_a_declared_size_above_the_quota_is_refused_before_the_body(
    ada: httpx.AsyncClient, path: str
) -> None:
    body = Body(PATHS[path], QUOTA * 20)
    body.may_end.set()
    headers = {**FORM, "content-length": str(QUOTA + FORM_BYTES + 1)}
    refused = await ada.post(path, content=body.parts(), headers=headers)
    assert refused.status_code == 422
    assert f"{QUOTA:,} bytes" in refused.text
    assert body.sent == 0


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_of_unknown_size_is_refused_where_it_passes_the_quota(
    ada: httpx.AsyncClient, path: str
) -> None:
    body = Body(PATHS[path], QUOTA * 20)
    body.may_end.set()
    refused = await ada.post(path, content=body.parts(), headers=FORM)
    assert refused.status_code == 422
    assert f"{QUOTA:,} bytes" in refused.text
    assert body.sent < QUOTA + FORM_BYTES + 500_000


async def test_a_file_as_large_as_the_quota_is_taken(ada: httpx.AsyncClient) -> None:
    body = Body("image", QUOTA)
    body.may_end.set()
    taken = await ada.post("/upload/image", content=body.parts(), headers=FORM)
    assert taken.status_code == 200, taken.text
    refused = await ada.post("/upload/image", files={"image": ("b.bin", b"x")})
    assert refused.status_code == 422


async def test_uploads_that_arrive_together_share_the_quota(ada: httpx.AsyncClient) -> None:
    first = Body("image", QUOTA // 2)
    sending = asyncio.create_task(ada.post("/upload/image", content=first.parts(), headers=FORM))
    await first.waits.wait()
    second = Body("image", QUOTA * 20)
    second.may_end.set()
    refused = await ada.post("/upload/image", content=second.parts(), headers=FORM)
    assert refused.status_code == 422
    assert second.sent < QUOTA // 2 + FORM_BYTES + 500_000
    first.may_end.set()
    assert (await sending).status_code == 200


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """An event that is set when an upload begins to wait for its turn."""
    begun, wait = asyncio.Event(), FairTurns._wait

    async def noted(turns: FairTurns, who: Hashable) -> None:
        begun.set()
        await wait(turns, who)

    monkeypatch.setattr(FairTurns, "_wait", noted)
    return begun


async def test_a_user_sends_three_files_at_once_and_others_wait(
    ada: httpx.AsyncClient, waits: asyncio.Event
) -> None:
    bodies = [Body("image", 1_000) for _ in range(UPLOADS_AT_ONCE_MAX)]
    sending = [
        asyncio.create_task(ada.post("/upload/image", content=body.parts(), headers=FORM))
        for body in bodies
    ]
    await asyncio.gather(*(body.waits.wait() for body in bodies))
    fourth = Body("image", 1_000)
    fourth.may_end.set()
    waiting = asyncio.create_task(ada.post("/upload/image", content=fourth.parts(), headers=FORM))
    async with asyncio.timeout(30):
        await waits.wait()
    assert (await ada.get("/queue")).status_code == 200
    assert fourth.sent == 0
    sending.append(waiting)
    for body in bodies:
        body.may_end.set()
    assert [each.status_code for each in await asyncio.gather(*sending)] == [200] * 4
    assert (await ada.post("/upload/image", files={"image": ("c.bin", b"x")})).status_code == 200


def open_files() -> list[str]:
    return [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]


async def test_too_many_uploads_that_wait_are_refused(
    ada: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, waits: asyncio.Event
) -> None:
    monkeypatch.setattr(uploads, "UPLOADS_WAITING_MAX", 1)
    bodies = [Body("image", 1_000) for _ in range(UPLOADS_AT_ONCE_MAX + 1)]

    def send(body: Body) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(ada.post("/upload/image", content=body.parts(), headers=FORM))

    sending = [send(body) for body in bodies[:-1]]
    await asyncio.gather(*(body.waits.wait() for body in bodies[:-1]))
    sending.append(send(bodies[-1]))
    await waits.wait()
    refused = await ada.post("/upload/image", files={"image": ("b.bin", b"x")})
    assert refused.status_code == 429
    for body in bodies:
        body.may_end.set()
    assert [each.status_code for each in await asyncio.gather(*sending)] == [200] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="open files are listed in /proc")
@pytest.mark.parametrize("path", ["/upload/image", "/api/v2/assets"])
async def test_an_upload_lies_beside_the_store_while_it_arrives(
    clients: GatewayClients, ada: httpx.AsyncClient, path: str
) -> None:
    body = Body(PATHS[path], 2_000_000)
    sending = asyncio.create_task(ada.post(path, content=body.parts(), headers=FORM))
    await body.waits.wait()
    folder = str(clients.plane.arriving.root)
    assert [each for each in open_files() if each.startswith(folder)]
    body.may_end.set()
    assert (await sending).status_code in (200, 201)
    assert list(clients.plane.arriving.root.iterdir()) == []


def test_a_process_for_pictures_gets_no_secrets() -> None:
    given = {"PGPASSWORD": "a", "OTHER_API_KEY": "b", "COMFYFLEET_ADMIN_KEY": "c", "LANG": "C"}
    assert passed_environ(given) == {"LANG": "C"}


async def test_pictures_are_decoded_in_other_processes(
    ada: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, modules = PictureProcesses.run, list[Any]()
    turn, turns = PictureProcesses.turn, list[Hashable]()

    def noted_turn(self: PictureProcesses, tenant: Hashable) -> Any:
        turns.append(tenant)
        return turn(self, tenant)

    async def noted(self: PictureProcesses, module: str, *words: str) -> str | None:
        modules.append((module, words[0]))
        return await run(self, module, *words)

    monkeypatch.setattr(PictureProcesses, "run", noted)
    monkeypatch.setattr(PictureProcesses, "turn", noted_turn)
    await ada.post("/upload/image", files={"image": ("a.png", png(16, 1), "image/png")})
    view = {"filename": "a.png", "type": "input"}
    for query, kind in (
        ({"preview": "webp;50"}, "image/webp"),
        ({"preview": "jpeg"}, "image/jpeg"),
        ({"channel": "rgb"}, "image/png"),
        ({"channel": "a"}, "image/png"),
    ):
        shown = await ada.get("/view", params={**view, **query})
        assert shown.status_code == 200, shown.text
        assert shown.headers["content-type"] == kind
    reference = '{"filename": "a.png", "type": "input"}'
    masked = await ada.post(
        "/upload/mask",
        files={"image": ("m.png", png(16, 2), "image/png")},
        data={"original_ref": reference},
    )
    assert masked.status_code == 200, masked.text
    module = "comfyfleet.protocol.picture_process"
    assert modules == [(module, "show")] * 4 + [(module, "mask")]
    tenant = (await ada.get("/api/account")).json()["tenant"]["id"]
    assert turns == [tenant] * 5


async def test_a_process_that_fails_or_takes_too_long_gives_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pictures = PictureProcesses()
    assert await pictures.run("comfyfleet.protocol.picture_process", "show", *"123456") is None
    monkeypatch.setattr("comfyfleet.server.media.picture_processes.PROCESS_SECONDS_MAX", 0.0)
    async with asyncio.timeout(60):  # it would serve for ever
        assert await pictures.run("http.server", "0") is None
