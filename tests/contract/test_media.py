"""A user's media, on every database."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from comfyfleet.errors import NotFound, Refused
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import MediaItem, MediaStatus, status_of

NOW = datetime(2026, 11, 15, 8, 30, tzinfo=UTC)
TENANT, USER, OTHER = UUID(int=1), UUID(int=2), UUID(int=3)
JOB, SECOND = UUID(int=10), UUID(int=11)


async def make(tx: Tx, at: datetime = NOW) -> MediaItem:
    return await media.create_media(
        tx,
        media_id=uuid4(),
        tenant_id=TENANT,
        user_id=USER,
        kind="image",
        original_file_id=uuid4(),
        now=at,
    )


async def attach(pool: Database, made: MediaItem, job_id: UUID) -> MediaItem:
    async with pool.transaction() as tx:
        return await media.attach_job(tx, TENANT, USER, made.id, job_id)


async def test_media_are_found_by_their_own_user_only(pool: Database) -> None:
    async with pool.transaction() as tx:
        made = await make(tx)
        assert await media.get_media(tx, TENANT, USER, made.id) == made
        for tenant_id, user_id in ((OTHER, USER), (TENANT, OTHER)):
            with pytest.raises(NotFound):
                await media.get_media(tx, tenant_id, user_id, made.id)
            with pytest.raises(NotFound):
                await media.attach_job(tx, tenant_id, user_id, made.id, JOB)
        assert await media.list_media(tx, TENANT, OTHER, limit=9) == []


async def test_they_come_in_pages_the_newest_first(pool: Database) -> None:
    async with pool.transaction() as tx:
        made = [await make(tx, NOW + timedelta(seconds=number // 2)) for number in range(5)]
        first = await media.list_media(tx, TENANT, USER, limit=2)
        rest = await media.list_media(tx, TENANT, USER, before_id=first[-1].id, limit=9)
    found = [each.id for each in first + rest]
    assert sorted(found) == sorted(each.id for each in made)
    assert first[0] == made[4]


async def test_one_job_at_a_time(pool: Database) -> None:
    async with pool.transaction() as tx:
        made = await make(tx)
    attached = await attach(pool, made, JOB)
    assert await attach(pool, made, JOB) == attached
    async with pool.transaction() as tx:
        assert await media.media_of_job(tx, TENANT, JOB) == attached
        ended = await media.end_job(tx, TENANT, JOB)
        assert await media.end_job(tx, TENANT, JOB) is None
    assert ended is not None
    assert (ended.job_id, ended.active_job_id) == (JOB, None)
    assert (await attach(pool, made, SECOND)).job_id == SECOND


async def test_of_many_jobs_at_once_one_is_the_latest(pool: Database) -> None:
    async with pool.transaction() as tx:
        made = await make(tx)
    ids = [uuid4() for _ in range(12)]
    await asyncio.gather(*(attach(pool, made, each) for each in ids))
    async with pool.transaction() as tx:
        ended = [await media.end_job(tx, TENANT, each) for each in ids]
    (latest,) = [each for each in ended if each]
    assert latest.job_id in ids


async def test_a_result_is_that_of_the_latest_job(pool: Database) -> None:
    async with pool.transaction() as tx:
        made = await make(tx)
        await media.attach_job(tx, TENANT, USER, made.id, JOB)
        result = uuid4()
        await media.end_job(tx, TENANT, JOB, processed_file_id=result, details={"seconds": 3})
        assert (await media.get_media(tx, TENANT, USER, made.id)).processed_file_id == result
        again = await media.attach_job(tx, TENANT, USER, made.id, SECOND)
        assert again.processed_file_id is None
        await media.end_job(tx, TENANT, SECOND)
        found = await media.get_media(tx, TENANT, USER, made.id)
    assert found.file_ids == (made.original_file_id,)


async def test_an_earlier_jobs_end_does_not_touch_the_later_one(pool: Database) -> None:
    async with pool.transaction() as tx:
        made = await make(tx)
        await media.attach_job(tx, TENANT, USER, made.id, JOB)
        await media.end_job(tx, TENANT, JOB)
        later = await media.attach_job(tx, TENANT, USER, made.id, SECOND)
        assert await media.end_job(tx, TENANT, JOB, processed_file_id=uuid4()) is None
        assert await media.get_media(tx, TENANT, USER, made.id) == later


async def test_old_media_expire_unless_they_are_at_work(pool: Database) -> None:
    async with pool.transaction() as tx:
        idle, busy, young = await make(tx), await make(tx), await make(tx, NOW + timedelta(days=2))
        await media.attach_job(tx, TENANT, USER, busy.id, JOB)
        day = NOW + timedelta(days=1)
        assert await media.expire_media(tx, TENANT, before=day, now=day, limit=9) == [idle]
        assert await media.expire_media(tx, TENANT, before=day, now=day, limit=9) == []
        gone = await media.get_media(tx, TENANT, USER, idle.id)
        with pytest.raises(Refused):
            await media.attach_job(tx, TENANT, USER, idle.id, SECOND)
        assert (await media.get_media(tx, TENANT, USER, young.id)).expired_at is None
    assert gone.file_ids == ()
    assert status_of(gone, "completed") is MediaStatus.EXPIRED


@pytest.mark.parametrize("job_status", ["queued", "processing", "completed", "failed", "cancelled"])
async def test_the_status_is_that_of_the_latest_job(pool: Database, job_status: str) -> None:
    async with pool.transaction() as tx:
        made = await make(tx)
        attached = await media.attach_job(tx, TENANT, USER, made.id, JOB)
    assert status_of(made, None) is MediaStatus.UPLOADED
    assert status_of(attached, job_status) == job_status
