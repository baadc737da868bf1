"""What a worker does, as those who watch count it."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest

from comfyfleet.plane.figures import state_of
from comfyfleet.plane.store import WorkerRow

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Case:
    state: str
    is_approved: bool = True
    is_draining: bool = False
    load: int = 0
    unseen: int = 0


@pytest.mark.parametrize(
    "case",
    [
        Case("idle"),
        Case("busy", load=1),
        Case("draining", is_draining=True, load=1),
        Case("offline", is_draining=True, unseen=91),
        Case("revoked", is_approved=False, unseen=91),
    ],
    ids=lambda case: case.state,
)
def test_the_gravest_state_counts(case: Case) -> None:
    seen = NOW - timedelta(seconds=case.unseen)
    row = WorkerRow(1, case.is_approved, case.is_draining, case.load, 1, seen)
    assert state_of(row, NOW - timedelta(seconds=90)) == case.state
