"""Candidates of a run: listed, judged, compared two by two; and what happens in it, as it happens."""

import json
from asyncio import get_running_loop
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID, uuid4

from fastapi import Query, Request
from fastapi.responses import StreamingResponse
from pydantic import Field

from comfyfleet.files.model import File
from comfyfleet.http.given import GivenPlane
from comfyfleet.http.problems import problems
from comfyfleet.http.public.auth import Reader, Writer
from comfyfleet.http.public.events import (
    HEARTBEAT_SECONDS,
    LOOK_AGAIN_SECONDS,
    RETRY_MILLISECONDS,
    STREAM_SECONDS_MAX,
    After,
    Since,
)
from comfyfleet.http.public.routing import PAGE_MAX, Answer, Body, Limit, public_router
from comfyfleet.http.public.showing import url_of
from comfyfleet.http.public.streams import MEDIA_TYPE, EventStream, KeyWatch
from comfyfleet.http.streaming import undisturbed
from comfyfleet.pipelines import judging, service, viewing
from comfyfleet.pipelines.judging import Whose
from comfyfleet.pipelines.model import Candidate, PipelineEvent, Status
from comfyfleet.pipelines.viewing import Filter
from comfyfleet.plane import Plane
from comfyfleet.tenants.keys.model import Caller

router = public_router("pipelines")
EVENTS_PER_LOOK = 200
STEPS_MAX = 1000
DESCRIBED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "`submitted`, `candidates`, `job_failed`, `no_work` and every act.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
    }
}


class CandidateAnswer(Answer):
    id: UUID
    step: int = Field(description="Its number; 0 is the base.")
    parent: UUID | None
    status: Status
    score: float
    child_count: int
    seed: int | None
    properties: dict[str, Any] = Field(description="What it was made with.")
    job_id: UUID | None
    output_index: int
    path: str = Field(description="Its name in listings and exports.")
    content_type: str
    size: int
    url: str | None = Field(
        description="Lives for 15 minutes; null of a text, and once the file was removed."
    )
    text: str | None = Field(description="What its job showed, beside a picture or in its place.")
    created_at: datetime


class CandidatePage(Answer):
    candidates: list[CandidateAnswer] = Field(description="The oldest first.")
    next: UUID | None = Field(description="Ask on with after=next; null: that was all.")


class Branch(Answer):
    id: UUID
    step: int
    status: Status
    score: float
    children: list["Branch"]


class TreeAnswer(Answer):
    tree: list[Branch]


class PairAnswer(Answer):
    candidates: list[CandidateAnswer] = Field(
        description="Two of one step; none where there are not two to compare."
    )


class VoteBody(Body):
    winner: UUID
    loser: UUID
    id: UUID | None = Field(
        default=None, description="Sent twice with the same id, it counts once."
    )


class VoteAnswer(Answer):
    id: UUID = Field(description="To undo it by.")
    scores: dict[UUID, float]


@router.get("/pipeline-runs/{run_id}/candidates", responses=problems(404))
async def list_candidates(
    run_id: UUID,
    plane: GivenPlane,
    caller: Reader,
    step: Annotated[int | None, Query(ge=0, le=STEPS_MAX)] = None,
    status: Status | None = None,
    parent: Annotated[UUID | None, Query(description="Only its children.")] = None,
    after: UUID | None = None,
    limit: Limit = PAGE_MAX,
) -> CandidatePage:
    wanted = Filter(step=step, status=status, parent=parent)
    found, files = await viewing.page(
        plane.sides, caller.tenant.id, caller.user_id, run_id, wanted, after=after, limit=limit + 1
    )
    rows = [await _answer(plane, each, files) for each in found[:limit]]
    return CandidatePage(candidates=rows, next=rows[-1].id if len(found) > limit else None)


@router.get("/pipeline-runs/{run_id}/tree", responses=problems(404))
async def tree(run_id: UUID, plane: GivenPlane, caller: Reader) -> TreeAnswer:
    """Who came out of whom."""
    found = await viewing.tree(plane.sides, caller.tenant.id, caller.user_id, run_id)
    children: dict[UUID | None, list[Candidate]] = {}
    for each in found:
        children.setdefault(each.parent, []).append(each)
    return TreeAnswer(tree=_branches(children, None))


def _branches(children: Mapping[UUID | None, list[Candidate]], parent: UUID | None) -> list[Branch]:
    """As deep as the pipeline has steps, and no deeper."""
    return [
        Branch(
            id=each.id,
            step=each.step,
            status=each.status,
            score=each.score,
            children=_branches(children, each.id),
        )
        for each in children.get(parent, [])
    ]


async def _judge(
    plane: Plane, caller: Caller, run_id: UUID, candidate_id: UUID, verdict: Status | None
) -> CandidateAnswer:
    whose = Whose(caller.tenant.id, caller.user_id, run_id, candidate_id)
    if verdict is None:
        found = await judging.undo(plane.sides, whose)
    else:
        found = await judging.judge(plane.sides, whose, verdict)
    files = await viewing.files_of(plane.sides, caller.tenant.id, [found])
    return await _answer(plane, found, files)


_CANDIDATE = "/pipeline-runs/{run_id}/candidates/{candidate_id}"


@router.get(_CANDIDATE, responses=problems(404))
async def show(
    run_id: UUID, candidate_id: UUID, plane: GivenPlane, caller: Reader
) -> CandidateAnswer:
    found, files = await viewing.one(
        plane.sides, caller.tenant.id, caller.user_id, run_id, candidate_id
    )
    return await _answer(plane, found, files)


@router.post(_CANDIDATE + "/approve", responses=problems(404, 409))
async def approve(
    run_id: UUID, candidate_id: UUID, plane: GivenPlane, caller: Writer
) -> CandidateAnswer:
    return await _judge(plane, caller, run_id, candidate_id, Status.APPROVED)


@router.post(_CANDIDATE + "/reject", responses=problems(404, 409))
async def reject(
    run_id: UUID, candidate_id: UUID, plane: GivenPlane, caller: Writer
) -> CandidateAnswer:
    """Stops its branch: children that are queued are cancelled."""
    return await _judge(plane, caller, run_id, candidate_id, Status.REJECTED)


@router.post(_CANDIDATE + "/winner", responses=problems(404, 409))
async def winner(
    run_id: UUID, candidate_id: UUID, plane: GivenPlane, caller: Writer
) -> CandidateAnswer:
    """Winners get children before all others of their step."""
    return await _judge(plane, caller, run_id, candidate_id, Status.WINNER)


@router.post(_CANDIDATE + "/undo", responses=problems(404, 409))
async def undo(
    run_id: UUID, candidate_id: UUID, plane: GivenPlane, caller: Writer
) -> CandidateAnswer:
    """The last that was said of it, as if it had never been said."""
    return await _judge(plane, caller, run_id, candidate_id, None)


@router.get("/pipeline-runs/{run_id}/pair", responses=problems(404))
async def pair(
    run_id: UUID,
    plane: GivenPlane,
    caller: Reader,
    step: Annotated[int | None, Query(ge=0, le=STEPS_MAX)] = None,
) -> PairAnswer:
    """Two that are worth comparing: of the step that is named, or the deepest that has two."""
    chosen = await judging.pair(plane.sides, caller.tenant.id, caller.user_id, run_id, step=step)
    files = await viewing.files_of(plane.sides, caller.tenant.id, chosen or ())
    return PairAnswer(candidates=[await _answer(plane, each, files) for each in chosen or ()])


@router.post("/pipeline-runs/{run_id}/vote", responses=problems(404, 409))
async def vote(run_id: UUID, body: VoteBody, plane: GivenPlane, caller: Writer) -> VoteAnswer:
    vote_id = body.id or uuid4()
    scores = await judging.vote(
        plane.sides,
        caller.tenant.id,
        caller.user_id,
        run_id,
        vote_id=vote_id,
        winner=body.winner,
        loser=body.loser,
    )
    return VoteAnswer(id=vote_id, scores=scores)


@router.post("/pipeline-runs/{run_id}/votes/{vote_id}/undo", responses=problems(404))
async def undo_vote(run_id: UUID, vote_id: UUID, plane: GivenPlane, caller: Writer) -> VoteAnswer:
    """The other votes are counted anew."""
    scores = await judging.undo_vote(plane.sides, caller.tenant.id, caller.user_id, run_id, vote_id)
    return VoteAnswer(id=vote_id, scores=scores)


@router.get(
    "/pipeline-runs/{run_id}/events",
    response_class=StreamingResponse,
    responses={**DESCRIBED, **problems(404)},
)
async def follow(
    request: Request,
    run_id: UUID,
    plane: GivenPlane,
    caller: Reader,
    last_event_id: Since = 0,
    after: After = 0,
) -> StreamingResponse:
    """Goes on for as long as somebody reads: a run may be judged at any time."""
    await service.get_run(plane.sides, caller.tenant.id, caller.user_id, run_id)
    lines = _lines(plane, caller, run_id, max(last_event_id, after))
    return EventStream(request, caller, lines)


async def _lines(plane: Plane, caller: Caller, run_id: UUID, since: int) -> AsyncIterator[str]:
    clock, key = get_running_loop().time, KeyWatch(plane, caller)
    begun = said_at = clock()
    yield f"retry: {RETRY_MILLISECONDS}\n\n"
    while clock() - begun < STREAM_SECONDS_MAX and await key.holds():
        found = await undisturbed(
            viewing.events(
                plane.sides, caller.tenant.id, run_id, after_id=since, limit=EVENTS_PER_LOOK
            )
        )
        if found:
            since, said_at = found[-1].id, clock()
            yield "".join(map(_line, found))
            continue
        if clock() - said_at >= HEARTBEAT_SECONDS:
            said_at = clock()
            yield ": still there\n\n"
        await plane.sides.news.changed(run_id, LOOK_AGAIN_SECONDS)


def _line(event: PipelineEvent) -> str:
    data = {**event.data, "at": event.created_at.isoformat()}
    return f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(data)}\n\n"


async def _answer(
    plane: Plane, candidate: Candidate, files: Mapping[UUID, File]
) -> CandidateAnswer:
    kept = candidate.file or {}
    file = files.get(UUID(kept["file_id"])) if kept.get("file_id") else None
    return CandidateAnswer(
        id=candidate.id,
        step=candidate.step,
        parent=candidate.parent,
        status=candidate.status,
        score=candidate.score,
        child_count=candidate.child_count,
        seed=candidate.seed,
        properties=dict(candidate.properties),
        job_id=candidate.job_id,
        output_index=candidate.output_index,
        path=kept.get("path", ""),
        content_type=kept.get("mime_type", ""),
        size=kept.get("size", 0),
        url=await url_of(plane, file) if file else None,
        text=candidate.text,
        created_at=candidate.created_at,
    )
