"""What a worker does, as those who watch count it."""

from dataclasses import dataclass

import pytest

from comfyfleet.server.db.metrics_queries import WorkersRow
from comfyfleet.server.metrics import state_of


@dataclass(frozen=True)
class Case:
    state: str
    is_approved: bool = True
    is_draining: bool = False
    is_busy: bool = False
    is_offline: bool = False


@pytest.mark.parametrize(
    "case",
    [
        Case("idle"),
        Case("busy", is_busy=True),
        Case("draining", is_draining=True, is_busy=True),
        Case("offline", is_draining=True, is_offline=True),
        Case("revoked", is_approved=False, is_offline=True),
    ],
    ids=lambda case: case.state,
)
def test_the_gravest_state_counts(case: Case) -> None:
    row = WorkersRow(
        1, case.is_approved, case.is_draining, case.is_busy, case.is_offline, workers=1, slots=1
    )
    assert state_of(row) == case.state
