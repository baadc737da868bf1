"""How often backends are asked what they have, and who waits for which answer."""

import asyncio
from time import monotonic
from typing import Any

import pytest

from comfyfleet.server.fleets import facts_requests
from comfyfleet.server.fleets.facts_requests import FactsRequests
from comfyfleet.server.gateway.freshness import QUERY_SECONDS_APART, FleetQueries


class Backends:
    """Answers queries when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked: list[bool] = []
        self.answers = asyncio.Event()
        self.queries = FleetQueries(self.ask, lambda: self.now, self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    async def ask(self, is_urgent: bool) -> None:
        self.asked.append(is_urgent)
        await self.answers.wait()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_all_who_come_within_five_seconds_share_a_query() -> None:
    backends = Backends()
    waiting = [
        asyncio.create_task(backends.queries.wait(began_after=backends.now - 5)) for _ in range(3)
    ]
    await settled()
    assert backends.asked == [False]
    backends.answers.set()
    await asyncio.gather(*waiting)
    backends.now += 5
    await backends.queries.wait(began_after=backends.now - 5)
    assert backends.asked == [False]
    backends.now += 0.1
    await backends.queries.wait(began_after=backends.now - 5)
    assert backends.asked == [False, False]


async def test_who_needs_a_later_query_waits_for_the_next_one() -> None:
    backends = Backends()
    first = asyncio.create_task(backends.queries.wait(began_after=backends.now))
    await settled()
    backends.now += 1
    later = [asyncio.create_task(backends.queries.wait(began_after=backends.now)) for _ in range(3)]
    await settled()
    assert backends.asked == [False]
    backends.answers.set()
    await asyncio.gather(first, *later)
    assert backends.asked == [False, False]


async def test_an_urgent_query_does_not_wait_for_another() -> None:
    backends = Backends()
    first = asyncio.create_task(backends.queries.wait(began_after=backends.now))
    await settled()
    backends.now += 1
    urgent = [
        asyncio.create_task(backends.queries.wait(began_after=backends.now, is_urgent=True))
        for _ in range(2)
    ]
    await settled()
    assert backends.asked == [False, True]
    backends.answers.set()
    await asyncio.gather(first, *urgent)


@pytest.mark.parametrize("is_urgent", [True, False])
async def test_queries_of_a_fleet_begin_some_time_apart_however_many_ask(is_urgent: bool) -> None:
    """As many clients send prompts with unknown models, or upload and list in turn; no worker answers."""
    backends = Backends()
    backends.answers.set()
    began = backends.now
    for number in range(100):
        asked_at = began + number / 100
        backends.now = max(backends.now, asked_at)
        await backends.queries.wait(began_after=backends.now, is_urgent=is_urgent)
    assert len(backends.asked) <= (backends.now - began) / QUERY_SECONDS_APART + 1
    together = [
        backends.queries.wait(began_after=backends.now, is_urgent=is_urgent) for _ in range(100)
    ]
    before = len(backends.asked)
    await asyncio.gather(*together)
    assert len(backends.asked) <= before + 2


class Orders:
    def __init__(self) -> None:
        self.announced: list[dict[str, Any]] = []
        self.ended: list[str] = []
        self.facts = FactsRequests(self.announced.append, self.ended.extend)

    async def report(self, worker_id: str) -> None:
        await settled()
        wanted = self.facts.take(worker_id)
        assert wanted is not None
        self.facts.reported(worker_id, wanted.tokens)


async def test_a_request_is_over_when_every_worker_has_reported() -> None:
    orders = Orders()
    asking = asyncio.create_task(orders.facts.ask(["w1", "w2"], seconds=60))
    await orders.report("w1")
    await settled()
    assert not asking.done()
    assert orders.facts.take("w1") is None
    await orders.report("w2")
    await asking
    assert orders.ended == ["w1", "w2"]


async def test_a_worker_that_did_not_answer_is_asked_again_but_not_waited_for() -> None:
    orders = Orders()
    await orders.facts.ask(["silent"], seconds=0)
    assert orders.facts.is_wanted("silent")
    await orders.facts.ask(["silent"], seconds=3600)
    await orders.report("silent")
    waiting = asyncio.create_task(orders.facts.ask(["silent"], seconds=3600))
    await settled()
    assert not waiting.done()
    await orders.report("silent")
    await waiting


async def test_requests_for_one_worker_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = Orders()
    both = [
        asyncio.create_task(orders.facts.ask(["w1"], is_urgent=urgent, seconds=60))
        for urgent in (True, False)
    ]
    await settled()
    wanted = orders.facts.take("w1")
    assert wanted is not None
    assert (len(wanted.tokens), wanted.is_urgent) == (2, True)
    orders.facts.reported("w1", wanted.tokens)
    await asyncio.gather(*both)
    monkeypatch.setattr(facts_requests, "DELIVERY_SECONDS", -1.0)
    await orders.facts.ask(["w2"], seconds=0)
    assert orders.facts.take("w2") is None


def test_a_call_that_may_have_changed_a_backend_is_known_everywhere() -> None:
    here, there = Orders(), Orders()
    assert here.facts.changed_at(1) is None
    here.facts.note_change([1, 2])
    (message,) = here.announced
    there.facts.heard(message)
    assert here.facts.changed_at(1) is not None
    assert there.facts.changed_at(2) is not None
    assert there.facts.changed_at(3) is None


async def test_another_control_plane_tells_the_workers_there() -> None:
    here, there = Orders(), Orders()
    asking = asyncio.create_task(here.facts.ask(["w1"], seconds=60))
    await settled()
    for message in here.announced:
        there.facts.heard(message)
    assert there.ended == ["w1"]
    await there.report("w1")
    for message in there.announced:
        here.facts.heard(message)
    await asking


def test_orders_for_workers_that_ask_elsewhere_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders = Orders()
    monkeypatch.setattr(facts_requests, "DELIVERY_SECONDS", -1.0)
    for number in range(1_000):
        orders.facts.heard(
            {"facts_wanted": {"workers": [f"w{number}"], "token": "t", "is_urgent": False}}
        )
    assert len(orders.facts._pending) == 1


async def test_a_report_to_another_control_plane_counts_as_fresh_data_here() -> None:
    here, there = Orders(), Orders()
    asked_at = monotonic()
    asking = asyncio.create_task(there.facts.ask(["w1", "w2"], seconds=60))
    await there.report("w1")
    for message in there.announced:
        here.facts.heard(message)
    assert here.facts.have_reported(["w1"], since=asked_at)
    assert not here.facts.have_reported(["w1", "w2"], since=asked_at)
    assert not here.facts.have_reported(["w1"], since=monotonic() + 1)
    await there.report("w2")
    await asking


def test_reports_of_many_workers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = Orders()
    monkeypatch.setattr(facts_requests, "REPORTS_KEPT_MAX", 10)
    for number in range(100):
        orders.facts.reported(f"w{number}", [])
    assert orders.facts.have_reported(["w90", "w99"], since=0.0)
    assert not orders.facts.have_reported(["w89"], since=0.0)
