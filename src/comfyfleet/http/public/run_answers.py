"""A graph run as customers see it."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import islice
from typing import Annotated, Any
from uuid import UUID

from pydantic import Field

from comfyfleet.graphs import service
from comfyfleet.graphs.budget import ANSWER_MAX, NOTHING, size_of
from comfyfleet.graphs.keeping import Kept
from comfyfleet.graphs.model import WorkflowNode, kind_of
from comfyfleet.graphs.progress import node_status, progress_of
from comfyfleet.graphs.runs import Choice, Key, Record, Run, RunStatus, Status, job_id
from comfyfleet.graphs.stored import Head
from comfyfleet.http.public.routing import Answer
from comfyfleet.http.public.showing import url_of
from comfyfleet.plane import Plane

URLS_MAX = 1000


# Workers' names are the operator's: shown is what the graph, a retry or an answer has asked for.
Bound = Annotated[str | None, Field(description="To which backend it is bound, if it is.")]


class RunningNodeSeen(Answer):
    node_id: str
    index: list[int]
    backend_id: Bound
    progress: float = Field(description="0 to 1.")
    current_step: str | None


class ProgressSeen(Answer):
    overall_percent: float
    weighted_percent: float = Field(description="By how long each node typically takes.")
    completed_nodes: int
    total_nodes: int
    running_nodes: list[RunningNodeSeen] = Field(description="That a backend works on.")


class QuestionSeen(Answer):
    node: str
    index: list[int]
    message: str = Field(examples=["Backend worker:gpu-7 is offline"])
    backends: list[str] = Field(description="That could take its place, the best first.")
    choices: list[Choice]


class ErrorSeen(Answer):
    node: str
    index: list[int]
    backend: Bound
    message: str
    alternatives: list[str] = Field(description="For one that is bound to a backend.")


class NodeSeen(Answer):
    id: str
    type: str
    workflow: str | None = Field(description="Of a node that names one.")
    effect: str | None = Field(description="Of a node that names one.")
    status: Status
    expected: int = Field(description="How often it runs, as far as that is known.")
    done: int
    skipped: int
    failed: int
    cancelled: int


class ExecutionSeen(Answer):
    node: str
    index: list[int]
    status: Status
    attempts: int
    job_id: UUID | None = Field(description="Of its last attempt.")
    why: str | None = Field(description="Why it waits, if nobody can run it just now.")
    backend: Bound
    progress: float
    current_step: str | None
    inputs: dict[str, Any] | None
    outputs: dict[str, Any] | None
    has_values: bool = Field(
        description="False: inputs and outputs were left out, as the answer would be too large."
    )
    error: str | None
    notes: list[str]
    queued_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None


class GraphRunAnswer(Answer):
    id: UUID
    graph_id: UUID
    graph_version: int
    name: str
    status: RunStatus
    tokens: int = Field(description="Of jobs that are in flight or done.")
    max_tokens: int | None
    inputs: dict[str, Any]
    outputs: dict[str, Any] | None = Field(description="By output node; files with fresh URLs.")
    error: ErrorSeen | None
    questions: list[QuestionSeen]
    progress: ProgressSeen
    nodes: list[NodeSeen]
    executions: list[ExecutionSeen]
    executions_total: int
    created_at: datetime
    ended_at: datetime | None
    is_expired: bool = Field(
        description="Its time was up: what went in, came out and was recorded is gone."
    )


async def seen(plane: Plane, kept: Kept, run: Run, *, limit: int) -> GraphRunAnswer:
    head = kept.head
    unable = await service.unable_nodes(plane.graphs, kept, run)
    return GraphRunAnswer(
        id=head.id,
        graph_id=head.graph_id,
        graph_version=head.graph_version,
        name=kept.plan.graph.name,
        status=run.status,
        tokens=run.tokens,
        max_tokens=run.max_tokens,
        inputs=dict(head.inputs),
        outputs=await _with_urls(plane, head, run.outputs),
        error=_error(run),
        questions=list(questions(run)),
        progress=progress_seen(plane, kept, run),
        nodes=list(nodes_seen(kept, run)),
        executions=list(islice(_executions(kept, run, unable), limit)),
        executions_total=len(run.records),
        created_at=head.created_at,
        ended_at=head.ended_at,
        is_expired=head.is_expired,
    )


def progress_seen(plane: Plane, kept: Kept, run: Run) -> ProgressSeen:
    found = plane.graphs.runs.not_below(run, progress_of(kept.plan, run))
    running = [
        RunningNodeSeen(
            node_id=each.node_id,
            index=list(each.at),
            backend_id=run.record(Key(each.node_id, each.at)).affinity,
            progress=round(each.progress, 3),
            current_step=each.current_step,
        )
        for each in found.running_nodes
    ]
    return ProgressSeen(
        overall_percent=round(found.overall_percent, 1),
        weighted_percent=round(found.weighted_percent, 1),
        completed_nodes=found.completed_nodes,
        total_nodes=found.total_nodes,
        running_nodes=running,
    )


def questions(run: Run) -> Iterator[QuestionSeen]:
    for key in sorted(run.asking):
        question = run.record(key).question
        if question:
            yield QuestionSeen(
                node=key.node,
                index=list(key.at),
                message=question.message,
                backends=list(question.backends),
                choices=list(question.choices),
            )


def _error(run: Run) -> ErrorSeen | None:
    if run.error is None:
        return None
    bound = run.record(Key(run.error.node, run.error.at)).affinity
    return ErrorSeen(
        node=run.error.node,
        index=list(run.error.at),
        backend=bound,
        message=run.error.message,
        alternatives=list(run.error.alternatives) if bound else [],
    )


def nodes_seen(kept: Kept, run: Run) -> Iterator[NodeSeen]:
    for name in kept.plan.shape.order:
        node, tally = kept.plan.node(name), run.tally(name)
        yield NodeSeen(
            id=name,
            type=kind_of(node),
            workflow=(node.workflow or None) if isinstance(node, WorkflowNode) else None,
            effect=node.effect if isinstance(node, WorkflowNode) else None,
            status=node_status(kept.plan, run, name),
            **tally._asdict(),
        )


def _executions(kept: Kept, run: Run, unable: Mapping[str, str]) -> Iterator[ExecutionSeen]:
    """In the order of the graph, those of one node by their index."""
    place = {name: number for number, name in enumerate(kept.plan.shape.order)}
    told = NOTHING
    for key in sorted(run.records, key=lambda each: (place[each.node], each.at)):
        record = run.record(key)
        size = size_of((record.inputs, record.outputs), told.within(ANSWER_MAX))
        is_told = size.fits(told.within(ANSWER_MAX))
        told = told.plus(size) if is_told else told
        why = unable.get(key.node) if record.status == Status.QUEUED else None
        yield execution(run.id, key, record, has_values=is_told, why=why)


def execution(
    run_id: UUID, key: Key, record: Record, *, has_values: bool = True, why: str | None = None
) -> ExecutionSeen:
    inputs, outputs = (record.inputs, record.outputs) if has_values else (None, None)
    return ExecutionSeen(
        node=key.node,
        index=list(key.at),
        status=record.status,
        attempts=record.attempt,
        job_id=job_id(run_id, key, record.attempt) if record.attempt else None,
        why=why,
        backend=record.affinity,
        progress=record.progress,
        current_step=record.current_step,
        inputs=None if inputs is None else dict(inputs),
        outputs=None if outputs is None else dict(outputs),
        has_values=has_values,
        error=record.error,
        notes=list(record.notes),
        queued_at=record.queued_at,
        started_at=record.started_at,
        ended_at=record.ended_at,
    )


async def _with_urls(
    plane: Plane, head: Head, outputs: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Only files of the run's own user get one: an id may stand in any text or JSON of a result."""
    if outputs is None:
        return None
    urls: dict[str, str] = {}
    owner = service.Owner(head.tenant_id, head.user_id)
    for file_id in islice(dict.fromkeys(service.file_ids_in(outputs)), URLS_MAX):
        file = await service.own_file(plane.graphs, owner, file_id)
        # Else it has expired, is somebody else's, or has never been looked at.
        if file is not None and not file.is_announced:
            urls[file_id] = await url_of(plane, file)
    found: dict[str, Any] = _filled(outputs, urls)
    return found


def _filled(value: Any, urls: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        found = {name: _filled(inner, urls) for name, inner in value.items()}
        url = urls.get(str(value.get("file_id")))
        return {**found, "url": url} if url else found
    if isinstance(value, list | tuple):
        return [_filled(each, urls) for each in value]
    return value
