"""Builds the customers' views of jobs, media and graph runs, with progress, remaining time and file
URLs."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from heapq import nsmallest
from itertools import islice
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any
from uuid import UUID

from comfyfleet.api.graph_model import WorkflowNode, is_hidden, kind_of
from comfyfleet.api.graphs import (
    ErrorSeen,
    ExecutionSeen,
    GraphRunAnswer,
    NodeSeen,
    ProgressSeen,
    QuestionSeen,
    RerunOf,
    ReusedFrom,
    RunErrorCode,
    RunningNodeSeen,
)
from comfyfleet.api.jobs import Output, Value
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.gateway.visible_backends import sees_backends
from comfyfleet.server.graphs import actions
from comfyfleet.server.graphs.apply import (
    IN_LOOP_EXECUTIONS_MAX,
    LoadedRun,
    large_runs,
)
from comfyfleet.server.graphs.draft import RunDraft
from comfyfleet.server.graphs.progress import node_status, progress_of
from comfyfleet.server.graphs.run import (
    ANSWER_SIZE_MAX,
    NO_SIZE,
    Environment,
    ExecutionKey,
    ExecutionRecord,
    ExecutionStatus,
    GraphRunState,
    RunRow,
    job_id,
    size_of,
)
from comfyfleet.server.jobs import stages
from comfyfleet.server.jobs.model import Job, JobStatus
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File, safe_name
from comfyfleet.server.tenants.model import Tenant

DONE_PERCENT = 100.0
SLUGS_KEPT_MAX = 10_000
STEM_CHARACTERS_MAX = 80


def percent_of(plane: ControlPlane, job: Job) -> float | None:
    """Returns a job's progress in percent, as last known to this control plane."""
    if job.status == JobStatus.COMPLETED:
        return DONE_PERCENT
    if not job.status.is_active:
        return None
    report = job.lease_token and plane.context.caches.progress.of(job.lease_token)
    return report.percent if report else None


async def seconds_left(plane: ControlPlane, job: Job, now: datetime) -> float | None:
    """Estimates a job's remaining time from the effect's history, without the time in the queue."""
    if not job.status.is_active or job.spec.effect_id is None:
        return None
    async with plane.central.read() as tx:
        typical = await catalog.typical_seconds(tx, job.spec.effect_id)
    return stages.seconds_left(job, typical, now)


async def original_and_outputs(
    plane: ControlPlane, job: Job
) -> tuple[File | None, list[tuple[str, File]]]:
    """Returns the input file of a finished job, and the job's outputs with their names.

    Expired files aren't included.
    """
    outputs = job.outputs
    source = None if job.status.is_active else job.spec.input_file_id
    ids = {output.file_id for output in outputs} | ({source} if source else set())
    if not ids:
        return None, []
    async with plane.context.tenant(job.tenant_id) as tx:
        files = await media.find_existing(tx, job.tenant_id, ids)
    named = [(output.name, files[output.file_id]) for output in outputs if output.file_id in files]
    return files.get(source) if source else None, named


async def download_names(
    plane: ControlPlane, job: Job, original: File | None, outputs: Sequence[File]
) -> dict[UUID, str]:
    """Returns the names under which browsers save outputs. They consist of the input file's name
    and the effect's slug."""
    if job.spec.effect_id is None or not outputs:
        return {}
    slug = await effect_slug(plane, job.spec.effect_id) or job.spec.workflow_slug
    stem = f"{_stem(original.filename)}-{slug}" if original else f"{slug}-{job.id.hex[:8]}"
    many = len(outputs) > 1
    return {
        file.id: f"{stem}{f'-{number}' if many else ''}{PurePosixPath(file.filename).suffix}"
        for number, file in enumerate(outputs, 1)
    }


async def effect_slug(plane: ControlPlane, effect_id: UUID) -> str | None:
    """Returns an effect's slug, which is cached because it never changes."""
    slugs = plane.context.caches.effect_slugs
    if effect_id not in slugs:
        async with plane.central.read() as tx:
            effect = (await catalog.get_effects(tx, [effect_id])).get(effect_id)
        if effect is None:
            return None
        if len(slugs) >= SLUGS_KEPT_MAX:
            slugs.clear()
        slugs[effect_id] = effect.slug
    return slugs[effect_id]


def _stem(filename: str) -> str:
    return PurePosixPath(safe_name(filename)).stem[:STEM_CHARACTERS_MAX]


async def outputs_of(
    plane: ControlPlane,
    named_files: Sequence[tuple[str, File]],
    names: Mapping[UUID, str] = MappingProxyType({}),
) -> tuple[Output, ...]:
    """Builds the outputs with their URLs. `names` maps file ids to download names that differ from
    the file's own name."""
    outputs = [
        Output(
            name=name,
            filename=file.filename,
            download_name=names.get(file.id),
            content_type=file.mime_type,
            size=file.size,
            url=await url_of(plane, file, names.get(file.id)),
            small_url=small_url_of(plane, file),
        )
        for name, file in named_files
    ]
    return tuple(outputs)


def values_of(job: Job) -> tuple[Value, ...]:
    return tuple(Value(**value.model_dump()) for value in job.values)


async def url_of(plane: ControlPlane, file: File, name: str | None = None) -> str:
    return await plane.store.url_to_get(
        file.path, seconds=plane.settings.url_seconds, filename=name or file.filename
    )


def small_url_of(plane: ControlPlane, file: File | None) -> str | None:
    return plane.small.url_of(file, seconds=plane.settings.url_seconds) if file else None


# Maximum numbers of file URLs, of questions, and of URLs for the files of executions per response.
URLS_MAX = 1000
QUESTIONS_MAX = 1000
EXECUTION_URLS_MAX = 200


async def run_view(
    plane: ControlPlane, tenant: Tenant, loaded: LoadedRun, run: GraphRunState, *, limit: int
) -> GraphRunAnswer:
    unable = await actions.unservable_nodes(plane.graphs, loaded, run)
    outputs = await _with_urls(plane, loaded.head, run.outputs)
    progress = progress_view(plane, tenant, loaded, run)
    sees = sees_backends(plane, tenant)
    work = partial(_run_answer, loaded, run, unable, outputs, progress, limit=limit, sees=sees)
    if len(run.records) <= IN_LOOP_EXECUTIONS_MAX:
        return work()
    return await large_runs.run(loaded.head.user_id, work)


def _run_answer(
    loaded: LoadedRun,
    run: GraphRunState,
    unable: Mapping[str, str],
    outputs: dict[str, Any] | None,
    progress: ProgressSeen,
    *,
    limit: int,
    sees: bool,
) -> GraphRunAnswer:
    head = loaded.head
    return GraphRunAnswer(
        id=head.id,
        graph_id=head.graph_id,
        graph_version=head.graph_version,
        name=loaded.plan.graph.name,
        status=run.status,
        tokens=run.tokens,
        max_tokens=run.max_tokens,
        inputs=dict(head.inputs),
        outputs=outputs,
        error=_error(run, sees=sees),
        paused_at=paused_at(run),
        questions=tuple(questions(loaded, run)),
        progress=progress,
        nodes=tuple(node_views(loaded, run)),
        executions=tuple(islice(_executions(loaded, run, unable, sees=sees), limit)),
        executions_total=sum(not is_hidden(loaded.plan.node(key.node)) for key in run.records),
        created_at=head.created_at,
        ended_at=head.ended_at,
        is_expired=head.is_expired,
        rerun_of=_rerun_of(head),
    )


def _rerun_of(head: RunRow) -> RerunOf | None:
    if head.rerun_of is None:
        return None
    changes = head.rerun or {}  # `rerun` is deleted when the run expires
    return RerunOf(
        run_id=head.rerun_of,
        node=changes.get("from"),
        inputs=tuple(changes.get("inputs", ())),
        set=dict(changes.get("set", {})),
    )


def backend_of(record: ExecutionRecord, *, sees: bool) -> str | None:
    """Returns the execution's worker if the caller may see backends (`sees`). Otherwise, returns
    the backend to which the execution is bound."""
    return f"worker:{record.backend}" if sees and record.backend else record.affinity


def progress_view(
    plane: ControlPlane, tenant: Tenant, loaded: LoadedRun, run: GraphRunState
) -> ProgressSeen:
    sees = sees_backends(plane, tenant)
    progress = plane.graphs.runs.keep_monotonic(run, progress_of(loaded.plan, run))
    running = (
        RunningNodeSeen(
            node_id=node.node_id,
            index=node.at,
            backend_id=backend_of(run.record(ExecutionKey(node.node_id, node.at)), sees=sees),
            progress=round(node.progress, 3),
            current_step=node.current_step,
        )
        for node in progress.running_nodes
    )
    return ProgressSeen(
        overall_percent=round(progress.overall_percent, 1),
        weighted_percent=round(progress.weighted_percent, 1),
        completed_nodes=progress.completed_nodes,
        total_nodes=progress.total_nodes,
        running_nodes=tuple(running),
    )


def questions(loaded: LoadedRun, run: GraphRunState) -> Iterator[QuestionSeen]:
    for key in nsmallest(QUESTIONS_MAX, run.asking):
        question = run.record(key).question
        facts = loaded.plan.workflows.get(key.node)
        if question:
            yield QuestionSeen(
                node=key.node,
                index=key.at,
                message=question.message,
                backends=question.backends,
                choices=question.choices,
                deadline=question.deadline,
                pick_from=question.pick_from,
                price_tokens=facts.price_tokens if facts else None,
            )


_ACTIONS = {
    RunErrorCode.NO_TOKENS: "Add tokens to the wallet, then retry the run.",
    RunErrorCode.NO_BACKEND: "Start a worker that can run it, or ask the operator for one. "
    "Then retry the run.",
    RunErrorCode.WITHDRAWN: "Ask the operator to offer the workflow again, or use another one.",
}


def paused_at(run: GraphRunState) -> datetime | None:
    """Returns when an active run was paused, or None if it has finished or isn't paused."""
    return None if run.status.is_over else run.paused_at


def _error(run: GraphRunState, *, sees: bool) -> ErrorSeen | None:
    if run.error is None:
        return None
    record = run.record(ExecutionKey(run.error.node, run.error.at))
    bound = record.affinity
    return ErrorSeen(
        node=run.error.node,
        index=run.error.at,
        backend=backend_of(record, sees=sees),
        message=run.error.message,
        alternatives=run.error.alternatives if bound else (),
        code=run.error.code,
        action=_ACTIONS[run.error.code] if run.error.code else None,
    )


def node_views(loaded: LoadedRun, run: GraphRunState) -> Iterator[NodeSeen]:
    for name in loaded.plan.shape.order:
        node, tally = loaded.plan.node(name), run.tally(name)
        if is_hidden(node):
            continue
        yield NodeSeen(
            id=name,
            type=kind_of(node),
            workflow=(node.workflow or None) if isinstance(node, WorkflowNode) else None,
            effect=node.effect if isinstance(node, WorkflowNode) else None,
            status=node_status(loaded.plan, run, name),
            **tally._asdict(),
        )


def _executions(
    loaded: LoadedRun, run: GraphRunState, unable: Mapping[str, str], *, sees: bool
) -> Iterator[ExecutionSeen]:
    """Yields executions in the order of the graph's nodes and, within a node, by index."""
    total_size = NO_SIZE
    # The draft already yields keys in this order. Sorting all executions would block the event loop
    # for too long, although a page needs only a few of them.
    draft = RunDraft(loaded.plan, run, Environment(loaded.head.created_at))
    for key in draft.all_keys():
        if key not in run.records or is_hidden(loaded.plan.node(key.node)):
            continue
        record = run.record(key)
        size = size_of((record.inputs, record.outputs), total_size.within(ANSWER_SIZE_MAX))
        is_included = size.fits(total_size.within(ANSWER_SIZE_MAX))
        total_size = total_size.plus(size) if is_included else total_size
        why = unable.get(key.node) if record.status == ExecutionStatus.QUEUED else None
        yield execution_view(run.id, key, record, has_values=is_included, why=why, sees=sees)


def execution_view(
    run_id: UUID,
    key: ExecutionKey,
    record: ExecutionRecord,
    *,
    has_values: bool = True,
    why: str | None = None,
    sees: bool = False,
) -> ExecutionSeen:
    inputs, outputs = (record.inputs, record.outputs) if has_values else (None, None)
    has_job = record.attempt > 0 and record.reused_from is None
    return ExecutionSeen(
        node=key.node,
        index=key.at,
        status=record.status,
        attempts=record.attempt,
        job_id=job_id(run_id, key, record.attempt) if has_job else None,
        why=why,
        backend=backend_of(record, sees=sees),
        progress=record.progress,
        current_step=record.current_step,
        inputs=None if inputs is None else dict(inputs),
        outputs=None if outputs is None else dict(outputs),
        has_values=has_values,
        error=record.error,
        traceback=record.traceback if sees else None,
        notes=record.notes,
        reused_from=ReusedFrom.model_validate(record.reused_from) if record.reused_from else None,
        queued_at=record.queued_at,
        started_at=record.started_at,
        ended_at=record.ended_at,
    )


async def _with_urls(
    plane: ControlPlane, head: RunRow, outputs: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    if outputs is None:
        return None
    with_urls: dict[str, Any] = _add_urls(outputs, await _urls_in(plane, head, outputs, URLS_MAX))
    return with_urls


async def with_execution_urls(
    plane: ControlPlane, head: RunRow, answer: GraphRunAnswer
) -> GraphRunAnswer:
    """Adds URLs to the files that nodes have created so far, and to the inputs of nodes that wait
    for an answer."""
    question_inputs = [
        execution.inputs
        for execution in answer.executions
        if execution.status == ExecutionStatus.ASKING
    ]
    node_outputs = [execution.outputs for execution in answer.executions]
    urls = await _urls_in(plane, head, [*question_inputs, *node_outputs], EXECUTION_URLS_MAX)
    shown = [
        execution.model_copy(
            update={
                "inputs": _add_urls(execution.inputs, urls),
                "outputs": _add_urls(execution.outputs, urls),
            }
        )
        for execution in answer.executions
    ]
    return answer.model_copy(update={"executions": tuple(shown)})


async def _urls_in(
    plane: ControlPlane, head: RunRow, values: Any, urls_max: int
) -> dict[str, dict[str, str]]:
    """Returns URLs for files in the given values, but only for files of the run's user, because
    results may contain arbitrary ids."""
    urls: dict[str, dict[str, str]] = {}
    owner = actions.Owner(head.tenant_id, head.user_id)
    for file_id in islice(dict.fromkeys(actions.file_ids_in(values)), urls_max):
        file = await actions.own_file(plane.graphs, owner, file_id)
        # Skips files that have expired, belong to another user, or haven't been uploaded yet.
        if file is not None and not file.is_announced:
            small = small_url_of(plane, file)
            file_urls = {"url": await url_of(plane, file)}
            urls[file_id] = {**file_urls, "small_url": small} if small else file_urls
    return urls


def _add_urls(value: Any, urls: Mapping[str, Mapping[str, str]]) -> Any:
    """Replaces the URLs of file values with ours, or removes them if `urls` has none for the file.

    Clients follow these URLs. A graph by another user or a node's text output could contain a
    malicious one.
    """
    if isinstance(value, Mapping):
        copied = {name: _add_urls(inner, urls) for name, inner in value.items()}
        if "file_id" not in copied:
            return copied
        plain = {name: inner for name, inner in copied.items() if name not in ("url", "small_url")}
        return {**plain, **urls.get(str(value["file_id"]), {})}
    if isinstance(value, list | tuple):
        return [_add_urls(item, urls) for item in value]
    return value
