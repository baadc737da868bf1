"""A job and its transactions: what agrees, and what does not."""

from datetime import UTC, datetime
from uuid import UUID

import pytest

from comfyfleet.server.tenants.model import (
    Fault,
    JobLedgerFacts,
    LedgerTransaction,
    TransactionType,
    drifts_of_job,
)

NOW = datetime(2026, 11, 15, 8, 30, tzinfo=UTC)
TENANT, USER, JOB = UUID(int=1), UUID(int=2), UUID(int=3)
RESERVE = ("JOB_RESERVE", -5)
CONSUME = ("JOB_CONSUME", 0)
REFUND = ("JOB_REFUND", 5)
ACTIVE, COMPLETED, FAILED = (False, False), (True, True), (True, False)


def line(number: int, kind: str, amount: int) -> LedgerTransaction:
    return LedgerTransaction(number, TENANT, USER, JOB, TransactionType(kind), amount, None, NOW)


@pytest.mark.parametrize(
    ("reserved", "state", "lines", "faults"),
    [
        (5, ACTIVE, [RESERVE], []),
        (5, COMPLETED, [RESERVE, CONSUME], []),
        (5, FAILED, [RESERVE, REFUND], []),
        (0, ACTIVE, [], []),
        (0, COMPLETED, [], []),
        (5, ACTIVE, [], [Fault.NOT_RESERVED]),
        (0, COMPLETED, [CONSUME], [Fault.NOT_RESERVED]),
        (6, ACTIVE, [RESERVE], [Fault.AMOUNT]),
        (5, COMPLETED, [RESERVE], [Fault.NOT_SETTLED]),
        (5, FAILED, [RESERVE], [Fault.NOT_SETTLED]),
        (5, ACTIVE, [RESERVE, REFUND], [Fault.SETTLED_EARLY]),
        (5, ACTIVE, [RESERVE, CONSUME], [Fault.SETTLED_EARLY]),
        (5, COMPLETED, [RESERVE, REFUND], [Fault.SETTLED_WRONGLY]),
        (5, FAILED, [RESERVE, CONSUME], [Fault.SETTLED_WRONGLY]),
        (6, FAILED, [RESERVE], [Fault.AMOUNT, Fault.NOT_SETTLED]),
    ],
)
def test_a_job_is_paid_for_as_it_went(
    reserved: int, state: tuple[bool, bool], lines: list[tuple[str, int]], faults: list[Fault]
) -> None:
    job = JobLedgerFacts(JOB, reserved, *state)
    found = [line(number, kind, amount) for number, (kind, amount) in enumerate(lines)]
    assert [each.fault for each in drifts_of_job(TENANT, job, found)] == faults
