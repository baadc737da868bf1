"""Runs workers inside the process of a test."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.support.workers.memory_plane import SECRET, Plane

from comfyfleet.worker.factory import open_worker
from comfyfleet.worker.settings import WorkerSettings
from comfyfleet.worker.worker import Worker


def settings_for(plane: Plane, backend_url: str | None, state: Path, **more: Any) -> WorkerSettings:
    base = WorkerSettings(
        control_url=plane.url,
        fleet_slug="gpus",
        stage="production",
        worker_id="gpu-1",
        state=state,
        backend_url=backend_url,
        secret=SECRET,
        heartbeat_seconds=1.0,
        grace_seconds=5.0,
    )
    return dataclasses.replace(base, **more)


@contextlib.asynccontextmanager
async def running_worker(
    settings: WorkerSettings, environ: dict[str, str] | None = None
) -> AsyncIterator[Worker]:
    """Runs a worker; at the end it shuts down in order, if it has not yet."""
    async with open_worker(settings, environ or {}) as worker:
        work = asyncio.create_task(worker.work())
        try:
            yield worker
            worker.stop.ask("shutdown", 5)
            await work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
