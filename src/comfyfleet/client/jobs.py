"""Follows jobs and batches: waits for them and downloads their results. Event streams are resumed
after an interruption, and replaced by polling if they aren't available."""

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

    async def follow(self) -> AsyncGenerator[JobEvent, None]:
        """Yields each event once, in order, until the job ends."""
        async with aclosing(self._listening.all_events()) as stream:
            async for event in stream:
                self._listening.is_over |= event.ends_job
                yield event
        async for event in self._polled():
            yield event

    async def _polled(self) -> AsyncGenerator[JobEvent, None]:
        """Polls the job and yields its changes as events. These events have no ids of their own."""
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


def _parse_event(event: ServerEvent) -> JobEvent | None:
    """Parses an event of a job. Returns None for others, such as keep-alive events."""
    try:
        # Progress events have no id. A client that resumes gets the current progress.
        return JobEvent(id=int(event.id or 0), kind=event.name, data=json.loads(event.data))
    except (ValueError, ValidationError):
        return None


class FollowedJobEvents:
    """Follows all jobs of a user, or of a media item. A stream that is interrupted is resumed."""

    def __init__(self, calls: ApiCalls, path: str) -> None:
        self._listening = ResumableStream(calls, path, _parse_followed)

    async def follow(self) -> AsyncGenerator[FollowedJob, None]:
        async with aclosing(self._listening.all_events()) as stream:
            async for job in stream:
                yield job


def _parse_followed(event: ServerEvent) -> FollowedJob | None:
    try:
        return FollowedJob.model_validate_json(event.data) if event.name == "job" else None
    except ValidationError:
        return None


NAME_CHARACTERS_MAX = 150


class JobHandle:
    """Follows a job: waits, streams events, downloads results, cancels and retries. `job` is its
    state as of the last call.

    `idempotency_key` is the key it was submitted with, if this client submitted it."""

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
        """Yields each event once, in order, until the job ends. Starts after `last_id`, if
        given."""
        async with aclosing(JobEvents(self._calls, self.id, last_id=last_id).follow()) as stream:
            async for event in stream:
                yield event

    async def wait(
        self,
        *,
        timeout_seconds: float | None = None,
        check: bool = True,
        on_event: Callable[[JobEvent], None] | None = None,
    ) -> Job:
        """Waits for the job to end and returns it.

        Raises RunFailed if the job did not succeed, unless `check` is off. Raises RunTimedOut after
        the timeout. The job then continues, and you can wait for it again."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ended(on_event)
        except TimeoutError as error:
            raise RunTimedOut(
                f"job {self.id} has not ended within {timeout_seconds} s; it is still active",
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
        """Starts a new job like this one, with its own reservation. Only a failed job can be
        retried.

        Repeated calls return the same new job."""
        call = Call("POST", f"/api/ai-jobs/{self.id}/retry", is_repeatable=True)
        answer = await self._calls.ask(call)
        return JobHandle(self._calls, parse_answer(Job, answer))

    async def why(self) -> str:
        """Returns why the job isn't running."""
        return (await self.explain()).why

    async def explain(self) -> JobWaitAnswer:
        """Returns why the job isn't running, and the number of seconds after which a person must
        help."""
        answer = await self._calls.ask(Call("GET", f"/api/ai-jobs/{self.id}/why"))
        return parse_answer(JobWaitAnswer, answer)

    async def progress(self) -> FollowedJob:
        """Returns the stage, queue position, percentage and current node, in the form shown on web
        pages."""
        answer = await self._calls.ask(Call("GET", f"/api/ai-jobs/{self.id}/progress"))
        return parse_answer(FollowedJob, answer)

    async def settings(self) -> AgainAnswer:
        """Returns the settings the job was submitted with, as far as they can be submitted
        again."""
        answer = await self._calls.ask(Call("GET", f"/api/ai-jobs/{self.id}/again"))
        return parse_answer(AgainAnswer, answer)

    async def share(self, **fields: Any) -> MadeShare:
        """Creates a link to the job's results for people without a key. See `Client.share`."""
        answer = await self._calls.ask(Call("POST", f"/api/ai-jobs/{self.id}/shares", fields))
        return parse_answer(MadeShare, answer)

    async def download(self, folder: Path, *, progress: Transferred | None = None) -> list[Path]:
        """Saves all results of the job, each under its `download_name`. Existing files are not
        overwritten."""
        job = await self.refresh()  # returns fresh URLs
        saved: list[Path] = []
        for output in job.outputs:
            path = free_path(folder, output.download_name or output.filename)
            saved.append(await download_file(self._calls, output.url, path, progress))
        return saved


def free_path(folder: Path, filename: str) -> Path:
    """Returns an unused path in the folder. The filename comes from other people and must not
    become a path or a hidden file."""
    name = PurePosixPath(filename.replace("\\", "/").replace("\0", "")).name.lstrip(".")
    base = Path(name[-NAME_CHARACTERS_MAX:] or "output")
    path, number = folder / base, 1
    while path.exists():
        number += 1
        path = folder / f"{base.stem}-{number}{base.suffix}"
    return path


BATCH_POLL_SECONDS = 1.0
BATCH_POLL_SECONDS_MAX = 10.0
PAGE = 100


class BatchHandle:
    """Follows a batch: waits for it and lists its jobs. `batch` is its state as of the last
    call."""

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
        """Waits until all jobs have ended and returns the batch. `counts` has the number of jobs by
        status.

        Raises RunTimedOut after the timeout. The batch then continues."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._ended(on_change)
        except TimeoutError as error:
            raise RunTimedOut(
                f"batch {self.id} has not ended within {timeout_seconds} s; it is still active"
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
        """Yields the jobs in the order of the submitted properties."""
        start = 0
        while True:
            page = await self._page(start)
            for job in page.jobs:
                yield JobHandle(self._calls, Job(**dict(job)))
            if page.next is None:
                return
            start = page.next

    async def cancel(self) -> Batch:
        """Cancels all jobs that have not ended, and refunds their reservations."""
        answer = await self._calls.ask(Call("DELETE", f"/api/ai-jobs/batches/{self.id}"))
        self.batch = parse_answer(Batch, answer)
        return self.batch

    async def _page(self, start: int) -> Batch:
        query = {"start": start, "limit": PAGE}
        call = Call("GET", f"/api/ai-jobs/batches/{self.id}", params=query)
        return parse_answer(Batch, await self._calls.ask(call))
