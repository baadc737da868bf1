"""Lanes take turns."""

from comfyfleet.server.queue.matcher import FairShare
from comfyfleet.server.queue.model import QueueLane

A, B = (QueueLane(number, "production", "self_hosted") for number in (1, 2))


def given(turns: FairShare, *backlogged: QueueLane) -> QueueLane:
    """The lane that is next of those with jobs."""
    starts = turns.starts(backlogged)
    lane = min(backlogged, key=lambda each: (starts[each], each))
    turns.given([lane])
    return lane


def test_fresh_lanes_start_equal() -> None:
    assert set(FairShare().starts([A, B]).values()) == {0.0}


def test_two_lanes_with_jobs_alternate() -> None:
    turns = FairShare()
    assert [given(turns, A, B) for _ in range(6)].count(A) == 3


def test_a_lane_that_was_empty_has_no_credit() -> None:
    turns = FairShare()
    for _ in range(100):
        given(turns, A)
    got = [given(turns, A, B) for _ in range(10)]
    assert 4 <= got.count(B) <= 6


def test_a_lane_that_was_alone_has_no_debt() -> None:
    turns = FairShare()
    turns.given([A] * 500)
    got = [given(turns, A, B) for _ in range(10)]
    assert got.count(A) >= 4


def test_a_lane_that_only_few_serve_is_not_favoured_for_ever() -> None:
    turns = FairShare()
    for _ in range(50):
        given(turns, A, B)
    for _ in range(200):  # by workers that know A only
        given(turns, A)
    got = [given(turns, A, B) for _ in range(20)]
    assert 9 <= got.count(A) <= 11
