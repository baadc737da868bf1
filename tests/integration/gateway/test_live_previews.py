"""Live previews: to clients that ask for them, at any control plane, and only while they look."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from tests.support.backends.prompts import node
from tests.support.databases.factory import Databases
from tests.support.server.gateway import PROMPT, GatewayInProcess, gateway_on, until

from comfyfleet.api.worker import Heartbeat
from comfyfleet.server.db.tenant_tables import job_previews, run_events
from comfyfleet.server.jobs import heartbeat
from comfyfleet.server.run_log.model import PICTURE


async def urls(databases: Databases) -> dict[str, Any]:
    return {
        "central_database_url": await databases.url("central"),
        "tenant_database_urls": f"main={await databases.url('tenant')}",
    }


STEPS = {
    **PROMPT,
    "3": node("ComfyfleetSteps", steps=40, step_ms=50, previews=True, image=["1", 0]),
    "2": node("SaveImage", images=["3", 0], filename_prefix="ComfyUI"),
}
# Until it is interrupted.
LONG = {
    **STEPS,
    "3": node("ComfyfleetSteps", steps=2_000, step_ms=50, previews=True, image=["1", 0]),
}


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[Heartbeat]:
    """All heartbeats of workers."""
    found: list[Heartbeat] = []
    extend = heartbeat._extend

    async def noted(context: Any, message: Heartbeat, worker: Any) -> Any:
        found.append(message)
        return await extend(context, message, worker)

    monkeypatch.setattr(heartbeat, "_extend", noted)
    return found


async def previews_stored(server: GatewayInProcess) -> int:
    async with server.plane.pools["main"].read() as tx:
        return int((await tx.execute(select(func.count()).select_from(job_previews))).scalar_one())


async def messages_stored(server: GatewayInProcess) -> set[str]:
    async with server.plane.pools["main"].read() as tx:
        rows = await tx.execute(select(run_events.c.events))
        return {kind for row in rows for kind, _ in row.events}


async def test_previews_reach_a_socket_at_the_other_control_plane(
    postgres_databases: Databases, tmp_path: Path, reported: list[Heartbeat]
) -> None:
    both = await urls(postgres_databases)
    async with (
        gateway_on(postgres_databases, tmp_path, **both) as with_worker,
        gateway_on(postgres_databases, tmp_path, engines=0, **both) as other,
    ):
        user = await with_worker.new_user()
        elsewhere = replace(user, url=other.url)

        def run() -> list[dict[str, Any]]:
            with user.open_engine_client() as here, elsewhere.open_engine_client() as there:
                asked, shy = there.listen("me"), there.listen("other")
                asked.send({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
                asks = {"preview_method": "auto"}
                prompt_id = here.submit(LONG, client_id="me", extra_data=asks)
                asked.wait_for_pictures(2)
                here.http.post("/interrupt")
                asked.wait("execution_interrupted", {"prompt_id": prompt_id})
                assert not [each for each in shy.events if isinstance(each, dict)]
                return [each for each in asked.events if isinstance(each, dict)]

        pictures = await asyncio.to_thread(run)
        assert {each["binary"] for each in pictures} == {4}
        assert {each["metadata"]["node_id"] for each in pictures} == {"3"}
        assert PICTURE not in await messages_stored(with_worker)

        async def is_removed() -> bool:
            return await previews_stored(with_worker) == 0

        await until(is_removed)


@pytest.mark.parametrize("extra_data", [{}, {"preview_method": "auto"}])
async def test_no_preview_is_sent_if_nobody_looks(
    databases: Databases, tmp_path: Path, reported: list[Heartbeat], extra_data: dict[str, str]
) -> None:
    """Neither to a client that has not asked for them, nor for one that is not there."""
    client_id = "gone" if extra_data else "me"
    async with gateway_on(databases, tmp_path) as gateway:
        user = await gateway.new_user()

        def run() -> list[Any]:
            with user.open_engine_client() as talk:
                ear = talk.listen("me")
                talk.submit(STEPS, client_id=client_id, extra_data=extra_data)
                talk.wait_idle()
                return [each for each in ear.events if isinstance(each, dict)]

        assert await asyncio.to_thread(run) == []
        assert len(reported) > 2
        assert not [
            each for each in reported if each.preview or (each.progress and each.progress.preview)
        ]
        assert not gateway.plane.context.previews._elsewhere


async def test_a_late_socket_of_a_client_that_asked_gets_the_newest_preview(
    databases: Databases, tmp_path: Path
) -> None:
    async with gateway_on(databases, tmp_path) as gateway:
        user = await gateway.new_user()

        def run() -> list[str]:
            with user.open_engine_client() as talk:
                asks = {"preview_method": "auto"}
                first = talk.listen("me")
                prompt_id = talk.submit(STEPS, client_id="me", extra_data=asks)
                first.wait("progress")
                first.close()
                ear = talk.listen("me")
                ear.wait("execution_success", {"prompt_id": prompt_id})
                return ear.names()

        names = await asyncio.to_thread(run)
        assert "binary 1" in names
        previews = gateway.plane.context.previews
        assert not previews._watches
        assert not previews._latest
