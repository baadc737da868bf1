"""Four jobs at once with the client of krita-ai-diffusion. It sends the next job when the last one has started."""

import asyncio
import importlib
from typing import Any

from ai_diffusion.backend.client import ClientEvent
from ai_diffusion.backend.comfy_client import ComfyClient

# Of krita's tests, which have the names of ours.
_krita_tests: Any = importlib.import_module("tests.test_client")
comfy_server = _krita_tests.comfy_server
qtapp_fixture = importlib.import_module("tests.conftest")._qtapp_fixture
in_qt: Any = _krita_tests.qtapp
make_default_work = _krita_tests.make_default_work

JOBS = 4
SECONDS_MAX = 280.0
ENDINGS = (ClientEvent.finished, ClientEvent.interrupted, ClientEvent.error)


async def _ends_of_jobs(client: ComfyClient, ids: list[str]) -> list[tuple[str, str, int]]:
    """Job, event and number of pictures, in the order in which the jobs end."""
    ends = []
    async for message in client.listen():
        if message.event is ClientEvent.connected and not ids:
            for number in range(JOBS):
                ids.append(await client.enqueue(make_default_work(size=320, steps=1 + number)))
        if message.event in ENDINGS:
            ends.append((message.job_id, message.event.name, len(message.images or ())))
        if len(ends) == JOBS:
            break
    return ends


@in_qt  # type: ignore[untyped-decorator]
async def test_four_jobs_at_once(comfy_server: Any) -> None:
    client = ComfyClient(comfy_server.url)
    await client.connect()
    async for _ in client.discover_models(refresh=False):
        pass
    ids: list[str] = []
    ends = await asyncio.wait_for(_ends_of_jobs(client, ids), SECONDS_MAX)
    assert ends == [(job_id, "finished", 1) for job_id in ids]
