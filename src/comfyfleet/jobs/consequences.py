"""What follows from a job's change on the tenant's side, in the same transaction: money, media, news."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeAlias
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.db.statement import Call, send_together
from comfyfleet.events import service as events
from comfyfleet.events.model import EventKind, NewEvent
from comfyfleet.files import service as file_rows
from comfyfleet.files.model import File
from comfyfleet.jobs import store
from comfyfleet.jobs.model import Job, JobStatus
from comfyfleet.ledger import service as ledger
from comfyfleet.media import service as media
from comfyfleet.webhooks import service as webhooks
from comfyfleet.webhooks.model import WebhookEvent

NewId: TypeAlias = Callable[[], UUID]
_WEBHOOK_EVENTS = {
    JobStatus.COMPLETED: WebhookEvent.COMPLETED,
    JobStatus.FAILED: WebhookEvent.FAILED,
    JobStatus.CANCELLED: WebhookEvent.CANCELLED,
}


async def after_submit(tx: Tx, jobs: Sequence[Job], *, now: datetime) -> None:
    """The tokens are reserved for all jobs of a submit at once, by the caller."""
    for job in jobs:
        await attach_media(tx, job)
    # Jobs without a user are operators' own: nobody follows their events.
    await events.record_all(tx, [submit_event(job) for job in jobs if job.asked.user_id], now=now)


async def attach_media(tx: Tx, job: Job) -> None:
    if job.asked.video_id and job.asked.user_id:
        await media.attach_job(tx, job.tenant_id, job.asked.user_id, job.asked.video_id, job.id)


def submit_event(job: Job) -> NewEvent:
    return _moved(job)


async def after_move(tx: Tx, job: Job, *, now: datetime) -> None:
    if job.asked.user_id:
        await events.record_all(tx, [_moved(job)], now=now)


def _moved(job: Job) -> NewEvent:
    return NewEvent(job.tenant_id, job.id, EventKind.STATUS, told(job))


async def after_end(
    tx: Tx, ended: store.EndedJob, files: Sequence[File], *, new_id: NewId, now: datetime
) -> list[int]:
    """The words that were left. Settled once, whatever comes later: the ledger's own keys see to
    that. What is only added is sent together; `files` are the job's outputs, and become its user's.
    """
    job = ended.job
    is_done = job.status == JobStatus.COMPLETED
    if job.reserved_tokens and not is_done:
        await ledger.refund(tx, job.tenant_id, job.id, now=now)
    if job.asked.video_id:
        await media.end_job(
            tx,
            job.tenant_id,
            job.id,
            processed_file_id=job.output_file_id if is_done else None,
            details=told(job),
        )
    if job.asked.user_id and ended.has_webhooks:
        await webhooks.announce(
            tx,
            job.tenant_id,
            job.asked.user_id,
            job.id,
            _WEBHOOK_EVENTS[job.status],
            told(job),
            new_id=new_id,
            now=now,
        )
    added = await send_together(
        tx, *_additions(job, files, now=now), store.leaving_word(job, now=now)
    )
    return [row[0] for row in added]


def _additions(job: Job, files: Sequence[File], *, now: datetime) -> Iterator[Call]:
    if job.reserved_tokens and job.status == JobStatus.COMPLETED:
        yield ledger.consuming(job.tenant_id, job.id, now=now)
    if job.asked.run_id:
        yield store.leaving_word_for_run(job, now=now)
    if job.asked.user_id:
        yield events.recording([*_outputs(job), _moved(job)], now=now)
    for file in files:
        yield file_rows.adding(replace(file, user_id=job.asked.user_id))


def _outputs(job: Job) -> Iterator[NewEvent]:
    if job.status == JobStatus.COMPLETED and job.result_metadata:
        outputs = {"outputs": job.result_metadata.get("outputs", [])}
        yield NewEvent(job.tenant_id, job.id, EventKind.OUTPUTS, outputs)


def told(job: Job) -> Mapping[str, Any]:
    """What a customer is told of a job; never the prompt, never the raw error."""
    return {
        "job_id": str(job.id),
        "status": job.shown_status,
        "error": job.error_message,
        "video_id": str(job.asked.video_id) if job.asked.video_id else None,
        "effect_id": str(job.asked.effect_id) if job.asked.effect_id else None,
        "reserved_tokens": job.reserved_tokens,
    }
