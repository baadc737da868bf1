"""Uploads while a disk is full: 507 with Retry-After and one line in the log, at each step that writes a file."""

import errno
import io
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.gateway.test_gateway_files import png
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.gateway import GatewayClients, clients_of

from comfyfleet.protocol import picture_process, small_picture
from comfyfleet.server.gateway import files
from comfyfleet.server.media.picture_processes import PictureProcesses
from comfyfleet.server.storage import outage

# Larger than what is held in memory while it arrives.
LARGE = png() + bytes(2_000_000)
PARTS = {"/upload/image": "image", "/upload/mask": "image", "/api/v2/assets": "file"}
Fill = Callable[[pytest.MonkeyPatch, Path], None]


def no_space(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing_below(folder: Path, call: Callable[..., Any]) -> Callable[..., Any]:
    def call_elsewhere(path: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(str(folder)):
            no_space()
        return call(path, *arguments, **options)

    return call_elsewhere


class FullFile(io.FileIO):
    def write(self, data: Any) -> int:
        return int(no_space())


def without_folders(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(os, "mkdir", failing_below(folder, os.mkdir))


def without_temporary_files(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(os, "open", failing_below(folder, os.open))


def without_contents(patch: pytest.MonkeyPatch, folder: Path) -> None:
    opened = Path.open

    def open_full(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode == "wb" and path.is_relative_to(folder):
            return io.BufferedWriter(FullFile(path, mode))
        return opened(path, mode, *arguments, **options)

    patch.setattr(Path, "open", open_full)


@pytest.fixture
async def clients(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayClients]:
    async with plane_on(sqlite_databases, tmp_path) as plane, clients_of(plane) as clients:
        yield clients


async def upload(client: httpx.AsyncClient, path: str, content: bytes) -> httpx.Response:
    parts = {PARTS[path]: ("a.png", content, "image/png")}
    original = '{"filename":"a.png","type":"input"}'
    return await client.post(path, files=parts, data={"original_ref": original})


@pytest.mark.parametrize("path", PARTS)
@pytest.mark.parametrize(
    ("fill", "content"),
    [
        pytest.param(without_folders, png(), id="folder"),
        pytest.param(without_temporary_files, LARGE, id="arriving"),
        pytest.param(without_contents, png(), id="saved"),
    ],
)
async def test_uploads_to_a_full_disk_get_507(
    clients: GatewayClients,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    fill: Fill,
    content: bytes,
) -> None:
    monkeypatch.setattr(outage, "SETTLE_SECONDS", 0.0)
    ada, plane = await clients.new_client(), clients.plane
    await upload(ada, "/upload/image", png())
    with monkeypatch.context() as patch:
        fill(patch, plane.arriving.root)
        for _ in range(3):
            answer = await upload(ada, path, content)
            assert (answer.status_code, answer.headers.get("retry-after")) == (507, "60")
            assert "store_full" in str(answer.json()["error"].values())
    assert plane.store.outage.is_full
    assert "Traceback" not in caplog.text
    assert (await upload(ada, path, png())).status_code < 300
    assert not plane.store.outage.is_full
    lines = [
        each.getMessage()
        for each in caplog.records
        if each.levelno >= logging.WARNING and each.name.startswith("comfyfleet.server.storage")
    ]
    assert [line.rpartition(" ")[2] for line in lines] == ["full", "again"], lines


async def test_a_mask_that_does_not_fit_gets_507(
    clients: GatewayClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = await clients.new_client()
    await upload(ada, "/upload/image", png())
    monkeypatch.setattr(PictureProcesses, "run", no_space)
    assert (await upload(ada, "/upload/mask", png())).status_code == 507
    shown = await ada.get("/view", params={"filename": "a.png", "type": "input", "preview": "webp"})
    assert shown.status_code == 507


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
@pytest.mark.parametrize("module", ["show", "mask", "small"])
async def test_a_process_for_pictures_reports_a_full_disk(tmp_path: Path, module: str) -> None:
    (tmp_path / "a.png").write_bytes(png((255, 0, 0, 9), "RGBA"))
    (tmp_path / "to.png").symlink_to("/dev/full")
    source, to = str(tmp_path / "a.png"), str(tmp_path / "to.png")
    words = {
        "show": (picture_process.__name__, "show", source, to, "10000", "preview", "", ""),
        "mask": (picture_process.__name__, "mask", source, source, to, "10000"),
        "small": (small_picture.__name__, source, to, "10000"),
    }
    with pytest.raises(OSError, match="No space left"):
        await PictureProcesses().run(*words[module])


async def test_an_unexpected_full_disk_is_no_internal_error(
    clients: GatewayClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = await clients.new_client()
    monkeypatch.setattr(files, "find_file", no_space)
    answer = await ada.get("/view", params={"filename": "a.png", "type": "input"})
    assert (answer.status_code, answer.headers["retry-after"]) == (507, "60")
