"""How many ComfyUIs share a GPU: scenes, and what holds in all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comfyfleet.worker.pack_plan import (
    GpuSample,
    MoveReason,
    PackDecision,
    PackMove,
    PackRules,
    PackSize,
    decide_pack_size,
    has_room,
)

GB = 1024**3
RULES = PackRules(most=4)
START_SECONDS = 30.0


@dataclass
class Scene:
    """A GPU on which n ComfyUIs finish `rates[n - 1]` jobs a minute while there is a backlog."""

    rates: Sequence[float] = (30, 60, 61, 61)
    each_bytes: int = 10 * GB
    total_bytes: int = 80 * GB
    backlog: Callable[[float], bool] = lambda at: True
    out_of_memory_above: int = 99
    never_starts_above: int = 99
    sample_seconds: float = RULES.sample_seconds
    at: float = 0.0
    finished: float = 0.0
    failures: int = 0
    size: PackSize = field(default_factory=PackSize)
    count: int = 1
    settled_at: float = 0.0
    decisions: list[tuple[float, PackDecision]] = field(default_factory=list)

    def run(self, seconds: float, rules: PackRules = RULES) -> "Scene":
        end = self.at + seconds
        while self.at < end:
            self.at += self.sample_seconds
            self.size, decision = decide_pack_size(self.size, self.look(), rules)
            if decision is not None:
                self.decisions.append((self.at, decision))
                assert decision.size == self.size.target
            if self.size.target != self.count:
                self.count, self.settled_at = self.size.target, self.at + START_SECONDS
        return self

    def look(self) -> GpuSample:
        is_settled = self.at >= self.settled_at and self.count <= self.never_starts_above
        ready = self.count if is_settled else self.count - 1
        has_backlog = self.backlog(self.at)
        if ready and has_backlog:
            self.finished += self.rates[ready - 1] * self.sample_seconds / 60
            self.failures += ready > self.out_of_memory_above
        return GpuSample(
            at=self.at,
            ready=ready,
            leaving=0,
            full=ready if has_backlog else 0,
            idle=0 if has_backlog else ready,
            finished=int(self.finished),
            out_of_memory=self.failures,
            memory_used=self.count * self.each_bytes,
            memory_total=self.total_bytes,
        )

    @property
    def moves(self) -> list[tuple[PackMove, MoveReason, int]]:
        return [(each.move, each.reason, each.size) for _, each in self.decisions]


ADD, KEEP, REMOVE = PackMove.ADD, PackMove.KEEP, PackMove.REMOVE


def test_a_second_one_stays_where_it_brings_more_and_a_third_goes_where_it_does_not() -> None:
    scene = Scene().run(1500)
    assert scene.moves == [
        (ADD, MoveReason.BACKLOG, 2),
        (KEEP, MoveReason.GAIN, 2),
        (ADD, MoveReason.BACKLOG, 3),
        (REMOVE, MoveReason.NO_GAIN, 2),
    ]
    tried, gained = scene.decisions[0][1], scene.decisions[1][1]
    assert tried.rate == pytest.approx(30, rel=0.05)
    assert gained.rate_before == tried.rate
    assert gained.rate == pytest.approx(60, rel=0.05)


def test_what_brought_nothing_is_tried_again_only_after_a_while() -> None:
    scene = Scene(rates=(30, 30, 30, 30)).run(4 * RULES.retry_seconds)
    adds = [at for at, decision in scene.decisions if decision.move is ADD]
    assert 2 <= len(adds) <= 4
    gaps = [after - before for before, after in pairwise(adds)]
    assert min(gaps) >= RULES.retry_seconds


def test_it_grows_to_the_most_that_is_allowed_where_each_brings_more() -> None:
    scene = Scene(rates=(30, 60, 90, 120)).run(3600)
    assert scene.size.target == RULES.most
    assert REMOVE not in [move for move, _, _ in scene.moves]


@pytest.mark.parametrize(("rate", "move"), [(60, KEEP), (31, REMOVE)])
def test_a_trial_ends_with_a_verdict_though_the_backlog_comes_and_goes(
    rate: float, move: PackMove
) -> None:
    """Two take jobs faster than they are prefetched: seldom do both have one waiting."""
    scene = Scene(rates=(30, rate, rate, rate))
    scene.run(200)
    assert scene.size.rate_before is not None
    full = scene.look

    def seldom_full() -> GpuSample:
        return replace(full(), full=1, idle=0)

    scene.look = seldom_full  # type: ignore[method-assign]
    scene.run(1_000)
    assert scene.size.rate_before is None
    assert scene.decisions[-1][1].move is move


def test_a_trial_ends_with_a_verdict_though_a_restart_interrupts_each_window() -> None:
    """A ComfyUI that is restarted to free memory isn't ready for a moment."""
    scene = Scene(rates=(30, 60, 60, 60)).run(200)
    assert scene.size.rate_before is not None
    settled = scene.look

    def restarting() -> GpuSample:
        sample = settled()
        is_restarting = scene.at % RULES.window_seconds < 2 * RULES.sample_seconds
        return replace(sample, ready=sample.ready - 1) if is_restarting else sample

    scene.look = restarting  # type: ignore[method-assign]
    scene.run(RULES.trial_windows_max * RULES.window_seconds)
    assert scene.size.rate_before is None
    assert scene.moves[-1] == (REMOVE, MoveReason.NO_GAIN, 1)


def test_without_a_backlog_nothing_is_added() -> None:
    """Each has something to do, and nothing waits behind it."""
    look = GpuSample(0, 1, 0, 0, 0, 0, 0, GB, 80 * GB)
    size = PackSize()
    for number in range(1000):
        size, decision = decide_pack_size(
            size, replace(look, at=5.0 * number, finished=number), RULES
        )
        assert decision is None


def test_where_one_more_would_not_fit_it_is_said_once_in_a_while() -> None:
    scene = Scene(each_bytes=45 * GB).run(RULES.retry_seconds)
    assert scene.moves == [(KEEP, MoveReason.NO_MEMORY, 1)]
    told = scene.decisions[0][1]
    assert (told.memory_used, told.memory_total) == (45 * GB, 80 * GB)


def test_where_nobody_tells_the_memory_nothing_is_added() -> None:
    assert not has_room(None, 80 * GB, 1, 0.1)
    assert not has_room(GB, None, 1, 0.1)
    assert has_room(GB, 3 * GB, 1, 0.1)
    assert not has_room(2 * GB, 4 * GB, 1, 0.1)  # the margin


def test_without_work_it_goes_back_to_one() -> None:
    scene = Scene(rates=(30, 60, 90, 120)).run(2400)
    assert scene.size.target == 4
    scene.backlog = lambda at: False
    scene.run(3 * (RULES.spare_seconds + START_SECONDS + RULES.sample_seconds))
    assert scene.size.target == 1
    assert scene.moves[-3:] == [(REMOVE, MoveReason.SPARE, size) for size in (3, 2, 1)]


def test_out_of_memory_takes_one_away_at_once_and_is_remembered() -> None:
    scene = Scene(rates=(30, 60, 90, 120), out_of_memory_above=2).run(RULES.memory_retry_seconds)
    assert scene.moves.count((REMOVE, MoveReason.OUT_OF_MEMORY, 2)) == 1
    (at,) = [at for at, each in scene.decisions if each.reason is MoveReason.OUT_OF_MEMORY]
    assert [each.size for later, each in scene.decisions if later > at] == []
    assert scene.size.target == 2


def test_out_of_memory_with_one_bars_a_second() -> None:
    scene = Scene(out_of_memory_above=0).run(3600)
    assert scene.moves == []


def test_one_that_does_not_start_goes_and_is_not_tried_again_soon() -> None:
    scene = Scene(never_starts_above=1).run(RULES.retry_seconds)
    assert scene.moves == [(ADD, MoveReason.BACKLOG, 2), (REMOVE, MoveReason.NOT_STARTED, 1)]


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    rates = draw(st.lists(st.floats(0.5, 200), min_size=4, max_size=4))
    busy = draw(st.lists(st.integers(30, 3000), min_size=1, max_size=8))

    def backlog(at: float) -> bool:
        """By turns busy and idle."""
        for number, seconds in enumerate(busy):
            if at < seconds:
                return number % 2 == 0
            at -= seconds
        return False

    return Scene(
        rates=rates,
        each_bytes=draw(st.integers(1, 60)) * GB,
        total_bytes=draw(st.sampled_from((24, 80, 141))) * GB,
        backlog=backlog,
        out_of_memory_above=draw(st.sampled_from((1, 2, 99))),
        never_starts_above=draw(st.sampled_from((1, 2, 99))),
        sample_seconds=20.0,
    )


@given(scenes())
@settings(max_examples=50, deadline=None)
def test_it_never_outgrows_the_memory_never_flaps_and_always_comes_back_to_one(
    scene: Scene,
) -> None:
    scene.run(26_000)
    for _, decision in scene.decisions:
        assert 1 <= decision.size <= RULES.most
        if decision.move is ADD:
            assert decision.size * scene.each_bytes <= scene.total_bytes
    changes = [(at, each) for at, each in scene.decisions if each.move is not KEEP]
    for (before, first), (after, second) in pairwise(changes):
        if second.reason is not MoveReason.OUT_OF_MEMORY:
            assert after - before >= min(RULES.window_seconds, RULES.spare_seconds)
        if first.reason in (MoveReason.NO_GAIN, MoveReason.OUT_OF_MEMORY, MoveReason.NOT_STARTED):
            assert not (second.move is ADD and after - before < RULES.retry_seconds)
    assert scene.size.target == 1, "it has been idle for long"
