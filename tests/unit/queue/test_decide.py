"""Who gets which job, decided without any database."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comfyfleet.server.queue.decide import MatchRules, match_waiters
from comfyfleet.server.queue.model import DispatchCandidate, QueueLane, Waiter
from comfyfleet.server.queue.switch_costs import Samples, SwitchCosts, estimate

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
A, B, C = (QueueLane(number, "production", "self_hosted") for number in (1, 2, 3))
_ids = count(1)


def job(
    lane: QueueLane = A, *, priority: int = 0, rank: int = 1, age: float = 1, **more: Any
) -> DispatchCandidate:
    return DispatchCandidate(next(_ids), lane, priority, rank, NOW - timedelta(seconds=age), **more)


def worker(name: str = "gpu-1", *lanes: QueueLane, **more: Any) -> Waiter:
    return Waiter(name, frozenset(lanes or (A,)), **more)


def chosen(
    jobs: list[DispatchCandidate], waiters: list[Waiter], **more: Any
) -> dict[str, DispatchCandidate]:
    made = match_waiters(jobs, waiters, now=NOW, starts=more.pop("starts", {}), **more)
    return {waiters[choice.waiter].worker_id: choice.candidate for choice in made.choices}


def test_priority_then_rank_then_age() -> None:
    last, third, second, first = (
        job(rank=2),
        job(rank=1),
        job(rank=1),
        job(priority=1, rank=9),
    )
    order = [first, third, second, last]
    waiters = [worker(f"gpu-{n}", free_gpu_memory_bytes=10 - n) for n in range(4)]
    got = chosen([last, third, second, first], waiters)
    assert [got[f"gpu-{n}"] for n in range(4)] == order


def test_between_lanes_places_count_and_ranks_do_not() -> None:
    deep = [job(A, rank=rank) for rank in range(1, 6)]
    single = job(B, rank=70_000)
    waiters = [worker(f"gpu-{n}", A, B, free_gpu_memory_bytes=-n) for n in range(2)]
    assert set(chosen([*deep, single], waiters).values()) == {deep[0], single}


def test_a_lane_that_has_had_its_turn_comes_later() -> None:
    first, other = job(A), job(B)
    assert chosen([first, other], [worker("w", A, B)], starts={A: 5.0, B: 4.0}) == {"w": other}


def test_priority_outweighs_turns() -> None:
    urgent, other = job(A, priority=1), job(B)
    assert chosen([urgent, other], [worker("w", A, B)], starts={A: 99.0}) == {"w": urgent}


def test_beyond_what_was_read_of_a_lane_nothing_is_decided() -> None:
    read = [job(A, priority=5), job(A, priority=5)]
    low = job(B)
    waiters = [worker(f"gpu-{n}", A, B) for n in range(3)]
    assert low not in chosen([*read, low], waiters, cut=frozenset({A})).values()
    assert low in chosen([*read, low], waiters).values()


def test_behind_jobs_in_other_hands_may_stand_an_urgent_one_that_was_not_read() -> None:
    taken = [job(A, priority=5), job(A, priority=5)]
    low, mine = job(B), [worker("w", A, B)]
    others = {each.id for each in taken}
    assert chosen([*taken, low], mine, elsewhere=others, cut={A}) == {}
    assert chosen([*taken, low], mine, elsewhere=others) == {"w": low}


def test_one_job_goes_to_one_worker() -> None:
    assert len(chosen([job()], [worker("a"), worker("b")])) == 1


def test_whoever_can_do_less_gets_it_so_that_both_have_work() -> None:
    one, two = job(A), job(B)
    waiters = [worker("both", A, B, free_gpu_memory_bytes=99), worker("only", A)]
    assert chosen([one, two], waiters) == {"only": one, "both": two}


def test_the_least_loaded_comes_first_even_if_another_has_the_model() -> None:
    wanted = job(model_key="sdxl")
    waiters = [worker("warm", load=1, models_loaded=("sdxl",)), worker("idle")]
    assert chosen([wanted], waiters) == {"idle": wanted}


def test_one_who_would_only_hold_it_comes_last() -> None:
    wanted = job()
    waiters = [worker("busy", is_prefetch=True), worker("loaded", load=3)]
    assert chosen([wanted], waiters) == {"loaded": wanted}


def test_jobs_go_to_the_workers_that_have_their_model() -> None:
    sdxl, flux = job(model_key="sdxl"), job(model_key="flux")
    waiters = [
        worker("f", models_loaded=("flux",), free_gpu_memory_bytes=9),
        worker("s", models_loaded=("sdxl",)),
    ]
    assert chosen([sdxl, flux], waiters) == {"f": flux, "s": sdxl}


def test_among_jobs_of_the_model_the_exact_set_is_preferred() -> None:
    other, same = job(model_key="sdxl", model_set="x"), job(model_key="sdxl", model_set="y")
    warm = worker("w", models_loaded=("sdxl",), model_set="y")
    assert chosen([other, same], [warm]) == {"w": same}


def test_without_a_match_the_head_is_taken() -> None:
    head = job(model_key="flux")
    warm = worker("w", models_loaded=("sdxl",))
    assert chosen([head, job(model_key="wan")], [warm]) == {"w": head}


@pytest.mark.parametrize(
    ("ahead", "is_reached"),
    [
        ({}, True),
        ({"rank": 2}, True),
        ({"rank": 3}, False),
        ({"priority": -1}, False),
    ],
)
def test_affinity_looks_no_further_than_a_priority_and_a_round(
    ahead: dict[str, int], is_reached: bool
) -> None:
    head, wanted = job(model_key="flux"), job(model_key="sdxl", **ahead)  # type: ignore[arg-type]
    got = chosen([head, wanted], [worker("w", models_loaded=("sdxl",))])
    assert got == {"w": wanted if is_reached else head}


@pytest.mark.parametrize(("others", "is_reached"), [(31, True), (32, False)])
def test_affinity_looks_32_ahead(others: int, is_reached: bool) -> None:
    heads = [job(model_key="flux") for _ in range(others + 1)]
    wanted = job(model_key="sdxl")
    got = chosen([*heads, wanted], [worker("w", models_loaded=("sdxl",))])
    assert got == {"w": wanted if is_reached else heads[0]}


def test_nobody_is_passed_for_longer_than_half_of_the_longest_wait() -> None:
    rules = MatchRules(affinity_max_wait=timedelta(seconds=60))
    head, wanted = job(model_key="flux", age=900), job(model_key="sdxl")
    fresh = job(model_key="flux")._replace(id=0)
    warm = worker("w", models_loaded=("sdxl",))
    for seconds, is_passed in ((29, True), (30, False)):
        since = {head.id: NOW - timedelta(seconds=seconds)}
        got = chosen([head, wanted], [warm], rules=rules, passed_since=since)
        assert got == {"w": wanted if is_passed else head}
        got = chosen([fresh, head, wanted], [warm], rules=rules, passed_since=since)
        assert got == {"w": wanted if is_passed else fresh}


def test_it_is_told_who_was_passed() -> None:
    first, second, wanted, behind = (job(model_key=key) for key in ("flux", "wan", "sdxl", "flux"))
    warm, cold = worker("w", models_loaded=("sdxl",)), worker("c", free_gpu_memory_bytes=1)
    made = match_waiters([first, second, wanted, behind], [warm, cold], now=NOW, starts={})
    assert {choice.candidate for choice in made.choices} == {first, wanted}
    assert made.passed == {second.id}
    assert match_waiters([first, second], [warm, cold], now=NOW, starts={}).passed == frozenset()


def test_a_worker_that_failed_with_a_job_is_passed_over_for_a_while() -> None:
    soon = NOW + timedelta(seconds=1)
    bad, good = job(avoid_worker_id="w", avoid_until=soon), job()
    assert chosen([bad, good], [worker("w")]) == {"w": good}
    assert chosen([bad, good], [worker("w", is_alone=True)]) == {"w": bad}
    assert chosen([bad._replace(avoid_until=NOW), good], [worker("w")])["w"].id == bad.id
    assert chosen([bad, good], [worker("w"), worker("v", load=0)]) == {"w": good, "v": bad}


def test_a_bound_job_goes_where_it_is_bound() -> None:
    bound = job(backend_affinity="worker:a")
    mine = worker("a", load=9, affinities=frozenset({"worker:a"}))
    assert chosen([bound], [worker("b"), mine]) == {"a": bound}


candidates = st.builds(
    DispatchCandidate,
    id=st.integers(1, 10_000),
    lane=st.sampled_from([A, B, C]),
    priority=st.integers(-1, 1),
    rank=st.integers(1, 4),
    queued_at=st.integers(0, 120).map(lambda age: NOW - timedelta(seconds=age)),
    model_key=st.sampled_from([None, "sdxl", "flux"]),
    model_set=st.none(),
    backend_affinity=st.none(),
    avoid_worker_id=st.sampled_from([None, "0", "1"]),
    avoid_until=st.just(NOW + timedelta(seconds=9)),
)
lanes = st.frozensets(st.sampled_from([A, B, C]), min_size=1)
workers = st.lists(
    st.builds(
        Waiter,
        worker_id=st.just(""),
        lanes=lanes,
        load=st.integers(0, 2),
        models_loaded=st.sampled_from([(), ("sdxl",), ("flux", "sdxl")]),
        is_prefetch=st.booleans(),
        is_alone=st.booleans(),
    ),
    max_size=6,
)


@settings(deadline=None)  # a busy machine is not what this is about
@given(st.lists(candidates, max_size=25, unique_by=lambda each: each.id), workers)
def test_whatever_comes_the_choice_is_allowed_and_nobody_idles_beside_work(
    jobs: list[DispatchCandidate], waiters: list[Waiter]
) -> None:
    waiters = [_named(each, str(n)) for n, each in enumerate(waiters)]
    made = match_waiters(jobs, waiters, now=NOW, starts={}).choices
    assert len({each.waiter for each in made}) == len(made)
    assert len({each.candidate.id for each in made}) == len(made)
    for each in made:
        who = waiters[each.waiter]
        assert each.candidate.lane in who.lanes
        assert who.is_alone or each.candidate.avoid_worker_id != who.worker_id
    served = {each.waiter for each in made}
    taken = {each.candidate.id for each in made}
    for place, who in enumerate(waiters):
        if place not in served:
            left = [each for each in jobs if each.id not in taken and each.lane in who.lanes]
            assert all(each.avoid_worker_id == who.worker_id and not who.is_alone for each in left)
    _assert_no_idle_loses_to_a_prefetch(made, waiters, served)


def _named(waiter: Waiter, name: str) -> Waiter:
    return Waiter(
        name,
        waiter.lanes,
        load=waiter.load,
        models_loaded=waiter.models_loaded,
        is_prefetch=waiter.is_prefetch,
        is_alone=waiter.is_alone,
    )


def _assert_no_idle_loses_to_a_prefetch(
    made: list[Any], waiters: list[Waiter], served: set[int]
) -> None:
    idle = [each for n, each in enumerate(waiters) if n not in served and not each.is_prefetch]
    for choice in made:
        if waiters[choice.waiter].is_prefetch:
            for other in idle:
                job = choice.candidate
                is_avoided = job.avoid_worker_id == other.worker_id and not other.is_alone
                assert job.lane not in other.lanes or is_avoided


def learned(stay: float, switch: float, **models_of: tuple[str, ...]) -> SwitchCosts:
    """Costs of both models in fleet 1, and workers by the model that they were given last."""
    known = estimate([Samples((stay,) * 9, (switch,) * 9)])
    assert known is not None
    costs = SwitchCosts({(1, "sdxl"): known, (1, "flux"): known})
    for model, names in models_of.items():
        for name in names:
            costs.warm.given(name, 1, model, NOW)
    return costs


def test_where_a_switch_is_free_the_order_is_kept() -> None:
    head, wanted = job(model_key="flux"), job(model_key="sdxl")
    warm = worker("w", models_loaded=("sdxl",), fleet_id=1)
    assert chosen([head, wanted], [warm]) == {"w": wanted}, "nothing is learned yet"
    free, dear = MatchRules(costs=learned(1.41, 1.45)), MatchRules(costs=learned(1.2, 2.2))
    assert chosen([head, wanted], [warm], rules=free) == {"w": head}
    assert chosen([head, wanted], [warm], rules=dear) == {"w": wanted}
    assert (
        match_waiters([head, wanted], [warm], now=NOW, starts={}, rules=free).passed == frozenset()
    )


@settings(deadline=None)
@given(st.lists(candidates, max_size=25, unique_by=lambda each: each.id), workers)
def test_where_switches_are_free_all_is_decided_as_if_nobody_had_told_of_models(
    jobs: list[DispatchCandidate], waiters: list[Waiter]
) -> None:
    rules = MatchRules(costs=learned(1.41, 1.45, flux=("0",), sdxl=("1",)))
    told = [replace(each, worker_id=str(n), fleet_id=1) for n, each in enumerate(waiters)]
    hidden = [replace(each, models_loaded=()) for each in told]
    by_order = match_waiters(jobs, hidden, now=NOW, starts={}).choices
    assert match_waiters(jobs, told, now=NOW, starts={}, rules=rules).choices == by_order


def test_how_long_a_job_is_passed_depends_on_what_a_switch_costs() -> None:
    head, wanted = job(model_key="flux"), job(model_key="sdxl")
    warm = worker("w", models_loaded=("sdxl",), fleet_id=1)
    rules = MatchRules(costs=learned(1, 2))
    for seconds, is_passed in ((9, True), (10, False)):
        since = {head.id: NOW - timedelta(seconds=seconds)}
        got = chosen([head, wanted], [warm], rules=rules, passed_since=since)
        assert got == {"w": wanted if is_passed else head}


def test_the_model_of_the_last_run_comes_before_one_that_was_used_earlier() -> None:
    earlier, same = job(model_key="flux"), job(model_key="sdxl", model_set="y")
    warm = worker("w", models_loaded=("sdxl", "flux"), model_set="x")
    assert chosen([earlier, same], [warm]) == {"w": same}


def test_a_new_job_is_left_to_a_busy_worker_that_has_its_model_for_a_moment() -> None:
    new, old = job(model_key="flux", age=1), job(model_key="flux", age=19)
    idle = [worker("w", models_loaded=("sdxl",), fleet_id=1)]
    rules = MatchRules(costs=learned(2, 8, flux=("other",)))
    made = match_waiters([new], idle, now=NOW, starts={}, rules=rules)
    assert (made.choices, made.held_seconds) == ([], 17.0)
    assert chosen([old], idle, rules=rules) == {"w": old}
    assert chosen([new, old], idle, rules=rules) == {"w": old}


def test_no_more_new_jobs_are_held_than_a_busy_worker_can_do_in_three_times_the_cost() -> None:
    jobs = [job(model_key="flux", age=1) for _ in range(10)]
    idle = [worker("w", models_loaded=("sdxl",), fleet_id=1)]
    rules = MatchRules(costs=learned(2, 8, flux=("other",)))
    assert chosen(jobs[:9], idle, rules=rules) == {}
    assert chosen(jobs, idle, rules=rules) == {"w": jobs[9]}


def test_a_model_that_another_has_followed_does_not_count_as_loaded_once_that_is_learned() -> None:
    new = job(model_key="flux", age=1)
    went_on = [worker("w", models_loaded=("sdxl", "flux"), fleet_id=1)]
    rules = MatchRules(costs=learned(2, 8, flux=("other",)))
    assert chosen([new], went_on) == {"w": new}
    assert chosen([new], went_on, rules=rules) == {}


def test_nobody_is_waited_for_where_nobody_has_the_model_or_the_job_is_bound() -> None:
    new = job(model_key="flux", age=1)
    idle = [worker("w", models_loaded=("sdxl",), fleet_id=1, affinities=frozenset({"worker:w"}))]
    assert chosen([new], idle, rules=MatchRules(costs=learned(2, 8))) == {"w": new}
    bound = new._replace(backend_affinity="worker:w")
    rules = MatchRules(costs=learned(2, 8, flux=("other",)))
    assert chosen([bound], idle, rules=rules) == {"w": bound}


def test_a_new_job_is_left_to_the_idle_worker_of_its_clients_previous_prompt() -> None:
    wanted = job(age=0.1, preferred_worker_id="mine")
    other = worker("other", free_gpu_memory_bytes=9)
    assert chosen([wanted], [other, worker("mine")]) == {"mine": wanted}
    warm = worker("other", models_loaded=("sdxl",))
    assert chosen([replace_model(wanted)], [warm]) == {}
    made = match_waiters([wanted], [other], now=NOW, starts={})
    assert made.choices == []
    assert made.held_seconds == pytest.approx(0.2)


def replace_model(candidate: DispatchCandidate) -> DispatchCandidate:
    return candidate._replace(model_key="sdxl")


def test_a_job_is_not_left_to_a_preferred_worker_for_long_or_while_it_is_busy() -> None:
    old = job(age=0.3, preferred_worker_id="mine")
    assert chosen([old], [worker("other")]) == {"other": old}
    new = job(age=0.1, preferred_worker_id="mine")
    assert chosen([new], [worker("mine", is_prefetch=True)]) == {}
