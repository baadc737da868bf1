"""A job's events as they happen (server-sent events), to be resumed where a reader left off.

Status and outputs are written down and numbered; progress is told as it is now, and has no number.
"""

import json
from asyncio import get_running_loop
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any
from uuid import UUID

from fastapi import Header, Query, Request, Response, status
from fastapi.responses import StreamingResponse

from comfyfleet.db import Database
from comfyfleet.events import service as events
from comfyfleet.events.model import EventKind, JobEvent
from comfyfleet.http.given import GivenPlane
from comfyfleet.http.problems import problems
from comfyfleet.http.public.auth import Reader
from comfyfleet.http.public.routing import public_router
from comfyfleet.http.public.streams import MEDIA_TYPE, EventStream, KeyWatch
from comfyfleet.http.streaming import undisturbed
from comfyfleet.jobs import customers
from comfyfleet.jobs import service as jobs
from comfyfleet.jobs.model import Job
from comfyfleet.plane import Plane
from comfyfleet.tenants.keys.model import Caller
from comfyfleet.wire.files import ROW_ID_MAX

router = public_router("ai-jobs")
# Another control plane may have written the event: news tell of those of this one only.
LOOK_AGAIN_SECONDS = 1.0
# Comments keep proxies from hanging up.
HEARTBEAT_SECONDS = 15.0
# Then the reader is let go, and comes again with the last number that it has.
STREAM_SECONDS_MAX = 3600.0
RETRY_MILLISECONDS = 2000
EXAMPLE = (
    'id: 7\nevent: status\ndata: {"job_id": "6a1f…", "status": "processing"}\n\n'
    'event: progress\ndata: {"percent": 40.0, "node": "3"}\n\n'
)
DESCRIBED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "`status`, `progress` and `outputs` until the job has ended.",
        "content": {MEDIA_TYPE: {"example": EXAMPLE}},
    },
    204: {"description": "It has ended, and nothing is left to tell: don't come again."},
}
# As a header, which browsers send by themselves; as a parameter, for the first time after a reload.
Since = Annotated[int, Header(ge=0, le=ROW_ID_MAX, description="The last number that is known.")]
After = Annotated[int, Query(ge=0, le=ROW_ID_MAX, description="As Last-Event-ID.")]


@router.get(
    "/ai-jobs/{job_id}/events",
    response_class=StreamingResponse,
    responses={**DESCRIBED, **problems(404)},
)
async def follow(
    request: Request,
    job_id: UUID,
    plane: GivenPlane,
    caller: Reader,
    last_event_id: Since = 0,
    after: After = 0,
    previews: Annotated[bool, Query(description="With pictures of what is in the making.")] = False,
) -> Response:
    """Ends after the event that ends the job."""
    job = await customers.get(plane.sides, caller.tenant.id, caller.user_id, job_id)
    pool = plane.pools[caller.tenant.pool]
    since = max(last_event_id, after)
    if not job.status.is_active:
        async with pool.look() as tx:
            left = await events.after(tx, job.tenant_id, job.id, after_id=since, limit=1)
        if not left:
            return Response(status_code=status.HTTP_204_NO_CONTENT)
    lines = _lines(plane, caller, job, since, previews=previews)
    return EventStream(request, caller, lines)


async def _lines(
    plane: Plane, caller: Caller, job: Job, since: int, *, previews: bool
) -> AsyncIterator[str]:
    """A look for each round: whoever reads slowly holds no transaction open."""
    pool, key = plane.pools[caller.tenant.pool], KeyWatch(plane, caller)
    clock = get_running_loop().time
    begun = said_at = clock()
    progress: dict[str, Any] | None = None
    yield f"retry: {RETRY_MILLISECONDS}\n\n"
    while clock() - begun < STREAM_SECONDS_MAX and await key.holds():
        job, found = await undisturbed(_look(pool, job, since))
        if found:
            since, said_at = found[-1].id, clock()
            yield "".join(map(_line, found))
            continue  # there may be more than one page
        if not job.status.is_active:
            return
        told = _progress(plane, job, previews=previews)
        if told != progress:
            progress, said_at = told, clock()
            yield _event(EventKind.PROGRESS, told or {})
        elif clock() - said_at >= HEARTBEAT_SECONDS:
            said_at = clock()
            yield ": still there\n\n"
        await plane.sides.news.changed(job.id, LOOK_AGAIN_SECONDS)


async def _look(pool: Database, job: Job, since: int) -> tuple[Job, Sequence[JobEvent]]:
    """The job first: once it has ended, its events are complete."""
    async with pool.look() as tx:
        seen = await jobs.get(tx, job.tenant_id, job.id)
        return seen, await events.after(tx, job.tenant_id, job.id, after_id=since)


def _progress(plane: Plane, job: Job, *, previews: bool) -> dict[str, Any] | None:
    told = plane.sides.progresses.of(job.lease_token)
    hidden = None if previews else {"preview"}
    return told.model_dump(mode="json", exclude_none=True, exclude=hidden) if told else None


def _line(event: JobEvent) -> str:
    return f"id: {event.id}\n{_event(event.kind, dict(event.data))}"


def _event(kind: str, data: dict[str, Any]) -> str:
    """JSON on one line: a line break in a text is written as \\n there."""
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"
