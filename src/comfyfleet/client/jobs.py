"""A job, or a batch of them: follow it, wait for it, take what it made. Streams of events are resumed where they
were cut, and polled where there are none."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

from pydantic import ValidationError

from comfyfleet.api.jobs import AgainAnswer, FollowedJob, JobEvent, JobWaitAnswer
from comfyfleet.api.media import MadeShare
from comfyfleet.client.files import download_file
from comfyfleet.client.model import Batch, Job
from comfyfleet.client.transport import ApiCalls, ResumableStream, parse_answer
from comfyfleet.errors import RunFailed, RunTimedOut
from comfyfleet.transport.files import Transferred
from comfyfleet.transport.http import Call
from comfyfleet.transport.sse import ServerEvent

POLL_SECONDS = 1.0
POLL_SECONDS_MAX = 5.0


async def fetch_job(calls: ApiCalls, job_id: UUID) -> Job:
    return parse_answer(Job, await calls.ask(Call("GET", f"/api/ai-jobs/{job_id}")))


class JobEvents:
    def __init__(self, calls: ApiCalls, job_id: UUID, *, last_id: int = 0) -> None:
        self._calls = calls
        self._job_id = job_id
        last = str(last_id) if last_id else ""
        self._listening = ResumableStream(
            calls, f"/api/ai-jobs/{job_id}/events", _parse_event, last_id=last
        )

    async def told(self) -> AsyncGenerator[JobEvent, None]:
        """Each once and in order, until the job has ended."""
        async with aclosing(self._listening.all_events()) as heard:
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
            job = await fetch_job(self._calls, self._job_id)
            is_over = job.has_ended
            if (job.status, job.progress) != seen:
                seen, seconds = (job.status, job.progress), POLL_SECONDS
                data = {"status": job.status, "progress": job.progress}
                yield JobEvent(id=number, kind="status", data=data)
            if not is_over:
                await self._calls.retry.sleep(seconds)
                seconds = min(seconds * 1.5, POLL_SECONDS_MAX)


def _parse_event(found: ServerEvent) -> JobEvent | None:
    """None: nothing that tells of a job, such as a sign of life."""
    try:
        # Progress has no number of its own: whoever resumes is told how far it is by then.
        return JobEvent(id=int(found.id or 0), kind=found.name, data=json.loads(found.data))
    except (ValueError, ValidationError):
        return None


class FollowedJobEvents:
    """All jobs of a user, or of one media, as they change; a stream that is cut is resumed."""

    def __init__(self, calls: ApiCalls, path: str) -> None:
        self._listening = ResumableStream(calls, path, _parse_followed)

    async def told(self) -> AsyncGenerator[FollowedJob, None]:
        async with aclosing(self._listening.all_events()) as heard:
            async for job in heard:
                yield job


def _parse_followed(found: ServerEvent) -> FollowedJob | None:
    try:
        return FollowedJob.model_validate_json(found.data) if found.name == "job" else None
    except ValidationError:
        return None


NAME_CHARACTERS_MAX = 150


class JobHandle:
    """Follows one job: wait, events, download, cancel, retry. `job` is its state as of the last call.

    `idempotency_key` is the key that it was submitted with, where this client submitted it.
    """

    def __init__(self, calls: ApiCalls, job: Job, *, idempotency_key: str | None = None) -> None:
        self._calls = calls
        self.job = job
        self.idempotency_key = idempotency_key

    @property
    def id(self) -> UUID:
        return self.job.id

    def __repr__(self) -> str:
        return f"JobHandle({self.id}, {self.job.status})"

    async def refresh(self) -> Job:
        self.job = await fetch_job(self._calls, self.id)
        return self.job

    async def events(self, *, last_id: int = 0) -> AsyncGenerator[JobEvent, None]:
        """Each once and in order, until the job has ended; from after `last_id`, if given."""
        async with aclosing(JobEvents(self._calls, self.id, last_id=last_id).told()) as told:
            async for event in told:
                yield event

    async def wait(
        self,
        *,
        timeout_seconds: float | None = None,
        check: bool = True,
        on_event: Callable[[JobEvent], None] | None = None,
    ) -> Job:
        """The job once it has ended.

        Raises RunFailed if it did not succeed (unless `check` is off), and RunTimedOut when the time
        is up: the job goes on, and may be waited for again.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ended(on_event)
        except TimeoutError as error:
            raise RunTimedOut(
                f"job {self.id} has not ended within {timeout_seconds} s; it goes on",
                job_id=str(self.id),
            ) from error
        if check and self.job.status != "completed":
            raise RunFailed(
                f"job {self.id} was {self.job.status}"
                if self.job.error is None
                else f"job {self.id} failed: {self.job.error}",
                job_id=str(self.id),
                status=self.job.status,
            )
        return self.job

    async def _ended(self, on_event: Callable[[JobEvent], None] | None) -> None:
        while not self.job.has_ended:
            async with aclosing(self.events()) as events:
                async for event in events:
                    if on_event:
                        on_event(event)
            await self.refresh()

    async def cancel(self) -> Job:
        """Cancels the job and refunds it. A repeated call returns the cancelled job.

        Raises `Conflict` with the code `job_ended` if the job completed or failed before.
        """
        answer = await self._calls.ask(Call("DELETE", f"/api/ai-jobs/{self.id}"))
        self.job = parse_answer(Job, answer)
        return self.job

    async def retry(self) -> "JobHandle":
        """A new job like this one, with a reservation of its own; only if this one has failed.

        Asked for twice, it is the same one.
        """
        call = Call("POST", f"/api/ai-jobs/{self.id}/retry", is_repeatable=True)
        answer = await self._calls.ask(call)
        return JobHandle(self._calls, parse_answer(Job, answer))

    async def why(self) -> str:
        """Why it is not running, if it isn't."""
        return (await self.explain()).why

    async def explain(self) -> JobWaitAnswer:
        """Why it is not running, and after how many seconds only a person can help."""
        answer = await self._calls.ask(Call("GET", f"/api/ai-jobs/{self.id}/why"))
        return parse_answer(JobWaitAnswer, answer)

    async def progress(self) -> FollowedJob:
        """Its stage, place in the queue, percent and current node, as a page shows them."""
        answer = await self._calls.ask(Call("GET", f"/api/ai-jobs/{self.id}/progress"))
        return parse_answer(FollowedJob, answer)

    async def settings(self) -> AgainAnswer:
        """What it was submitted with, as far as it can be submitted again."""
        answer = await self._calls.ask(Call("GET", f"/api/ai-jobs/{self.id}/again"))
        return parse_answer(AgainAnswer, answer)

    async def share(self, **fields: Any) -> MadeShare:
        """A link to what it made, for people without a key; see `Client.share`."""
        answer = await self._calls.ask(Call("POST", f"/api/ai-jobs/{self.id}/shares", fields))
        return parse_answer(MadeShare, answer)

    async def download(self, folder: Path, *, progress: Transferred | None = None) -> list[Path]:
        """Saves all that it made, each file under its `download_name`; nothing is overwritten."""
        job = await self.refresh()  # for URLs that are good from now on
        saved: list[Path] = []
        for output in job.outputs:
            path = free_path(folder, output.download_name or output.filename)
            saved.append(await download_file(self._calls, output.url, path, progress))
        return saved


def free_path(folder: Path, filename: str) -> Path:
    """A name is what others chose: never a path, never a hidden file."""
    name = PurePosixPath(filename.replace("\\", "/").replace("\0", "")).name.lstrip(".")
    given = Path(name[-NAME_CHARACTERS_MAX:] or "output")
    path, number = folder / given, 1
    while path.exists():
        number += 1
        path = folder / f"{given.stem}-{number}{given.suffix}"
    return path


BATCH_POLL_SECONDS = 1.0
BATCH_POLL_SECONDS_MAX = 10.0
PAGE = 100


class BatchHandle:
    """Follows one batch: wait, jobs. `batch` is its state as of the last call."""

    def __init__(self, calls: ApiCalls, batch: Batch) -> None:
        self._calls = calls
        self.batch = batch

    @property
    def id(self) -> UUID:
        return self.batch.id

    def __repr__(self) -> str:
        return f"BatchHandle({self.id}, {self.batch.progress:g}% of {self.batch.total})"

    async def refresh(self) -> Batch:
        self.batch = await self._page(0)
        return self.batch

    async def wait(
        self,
        *,
        timeout_seconds: float | None = None,
        on_change: Callable[[Batch], None] | None = None,
    ) -> Batch:
        """The batch when all its jobs have ended, however they did: `counts` tells.

        Raises RunTimedOut when the time is up; the batch goes on.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ended(on_change)
        except TimeoutError as error:
            raise RunTimedOut(
                f"batch {self.id} has not ended within {timeout_seconds} s; it goes on"
            ) from error
        return self.batch

    async def _ended(self, on_change: Callable[[Batch], None] | None) -> None:
        seconds = BATCH_POLL_SECONDS
        while not (await self.refresh()).is_ended:
            if on_change:
                on_change(self.batch)
            await self._calls.retry.sleep(seconds)
            seconds = min(seconds * 1.5, BATCH_POLL_SECONDS_MAX)

    async def jobs(self) -> AsyncIterator[JobHandle]:
        """In the order in which their properties were given."""
        start = 0
        while True:
            page = await self._page(start)
            for each in page.jobs:
                yield JobHandle(self._calls, Job(**dict(each)))
            if page.next is None:
                return
            start = page.next

    async def cancel(self) -> Batch:
        """Whatever has not ended; what was reserved for it comes back."""
        answer = await self._calls.ask(Call("DELETE", f"/api/ai-jobs/batches/{self.id}"))
        self.batch = parse_answer(Batch, answer)
        return self.batch

    async def _page(self, start: int) -> Batch:
        query = {"start": start, "limit": PAGE}
        call = Call("GET", f"/api/ai-jobs/batches/{self.id}", params=query)
        return parse_answer(Batch, await self._calls.ask(call))
