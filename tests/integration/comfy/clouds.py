"""Clouds that answer as a test says, and a backend that does not wait for them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.backends.scripted_server import (
    Reaction,
    ScriptedServer,
    by_route,
    json_reply,
    serving_script,
)

from comfyfleet.comfy import BackendLimits, CloudSettings, ComfyCloud
from comfyfleet.comfy.calls import CallTally
from comfyfleet.comfy.cloud import UNKNOWN_JOB_ID
from comfyfleet.comfy.cloud_calls import with_marker
from comfyfleet.transport.retry import RetryPolicy

KEY = "key-of-alice"
RUN = "6f1c1c1e-0000-4000-8000-000000000001"
JOB = "6f1c1c1e-0000-4000-8000-00000000000a"
PROMPT: dict[str, Any] = {"1": {"class_type": "A", "inputs": {}}}
MARKED = with_marker(PROMPT, RUN)
LIMITS = BackendLimits(max_retries=2, poll_seconds=0.01, cancel_seconds=1)

Replies = Mapping[str, Reaction | Sequence[Reaction]]
EMPTY_QUEUE = json_reply({"queue_running": [], "queue_pending": []})
V1: Replies = {
    "GET /api/prompt": json_reply({"exec_info": {"queue_remaining": 0}}),
    "GET /api/queue": EMPTY_QUEUE,
    "GET /api/jobs": json_reply({"jobs": [], "pagination": {"has_more": False}}),
}
V2: Replies = {
    f"GET /api/v2/jobs/{UNKNOWN_JOB_ID}": json_reply(
        {"error": {"code": "not_found", "message": ""}}, 404
    ),
}


def job(status: str, **more: Any) -> dict[str, Any]:
    return {"id": JOB, "status": status, "outputs": [], "error": None, "urls": {}, **more}


@dataclass(slots=True)
class Stage:
    server: ScriptedServer
    cloud: ComfyCloud
    tally: CallTally
    naps: list[float] = field(default_factory=list)


@contextlib.asynccontextmanager
async def cloud_of(replies: Replies, limits: BackendLimits = LIMITS) -> AsyncIterator[Stage]:
    """Sleeps are noted, not slept."""
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        await asyncio.sleep(0)

    tally = CallTally()
    async with serving_script(by_route(replies)) as server:
        settings = CloudSettings(KEY, server.url, limits)
        cloud = ComfyCloud(settings, meter=tally, retry=RetryPolicy(sleep=nap))
        async with cloud:
            yield Stage(server, cloud, tally, naps)
