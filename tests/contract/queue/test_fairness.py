"""Nobody's jobs wait for ever behind another's."""

import asyncio
import uuid
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert
from tests.support.jobs.dispatches import (
    ADA,
    BOB,
    lane,
    leased,
    new,
    opened,
    set_columns,
    submit,
    waiter,
)

from comfyfleet.clock import utc_now
from comfyfleet.server.db import Database
from comfyfleet.server.db.central_tables import dispatches
from comfyfleet.server.queue import service
from comfyfleet.server.queue.model import DispatchStatus
from comfyfleet.server.queue.queue import DispatchQueue

CAROL = uuid.UUID(int=0xCA401)
INSERTED_AT_ONCE = 5_000


async def leased_tenants(queue: DispatchQueue, number: int) -> list[uuid.UUID]:
    return [(await leased(queue)).tenant_id for _ in range(number)]


async def test_tenants_take_turns(central: Database) -> None:
    await submit(central, *(new(ADA) for _ in range(6)))
    await submit(central, *(new(BOB) for _ in range(3)))
    async with opened(central) as queue:
        got = await leased_tenants(queue, 9)
    # Bob's first stands in the second round: the first had begun when he came.
    assert got == [ADA, ADA, BOB, ADA, BOB, ADA, BOB, ADA, ADA]


async def test_a_tenants_own_jobs_stay_in_order(central: Database) -> None:
    first = await submit(central, new(ADA), new(ADA))
    second = await submit(central, new(ADA), new(ADA))
    assert [each.rank for each in first + second] == [1, 2, 3, 4]
    async with opened(central) as queue:
        got = [(await leased(queue)).dispatch_id for _ in range(4)]
    assert got == [each.id for each in first + second]


async def test_submits_at_the_same_moment_do_not_share_a_rank(central: Database) -> None:
    added = await asyncio.gather(*(submit(central, new(ADA)) for _ in range(12)))
    assert sorted(each.rank for [each] in added) == list(range(1, 13))


async def test_one_who_was_idle_comes_back_without_credit(central: Database) -> None:
    await submit(central, *(new(ADA) for _ in range(40)))
    async with opened(central) as queue:
        await leased_tenants(queue, 20)
        added = await submit(central, *(new(BOB) for _ in range(5)))
        assert [each.rank for each in added] == [22, 23, 24, 25, 26]
        got = await leased_tenants(queue, 10)
    assert got.count(BOB) == 4


async def test_one_who_cancelled_everything_is_not_punished(central: Database) -> None:
    await submit(central, new(ADA), new(ADA))
    many = await submit(central, *(new(BOB) for _ in range(50)))
    async with central.transaction() as tx:
        for job in many:
            await service.cancel(tx, job.id, now=utc_now())
    [job] = await submit(central, new(BOB))
    assert job.rank == 2


async def test_ranks_are_counted_per_priority(central: Database) -> None:
    await submit(central, *(new(ADA) for _ in range(5)))
    [urgent] = await submit(central, new(ADA, priority=1))
    assert urgent.rank == 1


async def test_a_delayed_job_that_is_due_does_not_pull_time_back(central: Database) -> None:
    first, *_ = await submit(central, *(new(ADA) for _ in range(9)))
    await set_columns(central, first.id, not_before=utc_now())
    async with opened(central) as queue:
        await leased_tenants(queue, 4)
    async with central.transaction() as tx:
        await service.wake_due(tx, now=utc_now() + timedelta(seconds=1), limit=5)
        assert (await service.get(tx, first.id)).rank == 6
    [other] = await submit(central, new(BOB))
    assert other.rank == 7


async def test_a_lane_with_many_jobs_does_not_starve_another(central: Database) -> None:
    await submit(central, *(new(ADA, to=lane(1)) for _ in range(200)))
    [single] = await submit(central, new(BOB, to=lane(2)))
    async with opened(central) as queue:
        both = waiter(lanes=[lane(1), lane(2)])
        got = [(await leased(queue, both)).dispatch_id for _ in range(3)]
        assert single.id in got
        # Nor does it profit from having had nothing for a while.
        for _ in range(10):
            await leased(queue, both)
        await submit(central, *(new(BOB, to=lane(2)) for _ in range(10)))
        lanes = [(await leased(queue, both)).lane for _ in range(10)]
    assert 4 <= lanes.count(lane(2)) <= 6


def _row(tenant: uuid.UUID, rank: int) -> dict[str, Any]:
    now = utc_now()
    return {
        "tenant_id": tenant,
        "tenant_job_id": uuid.uuid4(),
        **lane()._asdict(),
        "status": DispatchStatus.QUEUED,
        "priority": 0,
        "rank": rank,
        "created_at": now,
        "queued_at": now,
    }


@pytest.mark.parametrize("many", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_a_tenant_with_many_jobs_gets_its_share_and_no_more(
    central: Database, many: int
) -> None:
    rows = [_row(CAROL, rank) for rank in range(1, many + 1)]
    async with central.transaction() as tx:
        for start in range(0, len(rows), INSERTED_AT_ONCE):
            await tx.execute(insert(dispatches), rows[start : start + INSERTED_AT_ONCE])
    small = [uuid.UUID(int=1000 + number) for number in range(200)]
    await submit(central, *(new(tenant) for tenant in small for _ in range(3)))
    async with opened(central) as queue:
        got: list[uuid.UUID] = []
        for _ in range(10):
            asked = (queue.lease(waiter(f"gpu-{n}"), wait_seconds=0) for n in range(40))
            got += [lease.tenant_id for lease in await asyncio.gather(*asked) if lease]
    assert len(got) == 400
    assert got.count(CAROL) / 400 <= 0.02
    assert set(small) <= set(got)
