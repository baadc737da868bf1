"""Jobs as pages that wait for them show them: one of them, those of a media, and all of a user in one stream."""

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
# Another control plane may have changed a job; notifications are of this process only.
REREAD_SECONDS = 1.0
# Of a user who has no active job: one that is submitted here is noticed at once.
IDLE_REREAD_SECONDS = 5.0
# What happens within so long is told at once.
GATHER_SECONDS = 0.2
WHY_SECONDS = 3.0
EXPLAINED_MAX = 10
WATCHED_MAX = 10
STREAM_SECONDS_MAX = 3600.0
# Before the last event: what another control plane wrote meanwhile is told, perhaps twice.
OVERLAP = timedelta(seconds=10)
# What changes without news: whoever was told once can count on.
BY_THE_CLOCK = {"expected_progress", "seconds_left"}
Previews = Annotated[bool, Query(description="Include preview pictures.")]
ReadJobs: TypeAlias = Callable[[], Awaitable[list[WaitingJob]]]
EXAMPLE = (
    'id: 1760000000000\nevent: job\ndata: {"id": "6a1f…", "status": "processing", "stage": "making", "progress": 40.0}\n\n'
    'event: preview\ndata: {"job_id": "6a1f…", "preview": "data:image/jpeg;base64,…"}\n\n'
)
DESCRIBED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": (
            "`job`: a job as it is now, whenever it changes; the same may be told twice. `preview`: its latest picture. "
            "`wallet`: the balance, on a user's stream."
        ),
        "content": {MEDIA_TYPE: {"example": EXAMPLE}},
    },
}


class JobFollower:
    """Reads jobs as a page shows them; keeps what doesn't change, and asks rarely for what costs more."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._effects: dict[UUID, EffectDefinition] = {}
        self._titles: dict[UUID, dict[str, str]] = {}
        self._why: dict[UUID, tuple[float, str]] = {}

    async def views(self, jobs: Sequence[WaitingJob]) -> list[FollowedJob]:
        await self._learn_effects({each.effect_id for each in jobs if each.effect_id})
        explained = [each for each in jobs if each.shown_status == JobStatus.QUEUED]
        told = {each.id: await self._explain(each) for each in explained[:EXPLAINED_MAX]}
        return [await self._view(each, told.get(each.id)) for each in jobs]

    async def _learn_effects(self, wanted: Collection[UUID]) -> None:
        missing = [each for each in wanted if each not in self._effects]
        if missing:
            async with self._plane.central.read() as tx:
                self._effects.update(await catalog.get_effects(tx, missing))

    async def _explain(self, job: WaitingJob) -> str:
        now = get_running_loop().time()
        said_at, said = self._why.get(job.id, (-WHY_SECONDS, ""))
        if now - said_at >= WHY_SECONDS:
            said = await customer.explain_waiting(self._plane.context, job)
            self._why[job.id] = (now, said)
        return said

    async def _view(self, job: WaitingJob, why: str | None) -> FollowedJob:
        now = self._plane.clock()
        told = self._plane.context.caches.progress.of(job.lease_token)
        told = told if job.shown_status == JobStatus.PROCESSING else None
        percent = told.percent if told else None
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
            node=told.node if told else None,
            node_title=await self._title(job, told.node) if told and told.node else None,
            step=told.step if told else None,
            steps=told.steps if told else None,
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
        """Forgets what was read of other jobs."""
        self._titles = {each: self._titles[each] for each in job_ids if each in self._titles}
        self._why = {each: self._why[each] for each in job_ids if each in self._why}


@router.get("/ai-jobs/{job_id}/progress", responses=problems(404))
async def show_progress(job_id: UUID, plane: PlaneDep, caller: Reader) -> FollowedJob:
    """A job in four stages: why it waits, what it does, how far it is, and how it ended."""
    await customer.get_job(plane.context, caller.tenant.id, caller.user_id, job_id)
    found = await customer.read_waiting(plane.context, caller.tenant.id, [job_id])
    (view,) = await JobFollower(plane).views(found)
    return view


@router.get("/videos/{video_id}/progress", responses=problems(404))
async def show_media_progress(video_id: UUID, plane: PlaneDep, caller: Reader) -> FollowedJobs:
    """The latest job of a media, and all its others that have not ended."""
    await _require_media(plane, caller, video_id)
    found = await customer.read_media_jobs(plane.context, caller.tenant.id, video_id)
    return FollowedJobs(jobs=tuple(await JobFollower(plane).views(found)))


@router.get("/account/progress")
async def show_account_progress(plane: PlaneDep, caller: Reader) -> FollowedJobs:
    """All jobs of effects that have not ended."""
    found = await customer.read_active_jobs(plane.context, caller.tenant.id, caller.user_id)
    return FollowedJobs(jobs=tuple(await JobFollower(plane).views(found)))


@router.get(
    "/videos/{video_id}/events",
    response_class=StreamingResponse,
    responses={
        **DESCRIBED,
        204: {"description": "All its jobs have ended, and nothing is left to tell."},
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
    """Server-sent events of a media's jobs; the stream ends with the last of them."""
    await _require_media(plane, caller, video_id)

    async def read() -> list[WaitingJob]:
        return await customer.read_media_jobs(plane.context, caller.tenant.id, video_id)

    since = _moment(max(last_event_id, after))
    found = await read()
    if since and not any(_is_news(each, since) for each in found):
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
    """Server-sent events of all jobs of a user's effects, also of those submitted later. One connection is enough for
    all pages of a browser. After a break it tells which jobs have ended meanwhile."""
    read_until = _moment(max(last_event_id, after)) or plane.clock()

    async def read() -> list[WaitingJob]:
        """Also what has ended since the last time: a short job may begin and end in between."""
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
    """Events are numbered by the millisecond in which they were told."""
    try:
        return datetime.fromtimestamp(event_id / 1000, UTC) - OVERLAP if event_id else None
    except (ValueError, OverflowError, OSError):
        return None


def _is_news(job: WaitingJob, since: datetime) -> bool:
    return job.status.is_active or job.completed_at is None or job.completed_at >= since


class WatchedPreviews:
    """Pictures of jobs while they are made, for one reader. Workers send them only while somebody looks."""

    def __init__(self, plane: ControlPlane, tenant_id: UUID) -> None:
        self._context, self._tenant_id = plane.context, tenant_id
        self._watches: dict[UUID, PreviewWatch] = {}
        self._told: dict[UUID, str] = {}

    def look_at(self, ids: Collection[UUID]) -> None:
        """Looks at these, and at no others any longer."""
        for gone in self._watches.keys() - set(ids):
            self._watches.pop(gone).close()
            self._told.pop(gone, None)
        for each in ids:
            if each not in self._watches:
                told = partial(self._context.notifier.tell, each)
                self._watches[each] = self._context.previews.watch(self._tenant_id, each, told)

    def news(self, job_id: UUID) -> str | None:
        """Returns a job's picture as a data URL, unless it was returned before."""
        watch = self._watches.get(job_id)
        picture = watch.latest if watch else None
        if picture is None or self._told.get(job_id) == picture.base64:
            return None
        self._told[job_id] = picture.base64
        return picture.data_url


class _JobStream:
    """Tells each job when it changes. Jobs are read in a new transaction each time, so that a slow reader
    holds none open."""

    def __init__(
        self, plane: ControlPlane, caller: Caller, read: ReadJobs, *, has_previews: bool
    ) -> None:
        self._plane, self._caller, self._read = plane, caller, read
        self._has_previews = has_previews
        self._follower = JobFollower(plane)
        self._active: list[UUID] = []
        self._told: dict[UUID, str] = {}
        self._previews = WatchedPreviews(plane, caller.tenant.id)
        self._balance: int | None = None

    async def lines(self, *, ends: bool) -> AsyncIterator[str]:
        """Yields events until the stream ends; whoever wanted previews looks no longer then."""
        try:
            async for each in self._lines(ends=ends):
                yield each
        finally:
            self._previews.look_at(())

    async def _lines(self, *, ends: bool) -> AsyncIterator[str]:
        clock, key = get_running_loop().time, StreamKeyCheck(self._plane, self._caller)
        begun = said_at = clock()
        yield f"retry: {RETRY_MILLISECONDS}\n\n"
        while clock() - begun < STREAM_SECONDS_MAX and await key.is_valid():
            active, news = await run_shielded(self._news(has_wallet=not ends))
            if news:
                said_at = clock()
                yield "".join(news)
            elif clock() - said_at >= HEARTBEAT_SECONDS:
                said_at = clock()
                yield ": still there\n\n"
            if ends and not active:
                return
            seconds = REREAD_SECONDS if active else IDLE_REREAD_SECONDS
            await asyncio.sleep(GATHER_SECONDS)
            await self._plane.context.notifier.any_changed([*active, self._caller.user_id], seconds)

    async def _news(self, *, has_wallet: bool) -> tuple[list[UUID], list[str]]:
        """The active jobs, and the events to send."""
        now = self._plane.clock()
        listed = {each.id: each for each in await self._read()}
        # What was active a moment ago and is no longer listed has ended.
        gone = [job_id for job_id in self._active if job_id not in listed]
        ended = await customer.read_waiting(self._plane.context, self._caller.tenant.id, gone)
        jobs = [*ended, *listed.values()]
        # Where nothing is active nothing can be missed: whoever comes again is told what is new.
        now = now if any(each.status.is_active for each in jobs) else now + OVERLAP
        events = [event async for event in self._changes(jobs, int(now.timestamp() * 1000))]
        if has_wallet and (events or self._balance is None):
            events += await self._wallet()
        self._active = [each.id for each in listed.values() if each.status.is_active]
        if self._has_previews:
            # The user, too: a job may begin to run before this stream has heard of it.
            self._previews.look_at([*self._active[:WATCHED_MAX], self._caller.user_id])
        self._told = {job_id: told for job_id, told in self._told.items() if job_id in listed}
        self._follower.keep_only(self._active)
        return self._active, events

    async def _changes(self, jobs: Sequence[WaitingJob], number: int) -> AsyncIterator[str]:
        for job, view in zip(jobs, await self._follower.views(jobs), strict=True):
            facts = view.model_dump_json(exclude=BY_THE_CLOCK)
            if self._told.get(job.id) != facts:
                self._told[job.id] = facts
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
