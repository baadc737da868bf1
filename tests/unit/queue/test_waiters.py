"""Those who wait, without a queue."""

import asyncio
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.server.queue.model import QueueLane, Waiter
from comfyfleet.server.queue.waiters import PollRequest, WaiterPool

A, B, C = (QueueLane(number, "production", "self_hosted") for number in (1, 2, 3))


def asked(name: str, *lanes: QueueLane, **more: Any) -> PollRequest:
    affinities = frozenset({f"worker:{name}"})
    return PollRequest(Waiter(name, frozenset(lanes or (A,)), affinities, **more), _future(), 0.0)


def _future() -> "asyncio.Future[Any]":
    return asyncio.Future(loop=_LOOP)


_LOOP = asyncio.new_event_loop()
_LOOP.close()


def test_the_shortlist_of_one_job_is_short_however_many_wait() -> None:
    waiting = WaiterPool()
    for number in range(1_000):
        models = ("sdxl",) if number % 2 else ("flux",)
        waiting.add(asked(f"gpu-{number}", A, B, load=number % 5, models_loaded=models))
    names = [each.waiter.worker_id for each in waiting.shortlist(Counter([A]))]
    assert names == ["gpu-0", "gpu-5"]


def test_two_jobs_of_different_lanes_call_two_who_wait() -> None:
    waiting = WaiterPool()
    for number in range(3):
        waiting.add(asked(f"gpu-{number}", A, B))
    names = [each.waiter.worker_id for each in waiting.shortlist(Counter([A, B]))]
    assert names == ["gpu-0", "gpu-1"]


def test_nobody_is_called_for_a_lane_that_none_may_run() -> None:
    waiting = WaiterPool()
    waiting.add(asked("gpu-1", A))
    assert waiting.shortlist(Counter([C])) == []
    assert not waiting.has_waiter_for([C])
    assert waiting.has_waiter_for([C, A])


def test_those_with_an_affinity_are_found_by_it() -> None:
    waiting = WaiterPool()
    one, two = asked("gpu-1"), asked("gpu-2")
    waiting.add(one)
    waiting.add(two)
    assert waiting.shortlist(Counter(), ["worker:gpu-2", "worker:gone"]) == [two]
    assert waiting.waited_affinities(["worker:gpu-1", "worker:gone"]) == ["worker:gpu-1"]


@given(st.lists(st.tuples(st.integers(0, 8), st.sets(st.sampled_from([A, B, C]))), max_size=40))
def test_whoever_has_left_leaves_nothing_behind(moves: list[tuple[int, set[QueueLane]]]) -> None:
    waiting = WaiterPool()
    there: dict[int, PollRequest] = {}
    for number, lanes in moves:
        if number in there:
            waiting.discard(there.pop(number))
        else:
            there[number] = asked(str(number), *lanes, models_loaded=("sdxl",) * (number % 2))
            waiting.add(there[number])
        assert set(waiting) == set(there.values())
        lanes_waited_for = {lane for each in there.values() for lane in each.waiter.lanes}
        assert set(waiting.lanes()) == lanes_waited_for
    for each in there.values():
        waiting.discard(each)
        waiting.discard(each)
    assert (len(waiting), list(waiting.lanes())) == (0, [])
    assert not waiting._groups
    assert not waiting._by_affinity
