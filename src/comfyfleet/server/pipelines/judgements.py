"""Judgments of candidates, by people and by the judge of a step. A judge never overrules a
person."""

from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.api.expressions import compute_score
from comfyfleet.errors import Conflict, FleetError
from comfyfleet.server.graphs.apply import job_output
from comfyfleet.server.jobs.model import Job, JobStatus
from comfyfleet.server.media.model import File
from comfyfleet.server.pipelines import run_state, store, store_candidates
from comfyfleet.server.pipelines.decide import judged_verdict
from comfyfleet.server.pipelines.model import (
    CandidateStatus,
    JobState,
    JudgedBy,
    PipelineCandidate,
    PipelineDefinition,
    PipelineJob,
    StepJudge,
)
from comfyfleet.server.pipelines.run_state import RunTransaction

VERDICT_EVENTS = {
    CandidateStatus.APPROVED: "approved",
    CandidateStatus.REJECTED: "rejected",
    CandidateStatus.WINNER: "crowned",
}


async def set_status(
    act: RunTransaction,
    candidate: PipelineCandidate,
    status: CandidateStatus,
    judged_by: JudgedBy | None,
) -> None:
    if not await store_candidates.set_status(
        act.tx, candidate.id, before=candidate.status, after=status, judged_by=judged_by
    ):
        raise Conflict("the candidate was just judged by someone else; reload it first")


async def set_verdict(
    act: RunTransaction, candidate: PipelineCandidate, verdict: CandidateStatus, judged_by: JudgedBy
) -> None:
    """Judges a candidate, cancels queued jobs that are no longer needed, and records the event."""
    await set_status(act, candidate, verdict, judged_by)
    row = {
        "tenant_id": act.stored.tenant_id,
        "run_id": act.stored.id,
        "candidate_id": candidate.id,
        "before": candidate.status,
        "after": verdict,
        "created_at": act.now,
        "judged_by": judged_by,
    }
    await store.add_judgement(act.tx, row)
    may_cancel = judged_by == JudgedBy.PERSON or verdict == CandidateStatus.REJECTED
    payload = {
        "candidate_id": str(candidate.id),
        "before": candidate.status,
        "judged_by": judged_by,
        "jobs_cancelled": await act.cancel_unneeded() if may_cancel else 0,
    }
    if judged_by == JudgedBy.PERSON:
        await act.record(VERDICT_EVENTS[verdict], **payload)
    else:
        await run_state.record_event(
            act.tx, act.stored, VERDICT_EVENTS[verdict], payload, now=act.now
        )


class JudgeResult(NamedTuple):
    score: float | None
    error: str | None  # why there is no score


def read_score(judge: StepJudge | None, job: Job, files: Mapping[UUID, File]) -> JudgeResult:
    if job.status != JobStatus.COMPLETED:
        return JudgeResult(None, job.error_message or "The job was cancelled.")
    if judge is None:
        return JudgeResult(None, "the step has no judge")
    try:
        return JudgeResult(float(compute_score(judge.score, job_output(job, files))), None)
    except FleetError as problem:
        return JudgeResult(None, f"the judge returned no score: {problem.message}")


async def write_score(
    act: RunTransaction,
    pipeline: PipelineDefinition,
    row: PipelineJob,
    job: Job,
    files: Mapping[UUID, File],
) -> tuple[JobState, str | None] | None:
    """Writes the result of a judge's job. Also writes its verdict, unless a person has already
    judged the candidate.

    Returns how the job ended, and its error. Returns None if the result was written before."""
    score, error = read_score(pipeline.steps[row.step].judge, job, files)
    state, is_paid = JobState.FAILED if error else JobState.DONE, job.status == JobStatus.COMPLETED
    if not await store_candidates.end_job(
        act.tx, row.id, state, now=act.now, error=error, is_refunded=not is_paid
    ):
        return None
    await store.change_run(act.tx, act.stored.id, {"look_at": act.now, "changed_at": act.now})
    candidate_id = row.parent or row.id
    await store_candidates.set_judge_result(act.tx, [candidate_id], score=score, error=error)
    payload: dict[str, Any] = {
        "job_id": str(row.id),
        "step": row.step,
        "candidate_id": str(candidate_id),
    }
    if score is None:
        payload |= {"error": error, "is_judge": True}
        await run_state.record_event(act.tx, act.stored, "job_failed", payload, now=act.now)
        return state, error
    await run_state.record_event(
        act.tx, act.stored, "scored", {**payload, "score": score}, now=act.now
    )
    candidate = await store_candidates.get_candidate(act.tx, act.stored.id, candidate_id)
    verdict = judged_verdict(pipeline, candidate, score) if candidate else None
    if candidate and verdict:
        await set_verdict(act, candidate, verdict, JudgedBy.JUDGE)
    return state, None
