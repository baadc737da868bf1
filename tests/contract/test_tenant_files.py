"""A tenant's file rows, on both databases."""

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, update

from comfyfleet.errors import Conflict, InvalidInput, NotFound
from comfyfleet.server.db import Database
from comfyfleet.server.db.tenant_tables import files
from comfyfleet.server.maintenance import store as upkeep
from comfyfleet.server.media import service
from comfyfleet.server.media.model import File, upload_key

NOW = datetime(2026, 11, 15, 9, tzinfo=UTC)
ADA, BOB = uuid.uuid4(), uuid.uuid4()
HASH, OTHER_HASH = "ab" * 32, "cd" * 32


def a_file(**changes: Any) -> File:
    tenant_id = changes.get("tenant_id", ADA)
    fields: dict[str, Any] = {
        "id": uuid.uuid4(),
        "tenant_id": tenant_id,
        "disk": "local",
        "path": upload_key(tenant_id, uuid.uuid4(), "cat.png"),
        "filename": "cat 猫.png",
        "mime_type": "image/png",
        "created_at": NOW,
        "size": 5 * 1024**3,
        "content_hash": HASH,
        "metadata": {"width": 512, "tags": ["é"]},
    }
    return File(**(fields | changes))


async def added(pool: Database, **changes: Any) -> File:
    async with pool.transaction() as tx:
        return await service.add_file(tx, a_file(**changes))


async def test_a_file_comes_back_as_it_was(pool: Database) -> None:
    file = await added(pool, user_id=uuid.uuid4())
    async with pool.read() as tx:
        assert await service.get_file(tx, ADA, file.id) == file


async def test_another_tenants_file_is_not_there(pool: Database) -> None:
    file = await added(pool, size=None, content_hash=None)
    hashed = await added(pool)
    async with pool.transaction() as tx:
        for asking in (
            service.get_file(tx, BOB, file.id),
            service.get_files(tx, BOB, [file.id]),
            service.confirm_file(tx, BOB, file.id, size=3),
            service.delete_file(tx, BOB, file.id),
        ):
            with pytest.raises(NotFound, match=str(file.id)):
                await asking
        assert hashed.content_hash
        assert await service.file_by_hash(tx, BOB, None, hashed.content_hash) is None
        assert await service.get_file(tx, ADA, file.id) == file


async def test_many_are_got_at_once_or_the_missing_one_is_named(pool: Database) -> None:
    one, two = await added(pool), await added(pool)
    missing = uuid.uuid4()
    async with pool.read() as tx:
        found = await service.get_files(tx, ADA, [one.id, two.id, one.id])
        assert found == {one.id: one, two.id: two}
        assert await service.get_files(tx, ADA, []) == {}
        with pytest.raises(NotFound, match=str(missing)):
            await service.get_files(tx, ADA, [one.id, missing])
        with pytest.raises(InvalidInput, match="at most"):
            await service.get_files(tx, ADA, [uuid.uuid4() for _ in range(1001)])


async def test_an_announced_file_is_confirmed_once(pool: Database) -> None:
    file = await added(pool, size=None, content_hash=None)
    assert file.is_announced
    async with pool.transaction() as tx:
        confirmed = await service.confirm_file(tx, ADA, file.id, size=7, content_hash=HASH)
        assert (confirmed.size, confirmed.content_hash, confirmed.mime_type) == (
            7,
            HASH,
            "image/png",
        )
        assert not confirmed.is_announced
        assert await service.confirm_file(tx, ADA, file.id, size=7, content_hash=HASH) == confirmed
        with pytest.raises(Conflict):
            await service.confirm_file(tx, ADA, file.id, size=8)
        with pytest.raises(Conflict):
            await service.confirm_file(tx, ADA, file.id, size=7, content_hash=OTHER_HASH)
        assert await service.get_file(tx, ADA, file.id) == confirmed


async def test_of_many_confirmations_at_once_one_counts(pool: Database) -> None:
    file = await added(pool, size=None, content_hash=None)

    async def confirm(size: int) -> int | None:
        try:
            async with pool.transaction() as tx:
                return (await service.confirm_file(tx, ADA, file.id, size=size)).size
        except Conflict:
            return None

    sizes = await asyncio.gather(*(confirm(size) for size in range(10)))
    accepted = [size for size in sizes if size is not None]
    assert len(accepted) == 1
    async with pool.read() as tx:
        assert (await service.get_file(tx, ADA, file.id)).size == accepted[0]


async def test_the_same_content_is_found_by_its_hash(pool: Database) -> None:
    await added(pool, size=None)
    await added(pool, content_hash=OTHER_HASH)
    await added(pool, created_at=NOW + timedelta(seconds=1))
    oldest = await added(pool)
    async with pool.read() as tx:
        assert await service.file_by_hash(tx, ADA, None, HASH) == oldest
        assert await service.file_by_hash(tx, ADA, None, "00" * 32) is None
        with pytest.raises(InvalidInput, match="64"):
            await service.file_by_hash(tx, ADA, None, "blake3:" + HASH)


async def test_a_deleted_file_is_gone_and_tells_where_its_bytes_are(pool: Database) -> None:
    file = await added(pool)
    async with pool.transaction() as tx:
        assert await service.delete_file(tx, ADA, file.id) == file
    async with pool.transaction() as tx:
        with pytest.raises(NotFound):
            await service.get_file(tx, ADA, file.id)
        with pytest.raises(NotFound):
            await service.delete_file(tx, ADA, file.id)


async def used(pool: Database) -> int:
    async with pool.transaction() as tx:
        return await service.used_bytes(tx, ADA)


async def check(pool: Database, *those: File) -> None:
    async with pool.transaction() as tx:
        await upkeep.note_checked(tx, [upkeep.Checked(file, {}, NOW) for file in those])


async def test_what_a_tenant_stores_is_the_same_before_and_after_its_files_are_checked(
    pool: Database,
) -> None:
    await added(pool, tenant_id=BOB, size=1)
    await added(pool, size=None, content_hash=None, metadata={"announced_size": 30})
    first, second, third = [await added(pool, size=size) for size in (100, 200, 400)]
    assert await used(pool) == 730
    for file in (first, second, first):  # the same one is not counted again
        await check(pool, file)
        assert await used(pool) == 730
    async with pool.transaction() as tx:
        await service.delete_file(tx, ADA, first.id)
    assert await used(pool) == 630
    async with pool.transaction() as tx:
        await upkeep.remove_files(tx, ADA, [second.id, third.id])
    assert await used(pool) == 30
    assert await service.recount(pool) == {}


async def test_many_files_are_checked_at_once_each_counted_for_its_tenant(pool: Database) -> None:
    mine = [await added(pool, size=2**number) for number in range(4)]
    others = await added(pool, tenant_id=BOB, size=100)
    await check(pool, mine[0])
    await check(pool, *mine, others)
    assert await used(pool) == 15
    assert await service.recount(pool) == {}
    async with pool.read() as tx:
        assert (await service.get_file(tx, BOB, others.id)).checked_at == NOW


async def test_files_of_which_one_is_being_removed_are_checked_without_waiting(
    pool: Database,
) -> None:
    kept, removed = await added(pool, size=1), await added(pool, size=2)
    async with asyncio.timeout(10), pool.transaction() as tx:
        await service.delete_file(tx, ADA, removed.id)
        if not pool.is_sqlite:  # there, only one transaction writes at a time
            await check(pool, kept, removed)
        assert (await service.get_file(tx, ADA, kept.id)).checked_at == (
            None if pool.is_sqlite else NOW
        )
    assert await used(pool) == 1
    assert await service.recount(pool) == {}


async def test_files_that_are_checked_and_removed_at_once_are_counted_exactly(
    pool: Database,
) -> None:
    made = [await added(pool, size=2**number) for number in range(10)]

    async def remove(file: File) -> None:
        async with pool.transaction() as tx:
            await service.delete_file(tx, ADA, file.id)

    sums = [used(pool) for _ in range(5)]
    await asyncio.gather(*(check(pool, each) for each in made), *map(remove, made[:5]), *sums)
    assert await used(pool) == sum(each.size or 0 for each in made[5:])
    assert await service.recount(pool) == {}


async def test_storage_that_an_older_version_left_uncounted_is_counted_by_the_sweep(
    pool: Database,
) -> None:
    file = await added(pool, size=100)
    async with pool.transaction() as tx:
        await tx.execute(update(files).values(checked_at=NOW))
    assert await used(pool) == 0
    assert await service.recount(pool) == {ADA: 100}
    assert await used(pool) == 100
    async with pool.transaction() as tx:
        await tx.execute(delete(files).where(files.c.id == file.id))
    assert await service.recount(pool) == {ADA: -100}
    assert await used(pool) == 0
