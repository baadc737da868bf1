"""How many workers a fleet needs: decided with values."""

from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.server.maintenance.cloudwatch import wanted_workers

COUNTS = st.integers(0, 2_000_000)
CAPS = st.integers(1, 5000)
AGES = st.floats(0, 1e9)
SECONDS = st.none() | st.floats(0.001, 1e6)
SLOTS = st.none() | st.integers(0, 500)
PER_WORKER = st.integers(1, 64)


def wanted(  # the figures of a quiet fleet
    depth: int = 0,
    leased: int = 0,
    *,
    age: float = 0,
    typical: float | None = 60,
    cap: int = 50,
    slots: int | None = None,
    per_worker: int = 1,
) -> int:
    return wanted_workers(
        depth=depth,
        leased=leased,
        oldest_age=age,
        typical_seconds=typical,
        cap=cap,
        slots=slots,
        jobs_per_worker=per_worker,
        target_seconds=300,
    )


def test_an_idle_fleet_wants_none_and_one_job_wants_one() -> None:
    assert wanted() == 0
    assert wanted(1) == 1
    assert wanted(0, 1) == 1


def test_what_waits_shall_have_started_within_the_target() -> None:
    assert wanted(5) == 1
    assert wanted(6) == 2
    assert wanted(100) == 20
    assert wanted(100, typical=6) == 2
    assert wanted(3, typical=3600) == 3, "never more workers than jobs"


def test_what_runs_keeps_its_workers() -> None:
    assert wanted(0, 7) == 7
    assert wanted(5, 7) == 8


def test_a_job_that_a_busy_worker_holds_in_advance_is_one_that_waits() -> None:
    assert wanted(0, 2, slots=1) == 2
    assert wanted(0, 10, slots=5) == 6


def test_a_worker_that_runs_several_jobs_counts_for_several() -> None:
    assert wanted(0, 8, per_worker=4) == 2
    assert wanted(0, 9, per_worker=4) == 3


def test_a_queue_that_is_late_is_met_with_more() -> None:
    assert [wanted(50, age=age) for age in (0, 299, 300, 600, 1e9)] == [10, 10, 20, 30, 50]


def test_a_workflow_that_never_ran_is_taken_for_a_minute_long() -> None:
    assert wanted(10, typical=None) == wanted(10, typical=60)


@given(COUNTS, COUNTS, AGES, SECONDS, CAPS, SLOTS, PER_WORKER)
def test_it_is_within_the_cap_and_zero_only_when_there_is_nothing_to_do(
    depth: int,
    leased: int,
    age: float,
    typical: float | None,
    cap: int,
    slots: int | None,
    per_worker: int,
) -> None:
    found = wanted(
        depth, leased, age=age, typical=typical, cap=cap, slots=slots, per_worker=per_worker
    )
    assert 0 <= found <= min(cap, depth + leased)
    assert (found == 0) == (depth + leased == 0)


@given(COUNTS, COUNTS, COUNTS, AGES, SECONDS, CAPS, SLOTS, PER_WORKER)
def test_more_work_never_wants_fewer_workers(
    depth: int,
    more: int,
    leased: int,
    age: float,
    typical: float | None,
    cap: int,
    slots: int | None,
    per_worker: int,
) -> None:
    few = wanted(
        depth, leased, age=age, typical=typical, cap=cap, slots=slots, per_worker=per_worker
    )
    deeper = wanted(
        depth + more, leased, age=age, typical=typical, cap=cap, slots=slots, per_worker=per_worker
    )
    busier = wanted(
        depth, leased + more, age=age, typical=typical, cap=cap, slots=slots, per_worker=per_worker
    )
    assert few <= deeper
    assert few <= busier
