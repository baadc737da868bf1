"""A failed or cancelled job once more: as a new job, so that what ended stays as it was."""

from dataclasses import replace
from uuid import UUID, uuid5

from comfyfleet.jobs.model import Job, JobStatus, Submission
from comfyfleet.jobs.sides import Sides
from comfyfleet.jobs.submitting import get, submit_many
from comfyfleet.kernel.errors import Conflict, Refused


async def retry(sides: Sides, tenant_id: UUID, job_id: UUID) -> Job:
    """The same prompt and files. Asked twice, it is still one retry."""
    ended = await get(sides, tenant_id, job_id)
    if ended.status not in (JobStatus.FAILED, JobStatus.CANCELLED):
        raise Conflict(
            f"only a job that failed or was cancelled can be retried, not one that is {ended.status}"
        )
    new_id = retry_id(ended)
    added = await submit_many(sides, tenant_id, {new_id: once_more(ended)})
    return added[0] if added else await get(sides, tenant_id, new_id)


def retry_id(ended: Job) -> UUID:
    """Derived: however often a retry is asked for, it is one."""
    return uuid5(ended.id, "retry")


def once_more(ended: Job) -> Submission:
    """The same prompt and files. Its batch or run has counted the old job, and knows no other."""
    if not ended.asked.prompt:
        raise Refused("the job ended so long ago that its prompt was removed: submit it anew")
    return replace(
        ended.asked,
        retry_of=ended.id,
        idempotency_key=None,
        request_hash=None,
        batch_id=None,
        batch_position=None,
        run_kind=None,
        run_id=None,
        is_held=False,
    )
