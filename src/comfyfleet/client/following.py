"""A job's events as they happen: resumed where a stream was cut, polled where there is none."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from uuid import UUID

import httpx
from pydantic import ValidationError

from comfyfleet.client.answers import error_of, parsed
from comfyfleet.client.calls import PASSING, Call, Calls
from comfyfleet.client.model import Job, JobEvent
from comfyfleet.client.stream import EventLines, ServerEvent, lines_of

# A stream says something, if only that it lives, more often than this.
SILENCE_SECONDS_MAX = 45.0
# Streams in a row that told nothing; then the job is asked for instead.
FRUITLESS_MAX = 3
POLL_SECONDS = 1.0
POLL_SECONDS_MAX = 5.0
NO_STREAM = frozenset({404, 405, 406, 501})


async def job_of(calls: Calls, job_id: UUID) -> Job:
    return parsed(Job, await calls.ask(Call("GET", f"/api/ai-jobs/{job_id}")))


class Events:
    """`last_id` is where it stands: a later reader may begin there."""

    def __init__(self, calls: Calls, job_id: UUID, *, last_id: int = 0) -> None:
        self._calls = calls
        self._job_id = job_id
        self._lines = EventLines(str(last_id) if last_id else "")
        self._is_over = False
        self._may_stream = True

    async def told(self) -> AsyncGenerator[JobEvent, None]:
        """Each once and in order, until the job has ended."""
        fruitless = 0
        while not self._is_over and self._may_stream and fruitless < FRUITLESS_MAX:
            fruitless += 1
            async with aclosing(self._heard()) as heard:
                async for event in heard:
                    fruitless = 0
                    self._is_over = self._is_over or event.ends_job
                    yield event
            if fruitless and self._may_stream and not self._is_over:
                await self._calls.patience.back_off(fruitless)
        async for event in self._polled():
            yield event

    async def _heard(self) -> AsyncGenerator[JobEvent, None]:
        """What one stream tells, until it is cut or the server ends it: to hang up on it would be rude."""
        headers = {"Accept": "text/event-stream"}
        if self._lines.last_id:
            headers["Last-Event-ID"] = self._lines.last_id
        call = Call(
            "GET",
            f"/api/ai-jobs/{self._job_id}/events",
            headers=headers,
            answer_seconds=SILENCE_SECONDS_MAX,
        )
        lines = EventLines(self._lines.last_id)
        try:
            async with self._calls.stream(call) as response:
                if not await self._is_stream(response):
                    return
                async for line in lines_of(response.aiter_bytes()):
                    if self._is_over and line.startswith(":"):
                        return  # it would go on for the sake of going on
                    found = lines.take(line)
                    event = _event(found) if found else None
                    if event:
                        # Only what was told counts as heard: an id whose event was cut off is asked for again.
                        self._lines.last_id = found.id if found else ""
                        yield event
        except httpx.TransportError:
            return

    async def _is_stream(self, response: httpx.Response) -> bool:
        if response.status_code == httpx.codes.NO_CONTENT:
            self._is_over = True  # all has been told
            return False
        kind = response.headers.get("content-type", "")
        if response.is_success and kind.startswith("text/event-stream"):
            return True
        self._may_stream = response.status_code in PASSING
        if response.is_success or response.status_code in PASSING | NO_STREAM:
            return False
        await response.aread()
        raise error_of(response)

    async def _polled(self) -> AsyncGenerator[JobEvent, None]:
        """Changes of the job itself, told as events without numbers of their own."""
        seen: tuple[str, float | None] | None = None
        seconds = POLL_SECONDS
        number = int(self._lines.last_id) if self._lines.last_id.isdigit() else 0
        while not self._is_over:
            job = await job_of(self._calls, self._job_id)
            self._is_over = job.has_ended
            if (job.status, job.progress) != seen:
                seen, seconds = (job.status, job.progress), POLL_SECONDS
                data = {"status": job.status, "progress": job.progress}
                yield JobEvent(id=number, kind="status", data=data)
            if not self._is_over:
                await self._calls.patience.sleep(seconds)
                seconds = min(seconds * 1.5, POLL_SECONDS_MAX)


def _event(found: ServerEvent) -> JobEvent | None:
    """None: nothing that tells of a job, such as a sign of life."""
    try:
        # Progress has no number of its own: whoever resumes is told how far it is by then.
        return JobEvent(id=int(found.id or 0), kind=found.name, data=json.loads(found.data))
    except (ValueError, ValidationError):
        return None
