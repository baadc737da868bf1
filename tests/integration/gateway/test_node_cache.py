"""ComfyUI's node cache helps prompts with uploaded files through the gateway as it helps them directly."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from tests.support.backends.engine_client import EngineClient
from tests.support.databases.factory import Databases
from tests.support.server.gateway import GatewayInProcess, GatewayUser, gateway_on, worker_settings
from tests.support.workers.workers import running_worker

from comfyfleet.engine import Served, serve_in_thread
from comfyfleet.server.maintenance.embedded_fleet import embedded_fleet_secret


@contextlib.asynccontextmanager
async def gateway(
    databases: Databases, folder: Path, *, can_remove: bool
) -> AsyncIterator[tuple[GatewayInProcess, Served]]:
    """One worker, which knows its backend's folder or doesn't."""
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(gateway_on(databases, folder, engines=0))
        secret = await embedded_fleet_secret(server.plane, folder)
        home = folder / "engine"
        engine = stack.enter_context(serve_in_thread(data=home))
        settings = worker_settings(server.url, secret, engine.url, folder, "worker")
        if can_remove:
            settings = replace(settings, backend_folder=home)
        await stack.enter_async_context(running_worker(settings))
        await asyncio.to_thread(server.wait_until_ready, await server.new_user())
        yield server, engine


def blurred(file: str, *, radius: int = 1, alpha: float = 1.0) -> dict[str, Any]:
    return {
        "1": {"class_type": "LoadImage", "inputs": {"image": file}},
        "2": {
            "class_type": "ImageBlur",
            "inputs": {"image": ["1", 0], "blur_radius": radius, "sigma": alpha},
        },
        "3": {"class_type": "ImageInvert", "inputs": {"image": ["2", 0]}},
        "4": {"class_type": "PreviewImage", "inputs": {"images": ["3", 0]}},
    }


def upload(client: EngineClient, name: str, color: str) -> str:
    buffer = BytesIO()
    PIL.Image.new("RGB", (16, 16), color).save(buffer, "PNG")
    files = {"image": (name, buffer.getvalue(), "image/png")}
    return str(client.http.post("/upload/image", files=files).json()["name"])


def cached_nodes(client: EngineClient, prompt: dict[str, Any]) -> list[str]:
    prompt_id = client.submit(prompt)
    client.wait_idle()
    status = client.history(prompt_id)["status"]
    assert status["status_str"] == "success"
    (cached,) = [data for kind, data in status["messages"] if kind == "execution_cached"]
    return sorted(cached["nodes"])


def three_runs(client: EngineClient) -> list[list[str]]:
    name = upload(client, "photo.png", "red")
    prompts = [blurred(name), blurred(name), blurred(name, radius=2)]
    return [cached_nodes(client, prompt) for prompt in prompts]


def runs_of(user: GatewayUser) -> list[list[str]]:
    with user.open_engine_client() as client:
        return three_runs(client)


async def test_repeated_prompts_with_an_upload_run_the_same_nodes_as_directly(
    databases: Databases, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack, serve_in_thread(data=tmp_path / "direct") as engine:
        direct = await asyncio.to_thread(lambda: three_runs(EngineClient(engine.url, stack)))
    assert direct == [[], ["1", "2", "3", "4"], ["1"]]
    async with gateway(databases, tmp_path, can_remove=True) as (server, _):
        assert await asyncio.to_thread(runs_of, await server.new_user()) == direct


async def test_without_the_folder_each_job_has_names_of_its_own(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with gateway(sqlite_databases, tmp_path, can_remove=False) as (server, _):
        assert await asyncio.to_thread(runs_of, await server.new_user()) == [[], [], []]


async def test_another_tenant_gets_no_cached_nodes_and_no_file(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with gateway(sqlite_databases, tmp_path, can_remove=True) as (server, _):
        users = [await server.new_user(), await server.new_user()]
        for user in users:
            assert (await asyncio.to_thread(runs_of, user))[0] == []
        inputs = tmp_path / "engine" / "input"
        files = [each for each in inputs.rglob("*") if each.is_file()]
        assert len(files) == 2
        stolen = files[0].relative_to(inputs).as_posix()

        def submit(user: GatewayUser) -> int:
            with user.http() as http:
                answer = http.post("/prompt", json={"prompt": blurred(stolen)})
                return answer.status_code

        assert [await asyncio.to_thread(submit, user) for user in users] == [400, 400]


@pytest.mark.parametrize("color", ["red", "blue"])
async def test_a_file_that_changes_under_its_name_is_loaded_again(
    sqlite_databases: Databases, tmp_path: Path, color: str
) -> None:
    async with gateway(sqlite_databases, tmp_path, can_remove=True) as (server, _):
        user = await server.new_user()

        def work() -> list[str]:
            with user.open_engine_client() as client:
                name = upload(client, "photo.png", "red")
                cached_nodes(client, blurred(name))
                buffer = BytesIO()
                PIL.Image.new("RGB", (16, 16), color).save(buffer, "PNG")
                files = {"image": ("photo.png", buffer.getvalue(), "image/png")}
                client.http.post("/upload/image", files=files, data={"overwrite": "true"})
                return cached_nodes(client, blurred(name))

        cached = ["1", "2", "3", "4"] if color == "red" else []
        assert await asyncio.to_thread(work) == cached
