"""The four stages of a job, by its row and its effect's history."""

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from comfyfleet.api.jobs import JobStatus
from comfyfleet.server.jobs.stages import (
    EXPECTED_PERCENT_MAX,
    WaitingJob,
    expected_percent,
    seconds_left,
    stage_of,
    stages_of,
)

NOW = datetime(2031, 1, 1, tzinfo=UTC)
QUEUED = WaitingJob(
    id=UUID(int=1),
    tenant_id=UUID(int=2),
    status=JobStatus.QUEUED,
    effect_id=UUID(int=3),
    video_id=None,
    lease_token=None,
    is_held=False,
    reserved_tokens=5,
    error_message=None,
    submitted_at=NOW - timedelta(seconds=30),
    started_at=None,
    completed_at=None,
)
PREFETCHED = QUEUED._replace(status=JobStatus.PROCESSING)
RUNNING = PREFETCHED._replace(started_at=NOW - timedelta(seconds=10))
FAILED = RUNNING._replace(status=JobStatus.FAILED, completed_at=NOW)
DONE = FAILED._replace(status=JobStatus.COMPLETED)
CANCELLED = QUEUED._replace(status=JobStatus.CANCELLED, completed_at=NOW)


@pytest.mark.parametrize(
    ("job", "percent", "stage", "states"),
    [
        (QUEUED, None, "waiting", "done current to_come to_come"),
        (PREFETCHED, None, "waiting", "done current to_come to_come"),
        (RUNNING, None, "making", "done done current to_come"),
        (RUNNING, 50.0, "making", "done done current to_come"),
        (RUNNING, 100.0, "finishing", "done done done current"),
        (DONE, 100.0, None, "done done done done"),
        (FAILED, None, None, "done done to_come to_come"),
        (CANCELLED, None, None, "done to_come to_come to_come"),
    ],
)
def test_a_job_is_in_one_of_four_stages(
    job: WaitingJob, percent: float | None, stage: str | None, states: str
) -> None:
    assert stage_of(job, percent) == stage
    found = stages_of(job, percent, 20.0)
    assert [each.name for each in found] == ["checked", "waiting", "making", "finishing"]
    assert " ".join(each.state for each in found) == states


def test_widths_follow_the_history_until_the_job_has_its_own() -> None:
    assert [each.seconds for each in stages_of(QUEUED, None, 20.0)] == [0.0, None, 19.0, 1.0]
    assert [each.seconds for each in stages_of(RUNNING, None, 20.0)] == [0.0, 20.0, 19.0, 1.0]
    assert [each.seconds for each in stages_of(DONE, 100.0, 20.0)] == [0.0, 20.0, 9.5, 0.5]
    assert [each.seconds for each in stages_of(RUNNING, None, None)] == [0.0, 20.0, None, None]


def test_progress_is_expected_by_the_history_and_never_done() -> None:
    assert expected_percent(RUNNING, 20.0, NOW) == 50.0
    assert expected_percent(RUNNING, 2.0, NOW) == EXPECTED_PERCENT_MAX
    assert expected_percent(RUNNING, None, NOW) is None
    assert expected_percent(QUEUED, 20.0, NOW) is None
    assert seconds_left(RUNNING, 25.0, NOW) == 15.0
    assert seconds_left(RUNNING, 5.0, NOW) is None, "it takes longer than usual"
    assert seconds_left(DONE, 25.0, NOW) is None


def test_what_did_not_succeed_is_refunded() -> None:
    assert (FAILED.refunded_tokens, CANCELLED.refunded_tokens) == (5, 5)
    assert (DONE.refunded_tokens, RUNNING.refunded_tokens) == (0, 0)
