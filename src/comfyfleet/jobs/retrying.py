"""A failed or cancelled job once more: as a new job, so that what ended stays as it was."""

from dataclasses import replace
from uuid import UUID, uuid5

from comfyfleet.jobs.model import Job, JobStatus
from comfyfleet.jobs.sides import Sides
from comfyfleet.jobs.submitting import get, submit_many
from comfyfleet.kernel.errors import Conflict


async def retry(sides: Sides, tenant_id: UUID, job_id: UUID) -> Job:
    """The same prompt and files. Asked twice, it is still one retry."""
    ended = await get(sides, tenant_id, job_id)
    if ended.status not in (JobStatus.FAILED, JobStatus.CANCELLED):
        raise Conflict(
            f"only a job that failed or was cancelled can be retried, not one that is {ended.status}"
        )
    again = replace(ended.asked, retry_of=ended.id, idempotency_key=None, request_hash=None)
    new_id = uuid5(ended.id, "retry")
    added = await submit_many(sides, tenant_id, {new_id: again})
    return added[0] if added else await get(sides, tenant_id, new_id)
