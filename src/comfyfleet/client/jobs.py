"""A job in hand: follow it, wait for it, take what it made."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path, PurePosixPath
from uuid import UUID

from comfyfleet.client.answers import parsed
from comfyfleet.client.calls import Call, Calls
from comfyfleet.client.following import Events, job_of
from comfyfleet.client.model import Job, JobEvent, Why
from comfyfleet.client.uploading import Transferred, fetch
from comfyfleet.kernel.errors import RunFailed, RunTimedOut

NAME_CHARACTERS_MAX = 150


class JobHandle:
    """`job` is as it was last heard of; `idempotency_key` is what it was asked for with, if it was here."""

    def __init__(self, calls: Calls, job: Job, *, idempotency_key: str | None = None) -> None:
        self._calls = calls
        self.job = job
        self.idempotency_key = idempotency_key

    @property
    def id(self) -> UUID:
        return self.job.id

    def __repr__(self) -> str:
        return f"JobHandle({self.id}, {self.job.status})"

    async def refresh(self) -> Job:
        self.job = await job_of(self._calls, self.id)
        return self.job

    async def events(self, *, last_id: int = 0) -> AsyncGenerator[JobEvent, None]:
        """Each once and in order, until the job has ended; from after `last_id`, if given."""
        async with aclosing(Events(self._calls, self.id, last_id=last_id).told()) as told:
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
        """What was reserved comes back. A job that has ended stays as it is."""
        answer = await self._calls.ask(Call("DELETE", f"/api/ai-jobs/{self.id}"))
        self.job = parsed(Job, answer)
        return self.job

    async def retry(self) -> "JobHandle":
        """A new job like this one, with a reservation of its own; only if this one has failed.

        Asked for twice, it is the same one.
        """
        call = Call("POST", f"/api/ai-jobs/{self.id}/retry", is_repeatable=True)
        answer = await self._calls.ask(call)
        return JobHandle(self._calls, parsed(Job, answer))

    async def why(self) -> str:
        """Why it is not running, if it isn't."""
        answer = await self._calls.ask(Call("GET", f"/api/ai-jobs/{self.id}/why"))
        return parsed(Why, answer).why

    async def download(self, folder: Path, *, progress: Transferred | None = None) -> list[Path]:
        """Saves all that it made; nothing is overwritten."""
        job = await self.refresh()  # for URLs that are good from now on
        saved: list[Path] = []
        for output in job.outputs:
            path = free_path(folder, output.filename)
            saved.append(await fetch(self._calls, output.url, path, progress))
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
