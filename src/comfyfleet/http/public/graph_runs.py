"""Graph runs: started, followed, stopped, retried, answered."""

import json
from asyncio import get_running_loop
from collections.abc import AsyncIterator
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Query, Request, Response, status
from fastapi.responses import StreamingResponse
from pydantic import Field

from comfyfleet.graphs import listing, service
from comfyfleet.graphs.events import Answer as Said
from comfyfleet.graphs.keeping import Kept
from comfyfleet.graphs.runs import Choice, Key, Run, RunStatus
from comfyfleet.graphs.service import NewRun, Owner
from comfyfleet.graphs.stored import RunEntry
from comfyfleet.http.given import GivenPlane
from comfyfleet.http.problems import problems
from comfyfleet.http.public import run_answers
from comfyfleet.http.public.auth import Reader, Writer
from comfyfleet.http.public.graphs import TOKENS_MAX, GraphName, named, owner_of
from comfyfleet.http.public.routing import PAGE_USUAL, Answer, Body, Limit, Text, public_router
from comfyfleet.http.public.run_answers import GraphRunAnswer
from comfyfleet.http.public.streams import MEDIA_TYPE, EventStream, KeyWatch
from comfyfleet.http.streaming import undisturbed
from comfyfleet.http.values import ItemIndex, Tokens, VersionNumber
from comfyfleet.plane import Plane
from comfyfleet.tenants.keys.model import Caller

router = public_router("graphs")
EXECUTIONS_USUAL, EXECUTIONS_MAX = 200, 20_000
PROGRESS_SECONDS = 0.5
HEARTBEAT_SECONDS = 15.0
STREAM_SECONDS_MAX = 3600.0
EXAMPLE = 'event: progress\ndata: {"status": "running", "overall_percent": 40.0}\n\n'
DESCRIBED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "`progress` while something changes; `end` once, when the run is over.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string"}, "example": EXAMPLE}},
    }
}
Executions = Annotated[
    int, Query(ge=0, le=EXECUTIONS_MAX, description="At most so many executions.")
]


class RunBody(Body):
    inputs: dict[str, Any] = Field(
        default_factory=dict,
        description="By input node. A file is named by its id, or by that of its media.",
        examples=[{"width": 640}],
    )
    version: VersionNumber | None = Field(
        default=None, description="The newest, unless another is named."
    )
    max_tokens: Tokens | None = Field(
        default=None, ge=0, le=TOKENS_MAX, description="Nothing starts that could cost more."
    )
    idempotency_key: Text | None = Field(
        default=None, min_length=1, max_length=200, description="The same key gives the same run."
    )


class NewGraphRunBody(RunBody):
    document: dict[str, Any] | str = Field(
        description="The graph, as an object or as a text in JSON or YAML."
    )


class GraphRunSummary(Answer):
    id: UUID
    graph_id: UUID
    graph_version: int
    name: str = Field(description="Of its graph, as that is called now.")
    status: RunStatus
    tokens: int = Field(description="Of jobs that are in flight or done.")
    max_tokens: int | None
    error: str | None = Field(description="Why it failed, in words for people.")
    created_at: datetime
    ended_at: datetime | None


class GraphRunSummaries(Answer):
    runs: list[GraphRunSummary] = Field(description="The newest first.")
    next: UUID | None = Field(description="Ask on with before=next; null: that was all.")


class RetryBody(Body):
    max_tokens: int | None = Field(
        default=None,
        ge=0,
        le=TOKENS_MAX,
        description="What the whole run may spend from now on, if that is more than before.",
    )
    backend: Text | None = Field(default=None, examples=["worker:gpu-7"])


class AnswerBody(Body):
    node: Text | None = Field(default=None, description="May be left out if one node asks.")
    index: list[ItemIndex] = Field(default_factory=list, max_length=10)
    choice: Choice
    backend: Text | None = Field(default=None, examples=["worker:gpu-7"])


@router.post(
    "/graphs/{graph_id}/runs",
    status_code=status.HTTP_201_CREATED,
    responses={
        200: {"model": GraphRunAnswer, "description": "It was started before, by the same key"},
        **problems(404, 409),
    },
)
async def start(
    graph_id: GraphName, body: RunBody, plane: GivenPlane, caller: Writer, response: Response
) -> GraphRunAnswer:
    """The caller pays: each job reserves its price when it is started."""
    found = await named(plane, caller, graph_id)
    kept, is_new = await service.start(plane.graphs, owner_of(caller), found, _wanted(body))
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return await _answer(plane, kept)


@router.post(
    "/graph-runs",
    status_code=status.HTTP_201_CREATED,
    responses={
        200: {"model": GraphRunAnswer, "description": "It was started before, by the same key"},
        **problems(409),
    },
)
async def start_document(
    body: NewGraphRunBody, plane: GivenPlane, caller: Writer, response: Response
) -> GraphRunAnswer:
    """The graph is stored with its first run, once; what is refused stores nothing."""
    document = await service.document_from(body.document)
    owner = owner_of(caller)
    kept, is_new = await service.run_document(plane.graphs, owner, document, _wanted(body))
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return await _answer(plane, kept)


def _wanted(body: RunBody) -> NewRun:
    return NewRun(body.inputs, body.version, body.max_tokens, body.idempotency_key)


@router.get("/graph-runs", responses=problems(404))
async def list_runs(
    plane: GivenPlane,
    caller: Reader,
    graph_id: UUID | None = None,
    status: RunStatus | None = None,
    before: UUID | None = None,
    limit: Limit = PAGE_USUAL,
) -> GraphRunSummaries:
    """Without what went in and came out: ask for one of them to get that."""
    found = await listing.runs_of(
        plane.graphs,
        owner_of(caller),
        graph_id=graph_id,
        status=status,
        before=before,
        limit=limit + 1,
    )
    page = found[:limit]
    return GraphRunSummaries(
        runs=[_summary(each) for each in page], next=page[-1].id if len(found) > limit else None
    )


def _summary(entry: RunEntry) -> GraphRunSummary:
    error = entry.error.message if entry.error else None
    return GraphRunSummary(**{**asdict(entry), "error": error})


@router.get("/graph-runs/{run_id}", responses=problems(404))
async def show(
    run_id: UUID, plane: GivenPlane, caller: Reader, executions: Executions = EXECUTIONS_USUAL
) -> GraphRunAnswer:
    kept, run = await service.run_as_of_now(plane.graphs, owner_of(caller), run_id)
    return await run_answers.seen(plane, kept, run, limit=executions)


@router.post("/graph-runs/{run_id}/cancel", responses=problems(404))
async def cancel(run_id: UUID, plane: GivenPlane, caller: Writer) -> GraphRunAnswer:
    """Stops its jobs, on the backends too; one that is over stays as it is."""
    return await _answer(plane, await service.cancel(plane.graphs, owner_of(caller), run_id))


@router.post("/graph-runs/{run_id}/retry", responses=problems(404, 409))
async def retry(
    run_id: UUID, plane: GivenPlane, caller: Writer, body: RetryBody | None = None
) -> GraphRunAnswer:
    """Goes on from where it failed; what was done is used again."""
    wanted = body or RetryBody()
    kept = await service.retry(
        plane.graphs,
        owner_of(caller),
        run_id,
        backend=wanted.backend,
        max_tokens=wanted.max_tokens,
    )
    return await _answer(plane, kept)


@router.post("/graph-runs/{run_id}/answer", responses=problems(404, 409))
async def answer(
    run_id: UUID, body: AnswerBody, plane: GivenPlane, caller: Writer
) -> GraphRunAnswer:
    """To a node that asks; hours later is fine."""
    owner = owner_of(caller)
    if body.node is None:
        key = service.the_question(await service.get_run(plane.graphs, owner, run_id))
    else:
        key = Key(body.node, tuple(body.index))
    said = Said(key, body.choice, body.backend)
    return await _answer(plane, await service.answer(plane.graphs, owner, run_id, said))


async def _answer(plane: Plane, kept: Kept) -> GraphRunAnswer:
    return await run_answers.seen(plane, kept, kept.run, limit=EXECUTIONS_USUAL)


@router.get(
    "/graph-runs/{run_id}/events",
    response_class=StreamingResponse,
    responses={**DESCRIBED, **problems(404)},
)
async def follow(request: Request, run_id: UUID, plane: GivenPlane, caller: Reader) -> Response:
    """At most every half second while something changes; ends with the run."""
    await service.get_run(plane.graphs, owner_of(caller), run_id)
    return EventStream(request, caller, _lines(plane, caller, run_id))


async def _lines(plane: Plane, caller: Caller, run_id: UUID) -> AsyncIterator[str]:
    """A look for each round: whoever reads slowly holds no transaction open."""
    owner, key = owner_of(caller), KeyWatch(plane, caller)
    clock = get_running_loop().time
    begun, said_at, said = clock(), 0.0, ""
    while clock() - begun < STREAM_SECONDS_MAX and await key.holds():
        kept, run = await undisturbed(service.run_as_of_now(plane.graphs, owner, run_id))
        told = json.dumps(_told(plane, kept, run))
        if told != said:
            said, said_at = told, clock()
            yield f"event: progress\ndata: {told}\n\n"
        elif clock() - said_at >= HEARTBEAT_SECONDS:
            said_at = clock()
            yield ": still there\n\n"
        if run.status.is_over:
            yield f"event: end\ndata: {told}\n\n"
            return
        await _pause(plane, owner, run_id, said_at)


async def _pause(plane: Plane, owner: Owner, run_id: UUID, said_at: float) -> None:
    """Half a second since the last word; the end of the run is told at once."""
    clock = get_running_loop().time
    while (left := said_at + PROGRESS_SECONDS - clock()) > 0:
        if not await plane.sides.news.changed(run_id, left):
            return
        # It was changed in this process, and so is at hand as it is now.
        kept = plane.graphs.runs.at_hand(owner.tenant_id, run_id)
        if kept is None or kept.run.status.is_over:
            return
    if said_at + PROGRESS_SECONDS <= clock():
        await plane.sides.news.changed(run_id, PROGRESS_SECONDS)


def _told(plane: Plane, kept: Kept, run: Run) -> dict[str, Any]:
    progress = run_answers.progress_seen(plane, kept, run).model_dump(mode="json")
    asked = [each.model_dump(mode="json") for each in run_answers.questions(run)]
    return {
        "run_id": str(run.id),
        "status": run.status,
        **progress,
        "nodes": [each.model_dump(mode="json") for each in run_answers.nodes_seen(kept, run)],
        "questions": asked,
        "error": run.error.message if run.error else None,
    }
