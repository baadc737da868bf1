"""Routes for graphs, graph runs and the workflows that graphs can use."""

import json
from asyncio import get_running_loop, sleep
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any
from uuid import UUID

from fastapi import Body as FromBody
from fastapi import Path, Query, Request, Response, status
from fastapi.responses import StreamingResponse
from pydantic import Field

from comfyfleet.api.graph_mermaid import draw_mermaid
from comfyfleet.api.graph_model import DocumentProblem
from comfyfleet.api.graph_parse import parse_graph, write_graph
from comfyfleet.api.graph_spellings import with_our_spelling
from comfyfleet.api.graphs import (
    GraphAnswer,
    GraphPage,
    GraphPorts,
    GraphRunAnswer,
    GraphRunSummaries,
    GraphRunSummary,
    GraphSummary,
    OfferedProperty,
    ProblemSeen,
    QuoteAnswer,
    Verdict,
    WorkflowOffer,
    WorkflowOffers,
)
from comfyfleet.errors import NotFound
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog.model import Property
from comfyfleet.server.graphs import actions, pause_actions
from comfyfleet.server.graphs.actions import NewGraphRun, Owner
from comfyfleet.server.graphs.apply import LoadedRun
from comfyfleet.server.graphs.catalogue import WorkflowFacts
from comfyfleet.server.graphs.document_work import compute, read_body
from comfyfleet.server.graphs.environment import all_offered
from comfyfleet.server.graphs.plan import RunQuote, is_required
from comfyfleet.server.graphs.rerun import CHANGES_MAX
from comfyfleet.server.graphs.rerun_actions import NewRerun, rerun_graph_run
from comfyfleet.server.graphs.run import (
    Choice,
    ExecutionKey,
    GraphRunState,
    GraphRunStatus,
    RunListItem,
    StoredGraph,
    job_id,
)
from comfyfleet.server.graphs.run import QuestionAnswered as Said
from comfyfleet.server.graphs.validate import GraphCheck
from comfyfleet.server.http.deps import PlaneDep, problems
from comfyfleet.server.http.public import views
from comfyfleet.server.http.public.auth import (
    PAGE_USUAL,
    Body,
    IdempotencyHeader,
    Limit,
    Reader,
    Text,
    Writer,
    idempotency_key,
    public_router,
)
from comfyfleet.server.http.public.progress import WATCHED_MAX, WatchedPreviews
from comfyfleet.server.http.request_body import ItemIndex, Tokens, VersionNumber
from comfyfleet.server.http.streams import MEDIA_TYPE, EventStream, StreamKeyCheck, run_shielded
from comfyfleet.server.tenants.model import Caller, Tenant

router = public_router("graphs")


@router.get("/workflows")
async def list_offered(plane: PlaneDep, _: Reader) -> WorkflowOffers:
    """Lists the published effects and offered workflows that you can use in graphs."""
    async with plane.central.read() as tx:
        workflows = await all_offered(tx)
    return WorkflowOffers(workflows=tuple(map(_offer, workflows)))


def _offer(facts: WorkflowFacts) -> WorkflowOffer:
    return WorkflowOffer(
        kind="effect" if facts.effect else "workflow",
        name=facts.name,
        version=facts.version,
        price_tokens=facts.price_tokens,
        typical_seconds=facts.typical_seconds,
        properties=tuple(map(_property, facts.properties)),
    )


def _property(prop: Property) -> OfferedProperty:
    return OfferedProperty(
        name=prop.name,
        type=prop.type,
        # The default of a media property is a file on the backend, which customers must not see.
        default=None if prop.is_media else prop.default,
        minimum=prop.minimum,
        maximum=prop.maximum,
        step=prop.step,
        choices=prop.choices,
        required=is_required(prop),
        description=prop.description,
    )


TOKENS_MAX = 2**53
GRAPH_EXAMPLE = {
    "name": "Draw",
    "nodes": [
        {"id": "draw", "type": "workflow", "workflow": "negative", "properties": {"width": 640}},
        {"id": "picture", "type": "output"},
    ],
    "connections": [{"from": "draw.output", "to": "picture.value"}],
}
GraphName = Annotated[
    str,
    Path(
        max_length=200,
        description="The graph's id or name. Your own graphs take precedence over your tenant's.",
    ),
]
Document = Annotated[
    dict[str, Any],
    FromBody(
        description="The graph, or an object whose `document` is the graph as an object or as JSON "
        "or YAML text.",
        examples=[GRAPH_EXAMPLE],
    ),
]


class QuoteBody(Body):
    inputs: dict[str, Any] = Field(
        default_factory=dict,
        description="The run's inputs. Missing lists are assumed to have their maximum length.",
    )
    version: VersionNumber | None = None


def owner_of(caller: Caller) -> Owner:
    return Owner(caller.tenant.id, caller.user_id)


async def find_graph_id(plane: ControlPlane, caller: Caller, text: str) -> UUID:
    return await actions.find_graph(plane.graphs, owner_of(caller), text)


async def _document(body: Mapping[str, Any], tenant_id: UUID) -> Any:
    return await read_body(tenant_id, body.get("document", body))


@router.post(
    "/graphs",
    status_code=status.HTTP_201_CREATED,
    responses={200: {"model": GraphAnswer, "description": "You have already stored this graph"}},
)
async def create(
    body: Document, plane: PlaneDep, caller: Writer, response: Response
) -> GraphAnswer:
    """Creates a graph. If it is invalid, the error lists all problems. A graph with the same name
    and content is stored only once."""
    graph, is_new = await actions.create_graph_once(
        plane.graphs, owner_of(caller), await _document(body, caller.tenant.id)
    )
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return await _graph_answer(graph)


@router.get("/graphs", responses=problems(404))
async def list_graphs(
    plane: PlaneDep, caller: Reader, before: UUID | None = None, limit: Limit = PAGE_USUAL
) -> GraphPage:
    """Lists the tenant's graphs, newest first, without their documents. To see a graph's document,
    retrieve it by its id."""
    graphs = await actions.list_graphs(
        plane.graphs, owner_of(caller), before=before, limit=limit + 1
    )
    page = graphs[:limit]
    return GraphPage(
        graphs=tuple(GraphSummary(**asdict(graph)) for graph in page),
        next=page[-1].id if len(graphs) > limit else None,
    )


@router.post("/graphs/validate")
async def validate(body: Document, plane: PlaneDep, caller: Reader) -> Verdict:
    """Validates a graph without storing it, and estimates its price. If the graph is sent as text,
    the response includes the parsed document."""
    document = await _document(body, caller.tenant.id)
    checked = await actions.check_document(plane.graphs, owner_of(caller), document)
    was_text = isinstance(body.get("document"), str) and isinstance(document, dict)
    verdict = _verdict(checked.check)
    owner = owner_of(caller)
    priced = (
        await actions.quote_checked(plane.graphs, owner, checked, {}) if verdict.valid else None
    )
    spelled = None
    if was_text:
        spelled = await compute(owner.tenant_id, document, lambda: with_our_spelling(document))
    return verdict.model_copy(
        update={
            "document": spelled,
            "quote": _quote_answer(plane, priced) if priced else None,
        }
    )


@router.get("/graphs/{graph_id}", responses=problems(404), name="show")
async def show_graph(
    graph_id: GraphName, plane: PlaneDep, caller: Reader, version: VersionNumber | None = None
) -> GraphAnswer:
    stored_id = await find_graph_id(plane, caller, graph_id)
    return await _graph_answer(
        await actions.get_graph(plane.graphs, owner_of(caller), stored_id, version)
    )


@router.get("/graphs/{graph_id}/ports", responses=problems(404), name="ports")
async def show_ports(
    graph_id: GraphName, plane: PlaneDep, caller: Reader, version: VersionNumber | None = None
) -> GraphPorts:
    """Returns the inputs and outputs of a graph with their types. If the graph is used as a node of
    another graph, they are the node's ports."""
    stored_id = await find_graph_id(plane, caller, graph_id)
    return await actions.graph_ports(plane.graphs, owner_of(caller), stored_id, version)


@router.delete(
    "/graphs/{graph_id}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404)
)
async def delete(graph_id: GraphName, plane: PlaneDep, caller: Writer) -> None:
    """Deletes a graph. Only its creator can do this. Its runs aren't deleted, and active runs
    continue."""
    await actions.delete_graph(
        plane.graphs, owner_of(caller), await find_graph_id(plane, caller, graph_id)
    )


@router.post(
    "/graphs/{graph_id}/versions", status_code=status.HTTP_201_CREATED, responses=problems(404)
)
async def new_version(
    graph_id: GraphName, body: Document, plane: PlaneDep, caller: Writer
) -> GraphAnswer:
    """Adds a new version of a graph. Only its creator can do this. Active runs continue with the
    version that they started with."""
    owner, stored_id = owner_of(caller), await find_graph_id(plane, caller, graph_id)
    return await _graph_answer(
        await actions.add_graph_version(
            plane.graphs, owner, stored_id, await _document(body, caller.tenant.id)
        )
    )


@router.post("/graphs/{graph_id}/validate", responses=problems(404))
async def validate_stored(graph_id: GraphName, plane: PlaneDep, caller: Reader) -> Verdict:
    """Validates a stored graph again. It may have become invalid, because workflows and workers
    change."""
    stored_id = await find_graph_id(plane, caller, graph_id)
    owner = owner_of(caller)
    stored = await actions.get_graph(plane.graphs, owner, stored_id)
    checked = await actions.check_document(plane.graphs, owner, dict(stored.document))
    return _verdict(checked.check)


@router.post("/graphs/{graph_id}/quote", responses=problems(404))
async def quote(
    graph_id: GraphName, body: QuoteBody, plane: PlaneDep, caller: Reader
) -> QuoteAnswer:
    """Estimates the minimum and maximum price and duration of a graph run."""
    price = await actions.quote_run(
        plane.graphs,
        owner_of(caller),
        await find_graph_id(plane, caller, graph_id),
        body.inputs,
        version=body.version,
    )
    return _quote_answer(plane, price)


def _quote_answer(plane: ControlPlane, quote: RunQuote) -> QuoteAnswer:
    return QuoteAnswer(
        tokens_min=quote.tokens_min,
        tokens_max=quote.tokens_max,
        jobs_min=quote.jobs_min,
        jobs_max=quote.jobs_max,
        seconds_min=quote.seconds_min,
        seconds_max=quote.seconds_max,
        executions_min=quote.executions_min,
        executions_max=quote.executions_max,
        executions_limit=plane.settings.max_executions_per_graph_run,
        unknown_durations=quote.unknown_durations,
        warnings=_problems(quote.warnings),
    )


def _verdict(check: GraphCheck) -> Verdict:
    problems_seen = _problems(check.problems)
    return Verdict(
        valid=not problems_seen, problems=problems_seen, warnings=_problems(check.warnings)
    )


def _problems(document_problems: tuple[DocumentProblem, ...]) -> tuple[ProblemSeen, ...]:
    return tuple(ProblemSeen(**problem._asdict()) for problem in document_problems)


async def _graph_answer(graph: StoredGraph) -> GraphAnswer:
    document = dict(graph.document)

    def mermaid() -> str:
        return draw_mermaid(parse_graph(document).graph)

    return GraphAnswer(
        id=graph.id,
        name=graph.name,
        version=graph.version,
        document=document,
        mermaid=await compute(graph.tenant_id, document, mermaid),
    )


EXECUTIONS_USUAL, EXECUTIONS_MAX = 200, 20_000
# Minimum seconds between two progress events of a run.
PROGRESS_SECONDS = 0.5
HEARTBEAT_SECONDS = 15.0
STREAM_SECONDS_MAX = 3600.0
RUN_EXAMPLE = 'event: progress\ndata: {"status": "running", "overall_percent": 40.0}\n\n'
DESCRIBED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "`progress` events whenever the run changes, and one `end` event when it "
        "finishes.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string"}, "example": RUN_EXAMPLE}},
    }
}
WithPreviews = Annotated[
    bool, Query(description="Whether to include `preview` events with images of running nodes.")
]
Executions = Annotated[
    int, Query(ge=0, le=EXECUTIONS_MAX, description="Maximum number of executions to return.")
]


class RunBody(Body):
    inputs: dict[str, Any] = Field(
        default_factory=dict,
        description="Values by input node. A file is given by its id or the id of its media item.",
        examples=[{"width": 640}],
    )
    version: VersionNumber | None = Field(default=None, description="The newest one by default.")
    max_tokens: Tokens | None = Field(
        default=None,
        ge=0,
        le=TOKENS_MAX,
        description="Spending limit in tokens. Jobs that could exceed it aren't started.",
    )
    idempotency_key: Text | None = Field(
        default=None, min_length=1, max_length=200, description="The same key returns the same run."
    )


class NewGraphRunBody(RunBody):
    document: dict[str, Any] | str = Field(
        description="The graph, as an object or as JSON or YAML text."
    )


class RetryBody(Body):
    max_tokens: int | None = Field(
        default=None,
        ge=0,
        le=TOKENS_MAX,
        description="A higher spending limit for the whole run, in tokens.",
    )
    backend: Text | None = Field(default=None, examples=["worker:gpu-7"])


class RerunBody(Body):
    start: Text | None = Field(
        default=None,
        alias="from",
        max_length=200,
        description="The node that runs again with everything that depends on it. By default, "
        "changed nodes and nodes without a result run again.",
        examples=["soften"],
    )
    inputs: dict[str, Any] = Field(
        default_factory=dict, description="Inputs that differ from those of the earlier run."
    )
    set: dict[str, Any] = Field(
        default_factory=dict,
        max_length=CHANGES_MAX,
        description="Values for properties of nodes, by `node.property`, for this run only.",
        examples=[{"soften.radius": 4}],
    )
    version: VersionNumber | None = Field(
        default=None, description="The graph's version. The default is that of the earlier run."
    )
    max_tokens: Tokens | None = Field(
        default=None,
        ge=0,
        le=TOKENS_MAX,
        description="Spending limit of the new run in tokens. The default is that of the earlier "
        "run.",
    )
    idempotency_key: Text | None = Field(
        default=None, min_length=1, max_length=200, description="The same key returns the same run."
    )


class AnswerBody(Body):
    node: Text | None = Field(
        default=None, description="The node with the question. Optional if there is only one."
    )
    index: list[ItemIndex] = Field(default_factory=list, max_length=10)
    choice: Choice
    backend: Text | None = Field(default=None, examples=["worker:gpu-7"])
    picked: list[ItemIndex] | None = Field(
        default=None,
        max_length=10_000,
        description="With `approve` on a node for picking items, the indexes of the picked items, "
        "in order.",
    )
    for_all: bool = Field(
        default=False,
        description="Whether to give the same answer to all current questions of the node.",
    )


@router.post(
    "/graphs/{graph_id}/runs",
    status_code=status.HTTP_201_CREATED,
    responses={
        200: {"model": GraphRunAnswer, "description": "A run with this key exists already"},
        **problems(404, 409),
    },
)
async def start(
    graph_id: GraphName,
    body: RunBody,
    plane: PlaneDep,
    caller: Writer,
    response: Response,
    idempotency_header: IdempotencyHeader = None,
) -> GraphRunAnswer:
    """Starts a run of a graph. You are charged for each job, and its price is reserved when the job
    is submitted."""
    stored_id = await find_graph_id(plane, caller, graph_id)
    new = _new_run(body, idempotency_header)
    loaded, is_new = await actions.start_run(plane.graphs, owner_of(caller), stored_id, new)
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return await _run_answer(plane, caller, loaded)


@router.post(
    "/graph-runs",
    status_code=status.HTTP_201_CREATED,
    responses={
        200: {"model": GraphRunAnswer, "description": "A run with this key exists already"},
        **problems(409),
    },
)
async def start_document(
    body: NewGraphRunBody,
    plane: PlaneDep,
    caller: Writer,
    response: Response,
    idempotency_header: IdempotencyHeader = None,
) -> GraphRunAnswer:
    """Stores a graph, if it doesn't exist yet, and starts a run of it. If the run is rejected, the
    graph isn't stored."""
    document = await read_body(caller.tenant.id, body.document)
    owner, new = owner_of(caller), _new_run(body, idempotency_header)
    loaded, is_new = await actions.start_document_run(plane.graphs, owner, document, new)
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return await _run_answer(plane, caller, loaded)


def _new_run(body: RunBody, of_header: str | None) -> NewGraphRun:
    key = idempotency_key(body.idempotency_key, of_header)
    return NewGraphRun(body.inputs, body.version, body.max_tokens, key)


@router.get("/graph-runs", responses=problems(404))
async def list_runs(
    plane: PlaneDep,
    caller: Reader,
    graph_id: UUID | None = None,
    status: GraphRunStatus | None = None,
    rerun_of: Annotated[UUID | None, Query(description="Only reruns of this run.")] = None,
    before: UUID | None = None,
    limit: Limit = PAGE_USUAL,
) -> GraphRunSummaries:
    """Lists your graph runs, newest first, without inputs and outputs. To see them, retrieve a run
    by its id."""
    runs = await actions.list_runs(
        plane.graphs,
        owner_of(caller),
        graph_id=graph_id,
        status=status,
        rerun_of=rerun_of,
        before=before,
        limit=limit + 1,
    )
    page = runs[:limit]
    return GraphRunSummaries(
        runs=tuple(map(_summary, page)), next=page[-1].id if len(runs) > limit else None
    )


def _summary(entry: RunListItem) -> GraphRunSummary:
    error = entry.error.message if entry.error else None
    return GraphRunSummary(**{**asdict(entry), "error": error})


# Seconds between reads with and without an active run. Another control plane may have changed a
# run, and notifications only reach this process.
LIST_REREAD_SECONDS, LIST_IDLE_SECONDS = 1.0, 5.0
LIST_EXAMPLE = 'event: run\ndata: {"id": "6a1f…", "name": "Portraits", "status": "running"}\n\n'


@router.get(
    "/graph-runs/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "A `run` event for each of the latest runs, at first and whenever it "
            "changes.",
            "content": {MEDIA_TYPE: {"example": LIST_EXAMPLE}},
        }
    },
)
async def follow_all(
    request: Request, plane: PlaneDep, caller: Reader, graph_id: UUID | None = None
) -> Response:
    """Streams changes of your latest graph runs as server-sent events, including runs that start
    later."""
    return EventStream(request, caller, _list_lines(plane, caller, graph_id))


async def _list_lines(
    plane: ControlPlane, caller: Caller, graph_id: UUID | None
) -> AsyncIterator[str]:
    owner, key, clock = owner_of(caller), StreamKeyCheck(plane, caller), get_running_loop().time
    started_at = sent_at = clock()
    sent: dict[UUID, str] = {}
    yield ": here\n\n"
    while clock() - started_at < STREAM_SECONDS_MAX and await key.is_valid():
        runs = await run_shielded(
            actions.list_runs(plane.graphs, owner, graph_id=graph_id, limit=PAGE_USUAL)
        )
        current = {run.id: _summary(run).model_dump_json() for run in runs}
        news = [text for run_id, text in current.items() if sent.get(run_id) != text]
        sent = current
        if news:
            sent_at = clock()
            yield "".join(f"event: run\ndata: {text}\n\n" for text in news)
        elif clock() - sent_at >= HEARTBEAT_SECONDS:
            sent_at = clock()
            yield ": still there\n\n"
        active = [run.id for run in runs if not run.status.is_over]
        seconds = LIST_REREAD_SECONDS if active else LIST_IDLE_SECONDS
        # Waits a moment for further changes, so that they are sent together.
        if await plane.context.notifier.any_changed([*active, owner.user_id], seconds):
            await sleep(PROGRESS_SECONDS)


@router.get("/graph-runs/{run_id}", responses=problems(404), name="show")
async def show_run(
    run_id: UUID,
    plane: PlaneDep,
    caller: Reader,
    executions: Executions = EXECUTIONS_USUAL,
    urls: Annotated[bool, Query(description="Whether to include file URLs.")] = False,
    document: Annotated[bool, Query(description="Whether to include the graph.")] = False,
) -> GraphRunAnswer:
    loaded, run = await actions.get_live_run(plane.graphs, owner_of(caller), run_id)
    run_answer = await views.run_view(plane, caller.tenant, loaded, run, limit=executions)
    if document:
        run_answer = run_answer.model_copy(
            update={"document": await _document_of_run(plane, loaded)}
        )
    return await views.with_execution_urls(plane, loaded.head, run_answer) if urls else run_answer


async def _document_of_run(plane: ControlPlane, loaded: LoadedRun) -> dict[str, Any] | None:
    """Returns the graph of a run.

    After the run has expired, the stored graph is used instead. Returns None if it was deleted.
    """
    head = loaded.head
    if not head.is_expired:
        return write_graph(loaded.plan.source)
    owner = Owner(head.tenant_id, head.user_id)
    try:
        stored = await actions.get_graph(plane.graphs, owner, head.graph_id, head.graph_version)
    except NotFound:
        return None
    return dict(stored.document)


@router.post("/graph-runs/{run_id}/cancel", responses=problems(404))
async def cancel(run_id: UUID, plane: PlaneDep, caller: Writer) -> GraphRunAnswer:
    """Cancels a run and all its jobs, including running ones. A finished run isn't changed."""
    return await _run_answer(
        plane, caller, await actions.cancel_graph_run(plane.graphs, owner_of(caller), run_id)
    )


@router.post("/graph-runs/{run_id}/pause", responses=problems(404, 409))
async def pause(run_id: UUID, plane: PlaneDep, caller: Writer) -> GraphRunAnswer:
    """Pauses a run. No more jobs are submitted, and jobs that were already submitted continue.
    Deadlines are extended by the length of the pause."""
    return await _run_answer(
        plane, caller, await pause_actions.pause_graph_run(plane.graphs, owner_of(caller), run_id)
    )


@router.post("/graph-runs/{run_id}/resume", responses=problems(404, 409))
async def resume(run_id: UUID, plane: PlaneDep, caller: Writer) -> GraphRunAnswer:
    """Resumes a paused run."""
    return await _run_answer(
        plane, caller, await pause_actions.resume_graph_run(plane.graphs, owner_of(caller), run_id)
    )


@router.post("/graph-runs/{run_id}/retry", responses=problems(404, 409))
async def retry(
    run_id: UUID, plane: PlaneDep, caller: Writer, body: RetryBody | None = None
) -> GraphRunAnswer:
    """Continues a failed run. Nodes that have finished aren't run again."""
    options = body or RetryBody()
    loaded = await actions.retry_graph_run(
        plane.graphs,
        owner_of(caller),
        run_id,
        backend=options.backend,
        max_tokens=options.max_tokens,
    )
    return await _run_answer(plane, caller, loaded)


@router.post(
    "/graph-runs/{run_id}/rerun",
    status_code=status.HTTP_201_CREATED,
    responses={
        200: {"model": GraphRunAnswer, "description": "A run with this key exists already"},
        **problems(404, 409),
    },
)
async def rerun(
    run_id: UUID,
    plane: PlaneDep,
    caller: Writer,
    response: Response,
    body: RerunBody | None = None,
    idempotency_header: IdempotencyHeader = None,
) -> GraphRunAnswer:
    """Starts a new run that reuses results of a finished one. Reused results aren't charged again.

    The node in `from`, everything that depends on it, changed nodes and nodes without a result run
    again.
    """
    options = body or RerunBody()
    new = NewRerun(
        options.start,
        options.inputs,
        options.set,
        options.version,
        options.max_tokens,
        idempotency_key(options.idempotency_key, idempotency_header),
    )
    loaded, is_new = await rerun_graph_run(plane.graphs, owner_of(caller), run_id, new)
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return await _run_answer(plane, caller, loaded)


@router.post("/graph-runs/{run_id}/answer", responses=problems(404, 409))
async def answer(run_id: UUID, body: AnswerBody, plane: PlaneDep, caller: Writer) -> GraphRunAnswer:
    """Answers a node's question. Questions without a deadline can be answered at any time."""
    owner = owner_of(caller)
    if body.node is None:
        key = actions.only_question(await actions.get_run(plane.graphs, owner, run_id))
    else:
        key = ExecutionKey(body.node, tuple(body.index))
    picked = None if body.picked is None else tuple(body.picked)
    decision = Said(key, body.choice, body.backend, picked)
    loaded = await actions.answer_question(
        plane.graphs, owner, run_id, decision, for_all=body.for_all
    )
    return await _run_answer(plane, caller, loaded)


async def _run_answer(plane: ControlPlane, caller: Caller, loaded: LoadedRun) -> GraphRunAnswer:
    return await views.run_view(plane, caller.tenant, loaded, loaded.run, limit=EXECUTIONS_USUAL)


@router.get(
    "/graph-runs/{run_id}/events",
    response_class=StreamingResponse,
    responses={**DESCRIBED, **problems(404)},
)
async def follow(
    request: Request, run_id: UUID, plane: PlaneDep, caller: Reader, previews: WithPreviews = False
) -> Response:
    """Streams a run's progress as server-sent events, at most one every half second. The stream
    ends when the run finishes."""
    await actions.get_run(plane.graphs, owner_of(caller), run_id)
    return EventStream(request, caller, _watched_lines(plane, caller, run_id, previews=previews))


async def _watched_lines(
    plane: ControlPlane, caller: Caller, run_id: UUID, *, previews: bool
) -> AsyncIterator[str]:
    """Yields the lines of the event stream, and stops watching previews when it ends."""
    watched = WatchedPreviews(plane, caller.tenant.id)
    try:
        async for line in _lines(plane, caller, run_id, watched if previews else None):
            yield line
    finally:
        watched.look_at(())


def _preview_lines(watched: WatchedPreviews, user_id: UUID, run: GraphRunState) -> str:
    """Returns events with the latest previews of running jobs."""
    keys = sorted(run.in_flight)[:WATCHED_MAX]
    jobs = {job_id(run.id, key, run.record(key).attempt): key for key in keys}
    # Watches the user as well, because a new job may send previews before this stream has read that
    # job.
    watched.look_at([*jobs, user_id])
    pictures = ((key, watched.news(job)) for job, key in jobs.items())
    messages = (
        {"node_id": key.node, "index": key.at, "preview": picture}
        for key, picture in pictures
        if picture
    )
    return "".join(f"event: preview\ndata: {json.dumps(message)}\n\n" for message in messages)


async def _lines(
    plane: ControlPlane, caller: Caller, run_id: UUID, watched: WatchedPreviews | None
) -> AsyncIterator[str]:
    """Yields the lines of the event stream. Each read uses a new transaction, so that a slow client
    doesn't keep one open."""
    owner, key = owner_of(caller), StreamKeyCheck(plane, caller)
    clock = get_running_loop().time
    started_at, sent_at, last_data = clock(), 0.0, ""
    while clock() - started_at < STREAM_SECONDS_MAX and await key.is_valid():
        loaded, run = await run_shielded(actions.get_live_run(plane.graphs, owner, run_id))
        data = json.dumps(_event_data(plane, caller.tenant, loaded, run))
        if watched and (pictures := _preview_lines(watched, owner.user_id, run)):
            yield pictures
        if data != last_data:
            last_data, sent_at = data, clock()
            yield f"event: progress\ndata: {data}\n\n"
        elif clock() - sent_at >= HEARTBEAT_SECONDS:
            sent_at = clock()
            yield ": still there\n\n"
        if run.status.is_over:
            yield f"event: end\ndata: {data}\n\n"
            return
        await _wait_for_change(plane, owner, run_id, sent_at)


async def _wait_for_change(plane: ControlPlane, owner: Owner, run_id: UUID, sent_at: float) -> None:
    """Waits until half a second has passed since the last event, or until the run finishes. If that
    time has already passed, waits up to half a second for a change."""
    clock = get_running_loop().time
    while (remaining := sent_at + PROGRESS_SECONDS - clock()) > 0:
        if not await plane.context.notifier.changed(run_id, remaining):
            return
        # The change was made in this process, so the cached run is up to date.
        cached = plane.graphs.runs.get_cached(owner.tenant_id, run_id)
        if cached is None or cached.run.status.is_over:
            return
    if sent_at + PROGRESS_SECONDS <= clock():
        await plane.context.notifier.changed(run_id, PROGRESS_SECONDS)


def _event_data(
    plane: ControlPlane, tenant: Tenant, loaded: LoadedRun, run: GraphRunState
) -> dict[str, Any]:
    progress = views.progress_view(plane, tenant, loaded, run).model_dump(mode="json")
    questions = [question.model_dump(mode="json") for question in views.questions(loaded, run)]
    return {
        "run_id": str(run.id),
        "status": run.status,
        **progress,
        "nodes": [node.model_dump(mode="json") for node in views.node_views(loaded, run)],
        "questions": questions,
        "error": run.error.message if run.error else None,
        "paused_at": paused_at.isoformat() if (paused_at := views.paused_at(run)) else None,
    }
