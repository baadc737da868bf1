"""A job's events as they happen: resumed where a stream was cut, polled where there is none."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from uuid import UUID

from pydantic import ValidationError

from comfyfleet.client.answers import parsed
from comfyfleet.client.calls import Call, Calls
from comfyfleet.client.listening import Listening
from comfyfleet.client.model import Job, JobEvent
from comfyfleet.kernel.server_events import ServerEvent

POLL_SECONDS = 1.0
POLL_SECONDS_MAX = 5.0


async def job_of(calls: Calls, job_id: UUID) -> Job:
    return parsed(Job, await calls.ask(Call("GET", f"/api/ai-jobs/{job_id}")))


class Events:
    def __init__(self, calls: Calls, job_id: UUID, *, last_id: int = 0) -> None:
        self._calls = calls
        self._job_id = job_id
        last = str(last_id) if last_id else ""
        self._listening = Listening(calls, f"/api/ai-jobs/{job_id}/events", _event, last_id=last)

    async def told(self) -> AsyncGenerator[JobEvent, None]:
        """Each once and in order, until the job has ended."""
        async with aclosing(self._listening.all_heard()) as heard:
            async for event in heard:
                self._listening.is_over |= event.ends_job
                yield event
        async for event in self._polled():
            yield event

    async def _polled(self) -> AsyncGenerator[JobEvent, None]:
        """Changes of the job itself, told as events without numbers of their own."""
        seen: tuple[str, float | None] | None = None
        seconds, last_id = POLL_SECONDS, self._listening.last_id
        number = int(last_id) if last_id.isdigit() else 0
        is_over = self._listening.is_over
        while not is_over:
            job = await job_of(self._calls, self._job_id)
            is_over = job.has_ended
            if (job.status, job.progress) != seen:
                seen, seconds = (job.status, job.progress), POLL_SECONDS
                data = {"status": job.status, "progress": job.progress}
                yield JobEvent(id=number, kind="status", data=data)
            if not is_over:
                await self._calls.patience.sleep(seconds)
                seconds = min(seconds * 1.5, POLL_SECONDS_MAX)


def _event(found: ServerEvent) -> JobEvent | None:
    """None: nothing that tells of a job, such as a sign of life."""
    try:
        # Progress has no number of its own: whoever resumes is told how far it is by then.
        return JobEvent(id=int(found.id or 0), kind=found.name, data=json.loads(found.data))
    except (ValueError, ValidationError):
        return None
