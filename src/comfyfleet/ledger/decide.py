"""Whether a job and its transactions agree. Pure."""

from collections.abc import Sequence
from uuid import UUID

from comfyfleet.ledger.model import (
    SETTLES,
    Drift,
    Fault,
    JobFacts,
    Transaction,
    TransactionType,
)


def drifts_of_job(tenant_id: UUID, job: JobFacts, found: Sequence[Transaction]) -> list[Drift]:
    """`found` are all transactions of the job."""
    reserve = next((each for each in found if each.type is TransactionType.JOB_RESERVE), None)
    settled = [each for each in found if each.type in SETTLES]
    user_id = found[0].user_id if found else None
    faults = [*_of_amount(job, reserve, settled), *_of_settling(job, reserve, settled)]
    return [Drift(fault, tenant_id, user_id, job.job_id, says) for fault, says in faults]


def _of_amount(
    job: JobFacts, reserve: Transaction | None, settled: Sequence[Transaction]
) -> list[tuple[Fault, str]]:
    if reserve is None:
        if job.reserved_tokens or settled:
            says = f"{job.reserved_tokens} tokens should be reserved, and nothing is"
            return [(Fault.NOT_RESERVED, says)]
        return []
    if -reserve.amount != job.reserved_tokens:
        says = f"{-reserve.amount} tokens are reserved, and the job says {job.reserved_tokens}"
        return [(Fault.AMOUNT, says)]
    return []


def _of_settling(
    job: JobFacts, reserve: Transaction | None, settled: Sequence[Transaction]
) -> list[tuple[Fault, str]]:
    if reserve is None:
        return []
    if not settled:
        says = "the job has ended, and its tokens are still reserved"
        return [(Fault.NOT_SETTLED, says)] if job.is_ended else []
    if not job.is_ended:
        return [(Fault.SETTLED_EARLY, f"the job goes on after its {settled[0].type}")]
    wanted = TransactionType.JOB_CONSUME if job.is_completed else TransactionType.JOB_REFUND
    if settled[0].type is not wanted:
        return [(Fault.SETTLED_WRONGLY, f"{settled[0].type} instead of {wanted}")]
    return []
