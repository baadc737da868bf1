"""A customer asks one control plane while the worker talks to another."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import client_of, plane_on
from tests.support.server.customers import effect_setup_on


async def shown(client: httpx.AsyncClient, job_id: str, percent: float) -> None:
    for _ in range(60):
        answer = await client.get(f"/api/ai-jobs/{job_id}")
        assert answer.status_code == 200, answer.text
        if answer.json()["progress"] == percent:
            return
        await asyncio.sleep(0.25)
    raise AssertionError(f"{percent} % was never shown")


async def test_progress_is_seen_at_any_control_plane(
    postgres_databases: Databases, tmp_path: Path
) -> None:
    both: dict[str, Any] = {
        "central_database_url": await postgres_databases.url("central"),
        "tenant_database_urls": f"main={await postgres_databases.url('tenant')}",
    }
    async with (
        plane_on(postgres_databases, tmp_path, **both) as here,
        plane_on(postgres_databases, tmp_path, **both) as there,
        effect_setup_on(here) as effect_setup,
        effect_setup.fleet_setup.worker() as worker,
    ):
        ada = await effect_setup.customer()
        job_id = await ada.job(effect_setup.draw)
        job = await worker.job()
        await worker.call_for(job, "heartbeat", started=True, progress={"percent": 40})
        async with client_of(there, ada.key) as client:
            await shown(client, job_id, 40)
            await worker.call_for(job, "heartbeat", started=True, progress={"percent": 80})
            await shown(client, job_id, 80)
