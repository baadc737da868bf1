"""Two control planes: a client listens at one, its prompt is submitted and run at the other."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.gateway import PROMPT, gateway_on

from comfyfleet.server.gateway import feed


async def test_a_socket_hears_at_once_what_the_other_control_plane_was_told(
    postgres_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody looks by itself: only a hint of the other control plane can tell.
    monkeypatch.setattr(feed, "BUSY_SECONDS", 3600.0)
    monkeypatch.setattr(feed, "IDLE_SECONDS", 3600.0)
    both: dict[str, Any] = {
        "central_database_url": await postgres_databases.url("central"),
        "tenant_database_urls": f"main={await postgres_databases.url('tenant')}",
    }
    async with (
        gateway_on(postgres_databases, tmp_path, **both) as with_worker,
        gateway_on(postgres_databases, tmp_path, engines=0, **both) as other,
    ):
        user = await with_worker.new_user()
        elsewhere = replace(user, url=other.url)

        def run() -> None:
            with user.open_engine_client() as here, elsewhere.open_engine_client() as there:
                ear = there.listen("me")
                prompt_id = here.submit(PROMPT, client_id="me")
                ear.wait("execution_success", {"prompt_id": prompt_id})
                ear.wait("executing", {"node": None, "prompt_id": prompt_id})
                assert list(there.http.get("/history").json()) == [prompt_id]

        await asyncio.to_thread(run)
