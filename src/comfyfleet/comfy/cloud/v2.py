"""Comfy API v2: Comfy Cloud, Serverless, comfy-api-proxy. Checked against comfy-api-proxy 0.1.6."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from comfyfleet.comfy.backend import (
    Cancellation,
    Description,
    Fetched,
    OutputFile,
    Outputs,
    Prompt,
    Submitted,
    Uploaded,
)
from comfyfleet.comfy.calls import Calls
from comfyfleet.comfy.cloud.confirming import certainty, confirmed
from comfyfleet.comfy.cloud.downloads import download
from comfyfleet.comfy.cloud.following import follow, patiently
from comfyfleet.comfy.cloud.origins import own_link
from comfyfleet.comfy.cloud.patience import ask
from comfyfleet.comfy.cloud.routes import about
from comfyfleet.comfy.cloud.v2_events import Listener
from comfyfleet.comfy.cloud.v2_jobs import (
    job_of,
    jobs_of,
    outputs_of,
    place_of,
    search,
    settled_job_of,
)
from comfyfleet.comfy.cloud.v2_submit import submit_prompt
from comfyfleet.comfy.cloud.v2_uploads import upload_asset
from comfyfleet.comfy.events import Event
from comfyfleet.comfy.inbox import Inbox
from comfyfleet.comfy.places import Absent, Place
from comfyfleet.kernel.errors import FileGone, NotOffered, OutcomeUnknown, RunLost

CANCELLED_KEPT_MAX = 1000


class CloudV2:
    """See Backend. `calls` have the key; `storage` must not."""

    def __init__(self, calls: Calls, storage: httpx.AsyncBaseTransport) -> None:
        self._calls = calls
        self._storage = storage
        self._cancelled: deque[str] = deque(maxlen=CANCELLED_KEPT_MAX)

    async def aclose(self) -> None:
        await self._calls.client.aclose()

    async def describe(self) -> Description:
        raise NotOffered("Comfy API v2 does not tell which nodes there are")

    async def queue_length(self) -> int:
        jobs, _ = await jobs_of(self._calls, ("queued", "running"))
        return len(jobs)

    async def upload(self, path: Path, *, name: str | None = None) -> Uploaded:
        return await upload_asset(self._calls, path, name)

    async def submit(
        self, prompt: Prompt, *, prompt_id: str, extra_data: Mapping[str, Any] | None = None
    ) -> Submitted:
        return await submit_prompt(self._calls, prompt, prompt_id, extra_data or {})

    async def adopt(self, prompt_id: str) -> Submitted | None:
        job, is_complete = await search(self._calls, prompt_id)
        if job is not None:
            return Submitted(job.job_id, adopted=True)
        if not is_complete:
            raise OutcomeUnknown("not all jobs can be searched for the run", prompt_id=prompt_id)
        return None

    async def follow(self, run_id: str) -> AsyncGenerator[Event]:
        inbox = Inbox()
        events = follow(run_id, inbox, lambda: self._look(run_id), self._calls)
        async with self._listening(run_id, inbox), contextlib.aclosing(events):
            async for event in events:
                yield event

    async def outputs(self, run_id: str) -> Outputs:
        job = await settled_job_of(self._calls, run_id)
        if job is None or not job.is_over:
            raise RunLost(f"the server has no ended run {run_id}", run_id=run_id)
        return outputs_of(job)

    async def fetch(self, file: OutputFile, to: Path) -> Fetched:
        """By its asset: the addresses that a job tells expire."""
        if file.reference is None:
            raise FileGone(f"{file.filename} is no output of this backend", file=file)
        call = about("GET", "/assets/{id}/content", file.reference)
        return await download(self._calls, self._storage, call, to)

    async def cancel(self, run_id: str) -> Cancellation:
        place = await self._look(run_id)
        if isinstance(place, Absent):
            return Cancellation.NOT_FOUND
        if (certain := certainty(place)) is not None:
            return certain
        self._cancelled.append(run_id)
        await ask(self._calls, about("POST", "/jobs/{id}/cancel", run_id))
        return await confirmed(self._calls, run_id, lambda: self._look(run_id))

    async def free(self) -> None:
        """v2 has no word for it."""

    async def _look(self, run_id: str) -> Place:
        job = await settled_job_of(self._calls, run_id)
        if job is None:
            return Absent()
        return place_of(job, was_cancelled=run_id in self._cancelled)

    @contextlib.asynccontextmanager
    async def _listening(self, run_id: str, inbox: Inbox) -> AsyncIterator[None]:
        job = await patiently(lambda: job_of(self._calls, run_id), self._calls)
        link = None if job is None or job.events_url is None else job.events_url
        address = None if link is None else str(own_link(self._calls.client.base_url, link))
        listener = Listener(self._calls, run_id, inbox)
        listening = asyncio.create_task(listener.listen(address), name="comfy-cloud-events")
        try:
            yield
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening
