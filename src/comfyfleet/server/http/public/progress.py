"""Routes that report the progress of a single job, a media item's jobs, or all of a user's jobs."""

import asyncio
import json
from asyncio import get_running_loop
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, TypeAlias
from uuid import UUID

from fastapi import Query, Request, status
from fastapi.responses import Response, StreamingResponse

from comfyfleet.api.jobs import FollowedJob, FollowedJobs, JobStatus
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import EffectDefinition
from comfyfleet.server.http.deps import PlaneDep, problems
from comfyfleet.server.http.public.auth import Reader, public_router
from comfyfleet.server.http.public.jobs import HEARTBEAT_SECONDS, RETRY_MILLISECONDS, After, Since
from comfyfleet.server.http.streams import MEDIA_TYPE, EventStream, StreamKeyCheck, run_shielded
from comfyfleet.server.jobs import customer
from comfyfleet.server.jobs.progress import PreviewWatch
from comfyfleet.server.jobs.stages import (
    WaitingJob,
    expected_percent,
    seconds_left,
    stage_of,
    stages_of,
)
from comfyfleet.server.media import service as media
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.tenants.model import Caller

router = public_router("ai-jobs")
# Seconds between reads of active jobs. Another control plane may have changed a job, and
# notifications only reach this process.
REREAD_SECONDS = 1.0
# Seconds between reads if the user has no active job. New jobs submitted to this process are
# noticed immediately.
IDLE_REREAD_SECONDS = 5.0
# Seconds to wait for further changes, so that they are sent together.
GATHER_SECONDS = 0.2
# Seconds for which the reason for a job's wait is cached.
WHY_SECONDS = 3.0
# Maximum numbers of queued jobs with a reason, and of running jobs with previews.
EXPLAINED_MAX = 10
WATCHED_MAX = 10
STREAM_SECONDS_MAX = 3600.0
# Consecutive reads overlap by this time, so that changes by another control plane aren't missed.
# Some changes may therefore be sent twice.
OVERLAP = timedelta(seconds=10)
# Fields that change as time passes. They don't cause events, because clients can extrapolate them.
BY_THE_CLOCK = {"expected_progress", "seconds_left"}
Previews = Annotated[bool, Query(description="Whether to include previews.")]
ReadJobs: TypeAlias = Callable[[], Awaitable[list[WaitingJob]]]
EXAMPLE = (
    'id: 1760000000000\nevent: job\ndata: {"id": "6a1f…", "status": "processing", "stage": "making", "progress": 40.0}\n\n'
    'event: preview\ndata: {"job_id": "6a1f…", "preview": "data:image/jpeg;base64,…"}\n\n'
)
DESCRIBED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": (
            "`job` events contain the current state of a job that has changed, and may repeat. "
            "`preview` events contain the latest preview image of a job. "
            "`wallet` events contain the balance, on a user's stream only."
        ),
        "content": {MEDIA_TYPE: {"example": EXAMPLE}},
    },
}


class JobFollower:
    """Builds the progress views of jobs. It caches facts that don't change, and limits how often
    expensive queries run."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._effects: dict[UUID, EffectDefinition] = {}
        self._titles: dict[UUID, dict[str, str]] = {}
        self._why: dict[UUID, tuple[float, str]] = {}

    async def views(self, jobs: Sequence[WaitingJob]) -> list[FollowedJob]:
        await self._learn_effects({job.effect_id for job in jobs if job.effect_id})
        explained = [job for job in jobs if job.shown_status == JobStatus.QUEUED]
        reasons = {job.id: await self._explain(job) for job in explained[:EXPLAINED_MAX]}
        return [await self._view(job, reasons.get(job.id)) for job in jobs]

    async def _learn_effects(self, effect_ids: Collection[UUID]) -> None:
        missing = [effect_id for effect_id in effect_ids if effect_id not in self._effects]
        if missing:
            async with self._plane.central.read() as tx:
                self._effects.update(await catalog.get_effects(tx, missing))

    async def _explain(self, job: WaitingJob) -> str:
        now = get_running_loop().time()
        explained_at, why = self._why.get(job.id, (-WHY_SECONDS, ""))
        if now - explained_at >= WHY_SECONDS:
            why = await customer.explain_waiting(self._plane.context, job)
            self._why[job.id] = (now, why)
        return why

    async def _view(self, job: WaitingJob, why: str | None) -> FollowedJob:
        now = self._plane.clock()
        progress = self._plane.context.caches.progress.of(job.lease_token)
        progress = progress if job.shown_status == JobStatus.PROCESSING else None
        percent = progress.percent if progress else None
        percent = 100.0 if job.status == JobStatus.COMPLETED else percent
        effect = self._effects.get(job.effect_id) if job.effect_id else None
        typical = effect.typical_seconds if effect else None
        return FollowedJob(
            id=job.id,
            status=job.shown_status,
            effect_id=job.effect_id,
            effect_slug=effect.slug if effect else None,
            effect_title=effect.settings.title if effect else None,
            video_id=job.video_id,
            stage=stage_of(job, percent),
            stages=stages_of(job, percent, typical),
            why=why,
            progress=percent,
            expected_progress=None if percent is not None else expected_percent(job, typical, now),
            seconds_left=seconds_left(job, typical, now),
            node=progress.node if progress else None,
            node_title=await self._title(job, progress.node)
            if progress and progress.node
            else None,
            step=progress.step if progress else None,
            steps=progress.steps if progress else None,
            error=job.error_message,
            price_tokens=job.reserved_tokens,
            refunded_tokens=job.refunded_tokens,
            submitted_at=job.submitted_at,
            started_at=job.started_at,
            completed_at=job.completed_at,
        )

    async def _title(self, job: WaitingJob, node: str) -> str | None:
        if job.id not in self._titles:
            self._titles[job.id] = await customer.node_titles(
                self._plane.context, job.tenant_id, job.id
            )
        return self._titles[job.id].get(node)

    def keep_only(self, job_ids: Collection[UUID]) -> None:
        """Drops cached facts about all jobs except the given ones."""
        self._titles = {
            job_id: self._titles[job_id] for job_id in job_ids if job_id in self._titles
        }
        self._why = {job_id: self._why[job_id] for job_id in job_ids if job_id in self._why}


@router.get("/ai-jobs/{job_id}/progress", responses=problems(404))
async def show_progress(job_id: UUID, plane: PlaneDep, caller: Reader) -> FollowedJob:
    """Returns a job's progress with its stages, the reason why it is waiting, and its outcome."""
    await customer.get_job(plane.context, caller.tenant.id, caller.user_id, job_id)
    jobs = await customer.read_waiting(plane.context, caller.tenant.id, [job_id])
    (view,) = await JobFollower(plane).views(jobs)
    return view


@router.get("/videos/{video_id}/progress", responses=problems(404))
async def show_media_progress(video_id: UUID, plane: PlaneDep, caller: Reader) -> FollowedJobs:
    """Returns the progress of a media item's latest job and of its other unfinished jobs."""
    await _require_media(plane, caller, video_id)
    jobs = await customer.read_media_jobs(plane.context, caller.tenant.id, video_id)
    return FollowedJobs(jobs=tuple(await JobFollower(plane).views(jobs)))


@router.get("/account/progress")
async def show_account_progress(plane: PlaneDep, caller: Reader) -> FollowedJobs:
    """Returns the progress of all your unfinished effect jobs."""
    jobs = await customer.read_active_jobs(plane.context, caller.tenant.id, caller.user_id)
    return FollowedJobs(jobs=tuple(await JobFollower(plane).views(jobs)))


@router.get(
    "/videos/{video_id}/events",
    response_class=StreamingResponse,
    responses={
        **DESCRIBED,
        204: {"description": "All jobs have finished and all changes were sent."},
        **problems(404),
    },
)
async def follow_media(
    request: Request,
    video_id: UUID,
    plane: PlaneDep,
    caller: Reader,
    last_event_id: Since = 0,
    after: After = 0,
    previews: Previews = False,
) -> Response:
    """Streams the progress of a media item's jobs as server-sent events. The stream ends when the
    last job finishes."""
    await _require_media(plane, caller, video_id)

    async def read() -> list[WaitingJob]:
        return await customer.read_media_jobs(plane.context, caller.tenant.id, video_id)

    since = _moment(max(last_event_id, after))
    jobs = await read()
    if since and not any(_may_have_changed(job, since) for job in jobs):
        return Response(status_code=status.HTTP_204_NO_CONTENT)
    stream = _JobStream(plane, caller, read, has_previews=previews)
    return EventStream(request, caller, stream.lines(ends=True))


@router.get(
    "/account/events",
    response_class=StreamingResponse,
    responses=DESCRIBED,
)
async def follow_account(
    request: Request,
    plane: PlaneDep,
    caller: Reader,
    last_event_id: Since = 0,
    after: After = 0,
    previews: Previews = False,
) -> Response:
    """Streams the progress of all your effect jobs as server-sent events, including jobs submitted
    later.

    One connection is enough for all pages of a browser. After a reconnect, the stream includes the
    jobs that finished in the meantime.
    """
    read_until = _moment(max(last_event_id, after)) or plane.clock()

    async def read() -> list[WaitingJob]:
        """Reads active jobs, and jobs that finished since the last read, because a short job may
        start and finish in between."""
        nonlocal read_until
        ended_since, read_until = read_until, plane.clock() - OVERLAP
        return await customer.read_active_jobs(
            plane.context, caller.tenant.id, caller.user_id, ended_since=ended_since
        )

    stream = _JobStream(plane, caller, read, has_previews=previews)
    return EventStream(request, caller, stream.lines(ends=False))


async def _require_media(plane: ControlPlane, caller: Caller, media_id: UUID) -> None:
    async with plane.pools[caller.tenant.pool].read() as tx:
        await media.get_media(tx, caller.tenant.id, caller.user_id, media_id)


def _moment(event_id: int) -> datetime | None:
    """Returns the time since which changes are read. An event's id is the time at which it was
    sent, in milliseconds."""
    try:
        return datetime.fromtimestamp(event_id / 1000, UTC) - OVERLAP if event_id else None
    except (ValueError, OverflowError, OSError):
        return None


def _may_have_changed(job: WaitingJob, since: datetime) -> bool:
    return job.status.is_active or job.completed_at is None or job.completed_at >= since


class WatchedPreviews:
    """The previews of running jobs for one client. Workers send previews of a job only while a
    client watches it."""

    def __init__(self, plane: ControlPlane, tenant_id: UUID) -> None:
        self._context, self._tenant_id = plane.context, tenant_id
        self._watches: dict[UUID, PreviewWatch] = {}
        self._sent: dict[UUID, str] = {}

    def look_at(self, ids: Collection[UUID]) -> None:
        """Watches these jobs, and stops watching all others."""
        for job_id in self._watches.keys() - set(ids):
            self._watches.pop(job_id).close()
            self._sent.pop(job_id, None)
        for job_id in ids:
            if job_id not in self._watches:
                notify = partial(self._context.notifier.tell, job_id)
                self._watches[job_id] = self._context.previews.watch(
                    self._tenant_id, job_id, notify
                )

    def news(self, job_id: UUID) -> str | None:
        """Returns a job's preview as a data URL, or None if it hasn't changed since the last
        call."""
        watch = self._watches.get(job_id)
        picture = watch.latest if watch else None
        if picture is None or self._sent.get(job_id) == picture.base64:
            return None
        self._sent[job_id] = picture.base64
        return picture.data_url


class _JobStream:
    """A stream with an event for each job that changes. Each read uses a new transaction, so that a
    slow client doesn't keep one open."""

    def __init__(
        self, plane: ControlPlane, caller: Caller, read: ReadJobs, *, has_previews: bool
    ) -> None:
        self._plane, self._caller, self._read = plane, caller, read
        self._has_previews = has_previews
        self._follower = JobFollower(plane)
        self._active: list[UUID] = []
        self._sent: dict[UUID, str] = {}
        self._previews = WatchedPreviews(plane, caller.tenant.id)
        self._balance: int | None = None

    async def lines(self, *, ends: bool) -> AsyncIterator[str]:
        """Yields the lines of the event stream, and stops watching previews when it ends.

        With `ends`, the stream ends when no job is active.
        """
        try:
            async for line in self._lines(ends=ends):
                yield line
        finally:
            self._previews.look_at(())

    async def _lines(self, *, ends: bool) -> AsyncIterator[str]:
        clock, key = get_running_loop().time, StreamKeyCheck(self._plane, self._caller)
        started_at = sent_at = clock()
        yield f"retry: {RETRY_MILLISECONDS}\n\n"
        while clock() - started_at < STREAM_SECONDS_MAX and await key.is_valid():
            active, news = await run_shielded(self._news(has_wallet=not ends))
            if news:
                sent_at = clock()
                yield "".join(news)
            elif clock() - sent_at >= HEARTBEAT_SECONDS:
                sent_at = clock()
                yield ": still there\n\n"
            if ends and not active:
                return
            seconds = REREAD_SECONDS if active else IDLE_REREAD_SECONDS
            await asyncio.sleep(GATHER_SECONDS)
            await self._plane.context.notifier.any_changed([*active, self._caller.user_id], seconds)

    async def _news(self, *, has_wallet: bool) -> tuple[list[UUID], list[str]]:
        """Returns the active jobs and the events to send."""
        now = self._plane.clock()
        listed = {job.id: job for job in await self._read()}
        # Jobs that were active at the last read and are no longer listed have finished.
        ended_ids = [job_id for job_id in self._active if job_id not in listed]
        ended = await customer.read_waiting(self._plane.context, self._caller.tenant.id, ended_ids)
        jobs = [*ended, *listed.values()]
        # Without an active job, no change can be missed, so the overlap isn't needed and is added
        # to the time. A client that reconnects then only gets changes since this event.
        now = now if any(job.status.is_active for job in jobs) else now + OVERLAP
        events = [event async for event in self._changes(jobs, int(now.timestamp() * 1000))]
        if has_wallet and (events or self._balance is None):
            events += await self._wallet()
        self._active = [job.id for job in listed.values() if job.status.is_active]
        if self._has_previews:
            # Watches the user as well, because a job may send previews before this stream has read
            # it.
            self._previews.look_at([*self._active[:WATCHED_MAX], self._caller.user_id])
        self._sent = {job_id: facts for job_id, facts in self._sent.items() if job_id in listed}
        self._follower.keep_only(self._active)
        return self._active, events

    async def _changes(self, jobs: Sequence[WaitingJob], number: int) -> AsyncIterator[str]:
        for job, view in zip(jobs, await self._follower.views(jobs), strict=True):
            facts = view.model_dump_json(exclude=BY_THE_CLOCK)
            if self._sent.get(job.id) != facts:
                self._sent[job.id] = facts
                yield f"id: {number}\nevent: job\ndata: {view.model_dump_json()}\n\n"
            if picture := self._previews.news(job.id):
                data = json.dumps({"job_id": str(job.id), "preview": picture})
                yield f"event: preview\ndata: {data}\n\n"

    async def _wallet(self) -> list[str]:
        caller = self._caller
        async with self._plane.pools[caller.tenant.pool].read() as tx:
            balance = await ledger.balance(tx, caller.tenant.id, caller.user_id)
        if balance == self._balance:
            return []
        self._balance = balance
        return [f'event: wallet\ndata: {{"balance": {balance}}}\n\n']
