"""Routes for pipelines, pipeline runs and candidates."""

import json
from asyncio import get_running_loop
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID, uuid4

from fastapi import Depends, Path, Query, Request, Response, status
from fastapi.responses import StreamingResponse
from pydantic import AwareDatetime, Field

from comfyfleet.api.pipelines import (
    Branch,
    CandidateAnswer,
    CandidatePage,
    CandidateSort,
    FailureAnswer,
    Failures,
    LineageAnswer,
    PairAnswer,
    PipelineAnswer,
    PipelinePage,
    PipelineRunAnswer,
    PipelineRunSummaries,
    PipelineRunSummary,
    RetriedJobs,
    StepAnswer,
    StepJudgeAnswer,
    TreeAnswer,
    VoteAnswer,
)
from comfyfleet.errors import InvalidInput
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.graphs.document_work import read_body
from comfyfleet.server.http.deps import PlaneDep, problems
from comfyfleet.server.http.public.auth import (
    PAGE_MAX,
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
from comfyfleet.server.http.public.jobs import (
    HEARTBEAT_SECONDS,
    REREAD_SECONDS,
    RETRY_MILLISECONDS,
    STREAM_SECONDS_MAX,
    After,
    IdempotencyKey,
    Since,
)
from comfyfleet.server.http.public.views import small_url_of, url_of
from comfyfleet.server.http.streams import MEDIA_TYPE, EventStream, StreamKeyCheck, run_shielded
from comfyfleet.server.media.model import File
from comfyfleet.server.pipelines import actions, run_state
from comfyfleet.server.pipelines.actions import CandidateRef, NewPipelineRun, limits_data
from comfyfleet.server.pipelines.decide import StepProgress
from comfyfleet.server.pipelines.model import (
    CandidateStatus,
    PipelineCandidate,
    PipelineRunEvent,
    Step,
    StoredPipeline,
    StoredRun,
)
from comfyfleet.server.pipelines.parse import STEPS_MAX
from comfyfleet.server.pipelines.run_state import CandidateFilter, RunView
from comfyfleet.server.tenants.model import Caller

router = public_router("pipelines")
NAME = "The pipeline's id or name. If several of your pipelines have this name, the newest is used."
PipelineName = Annotated[str, Path(max_length=200, description=NAME)]
NUMBER_MAX = 2**53
Whole = Annotated[int, Field(ge=0, le=NUMBER_MAX)]


class NewPipeline(Body):
    name: Text | None = None
    steps: list[dict[str, Any]] | None = Field(
        default=None,
        max_length=STEPS_MAX,
        description="The steps in order. The pipelines documentation describes their fields.",
    )
    document: dict[str, Any] | str | None = Field(
        default=None,
        description="The whole pipeline as an object or as YAML or JSON text, instead of `name` "
        "and `steps`.",
    )


class LimitsBody(Body):
    """The limits of a run. Omitted fields aren't changed, and null means no limit."""

    candidates: Whole | None = None
    tokens: Whole | None = None
    concurrent_jobs: int = Field(default=1, ge=1, le=actions.CONCURRENT_JOBS_MAX)
    until: AwareDatetime | None = None
    bytes: Whole | None = Field(
        default=None,
        description="Maximum total size of the run's files. When it is reached, the run is paused.",
    )

    def sent_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.model_fields_set}


class NewPipelineRunBody(Body):
    base_candidates: int = Field(ge=1, le=actions.BASE_CANDIDATES_MAX)
    variables: dict[str, Any] = Field(default_factory=dict)
    target_folder: Text | None = Field(default=None, examples=["cats/spring"])
    limits: LimitsBody = LimitsBody()
    idempotency_key: IdempotencyKey = None


class Changes(Body):
    variables: dict[str, Any] | None = Field(
        default=None, description="New values for variables. Other variables aren't changed."
    )
    limits: LimitsBody | None = None
    base_candidates: int | None = Field(default=None, ge=1, le=actions.BASE_CANDIDATES_MAX)


class Retry(Body):
    job_id: UUID | None = Field(
        default=None, description="The job to retry. The default is all failed jobs."
    )


@router.post("/pipelines", status_code=status.HTTP_201_CREATED)
async def create(body: NewPipeline, plane: PlaneDep, caller: Writer) -> PipelineAnswer:
    """Creates a pipeline. If it is invalid, the error lists all problems. A pipeline can't be
    changed after it is created."""
    document = await _document(body, caller.tenant.id)
    stored = await actions.create_pipeline(
        plane.context, caller.tenant.id, caller.user_id, document
    )
    return _pipeline_answer(stored, await actions.pipeline_warnings(plane.context, stored))


async def _document(body: NewPipeline, tenant_id: UUID) -> dict[str, Any]:
    if body.document is None:
        return {"name": body.name or "", "steps": body.steps or []}
    parsed_document = await read_body(tenant_id, body.document)
    if not isinstance(parsed_document, dict):
        raise InvalidInput("a pipeline must be an object", field="document")
    return parsed_document


@router.get("/pipelines", responses=problems(404))
async def list_pipelines(
    plane: PlaneDep, caller: Reader, before: UUID | None = None, limit: Limit = PAGE_USUAL
) -> PipelinePage:
    """Lists your pipelines, newest first."""
    pipelines = await actions.list_pipelines(
        plane.context, caller.tenant.id, caller.user_id, before=before, limit=limit + 1
    )
    page = pipelines[:limit]
    more = page[-1].id if len(pipelines) > limit else None
    return PipelinePage(pipelines=tuple(map(_pipeline_answer, page)), next=more)


@router.get("/pipelines/{pipeline_id}", responses=problems(404))
async def show_pipeline(
    pipeline_id: PipelineName, plane: PlaneDep, caller: Reader
) -> PipelineAnswer:
    stored_id = await _find_pipeline_id(plane, caller, pipeline_id)
    stored = await actions.get_pipeline(plane.context, caller.tenant.id, caller.user_id, stored_id)
    return _pipeline_answer(stored)


async def _find_pipeline_id(plane: ControlPlane, caller: Caller, text: str) -> UUID:
    return await actions.find_pipeline(plane.context, caller.tenant.id, caller.user_id, text)


@router.delete(
    "/pipelines/{pipeline_id}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404)
)
async def delete_pipeline(pipeline_id: PipelineName, plane: PlaneDep, caller: Writer) -> None:
    """Deletes a pipeline. Its active runs aren't canceled."""
    stored_id = await _find_pipeline_id(plane, caller, pipeline_id)
    await actions.delete_pipeline(plane.context, caller.tenant.id, caller.user_id, stored_id)


@router.post(
    "/pipelines/{pipeline_id}/runs",
    status_code=status.HTTP_201_CREATED,
    responses={
        200: {
            "model": PipelineRunAnswer,
            "description": "A run with this idempotency key exists already",
        },
        **problems(404, 409),
    },
)
async def start(
    pipeline_id: PipelineName,
    body: NewPipelineRunBody,
    plane: PlaneDep,
    caller: Writer,
    response: Response,
    idempotency_header: IdempotencyHeader = None,
) -> PipelineRunAnswer:
    """Starts a run of a pipeline. You are charged for each job of the run."""
    new = NewPipelineRun(
        base_candidates=body.base_candidates,
        variables=body.variables,
        target_folder=body.target_folder,
        limits=body.limits.sent_fields(),
        idempotency_key=idempotency_key(body.idempotency_key, idempotency_header),
    )
    stored_id = await _find_pipeline_id(plane, caller, pipeline_id)
    run, is_new = await actions.start_run(
        plane.context, caller.tenant.id, caller.user_id, stored_id, new
    )
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return await _run_answer(plane, caller, run.id)


@router.get("/pipeline-runs", responses=problems(404))
async def list_runs(
    plane: PlaneDep,
    caller: Reader,
    pipeline_id: Annotated[str | None, Query(max_length=200, description=NAME)] = None,
    before: UUID | None = None,
    limit: Limit = PAGE_USUAL,
) -> PipelineRunSummaries:
    """Lists your pipeline runs, newest first."""
    stored_id = await _find_pipeline_id(plane, caller, pipeline_id) if pipeline_id else None
    runs = await actions.list_runs(
        plane.context,
        caller.tenant.id,
        caller.user_id,
        pipeline_id=stored_id,
        before=before,
        limit=limit + 1,
    )
    page, now = runs[:limit], plane.clock()
    more = page[-1].id if len(runs) > limit else None
    names = await actions.pipeline_names(plane.context, caller.tenant.id, page)
    summaries = [
        PipelineRunSummary(**_summary_fields(run, now), pipeline=names[run.pipeline_id])
        for run in page
    ]
    return PipelineRunSummaries(runs=tuple(summaries), next=more)


@router.get("/pipeline-runs/{run_id}", responses=problems(404), name="show")
async def show_run(run_id: UUID, plane: PlaneDep, caller: Reader) -> PipelineRunAnswer:
    """Returns a run with its progress, which is the number of planned, created, approved, active
    and failed candidates of each step."""
    return await _run_answer(plane, caller, run_id)


@router.patch("/pipeline-runs/{run_id}", responses=problems(404, 409))
async def change(run_id: UUID, body: Changes, plane: PlaneDep, caller: Writer) -> PipelineRunAnswer:
    """Changes the variables or limits of a run. The changes apply to jobs that are submitted
    later."""
    await actions.change_run(
        plane.context,
        caller.tenant.id,
        caller.user_id,
        run_id,
        variables=body.variables,
        limits=body.limits.sent_fields() if body.limits else None,
        base_candidates=body.base_candidates,
    )
    return await _run_answer(plane, caller, run_id)


@router.post("/pipeline-runs/{run_id}/pause", responses=problems(404, 409))
async def pause(run_id: UUID, plane: PlaneDep, caller: Writer) -> PipelineRunAnswer:
    """Pauses a run. No more jobs are submitted, and jobs that were already submitted continue."""
    await actions.pause_run(plane.context, caller.tenant.id, caller.user_id, run_id)
    return await _run_answer(plane, caller, run_id)


@router.post("/pipeline-runs/{run_id}/resume", responses=problems(404, 409))
async def resume(run_id: UUID, plane: PlaneDep, caller: Writer) -> PipelineRunAnswer:
    await actions.resume_run(plane.context, caller.tenant.id, caller.user_id, run_id)
    return await _run_answer(plane, caller, run_id)


@router.post("/pipeline-runs/{run_id}/check", responses=problems(404))
async def check(run_id: UUID, plane: PlaneDep, caller: Writer) -> PipelineRunAnswer:
    """Checks immediately whether the problem in the run's `trouble` still exists. During the check,
    `trouble_seconds` is null."""
    await run_state.wake_run(plane.context, caller.tenant.id, caller.user_id, run_id)
    return await _run_answer(plane, caller, run_id)


@router.post("/pipeline-runs/{run_id}/cancel", responses=problems(404))
async def cancel(run_id: UUID, plane: PlaneDep, caller: Writer) -> PipelineRunAnswer:
    """Cancels a run and its queued jobs. Running jobs finish, and their candidates are stored."""
    await actions.cancel_run(plane.context, caller.tenant.id, caller.user_id, run_id)
    return await _run_answer(plane, caller, run_id)


@router.post("/pipeline-runs/{run_id}/retry", responses=problems(404, 409))
async def retry(
    run_id: UUID, plane: PlaneDep, caller: Writer, body: Retry | None = None
) -> RetriedJobs:
    """Retries failed jobs of a run, which aren't retried automatically."""
    job_id = body.job_id if body else None
    job_ids = await actions.retry_jobs(
        plane.context, caller.tenant.id, caller.user_id, run_id, job_id
    )
    return RetriedJobs(jobs=tuple(job_ids))


@router.get("/pipeline-runs/{run_id}/failures", responses=problems(404))
async def failures(
    run_id: UUID, plane: PlaneDep, caller: Reader, limit: Limit = PAGE_USUAL
) -> Failures:
    """Lists failed jobs that haven't been retried, with their errors."""
    run_view = await run_state.read_run(plane.context, caller.tenant.id, caller.user_id, run_id)
    failed_jobs = await run_state.list_failures(
        plane.context, caller.tenant.id, caller.user_id, run_id, limit=limit
    )
    rows = [
        FailureAnswer(
            job_id=failed_job.id,
            step=run_view.pipeline.steps[failed_job.step].name,
            parent=failed_job.parent,
            is_judge=failed_job.is_judge,
            error=failed_job.error,
            ended_at=failed_job.ended_at,
        )
        for failed_job in failed_jobs
    ]
    return Failures(failures=tuple(rows))


def _pipeline_answer(stored: StoredPipeline, warnings: tuple[str, ...] = ()) -> PipelineAnswer:
    return PipelineAnswer(
        id=stored.id,
        name=stored.pipeline.name,
        document=dict(stored.document),
        created_at=stored.created_at,
        warnings=warnings,
    )


async def _run_answer(plane: ControlPlane, caller: Caller, run_id: UUID) -> PipelineRunAnswer:
    seen = await run_state.read_run(plane.context, caller.tenant.id, caller.user_id, run_id)
    return _run_view_answer(seen, plane.clock())


def _run_view_answer(seen: RunView, now: datetime) -> PipelineRunAnswer:
    return PipelineRunAnswer(
        **_summary_fields(seen.stored, now),
        pipeline=seen.pipeline.name,
        steps=tuple(map(_step_answer, seen.steps, seen.pipeline.steps)),
        jobs={str(state): count for state, count in seen.jobs.items()},
        queued=seen.queued,
        success_rate=seen.success_rate,
        bytes=seen.bytes,
        seconds_left=seen.seconds_left,
        last_event_id=seen.last_event_id,
    )


def _step_answer(progress: StepProgress, step: Step) -> StepAnswer:
    judge = None
    if step.judge:
        judge = StepJudgeAnswer(
            name=step.judge.name,
            approve_above=step.judge.approve_above,
            reject_below=step.judge.reject_below,
        )
    return StepAnswer(**progress._asdict(), judge=judge)


def _summary_fields(stored: StoredRun, now: datetime) -> dict[str, Any]:
    run = stored.run
    return {
        "id": run.id,
        "pipeline_id": stored.pipeline_id,
        "status": run.status,
        "pause_reason": stored.pause_reason,
        "reason": stored.reason_at(now),
        "trouble": stored.trouble,
        "trouble_seconds": stored.trouble_seconds_at(now),
        "target_folder": run.target_folder,
        "base_candidates": run.base_candidates,
        "variables": dict(run.variables),
        "limits": limits_data(run.limits),
        "tokens": run.tokens,
        "created_at": stored.created_at,
        "changed_at": stored.changed_at,
        "files_removed_at": stored.files_removed_at,
    }


EVENTS_PER_READ = 200
STEPS_MAX = 1000
SKIPPED_MAX = 40
DESCRIBED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events such as `submitted`, `candidates`, `scored`, `job_failed` and "
        "`no_work`, and an event for every action.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
    }
}


class VoteBody(Body):
    winner: UUID
    loser: UUID
    is_tie: bool = Field(default=False, description="Whether both candidates are equally good.")
    id: UUID | None = Field(
        default=None, description="The vote's id. Repeated calls with the same id count once."
    )


async def candidate_filter(
    step: Annotated[int | None, Query(ge=0, le=STEPS_MAX)] = None,
    status: CandidateStatus | None = None,
    parent: Annotated[UUID | None, Query(description="Only children of this candidate.")] = None,
    best: Annotated[bool, Query(description="Same as sort=best.")] = False,
    sort: Annotated[
        CandidateSort,
        Query(
            description="`best` returns a single page that starts with winners, then approved "
            "candidates, later steps and high ratings. `score` sorts by the judge's score, highest "
            "first, with unscored candidates last."
        ),
    ] = CandidateSort.OLDEST,
) -> CandidateFilter:
    sort = CandidateSort.BEST if best else sort
    return CandidateFilter(step=step, status=status, parent=parent, sort=sort)


@router.get("/pipeline-runs/{run_id}/candidates", responses=problems(404))
async def list_candidates(
    run_id: UUID,
    plane: PlaneDep,
    caller: Reader,
    wanted: Annotated[CandidateFilter, Depends(candidate_filter)],
    after: UUID | None = None,
    limit: Limit = PAGE_MAX,
) -> CandidatePage:
    candidates, files = await run_state.list_candidates(
        plane.context,
        caller.tenant.id,
        caller.user_id,
        run_id,
        wanted,
        after=None if wanted.sort == CandidateSort.BEST else after,
        limit=limit + 1,
    )
    rows = [await _candidate_answer(plane, candidate, files) for candidate in candidates[:limit]]
    is_more = len(candidates) > limit and wanted.sort != CandidateSort.BEST
    return CandidatePage(candidates=tuple(rows), next=rows[-1].id if is_more else None)


@router.get("/pipeline-runs/{run_id}/tree", responses=problems(404))
async def tree(run_id: UUID, plane: PlaneDep, caller: Reader) -> TreeAnswer:
    """Returns all candidates of a run as a tree of parents and children."""
    candidates = await run_state.read_tree(plane.context, caller.tenant.id, caller.user_id, run_id)
    children: dict[UUID | None, list[PipelineCandidate]] = {}
    for candidate in candidates:
        children.setdefault(candidate.parent, []).append(candidate)
    return TreeAnswer(tree=_branches(children, None))


def _branches(
    children: Mapping[UUID | None, list[PipelineCandidate]], parent: UUID | None
) -> tuple[Branch, ...]:
    """Builds the tree recursively. Its depth is limited by the number of steps."""
    return tuple(
        Branch(
            id=child.id,
            step=child.step,
            status=child.status,
            judged_by=child.judged_by,
            score=child.score,
            judge_score=child.judge_score,
            children=_branches(children, child.id),
        )
        for child in children.get(parent, [])
    )


async def _judge(
    plane: ControlPlane,
    caller: Caller,
    run_id: UUID,
    candidate_id: UUID,
    verdict: CandidateStatus | None,
) -> CandidateAnswer:
    ref = CandidateRef(caller.tenant.id, caller.user_id, run_id, candidate_id)
    if verdict is None:
        candidate = await actions.undo_judgement(plane.context, ref)
    else:
        candidate = await actions.judge_candidate(plane.context, ref, verdict)
    files = await run_state.files_of(plane.context, caller.tenant.id, [candidate])
    return await _candidate_answer(plane, candidate, files)


_CANDIDATE = "/pipeline-runs/{run_id}/candidates/{candidate_id}"


@router.get(_CANDIDATE, responses=problems(404), name="show")
async def show_candidate(
    run_id: UUID, candidate_id: UUID, plane: PlaneDep, caller: Reader
) -> CandidateAnswer:
    candidate, files = await run_state.read_candidate(
        plane.context, caller.tenant.id, caller.user_id, run_id, candidate_id
    )
    return await _candidate_answer(plane, candidate, files)


@router.get(_CANDIDATE + "/lineage", responses=problems(404))
async def lineage(
    run_id: UUID, candidate_id: UUID, plane: PlaneDep, caller: Reader
) -> LineageAnswer:
    """Returns a candidate with all its ancestors, and the number of votes that it won."""
    ancestry = await run_state.read_lineage(
        plane.context, caller.tenant.id, caller.user_id, run_id, candidate_id
    )
    rows = [
        await _candidate_answer(plane, candidate, ancestry.files)
        for candidate in ancestry.candidates
    ]
    return LineageAnswer(candidates=tuple(rows), **ancestry.votes._asdict())


@router.post(_CANDIDATE + "/approve", responses=problems(404, 409))
async def approve(
    run_id: UUID, candidate_id: UUID, plane: PlaneDep, caller: Writer
) -> CandidateAnswer:
    return await _judge(plane, caller, run_id, candidate_id, CandidateStatus.APPROVED)


@router.post(_CANDIDATE + "/reject", responses=problems(404, 409))
async def reject(
    run_id: UUID, candidate_id: UUID, plane: PlaneDep, caller: Writer
) -> CandidateAnswer:
    """Rejects a candidate. Neither it nor its descendants get more children, and queued ones are
    canceled."""
    return await _judge(plane, caller, run_id, candidate_id, CandidateStatus.REJECTED)


@router.post(_CANDIDATE + "/winner", responses=problems(404, 409))
async def winner(
    run_id: UUID, candidate_id: UUID, plane: PlaneDep, caller: Writer
) -> CandidateAnswer:
    """Marks a candidate as a winner. Winners get children before the other candidates of their
    step."""
    return await _judge(plane, caller, run_id, candidate_id, CandidateStatus.WINNER)


@router.post(_CANDIDATE + "/undo", responses=problems(404, 409))
async def undo(
    run_id: UUID, candidate_id: UUID, plane: PlaneDep, caller: Writer
) -> CandidateAnswer:
    """Undoes the latest judgment of a candidate."""
    return await _judge(plane, caller, run_id, candidate_id, None)


@router.get("/pipeline-runs/{run_id}/pair", responses=problems(404))
async def pair(
    run_id: UUID,
    plane: PlaneDep,
    caller: Reader,
    step: Annotated[int | None, Query(ge=0, le=STEPS_MAX)] = None,
    skipped: Annotated[
        tuple[UUID, ...],
        Query(
            max_length=SKIPPED_MAX,
            description="Pairs to skip for now, as a list of ids (first, second, first, …).",
        ),
    ] = (),
) -> PairAnswer:
    """Returns two candidates to compare, from the given step or from the latest step that has at
    least two."""
    chosen = await actions.pick_pair(
        plane.context,
        caller.tenant.id,
        caller.user_id,
        run_id,
        step=step,
        skipped=list(zip(skipped[::2], skipped[1::2], strict=False)),
    )
    if chosen is None:
        return PairAnswer()
    files = await run_state.files_of(plane.context, caller.tenant.id, chosen.candidates)
    rows = [await _candidate_answer(plane, candidate, files) for candidate in chosen.candidates]
    return PairAnswer(candidates=tuple(rows), votes=chosen.votes, votes_enough=chosen.votes_enough)


@router.post("/pipeline-runs/{run_id}/vote", responses=problems(404, 409))
async def vote(run_id: UUID, body: VoteBody, plane: PlaneDep, caller: Writer) -> VoteAnswer:
    vote_id = body.id or uuid4()
    scores = await actions.add_vote(
        plane.context,
        caller.tenant.id,
        caller.user_id,
        run_id,
        vote_id=vote_id,
        winner=body.winner,
        loser=body.loser,
        is_tie=body.is_tie,
    )
    return VoteAnswer(id=vote_id, scores=scores)


@router.post("/pipeline-runs/{run_id}/votes/{vote_id}/undo", responses=problems(404))
async def undo_vote(run_id: UUID, vote_id: UUID, plane: PlaneDep, caller: Writer) -> VoteAnswer:
    """Undoes a vote and recalculates the scores from the other votes."""
    scores = await actions.undo_vote(
        plane.context, caller.tenant.id, caller.user_id, run_id, vote_id
    )
    return VoteAnswer(id=vote_id, scores=scores)


@router.get(
    "/pipeline-runs/{run_id}/events",
    response_class=StreamingResponse,
    responses={**DESCRIBED, **problems(404)},
)
async def follow(
    request: Request,
    run_id: UUID,
    plane: PlaneDep,
    caller: Reader,
    last_event_id: Since = 0,
    after: After = 0,
) -> StreamingResponse:
    """Streams a run's events as server-sent events. The stream doesn't end when the run finishes,
    because candidates can still be judged."""
    await actions.get_run(plane.context, caller.tenant.id, caller.user_id, run_id)
    lines = _lines(plane, caller, run_id, max(last_event_id, after))
    return EventStream(request, caller, lines)


async def _lines(
    plane: ControlPlane, caller: Caller, run_id: UUID, since: int
) -> AsyncIterator[str]:
    clock, key = get_running_loop().time, StreamKeyCheck(plane, caller)
    started_at = sent_at = clock()
    yield f"retry: {RETRY_MILLISECONDS}\n\n"
    while clock() - started_at < STREAM_SECONDS_MAX and await key.is_valid():
        events = await run_shielded(
            run_state.list_events(
                plane.context, caller.tenant.id, run_id, after_id=since, limit=EVENTS_PER_READ
            )
        )
        if events:
            since, sent_at = events[-1].id, clock()
            yield "".join(map(_format_event, events))
            continue
        if clock() - sent_at >= HEARTBEAT_SECONDS:
            sent_at = clock()
            yield ": still there\n\n"
        await plane.context.notifier.changed(run_id, REREAD_SECONDS)


def _format_event(event: PipelineRunEvent) -> str:
    data = {**event.data, "at": event.created_at.isoformat()}
    return f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(data)}\n\n"


async def _candidate_answer(
    plane: ControlPlane, candidate: PipelineCandidate, files: Mapping[UUID, File]
) -> CandidateAnswer:
    file_data = candidate.file or {}
    file = files.get(UUID(file_data["file_id"])) if file_data.get("file_id") else None
    return CandidateAnswer(
        id=candidate.id,
        step=candidate.step,
        parent=candidate.parent,
        status=candidate.status,
        judged_by=candidate.judged_by,
        score=candidate.score,
        judge_score=candidate.judge_score,
        judge_error=candidate.judge_error,
        child_count=candidate.child_count,
        seed=candidate.seed,
        seed_text=None if candidate.seed is None else str(candidate.seed),
        properties=dict(candidate.properties),
        job_id=candidate.job_id,
        provider_job_id=candidate.provider_job_id,
        output_index=candidate.output_index,
        path=file_data.get("path", ""),
        content_type=file_data.get("mime_type", ""),
        size=file_data.get("size", 0),
        url=await url_of(plane, file) if file else None,
        small_url=small_url_of(plane, file),
        text=candidate.text,
        created_at=candidate.created_at,
    )
