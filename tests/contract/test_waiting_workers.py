"""Workers that wait are looked at together, and only those whom it concerns are woken."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.bulk import counting
from tests.support.jobs.dispatches import parked, parked_requests
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on
from tests.support.server.tenants import AdjustableClock

from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.jobs import poll
from comfyfleet.server.jobs.poll import REFRESH_SECONDS, WaitingWorkerRefresher, refresh_workers
from comfyfleet.server.queue.waiters import PollRequest

PATIENCE_SECONDS = 10
WAIT_SECONDS = 30


@dataclass
class Room:
    """Workers wait here, and hear of no order by themselves."""

    fleet_setup: FleetSetup
    clock: AdjustableClock
    stack: AsyncExitStack
    polls: dict[str, "asyncio.Task[httpx.Response]"] = field(default_factory=dict)

    async def enter(self, worker_id: str) -> None:
        worker = await self.stack.enter_async_context(self.fleet_setup.worker(worker_id))
        said = worker.call("poll", worker_id=worker_id, wait_seconds=WAIT_SECONDS, held=[])
        self.polls[worker_id] = asyncio.create_task(said)
        await self.wait(len(self.polls))

    async def wait(self, number: int) -> None:
        await parked(self.fleet_setup.plane.queue, number)

    async def look(self) -> None:
        queue = self.fleet_setup.plane.queue
        await refresh_workers(
            self.fleet_setup.plane.context, [each.waiter for each in parked_requests(queue)]
        )

    async def answer(self, worker_id: str) -> httpx.Response:
        return await asyncio.wait_for(self.polls.pop(worker_id), PATIENCE_SECONDS)

    async def seen_for(self, worker_id: str) -> timedelta:
        async with self.fleet_setup.plane.central.read() as tx:
            worker = await fleets.get_worker(tx, worker_id)
        return self.clock() - worker.last_seen_at


@pytest.fixture
async def room(databases: Databases, tmp_path: Path) -> AsyncIterator[Room]:
    clock = AdjustableClock()
    async with (
        plane_on(databases, tmp_path, clock=clock) as plane,
        fleet_setup_on(plane) as fleet_setup,
        AsyncExitStack() as stack,
    ):
        plane.queue.order = lambda *_: None  # type: ignore[method-assign]
        room = Room(fleet_setup, clock, stack)
        yield room
        plane.queue.dismiss()
        for each in room.polls.values():
            each.cancel()


ORDERS: dict[str, Callable[[FleetSetup], Awaitable[Any]]] = {
    "revoke": lambda fleet_setup: fleet_setup.act("workers/w1/revoke"),
    "drain": lambda fleet_setup: fleet_setup.act("workers/w1/drain"),
    "replace key": lambda fleet_setup: fleet_setup.act("workers/w1/rotate-token", now=True),
    "next key": lambda fleet_setup: fleet_setup.act("workers/w1/rotate-token"),
    "maintenance": lambda fleet_setup: fleet_setup.act("maintenance", on=True),
    "pause": lambda fleet_setup: fleet_setup.act("workflows/invert/pause"),
}


@pytest.mark.parametrize("order", ORDERS)
async def test_one_look_wakes_those_whose_rights_have_changed(room: Room, order: str) -> None:
    await room.enter("w1")
    await room.enter("w2")
    await room.look()
    await room.wait(2)
    first = {each.waiter.worker_id: each for each in parked_requests(room.fleet_setup.plane.queue)}
    await ORDERS[order](room.fleet_setup)
    await room.look()
    assert first["w1"].future.done()
    concerns_all = order in ("maintenance", "pause")
    assert first["w2"].future.done() == concerns_all
    if order in ("revoke", "replace key"):
        assert (await room.answer("w1")).status_code == 401


async def test_one_that_is_held_back_waits_for_the_end_of_it(room: Room) -> None:
    await room.fleet_setup.act("maintenance", on=True)
    await room.enter("w1")
    (held_back,) = parked_requests(room.fleet_setup.plane.queue)
    await room.look()
    assert not held_back.future.done()
    await room.fleet_setup.act("maintenance", on=False)
    job_id = await room.fleet_setup.submit()
    await room.look()
    assert (await room.answer("w1")).json()["job"]["job_id"] == str(job_id)


async def test_one_that_is_held_back_is_not_woken_by_a_job_that_is_bound_to_it(room: Room) -> None:
    await room.fleet_setup.assign()
    await room.enter("w1")
    (held_back,) = parked_requests(room.fleet_setup.plane.queue)
    assert not held_back.waiter.affinities
    assert not held_back.waiter.lanes


async def test_the_last_one_that_lives_is_told_that_it_is_alone(room: Room) -> None:
    await room.enter("w1")
    await room.enter("w2")
    alone = {each.waiter.worker_id: each for each in parked_requests(room.fleet_setup.plane.queue)}
    room.polls.pop("w2").cancel()
    await room.wait(1)
    room.clock.by = timedelta(seconds=room.fleet_setup.plane.settings.offline_after_seconds + 5)
    await room.look()
    assert not alone["w2"].waiter.is_alone
    await room.wait(1)
    (now,) = parked_requests(room.fleet_setup.plane.queue)
    assert now.waiter.is_alone


async def test_whoever_waits_is_seen_with_as_many_statements_as_one(room: Room) -> None:
    async def statements() -> int:
        room.clock.by += timedelta(seconds=60)
        with counting(room.fleet_setup.plane.central) as sent:
            await room.look()
        return len(sent)

    await room.enter("w1")
    await room.enter("w2")
    of_two = await statements()
    for number in range(3, 7):
        await room.enter(f"w{number}")
    assert await statements() == of_two
    for worker_id in room.polls:
        assert await room.seen_for(worker_id) < timedelta(seconds=30)
    assert len(parked_requests(room.fleet_setup.plane.queue)) == len(room.polls), "nobody was woken"


async def test_whoever_has_waited_long_is_looked_at_once_in_that_time(room: Room) -> None:
    waiting = WaitingWorkerRefresher(room.fleet_setup.plane.context)
    await room.enter("w1")
    await room.enter("w2")
    with counting(room.fleet_setup.plane.central) as sent:
        await waiting.look()
    assert not sent, "both have just been let in"
    for each in parked_requests(room.fleet_setup.plane.queue):
        each.looked_at -= REFRESH_SECONDS
    await ORDERS["revoke"](room.fleet_setup)
    await waiting.look()
    assert (await room.answer("w1")).status_code == 401
    with counting(room.fleet_setup.plane.central) as sent:
        await waiting.look()
    assert not sent


async def test_a_poll_that_was_answered_is_not_kept_until_the_next_look(room: Room) -> None:
    await room.enter("w1")
    looking = asyncio.create_task(WaitingWorkerRefresher(room.fleet_setup.plane.context).run())
    await asyncio.sleep(0)
    room.fleet_setup.plane.queue.dismiss(["w1"])
    await room.wait(1)
    gc.collect()
    kept = [
        each for each in gc.get_objects() if isinstance(each, PollRequest) and each.future.done()
    ]
    looking.cancel()
    assert kept == []


@pytest.mark.parametrize(("chance", "seconds"), [(0.0, 30), (1.0, 27)])
async def test_waits_of_the_same_length_end_apart(
    room: Room, monkeypatch: pytest.MonkeyPatch, chance: float, seconds: float
) -> None:
    monkeypatch.setattr(poll, "_dice", Mock(random=lambda: chance))
    begun = asyncio.get_running_loop().time()
    await room.enter("w1")
    (asked,) = parked_requests(room.fleet_setup.plane.queue)
    entered = asyncio.get_running_loop().time()
    assert begun + seconds <= asked.deadline <= entered + seconds
