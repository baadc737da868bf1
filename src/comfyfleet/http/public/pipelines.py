"""Pipelines and their runs: made, started, looked at, paused, changed, cancelled, retried."""

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Path, Query, Response, status
from pydantic import AwareDatetime, Field

from comfyfleet.graphs.service import document_from
from comfyfleet.http.given import GivenPlane
from comfyfleet.http.problems import problems
from comfyfleet.http.public.ai_jobs import IdempotencyKey
from comfyfleet.http.public.auth import Reader, Writer
from comfyfleet.http.public.routing import PAGE_USUAL, Answer, Body, Limit, Text, public_router
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.pipelines import service, viewing
from comfyfleet.pipelines.model import RunStatus, StoredPipeline, StoredRun
from comfyfleet.pipelines.service import NewRun, told_limits
from comfyfleet.pipelines.viewing import RunView
from comfyfleet.plane import Plane
from comfyfleet.tenants.keys.model import Caller

router = public_router("pipelines")
NAME = "Its id, or its name: the newest of yours."
PipelineName = Annotated[str, Path(max_length=200, description=NAME)]
NUMBER_MAX = 2**53
Whole = Annotated[int, Field(ge=0, le=NUMBER_MAX)]


class NewPipeline(Body):
    name: Text | None = None
    steps: list[dict[str, Any]] | None = Field(
        default=None, description="In order; see the concepts page for their fields."
    )
    document: dict[str, Any] | str | None = Field(
        default=None, description="Instead: all of it as an object, or as a text in YAML or JSON."
    )


class PipelineAnswer(Answer):
    id: UUID
    name: str
    document: dict[str, Any]
    created_at: datetime


class PipelinePage(Answer):
    pipelines: list[PipelineAnswer]
    next: UUID | None = Field(description="Ask on with before=next; null: that was all.")


class LimitsBody(Body):
    """What is left out stays as it is; null is no limit."""

    candidates: Whole | None = None
    tokens: Whole | None = None
    concurrent_jobs: int = Field(default=1, ge=1, le=service.CONCURRENT_JOBS_MAX)
    until: AwareDatetime | None = None
    bytes: Whole | None = Field(default=None, description="Of its files; then it is paused.")

    def said(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.model_fields_set}


class NewPipelineRunBody(Body):
    base_candidates: int = Field(ge=1, le=service.BASE_CANDIDATES_MAX)
    variables: dict[str, Any] = Field(default_factory=dict)
    target_folder: Text | None = Field(default=None, examples=["cats/spring"])
    limits: LimitsBody = LimitsBody()
    idempotency_key: IdempotencyKey = None


class Changes(Body):
    variables: dict[str, Any] | None = Field(
        default=None, description="They replace those of the same name."
    )
    limits: LimitsBody | None = None
    base_candidates: int | None = Field(default=None, ge=1, le=service.BASE_CANDIDATES_MAX)


class StepAnswer(Answer):
    name: str
    wanted: int = Field(description="As things stand: for the parents that there are now.")
    made: int
    approved: int
    rejected: int
    in_flight: int
    failed: int


class PipelineRunSummary(Answer):
    id: UUID
    pipeline_id: UUID
    pipeline: str = Field(description="Its name.")
    status: RunStatus
    pause_reason: str | None
    reason: str | None = Field(
        description="Why nothing was submitted at the last look; null while the next one is due."
    )
    trouble: str | None = Field(description="What stands in the way of the next job.")
    target_folder: str
    base_candidates: int
    variables: dict[str, Any]
    limits: dict[str, Any]
    tokens: int = Field(description="Reserved and consumed.")
    created_at: datetime
    changed_at: datetime
    files_removed_at: datetime | None


class PipelineRunAnswer(PipelineRunSummary):
    steps: list[StepAnswer]
    jobs: dict[str, int] = Field(description="How many there were, by state.")
    queued: int = Field(description="Jobs that wait for a worker.")
    success_rate: float | None = Field(description="Of jobs that ended; null while none has.")
    bytes: int = Field(description="Of the files that are there.")
    seconds_left: float | None = Field(
        description="If all that can be made is made, and takes as long as the last jobs did."
    )


class PipelineRunSummaries(Answer):
    runs: list[PipelineRunSummary]
    next: UUID | None = Field(description="Ask on with before=next; null: that was all.")


class Retry(Body):
    job_id: UUID | None = Field(default=None, description="One; else all that failed.")


class RetriedJobs(Answer):
    jobs: list[UUID] = Field(description="Whose places are free now.")


class FailureAnswer(Answer):
    job_id: UUID
    step: str
    parent: UUID | None
    error: str | None
    ended_at: datetime | None


class Failures(Answer):
    failures: list[FailureAnswer] = Field(description="The newest first.")


@router.post("/pipelines", status_code=status.HTTP_201_CREATED)
async def create(body: NewPipeline, plane: GivenPlane, caller: Writer) -> PipelineAnswer:
    """All that is wrong with it is told at once. It is never changed afterwards."""
    document = await _document(body)
    made = await service.create(plane.sides, caller.tenant.id, caller.user_id, document)
    return _pipeline(made)


async def _document(body: NewPipeline) -> dict[str, Any]:
    if body.document is None:
        return {"name": body.name or "", "steps": body.steps or []}
    read = await document_from(body.document)
    if not isinstance(read, dict):
        raise InvalidInput("a pipeline must be an object", field="document")
    return read


@router.get("/pipelines", responses=problems(404))
async def list_pipelines(
    plane: GivenPlane, caller: Reader, before: UUID | None = None, limit: Limit = PAGE_USUAL
) -> PipelinePage:
    """The newest first."""
    found = await service.pipelines_of(
        plane.sides, caller.tenant.id, caller.user_id, before=before, limit=limit + 1
    )
    page = found[:limit]
    more = page[-1].id if len(found) > limit else None
    return PipelinePage(pipelines=[_pipeline(each) for each in page], next=more)


@router.get("/pipelines/{pipeline_id}", responses=problems(404))
async def show_pipeline(
    pipeline_id: PipelineName, plane: GivenPlane, caller: Reader
) -> PipelineAnswer:
    named = await _named(plane, caller, pipeline_id)
    found = await service.get_pipeline(plane.sides, caller.tenant.id, caller.user_id, named)
    return _pipeline(found)


async def _named(plane: Plane, caller: Caller, text: str) -> UUID:
    return await service.pipeline_named(plane.sides, caller.tenant.id, caller.user_id, text)


@router.delete(
    "/pipelines/{pipeline_id}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404)
)
async def delete_pipeline(pipeline_id: PipelineName, plane: GivenPlane, caller: Writer) -> None:
    """Its runs stay, and go on until they are cancelled."""
    named = await _named(plane, caller, pipeline_id)
    await service.delete_pipeline(plane.sides, caller.tenant.id, caller.user_id, named)


@router.post(
    "/pipelines/{pipeline_id}/runs",
    status_code=status.HTTP_201_CREATED,
    responses={
        200: {"model": PipelineRunAnswer, "description": "It was started before, by the same key"},
        **problems(404, 409),
    },
)
async def start(
    pipeline_id: PipelineName,
    body: NewPipelineRunBody,
    plane: GivenPlane,
    caller: Writer,
    response: Response,
) -> PipelineRunAnswer:
    """It begins at once. Whoever starts it pays, job by job."""
    new = NewRun(
        base_candidates=body.base_candidates,
        variables=body.variables,
        target_folder=body.target_folder,
        limits=body.limits.said(),
        idempotency_key=body.idempotency_key,
    )
    named = await _named(plane, caller, pipeline_id)
    run, is_new = await service.start_run(plane.sides, caller.tenant.id, caller.user_id, named, new)
    response.status_code = status.HTTP_201_CREATED if is_new else status.HTTP_200_OK
    return await _answer(plane, caller, run.id)


@router.get("/pipeline-runs", responses=problems(404))
async def list_runs(
    plane: GivenPlane,
    caller: Reader,
    pipeline_id: Annotated[str | None, Query(max_length=200, description=NAME)] = None,
    before: UUID | None = None,
    limit: Limit = PAGE_USUAL,
) -> PipelineRunSummaries:
    """The newest first."""
    named = await _named(plane, caller, pipeline_id) if pipeline_id else None
    found = await service.runs_of(
        plane.sides,
        caller.tenant.id,
        caller.user_id,
        pipeline_id=named,
        before=before,
        limit=limit + 1,
    )
    page, now = found[:limit], plane.clock()
    more = page[-1].id if len(found) > limit else None
    names = await service.names_of(plane.sides, caller.tenant.id, page)
    listed = [
        PipelineRunSummary(**_summary(each, now), pipeline=names[each.pipeline_id]) for each in page
    ]
    return PipelineRunSummaries(runs=listed, next=more)


@router.get("/pipeline-runs/{run_id}", responses=problems(404))
async def show(run_id: UUID, plane: GivenPlane, caller: Reader) -> PipelineRunAnswer:
    """Its board: per step how many are wanted, made, approved, in flight and failed."""
    return await _answer(plane, caller, run_id)


@router.patch("/pipeline-runs/{run_id}", responses=problems(404, 409))
async def change(
    run_id: UUID, body: Changes, plane: GivenPlane, caller: Writer
) -> PipelineRunAnswer:
    """Applies to what is submitted next."""
    await service.change(
        plane.sides,
        caller.tenant.id,
        caller.user_id,
        run_id,
        variables=body.variables,
        limits=body.limits.said() if body.limits else None,
        base_candidates=body.base_candidates,
    )
    return await _answer(plane, caller, run_id)


@router.post("/pipeline-runs/{run_id}/pause", responses=problems(404, 409))
async def pause(run_id: UUID, plane: GivenPlane, caller: Writer) -> PipelineRunAnswer:
    """What was submitted goes on; nothing more is."""
    await service.pause(plane.sides, caller.tenant.id, caller.user_id, run_id)
    return await _answer(plane, caller, run_id)


@router.post("/pipeline-runs/{run_id}/resume", responses=problems(404, 409))
async def resume(run_id: UUID, plane: GivenPlane, caller: Writer) -> PipelineRunAnswer:
    await service.resume(plane.sides, caller.tenant.id, caller.user_id, run_id)
    return await _answer(plane, caller, run_id)


@router.post("/pipeline-runs/{run_id}/cancel", responses=problems(404))
async def cancel(run_id: UUID, plane: GivenPlane, caller: Writer) -> PipelineRunAnswer:
    """For good, with what is queued; what runs is let end, and its candidates are kept."""
    await service.cancel(plane.sides, caller.tenant.id, caller.user_id, run_id)
    return await _answer(plane, caller, run_id)


@router.post("/pipeline-runs/{run_id}/retry", responses=problems(404, 409))
async def retry(
    run_id: UUID, plane: GivenPlane, caller: Writer, body: Retry | None = None
) -> RetriedJobs:
    """Failed jobs are not made again by themselves."""
    job_id = body.job_id if body else None
    freed = await service.retry(plane.sides, caller.tenant.id, caller.user_id, run_id, job_id)
    return RetriedJobs(jobs=freed)


@router.get("/pipeline-runs/{run_id}/failures", responses=problems(404))
async def failures(
    run_id: UUID, plane: GivenPlane, caller: Reader, limit: Limit = PAGE_USUAL
) -> Failures:
    """Jobs that failed and were not retried, and why."""
    seen = await viewing.view(plane.sides, caller.tenant.id, caller.user_id, run_id)
    found = await viewing.failures(
        plane.sides, caller.tenant.id, caller.user_id, run_id, limit=limit
    )
    rows = [
        FailureAnswer(
            job_id=each.id,
            step=seen.pipeline.steps[each.step].name,
            parent=each.parent,
            error=each.error,
            ended_at=each.ended_at,
        )
        for each in found
    ]
    return Failures(failures=rows)


def _pipeline(stored: StoredPipeline) -> PipelineAnswer:
    return PipelineAnswer(
        id=stored.id,
        name=stored.pipeline.name,
        document=dict(stored.document),
        created_at=stored.created_at,
    )


async def _answer(plane: Plane, caller: Caller, run_id: UUID) -> PipelineRunAnswer:
    seen = await viewing.view(plane.sides, caller.tenant.id, caller.user_id, run_id)
    return _seen(seen, plane.clock())


def _seen(seen: RunView, now: datetime) -> PipelineRunAnswer:
    return PipelineRunAnswer(
        **_summary(seen.stored, now),
        pipeline=seen.pipeline.name,
        steps=[StepAnswer(**each._asdict()) for each in seen.steps],
        jobs={str(state): count for state, count in seen.jobs.items()},
        queued=seen.queued,
        success_rate=seen.success_rate,
        bytes=seen.bytes,
        seconds_left=seen.seconds_left,
    )


def _summary(stored: StoredRun, now: datetime) -> dict[str, Any]:
    run = stored.run
    return {
        "id": run.id,
        "pipeline_id": stored.pipeline_id,
        "status": run.status,
        "pause_reason": stored.pause_reason,
        "reason": stored.reason_at(now),
        "trouble": stored.trouble,
        "target_folder": run.target_folder,
        "base_candidates": run.base_candidates,
        "variables": dict(run.variables),
        "limits": told_limits(run.limits),
        "tokens": run.tokens,
        "created_at": stored.created_at,
        "changed_at": stored.changed_at,
        "files_removed_at": stored.files_removed_at,
    }
