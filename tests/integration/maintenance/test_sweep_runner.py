"""Sweeps: each on its own, one control plane at a time, stopped in order."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.support.databases.factory import Databases

from comfyfleet.clock import utc_now
from comfyfleet.errors import Unavailable
from comfyfleet.server.app import ProcessMetrics
from comfyfleet.server.db import Database, Pools, for_each_pool, open_database
from comfyfleet.server.db.coordination import AdvisoryLocks
from comfyfleet.server.maintenance.runner import Sweep, SweepRunner, run_sweeps

SOON = 5.0


class Noted:
    """Counts its passes, and tells when there were so many."""

    def __init__(self, body: Callable[[], Awaitable[object]] | None = None) -> None:
        self.passes = 0
        self._body = body
        self._changed = asyncio.Condition()

    async def __call__(self) -> object:
        async with self._changed:
            self.passes += 1
            self._changed.notify_all()
        return await self._body() if self._body else None

    async def reaches(self, passes: int) -> None:
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: self.passes >= passes), SOON)


def sweeps_of(
    turns: AdvisoryLocks, *sweeps: Sweep, meters: ProcessMetrics | None = None
) -> SweepRunner:
    return SweepRunner(sweeps, turns, meters or ProcessMetrics(), utc_now)


@pytest.fixture
async def turns(central: Database) -> AsyncIterator[AdvisoryLocks]:
    turns = AdvisoryLocks(central)
    yield turns
    await turns.close()


async def broken() -> object:
    raise ValueError("on purpose")


async def test_a_sweep_that_fails_runs_again_and_stops_no_other(
    turns: AdvisoryLocks, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good, meters = Noted(broken), Noted(), ProcessMetrics()
    sweeps = sweeps_of(turns, Sweep("bad", bad, 0.01), Sweep("good", good, 0.01), meters=meters)
    async with run_sweeps(sweeps):
        await asyncio.gather(bad.reaches(3), good.reaches(3))
    assert "on purpose" in caplog.text
    value = meters.registry.get_sample_value
    failed = value("comfyfleet_sweep_passes_total", {"sweep": "bad", "outcome": "failed"})
    assert failed == bad.passes
    assert value("comfyfleet_sweep_last_pass_timestamp_seconds", {"sweep": "bad"}) is None
    assert value("comfyfleet_sweep_last_pass_timestamp_seconds", {"sweep": "good"})


async def test_a_sweep_that_left_out_a_pool_is_not_counted_as_done(
    turns: AdvisoryLocks, central: Database
) -> None:
    acted = 0

    async def fail_once(pool: Database) -> None:
        nonlocal acted
        acted += 1
        if acted == 1:
            raise Unavailable("on purpose")

    async def sweep_pools() -> None:
        pools = Pools({"a": central, "b": central})
        await for_each_pool(pools, fail_once, "nothing is done", at_once=True)

    meters = ProcessMetrics()
    sweeps = sweeps_of(turns, meters=meters)
    await sweeps.pass_once(Sweep("pools", sweep_pools, 1))
    value = meters.registry.get_sample_value
    assert value("comfyfleet_sweep_passes_total", {"sweep": "pools", "outcome": "partial"}) == 1
    assert value("comfyfleet_sweep_last_pass_timestamp_seconds", {"sweep": "pools"}) is None
    assert acted == 2


async def test_a_sweep_is_woken_before_its_time(turns: AdvisoryLocks) -> None:
    lazy = Noted()
    async with run_sweeps(sweeps_of(turns, Sweep("lazy", lazy, 3600))) as sweeps:
        await lazy.reaches(1)
        sweeps.wake("lazy")
        await lazy.reaches(2)
        sweeps.wake("nobody")


async def test_a_sweep_with_more_to_do_goes_on_at_once(turns: AdvisoryLocks) -> None:
    async def more() -> bool:
        return busy.passes < 5

    busy = Noted(more)
    async with run_sweeps(sweeps_of(turns, Sweep("busy", busy, 3600))):
        await busy.reaches(5)
        await asyncio.sleep(0.05)
    assert busy.passes == 5


async def test_a_pass_at_work_ends_in_order_when_all_stop(turns: AdvisoryLocks) -> None:
    ended = asyncio.Event()

    async def slow() -> None:
        await asyncio.sleep(0.1)
        ended.set()

    at_work = Noted(slow)
    async with run_sweeps(sweeps_of(turns, Sweep("slow", at_work, 3600))):
        await at_work.reaches(1)
    assert ended.is_set()


async def test_a_sweep_without_anything_due_takes_no_turn(central: Database) -> None:
    is_due, calls = False, list[str]()

    async def look() -> bool:
        return is_due

    class Counted(AdvisoryLocks):
        async def take(self, name: str) -> bool:
            calls.append(name)
            return await super().take(name)

    noted, meters = Noted(), ProcessMetrics()
    sweep, counted = Sweep("due", noted, 1, is_due=look), Counted(central)
    sweeps = sweeps_of(counted, sweep, meters=meters)
    assert not await sweeps.pass_once(sweep)
    assert (noted.passes, calls) == (0, [])
    value = meters.registry.get_sample_value
    assert value("comfyfleet_sweep_last_pass_timestamp_seconds", {"sweep": "due"})
    is_due = True
    await sweeps.pass_once(sweep)
    assert (noted.passes, calls) == (1, ["due"])
    await counted.close()


async def test_of_two_control_planes_on_postgres_one_passes_at_a_time(
    postgres_databases: Databases,
) -> None:
    url = await postgres_databases.url("central")
    here, there = open_database(url), open_database(url)
    first, second = AdvisoryLocks(here), AdvisoryLocks(there)
    try:
        assert await first.take("expiry")
        assert not await second.take("expiry")
        assert await second.take("outbox")
        meters = ProcessMetrics()
        sweep = Sweep("expiry", Noted(), 1)
        await sweeps_of(second, sweep, meters=meters).pass_once(sweep)
        left = {"sweep": "expiry", "outcome": "elsewhere"}
        assert meters.registry.get_sample_value("comfyfleet_sweep_passes_total", left) == 1
        await first.give("expiry")
        assert await second.take("expiry")
        # A control plane that is gone holds nobody back.
        await second.close()
        # PostgreSQL notices the closed connection after a moment.
        for _ in range(600):
            if await first.take("expiry") and await first.take("outbox"):
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("the locks of a control plane that is gone are still held")
    finally:
        for turns, database in ((first, here), (second, there)):
            await turns.close()
            await database.close()


async def test_a_database_that_is_away_is_told_in_a_line_and_turns_come_back(
    postgres_databases: Databases, caplog: pytest.LogCaptureFixture
) -> None:
    database = open_database(await postgres_databases.url("central"))
    turns, meters = AdvisoryLocks(database), ProcessMetrics()
    sweep = Sweep("expiry", Noted(), 1)
    sweeps = sweeps_of(turns, sweep, meters=meters)
    try:
        await sweeps.pass_once(sweep)
        async with database.transaction() as tx:
            await tx.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        for _ in range(2):
            await sweeps.pass_once(sweep)
    finally:
        await turns.close()
        await database.close()
    told = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert ["is unavailable" in each for each in told] == [True, False]
    assert told[1].endswith("is available again")
    assert "Traceback" not in caplog.text
    passes = meters.registry.get_sample_value
    assert passes("comfyfleet_sweep_passes_total", {"sweep": "expiry", "outcome": "done"}) == 2
    assert passes("comfyfleet_sweep_passes_total", {"sweep": "expiry", "outcome": "failed"}) == 1


async def test_what_is_away_is_told_once_and_again_when_it_is_back(
    turns: AdvisoryLocks, caplog: pytest.LogCaptureFixture
) -> None:
    is_away = True

    async def look() -> None:
        if is_away:
            raise Unavailable("the database can't be reached")

    sweep = Sweep("expiry", look, 1)
    sweeps = sweeps_of(turns, sweep)
    for _ in range(3):
        await sweeps.pass_once(sweep)
    is_away = False
    for _ in range(2):
        await sweeps.pass_once(sweep)
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [
        "the expiry sweep was interrupted: the database can't be reached",
        "the expiry sweep works again",
    ]
