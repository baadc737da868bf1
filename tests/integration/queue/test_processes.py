"""Several control planes on one PostgreSQL."""

import asyncio
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import asyncpg
import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.dispatches import (
    add_workflows,
    lane,
    new,
    opened,
    outcome,
    parked,
    submit,
    waiter,
)

from comfyfleet.server.db import Database
from comfyfleet.server.db.database import dsn
from comfyfleet.server.queue.model import DispatchLease, DispatchStatus
from comfyfleet.server.queue.queue import DispatchQueue

PROCESSES = 8
JOBS = 2_000
LANES = [lane(1), lane(2), lane(3)]
LISTENS = (
    "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
)


@pytest.fixture
async def db(postgres_databases: Databases) -> AsyncIterator[Database]:
    database = await postgres_databases.open("central")
    await add_workflows(database, 1, 2, 3)
    yield database
    await database.close()


@asynccontextmanager
async def running(db: Database) -> AsyncIterator[DispatchQueue]:
    """A control plane's queue with its background, listening."""
    async with opened(db) as queue:
        background = asyncio.create_task(queue.run())
        yield queue
        background.cancel()
        with suppress(asyncio.CancelledError):
            await background


async def listening(db: Database, number: int, *, but: set[int] | None = None) -> set[int]:
    connection = await asyncpg.connect(dsn(db.url))
    try:
        for _ in range(200):
            pids = {row[0] for row in await connection.fetch(LISTENS)} - (but or set())
            if len(pids) == number:
                return pids
            await asyncio.sleep(0.05)
    finally:
        await connection.close()
    raise AssertionError(f"{len(pids)} listen, not {number}")


async def test_8_processes_lease_2000_jobs_once_each(db: Database) -> None:
    jobs = [new(uuid.UUID(int=n % 7), to=LANES[n % 3], priority=n % 2) for n in range(JOBS)]
    await submit(db, *jobs)
    script = Path(__file__).with_name("work_the_queue.py")
    started = [
        await asyncio.create_subprocess_exec(
            sys.executable, str(script), db.url, str(number), stdout=asyncio.subprocess.PIPE
        )
        for number in range(PROCESSES)
    ]
    told = await asyncio.gather(*(each.communicate() for each in started))
    assert [each.returncode for each in started] == [0] * PROCESSES
    completed = Counter(line for out, _ in told for line in out.split())
    assert len(completed) == JOBS
    assert set(completed.values()) == {1}
    by_status, made, noted = await outcome(db)
    assert by_status == {DispatchStatus.COMPLETED: JOBS}
    # One lease each, but for those that were given back on purpose.
    assert made == noted > JOBS


async def test_a_hint_wakes_a_waiter_of_another_process(db: Database) -> None:
    async with running(db) as here, running(db) as there:
        await listening(db, 2)
        wait = asyncio.create_task(there.lease(waiter(), wait_seconds=20))
        await parked(there, 1)
        [job] = await submit(db, new())
        here.arrived([job])
        async with asyncio.timeout(2):
            lease = await wait
    assert lease
    assert lease.dispatch_id == job.id


async def test_a_job_that_comes_while_an_older_one_is_given_is_told_to_others(db: Database) -> None:
    async with running(db) as here, running(db) as there:
        await listening(db, 2)
        wait = asyncio.create_task(there.lease(waiter("gpu-2"), wait_seconds=20))
        await parked(there, 1)
        older, newer = await submit(db, new(), new())
        asked = here.ask(waiter("gpu-1"), wait_seconds=0)
        await asyncio.sleep(0)  # it is being served now
        here.arrived([newer])
        given = await asked.future
        async with asyncio.timeout(3):
            lease = await wait
    assert given
    assert lease
    assert (given.dispatch_id, lease.dispatch_id) == (older.id, newer.id)


async def test_others_are_not_told_of_a_job_that_was_taken_here(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    async def tell(_hints: object, payload: str) -> None:
        told.append(payload)

    monkeypatch.setattr("comfyfleet.server.db.coordination.NotifyChannel.send", tell)
    async with opened(db) as queue:
        wait = asyncio.create_task(queue.lease(waiter(), wait_seconds=20))
        await parked(queue, 1)
        jobs = await submit(db, new())
        queue.arrived(jobs)
        await wait
        jobs = await submit(db, *(new() for _ in range(30)))
        queue.arrived(jobs)
    assert len(told) == 1
    assert '"production", "self_hosted", 30' in told[0]


async def test_a_bound_job_wakes_its_worker_at_another_process(db: Database) -> None:
    async with running(db) as here, running(db) as there:
        await listening(db, 2)
        waits = {
            name: asyncio.create_task(there.lease(waiter(name), wait_seconds=20))
            for name in ("gpu-1", "gpu-2", "gpu-3")
        }
        await parked(there, 3)
        [job] = await here.enqueue([new(backend_affinity="worker:gpu-2")])
        async with asyncio.timeout(3):
            lease = await waits["gpu-2"]
        assert lease
        assert lease.dispatch_id == job.id
        assert not waits["gpu-1"].done()
        there.dismiss()
        await asyncio.gather(*waits.values())


async def test_listening_is_taken_up_again_when_the_connection_was_cut(db: Database) -> None:
    async with running(db) as here, running(db) as there:
        pids = await listening(db, 2)
        wait = asyncio.create_task(there.lease(waiter(), wait_seconds=20))
        await parked(there, 1)
        connection = await asyncpg.connect(dsn(db.url))
        for pid in pids:
            await connection.execute("SELECT pg_terminate_backend($1)", pid)
        await connection.close()
        await listening(db, 2, but=pids)
        [job] = await submit(db, new())
        here.arrived([job])
        async with asyncio.timeout(3):
            lease = await wait
    assert lease
    assert lease.dispatch_id == job.id


async def test_the_queue_goes_on_after_every_connection_was_cut(db: Database) -> None:
    async with opened(db) as queue:
        await submit(db, new(), new())
        first = await queue.lease(waiter(), wait_seconds=0)
        connection = await asyncpg.connect(dsn(db.url))
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await connection.close()
        await asyncio.sleep(0.2)
        second = await queue.lease(waiter(), wait_seconds=0)
        assert isinstance(first, DispatchLease)
        assert isinstance(second, DispatchLease)
        await queue.complete(first.dispatch_id, first.token)
