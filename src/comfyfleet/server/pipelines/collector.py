"""Converts ended jobs into candidates, one per image or text, exactly once. Alerts on failures and
full storage."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, TypeAlias
from uuid import UUID, uuid5

from comfyfleet.api.values import text_of
from comfyfleet.errors import NotFound
from comfyfleet.media import picture_problem
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.outages import log_failure
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.context import JobContext
from comfyfleet.server.jobs.model import Failure, Job, JobStatus
from comfyfleet.server.jobs.outbox import flush
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File, kind_of
from comfyfleet.server.notifications import webhooks
from comfyfleet.server.notifications.model import EndOfJob, WebhookEvent
from comfyfleet.server.pipelines import run_state, store, store_candidates
from comfyfleet.server.pipelines import store_candidates as job_rows
from comfyfleet.server.pipelines.decide import wanted_of
from comfyfleet.server.pipelines.judgements import write_score
from comfyfleet.server.pipelines.model import (
    JobState,
    PipelineCandidate,
    PipelineJob,
    PipelineRunStatus,
    StoredPipeline,
    StoredRun,
    candidate_path,
)
from comfyfleet.server.pipelines.run_state import PIPELINE_RUN_KIND, RunTransaction
from comfyfleet.server.pipelines.store_candidates import UnderwayJob

PICTURE_BYTES_MAX = 256 * 1024**2
log = logging.getLogger(__name__)
STORAGE_LIMIT = "storage_limit"
NO_PICTURE = "it is a text, and the judge looks at pictures"


async def raise_alert(
    tx: Tx,
    context: JobContext,
    stored: StoredRun,
    row: PipelineJob,
    error: str | None,
    *,
    now: datetime,
) -> bool:
    """Sends an alert if too many jobs failed within the window, at most once per window."""
    window = timedelta(seconds=context.settings.pipeline_alert_seconds)
    if stored.alerted_at and stored.alerted_at > now - window:
        return False
    failures = await store_candidates.failures_since(tx, stored.id, now - window)
    if failures < context.settings.pipeline_alert_failures:
        return False
    log.error(
        "alert: %s jobs of pipeline run %s failed within %s s; last error: %s",
        failures,
        stored.id,
        context.settings.pipeline_alert_seconds,
        error,
    )
    payload = {
        "pipeline_run_id": str(stored.id),
        "failures": failures,
        "window_seconds": context.settings.pipeline_alert_seconds,
        "error": error,
    }
    await store.change_run(tx, stored.id, {"alerted_at": now})
    await run_state.record_event(tx, stored, "alert", payload, now=now)
    await _enqueue_webhook(tx, context, stored, row, WebhookEvent.PIPELINE_ALERT, payload, now)
    return True


async def pause_if_full(
    tx: Tx, context: JobContext, stored: StoredRun, row: PipelineJob, *, now: datetime
) -> bool:
    """Pauses a run whose files exceed its limit, so that it doesn't fill the storage of all
    users."""
    most = stored.run.limits.bytes
    if most is None or stored.run.status != PipelineRunStatus.ACTIVE:
        return False
    used = await store_candidates.bytes_of(tx, stored.id)
    if used < most:
        return False
    log.warning("pipeline run %s was paused, because its files take %s bytes", stored.id, used)
    payload = {"pipeline_run_id": str(stored.id), "bytes": used, "limit": most}
    payload["reason"] = STORAGE_LIMIT
    changes = {"status": PipelineRunStatus.PAUSED, "pause_reason": STORAGE_LIMIT}
    await store.change_run(tx, stored.id, changes)
    await run_state.record_event(tx, stored, "paused", payload, now=now)
    await _enqueue_webhook(tx, context, stored, row, WebhookEvent.PIPELINE_PAUSED, payload, now)
    return True


async def _enqueue_webhook(
    tx: Tx,
    context: JobContext,
    stored: StoredRun,
    row: PipelineJob,
    event: WebhookEvent,
    payload: dict[str, object],
    now: datetime,
) -> None:
    """Enqueues a webhook in the same transaction, so that it is enqueued exactly once."""
    context.run_metrics.pipeline_alerts.labels(event).inc()
    await webhooks.enqueue(
        tx,
        stored.tenant_id,
        stored.user_id,
        EndOfJob(row.id, event, payload),
        new_id=context.new_id,
        now=now,
    )


OUTBOX_PER_PASS_MAX = 200
REMARK_CHARACTERS_MAX = 2000
# The number of new candidates, and the new state of the job. None means the state did not change.
WriteResult: TypeAlias = tuple[int, JobState | None]


@dataclass(frozen=True)
class CollectedJob:
    """The results of a job. They are read before anything is written."""

    job: Job
    pictures: Mapping[int, File] = field(default_factory=dict)  # images by output index
    texts: tuple[str, ...] = ()  # used as candidates if there are no images
    remarks: tuple[str, ...] = ()  # outputs that are not candidates, with the reason

    @property
    def remark(self) -> str | None:
        return "; ".join(self.remarks)[:REMARK_CHARACTERS_MAX] or None


async def collect_ended(context: JobContext, pool: Database) -> bool:
    """Collects ended jobs from the outbox, and jobs whose outbox row was lost. Returns whether
    there is more to collect."""
    async with pool.read() as tx:
        rows = await jobs.outbox_of_runs(
            tx, PIPELINE_RUN_KIND, now=context.clock(), limit=OUTBOX_PER_PASS_MAX
        )
    for outbox_id, tenant_id, run_id, job_id in rows:
        await _collect_safely(context, pool, tenant_id, run_id, job_id, outbox_id)
    async with pool.read() as tx:
        uncollected = await job_rows.ended_uncollected(tx, limit=OUTBOX_PER_PASS_MAX)
    for job in uncollected:
        await _collect_safely(context, pool, job.tenant_id, job.run_id, job.job_id, None)
    return len(rows) == OUTBOX_PER_PASS_MAX


async def _collect_safely(
    context: JobContext,
    pool: Database,
    tenant_id: UUID,
    run_id: UUID,
    job_id: UUID,
    outbox_id: int | None,
) -> None:
    """Collects a job and logs any error, so that a job with unreadable files doesn't block the
    others. After an error, its outbox row remains."""
    try:
        await collect_job(context, pool, tenant_id, run_id, job_id, outbox_id=outbox_id)
    except Exception as error:  # noqa: BLE001 — one job must not block the others
        log_failure(log, error, "candidates of job %s are not collected, will be retried", job_id)


async def collect_job(
    context: JobContext,
    pool: Database,
    tenant_id: UUID,
    run_id: UUID,
    job_id: UUID,
    *,
    outbox_id: int | None = None,
) -> int:
    """Writes the candidates of a job. Returns their number, or 0 if they have already been
    written."""
    outcome = await _read_outcome(context, pool, tenant_id, job_id)
    written: WriteResult = (0, None)
    act: RunTransaction | None = None
    async with pool.transaction() as tx:
        stored = await store.get_run(tx, tenant_id, run_id, is_locked=True)
        row = await job_rows.get_job(tx, run_id, job_id) if stored else None
        if stored and row and outcome and not outcome.job.status.is_active:
            act = RunTransaction(context, tx, stored, context.clock())
            write = _write_score if row.is_judge else _write_candidates
            written = await write(act, row, outcome)
        if outbox_id is not None:
            await jobs.delete_outbox(tx, [outbox_id])
    if act:
        await act.flush_cancelled(pool)
    context.notifier.tell(run_id)
    count, state = written
    if state is not None:
        context.run_metrics.pipeline_jobs.labels(state).inc()
    return count


async def _read_outcome(
    context: JobContext, pool: Database, tenant_id: UUID, job_id: UUID
) -> CollectedJob | None:
    try:
        async with pool.read() as tx:
            job = await jobs.get(tx, tenant_id, job_id)
    except NotFound:
        return None
    if job.status != JobStatus.COMPLETED:
        return CollectedJob(job)
    pictures: dict[int, File] = {}
    remarks: list[str] = []
    for index, output in enumerate(job.outputs):
        file = await _file(pool, tenant_id, output.file_id)
        problem = await _file_problem(context, file)
        if file and problem is None:
            pictures[index] = file
        else:
            remarks.append(f"output {output.name!r}: {problem}")
    texts = () if pictures else _texts(job)
    if not pictures and not texts and not remarks:
        remarks.append("the job saved no image and showed no text")
    return CollectedJob(job, pictures, texts, tuple(remarks))


def _texts(job: Job) -> tuple[str, ...]:
    """Returns the text outputs of the first node that has any."""
    shown = [value for value in job.values if isinstance(value.value, str) and value.value]
    return tuple(value.value for value in shown if value.node_id == shown[0].node_id)


async def _file(pool: Database, tenant_id: UUID, file_id: UUID) -> File | None:
    try:
        async with pool.read() as tx:
            return await media.get_file(tx, tenant_id, file_id)
    except NotFound:
        return None


async def _file_problem(context: JobContext, file: File | None) -> str | None:
    if file is None:
        return "its file was deleted"
    if kind_of(file.mime_type) in ("video", "audio"):
        return f"it is {file.mime_type}, not an image"
    if (file.size or 0) > PICTURE_BYTES_MAX:
        return f"it is larger than {PICTURE_BYTES_MAX:,} bytes"
    try:
        return picture_problem(await context.store.get(file.path))
    except NotFound:
        return "its object is missing from the storage"


async def _write_score(act: RunTransaction, row: PipelineJob, outcome: CollectedJob) -> WriteResult:
    made_with = await _pipeline_of(act)
    files = {file.id: file for file in outcome.pictures.values()}
    ended = await write_score(act, made_with.pipeline, row, outcome.job, files)
    if ended is None:
        return 0, None
    state, error = ended
    if error is not None:
        await raise_alert(act.tx, act.context, act.stored, row, error, now=act.now)
    return 0, state


async def _pipeline_of(act: RunTransaction) -> StoredPipeline:
    pipeline = await store.get_pipeline(act.tx, act.stored.tenant_id, act.stored.pipeline_id)
    if pipeline is None:
        raise NotFound(f"pipeline {act.stored.pipeline_id} was not found")
    return pipeline


async def _write_candidates(
    act: RunTransaction, row: PipelineJob, outcome: CollectedJob
) -> WriteResult:
    tx, context, stored, now = act.tx, act.context, act.stored, act.now
    made_with = await _pipeline_of(act)
    outcome = await _drop_unwanted(tx, stored, made_with, row, outcome)
    is_done = bool(outcome.pictures or outcome.texts)
    is_paid = outcome.job.status == JobStatus.COMPLETED
    error = outcome.remark if is_paid else outcome.job.error_message or "The job was cancelled."
    state = JobState.DONE if is_done else JobState.FAILED
    if not await job_rows.end_job(tx, row.id, state, now=now, error=error, is_refunded=not is_paid):
        return 0, None  # already written, or cancelled by this control plane
    await store.change_run(tx, stored.id, {"look_at": now, "changed_at": now})
    if not is_done:
        payload = {"job_id": str(row.id), "step": row.step, "error": error}
        await run_state.record_event(tx, stored, "job_failed", payload, now=now)
        await raise_alert(tx, context, stored, row, error, now=now)
        return 0, state
    outputs: Mapping[int, File | str] = outcome.pictures or dict(enumerate(outcome.texts))
    rows = [
        _candidate(stored, made_with, row, outcome.job, index, output, now)
        for index, output in outputs.items()
    ]
    await store_candidates.add_candidate(tx, stored.tenant_id, stored.id, rows)
    if row.parent:
        await store_candidates.count_children(tx, row.parent, len(rows))
    await run_state.record_event(tx, stored, "candidates", _event_data(row, rows, error), now=now)
    await pause_if_full(tx, context, stored, row, now=now)
    return len(rows), state


async def _drop_unwanted(
    tx: Tx, stored: StoredRun, made_with: StoredPipeline, row: PipelineJob, outcome: CollectedJob
) -> CollectedJob:
    """Drops candidates beyond `images_per_job` or beyond the number still needed. Adds a remark
    about them."""
    count = len(outcome.pictures) or len(outcome.texts)
    if count <= 1:
        return outcome
    tree = await store_candidates.tree_of(tx, stored.id)
    siblings = sum(
        candidate.step == row.step and candidate.parent == row.parent for candidate in tree.values()
    )
    missing = wanted_of(made_with.pipeline, stored.run, row.step) - siblings
    most = max(1, min(made_with.pipeline.steps[row.step].images_per_job, missing))
    if count <= most:
        return outcome
    remark = f"the job made {count} candidates, and {most} were kept because of images_per_job or the number still needed"
    return replace(
        outcome,
        pictures=dict(islice(outcome.pictures.items(), most)),
        texts=outcome.texts[:most],
        remarks=(*outcome.remarks, remark),
    )


def _event_data(
    row: PipelineJob, rows: list[PipelineCandidate], remark: str | None
) -> dict[str, Any]:
    return {
        "job_id": str(row.id),
        "step": row.step,
        "parent": str(row.parent) if row.parent else None,
        "candidates": [str(candidate.id) for candidate in rows],
        "remark": remark,
    }


def _candidate(
    stored: StoredRun,
    made_with: StoredPipeline,
    row: PipelineJob,
    job: Job,
    index: int,
    output: File | str,
    now: datetime,
) -> PipelineCandidate:
    candidate_id = uuid5(row.id, str(index))
    # The first output of a job counts as the oldest.
    created_at = now + timedelta(microseconds=index)
    file = output if isinstance(output, File) else None
    step = made_with.pipeline.steps[row.step]
    path = candidate_path(
        target_folder=stored.run.target_folder,
        step=step.name,
        candidate_id=candidate_id,
        created_at=created_at,
        extension=_suffix(file) if file else ".txt",
    )
    return PipelineCandidate(
        id=candidate_id,
        step=row.step,
        created_at=created_at,
        parent=row.parent,
        file={
            "file_id": str(file.id) if file else None,
            "path": path,
            "mime_type": file.mime_type if file else "text/plain",
            "size": (file.size or 0) if file else len(str(output).encode()),
        },
        text=text_of(job.values) if file else str(output),
        seed=row.seed,
        properties=job.spec.properties,
        job_id=row.id,
        output_index=index,
        judge_error=NO_PICTURE if step.judge and not file else None,
    )


def _suffix(file: File) -> str:
    return PurePosixPath(file.filename).suffix or PurePosixPath(file.path).suffix


JOBS_PER_PASS_MAX = 5000
RUNS_PER_PASS_MAX = 20
FILES_PER_PASS_MAX = 500


async def fail_overdue(context: JobContext, pool: Database) -> int:
    """Fails jobs over their time limit and returns their number. Each failure adds an outbox row,
    like any end of a job."""
    async with pool.read() as tx:
        underway = await job_rows.list_underway(tx, limit=JOBS_PER_PASS_MAX)
    failed = 0
    for job in underway:
        why = overdue_reason(
            job, context.clock(), abandoned_hours=context.settings.abandoned_job_hours
        )
        if why:
            failed += await _fail(context, pool, job, why)
    return failed


def overdue_reason(job: UnderwayJob, now: datetime, *, abandoned_hours: int) -> str | None:
    """Returns why a job is overdue, or None. Time in the queue doesn't count, unless no worker
    accepts the job for hours."""
    if job.status == "processing" and job.started_at:
        if now - job.started_at > timedelta(seconds=job.timeout_seconds):
            return f"It took longer than {job.timeout_seconds} s."
        return None
    if now - (job.started_at or job.submitted_at) > timedelta(hours=abandoned_hours):
        return f"No worker reported on it for {abandoned_hours} hours."
    return None


async def _fail(context: JobContext, pool: Database, job: UnderwayJob, why: str) -> bool:
    async with pool.transaction() as tx:
        failed, outbox_ids = await jobs.force_fail(
            tx,
            job.tenant_id,
            job.job_id,
            Failure(why),
            new_id=context.new_id,
            now=context.clock(),
        )
    if failed is None:
        return False
    await flush(context, pool, [failed], outbox_ids)
    return True


async def remove_old_files(context: JobContext, pool: Database) -> bool:
    """Deletes the files of old runs. Candidates and judgments remain. Returns whether there is
    more to delete."""
    unchanged = context.clock() - timedelta(days=context.settings.pipeline_keep_days)
    async with pool.read() as tx:
        old = await store.old_runs(tx, unchanged_since=unchanged, limit=RUNS_PER_PASS_MAX)
    for stored in old:
        try:
            await _remove_files(context, pool, stored)
        except Exception as error:  # noqa: BLE001 — one run must not block the others
            message = "files of pipeline run %s are not removed, will be retried"
            log_failure(log, error, message, stored.id)
    return len(old) == RUNS_PER_PASS_MAX


async def _remove_files(context: JobContext, pool: Database, stored: StoredRun) -> None:
    async with pool.read() as tx:
        files = await store_candidates.files_of(tx, stored.id, limit=FILES_PER_PASS_MAX)
    for candidate_id, file_id in files.items():
        await _remove_file(context, pool, stored, candidate_id, file_id)
    if len(files) == FILES_PER_PASS_MAX:
        return  # the next pass deletes the remaining files
    async with pool.transaction() as tx:
        now = context.clock()
        await store.change_run(tx, stored.id, {"files_removed_at": now})
        await run_state.record_event(tx, stored, "files_removed", {"last": len(files)}, now=now)


async def _remove_file(
    context: JobContext, pool: Database, stored: StoredRun, candidate_id: UUID, file_id: UUID
) -> None:
    """Deletes the object before its row, so that the next pass can finish the deletion after a
    crash in between."""
    try:
        async with pool.read() as tx:
            file = await media.get_file(tx, stored.tenant_id, file_id)
        await context.store.delete(*file.object_keys)
        async with pool.transaction() as tx:
            await store_candidates.clear_file(tx, candidate_id)
            await media.delete_file(tx, stored.tenant_id, file_id)
    except NotFound:
        async with pool.transaction() as tx:
            await store_candidates.clear_file(tx, candidate_id)
