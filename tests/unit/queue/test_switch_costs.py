"""What a switch of models costs, learned from runs with and without one."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from comfyfleet.server.queue.switch_costs import (
    RUNS_NOTED_MAX,
    SAMPLES_KEPT_MAX,
    SAMPLES_MIN,
    SWITCHES_MIN,
    Estimate,
    ModelChange,
    RunKind,
    Samples,
    SwitchCosts,
    TimedRun,
    WarmWorkers,
    estimate,
)

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
MOST = timedelta(seconds=60)
KIND = RunKind(1, "sdxl", 7)


def runs(
    *,
    stay: float,
    switch: float,
    noise: float = 0.02,
    count: int = SAMPLES_KEPT_MAX,
    start: Samples = Samples(),  # noqa: B008 — a value
) -> Samples:
    """As many of each kind, each longer or shorter by some share of it."""
    chance, samples = random.Random(7), start
    for _ in range(count):
        for change, seconds in ((ModelChange.SAME, stay), (ModelChange.SWITCHED, switch)):
            samples = samples.with_run(change, seconds * chance.uniform(1 - noise, 1 + noise))
    return samples


def learned(samples: Samples) -> Estimate:
    found = estimate([samples])
    assert found is not None
    return found


def costs(**samples: Samples) -> SwitchCosts:
    return SwitchCosts({(1, model): learned(each) for model, each in samples.items()})


def test_a_switch_that_costs_next_to_nothing_is_free() -> None:
    found = learned(runs(stay=1.41, switch=1.45))
    assert found.is_free
    assert found.seconds < 0.1


@pytest.mark.parametrize("cost", [0.5, 2.0, 6.0])
def test_a_switch_that_costs_is_learned_to_a_tenth(cost: float) -> None:
    found = learned(runs(stay=1.2, switch=1.2 + cost))
    assert not found.is_free
    assert found.seconds == pytest.approx(cost, rel=0.1)
    assert found.run_seconds == pytest.approx(1.2, rel=0.05)


def test_one_run_that_took_very_long_changes_nothing() -> None:
    samples = runs(stay=1.4, switch=1.45)
    hung = samples.with_run(ModelChange.SWITCHED, 3600).with_run(ModelChange.SWITCHED, 3600)
    assert learned(hung).seconds == pytest.approx(learned(samples).seconds, abs=0.05)


def test_while_runs_vary_too_much_to_tell_a_switch_is_taken_for_dear() -> None:
    found = learned(runs(stay=10, switch=10.1, noise=0.9))
    assert found.error > 1
    assert not found.is_free


def test_of_several_workflows_the_one_counts_whose_runs_tell_best() -> None:
    steady, wild = runs(stay=1.4, switch=1.44), runs(stay=30, switch=30, noise=0.9)
    assert estimate([wild, steady, Samples()]) == estimate([steady])


def test_a_few_switches_of_each_of_several_workflows_are_put_together() -> None:
    several = [Samples((usual,) * 9, (usual + 1.0,)) for usual in (1.0, 2.0, 3.0)]
    assert estimate(several[:1]) is None
    found = estimate(several)
    assert found is not None
    assert (found.seconds, found.run_seconds, found.switched) == (1.0, 2.0, 3)


@pytest.mark.parametrize("few", [(SAMPLES_MIN - 1, 30), (30, SWITCHES_MIN - 1), (0, 0)])
def test_from_a_few_runs_nothing_is_learned(few: tuple[int, int]) -> None:
    stayed, switched = few
    assert estimate([Samples((1.0,) * stayed, (2.0,) * switched)]) is None
    assert estimate([]) is None


def test_a_backend_that_was_started_with_another_cache_is_learned_anew() -> None:
    dear = runs(stay=1.2, switch=2.2)
    free = runs(stay=1.2, switch=1.21, start=dear, count=SAMPLES_KEPT_MAX * 3 // 4)
    again = runs(stay=1.2, switch=2.2, start=free, count=SAMPLES_KEPT_MAX * 3 // 4)
    assert [learned(each).is_free for each in (dear, free, again)] == [False, True, False]


@pytest.mark.parametrize(("cost", "is_free"), [(3.0, False), (0.02, True)])
def test_the_first_mixed_backlog_is_enough(cost: float, is_free: bool) -> None:
    """It is grouped by model: 40 runs have three or four switches, two of them to each model."""
    chance, samples = random.Random(7), Samples()
    for number in range(20):
        change = ModelChange.SWITCHED if number in (5, 15) else ModelChange.SAME
        seconds = 1.4 + cost * (change is ModelChange.SWITCHED)
        samples = samples.with_run(change, seconds * chance.uniform(0.98, 1.02))
    found = learned(samples)
    assert found.is_free is is_free
    assert cost - 0.1 <= found.seconds <= cost + 0.1 + 0.05 * cost


def test_two_switches_that_differ_much_are_taken_for_dear() -> None:
    samples = runs(stay=1.4, switch=1.4, count=10)._replace(switched=(1.41, 3.0))
    assert not learned(samples).is_free


def test_reading_a_model_for_the_first_time_is_no_switch() -> None:
    assert Samples().with_run(ModelChange.FIRST, 60) == Samples()


def test_only_so_many_runs_are_kept() -> None:
    samples = runs(stay=1, switch=2, count=3 * SAMPLES_KEPT_MAX)
    assert {len(each) for each in samples} == {SAMPLES_KEPT_MAX}


def test_until_it_is_learned_a_job_may_be_passed_for_the_longest_wait() -> None:
    free = runs(stay=1.41, switch=1.45)
    assert SwitchCosts().passed_max(1, "sdxl", "flux", MOST) == MOST
    half = costs(sdxl=free)
    assert half.passed_max(1, "sdxl", "flux", MOST) == MOST
    assert half.passed_max(2, "sdxl", "sdxl", MOST) == MOST
    assert half.passed_max(None, "sdxl", "sdxl", MOST) == MOST


def test_where_switches_are_free_nobody_is_passed() -> None:
    free = runs(stay=1.41, switch=1.45)
    known = costs(sdxl=free, flux=free)
    assert known.passed_max(1, "sdxl", "flux", MOST) == timedelta()
    assert known.passed_max(1, "sdxl", None, MOST) == timedelta()


def test_a_job_is_passed_for_twenty_times_the_cost_at_most() -> None:
    known = costs(
        sdxl=runs(stay=1.2, switch=2.2, noise=0),
        flux=runs(stay=1.2, switch=1.7, noise=0),
        wan=runs(stay=20, switch=30, noise=0),
    )
    assert known.passed_max(1, "sdxl", "sdxl", MOST) == timedelta(seconds=20)
    assert known.passed_max(1, "sdxl", "flux", MOST) == timedelta(seconds=15)
    assert known.passed_max(1, "wan", "sdxl", MOST) == MOST


def warm(*workers: str, model: str = "sdxl") -> WarmWorkers:
    found = WarmWorkers()
    for worker in workers:
        found.given(worker, 1, model, NOW)
    return found


def test_a_job_is_left_to_those_with_its_model_if_that_is_quicker_than_a_switch() -> None:
    known = costs(sdxl=runs(stay=2, switch=8, noise=0))
    assert known.held_max(1, "sdxl", 0) == timedelta(), "nobody has it"
    known.warm = warm("a")
    assert known.held_max(1, "sdxl", 0) == timedelta(seconds=18)
    for fleet_id, model in ((2, "sdxl"), (1, "flux"), (1, None), (None, "sdxl")):
        assert known.held_max(fleet_id, model, 0) == timedelta()


def test_a_job_is_not_held_where_runs_are_long_and_switches_short() -> None:
    known = costs(sdxl=runs(stay=60, switch=68, noise=0))
    known.warm = warm("a")
    assert known.held_max(1, "sdxl", 0) == timedelta()
    known.warm = warm(*"abcdefgh")  # one of eight is soon free
    assert known.held_max(1, "sdxl", 0) == timedelta(seconds=24)


def test_a_worker_is_warm_for_the_model_that_it_was_given_last_and_not_for_ever() -> None:
    found = warm("a", "b")
    found.given("a", 1, "flux", NOW + timedelta(seconds=1))
    assert [found.count(1, "sdxl"), found.count(1, "flux"), found.count(2, "flux")] == [1, 1, 0]
    found.given("c", 1, "wan", NOW + timedelta(minutes=6))
    assert found.count(1, "sdxl") == 0


def test_what_is_noted_is_sound_and_bounded() -> None:
    known = SwitchCosts()
    for seconds in (float("inf"), float("nan"), -1.0, 1e9):
        known.note(TimedRun(KIND, ModelChange.SAME, seconds))
    known.note(TimedRun(KIND, ModelChange.FIRST, 9.0))
    assert known.noted == []
    for _ in range(RUNS_NOTED_MAX + 5):
        known.note(TimedRun(KIND, ModelChange.SAME, 1.0))
    assert len(known.noted) == RUNS_NOTED_MAX
