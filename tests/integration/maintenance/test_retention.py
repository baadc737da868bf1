"""What goes when its time is up, what is left over, and what stays."""

import asyncio
from datetime import timedelta
from uuid import uuid4

from sqlalchemy import update
from tests.support.server.fleet import FleetSetup
from tests.support.server.tenants import PNG, AdjustableClock, TenantData, customer_of

from comfyfleet.server.db.central_tables import tenants
from comfyfleet.server.jobs import submit
from comfyfleet.server.maintenance.sweeps import expire_all, prune_expired_rows, remove_all_orphans
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import output_key, small_key, upload_key
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.notifications import store
from comfyfleet.server.notifications.model import EventKind, NewJobEvent


async def keep_for(customer: TenantData, days: int) -> None:
    await customer.admin.put(f"{customer.path}/retention", json={"retention_days": days})


async def test_media_and_files_go_when_their_time_is_up(
    ada: TenantData, ahead: AdjustableClock
) -> None:
    await keep_for(ada, 30)
    old = await ada.file()
    seen = await ada.media(old)
    ahead.by = timedelta(days=29)
    young = await ada.file()
    await ada.media(young)
    await expire_all(ada.plane)
    assert await ada.has(old) == (True, True)
    ahead.by = timedelta(days=31)
    await expire_all(ada.plane)
    assert await ada.has(old) == (False, False)
    assert await ada.has(young) == (True, True)
    async with ada.pool.read() as tx:
        found = await media.get_media(tx, ada.tenant_id, ada.user_id, seen.id)
    assert (found.expired_at is not None, found.file_ids) == (True, ())


async def test_without_a_retention_nothing_goes(ada: TenantData, ahead: AdjustableClock) -> None:
    kept = await ada.file()
    ahead.by = timedelta(days=9999)
    await expire_all(ada.plane)
    assert await ada.has(kept) == (True, True)


async def test_one_tenants_retention_is_not_anothers(
    house: FleetSetup, ada: TenantData, ahead: AdjustableClock
) -> None:
    bob = await customer_of(house.plane, house.admin, "Bob")
    await keep_for(ada, 1)
    gone, kept = await ada.file(), await bob.file()
    ahead.by = timedelta(days=2)
    await expire_all(ada.plane)
    assert (await ada.has(gone), await bob.has(kept)) == ((False, False), (True, True))


async def test_a_file_that_younger_media_share_stays(
    ada: TenantData, ahead: AdjustableClock
) -> None:
    await keep_for(ada, 10)
    shared = await ada.file()
    await ada.media(shared)
    ahead.by = timedelta(days=9)
    await ada.media(shared)
    ahead.by = timedelta(days=11)
    await expire_all(ada.plane)
    assert await ada.has(shared) == (True, True)
    ahead.by = timedelta(days=20)
    await expire_all(ada.plane)
    assert await ada.has(shared) == (False, False)


async def test_a_file_that_a_job_still_needs_stays(ada: TenantData, ahead: AdjustableClock) -> None:
    await keep_for(ada, 10)
    needed = await ada.file()
    job = await ada.job(needed)
    ahead.by = timedelta(days=11)
    await expire_all(ada.plane)
    assert await ada.has(needed) == (True, True)
    await submit.cancel_job(ada.plane.context, ada.tenant_id, job.id)
    await expire_all(ada.plane)
    assert await ada.has(needed) == (False, False)


async def test_objects_that_no_row_names_go_after_a_day(
    ada: TenantData, ahead: AdjustableClock
) -> None:
    store = ada.plane.store
    named = await ada.file()
    upload = upload_key(ada.tenant_id, uuid4(), "lost.png")
    output = output_key(ada.tenant_id, uuid4(), uuid4(), "lost.png")
    for key in (upload, output, "central/workflows/kept.json"):
        await store.put(key, PNG, "image/png")
    ahead.by = timedelta(hours=23)
    await remove_all_orphans(ada.plane)
    assert await store.head(upload) is not None
    ahead.by = timedelta(hours=25)
    await remove_all_orphans(ada.plane)
    assert [await store.head(key) for key in (upload, output)] == [None, None]
    assert await store.head("central/workflows/kept.json") is not None
    assert await ada.has(named) == (True, True)


async def test_what_a_job_at_work_has_delivered_is_not_left_over(
    ada: TenantData, ahead: AdjustableClock
) -> None:
    job = await ada.job(await ada.file())
    key = output_key(ada.tenant_id, job.id, uuid4(), "out.png")
    await ada.plane.store.put(key, PNG, "image/png")
    ahead.by = timedelta(days=3)
    await remove_all_orphans(ada.plane)
    assert await ada.plane.store.head(key) is not None
    await submit.cancel_job(ada.plane.context, ada.tenant_id, job.id)
    await remove_all_orphans(ada.plane)
    assert await ada.plane.store.head(key) is None


async def test_objects_of_a_tenant_that_nobody_knows_are_left_alone(
    ada: TenantData, ahead: AdjustableClock
) -> None:
    store = ada.plane.store
    strange = (upload_key(uuid4(), uuid4(), "theirs.png"), "tenants/notes.txt")
    mine = upload_key(ada.tenant_id, uuid4(), "lost.png")
    for key in (*strange, mine):
        await store.put(key, PNG, "image/png")
    async with ada.plane.central.transaction() as tx:
        await tx.execute(
            update(tenants).where(tenants.c.id == ada.tenant_id).values(pool="elsewhere")
        )
    ahead.by = timedelta(days=9)
    await remove_all_orphans(ada.plane)
    assert all([await store.head(key) for key in (*strange, mine)])


async def test_events_of_long_ago_go(ada: TenantData, ahead: AdjustableClock) -> None:
    job_id = uuid4()
    async with ada.pool.transaction() as tx:
        await store.add_event(
            tx, NewJobEvent(ada.tenant_id, job_id, EventKind.STATUS, {}), now=ada.plane.clock()
        )
    for days, left in ((6, 1), (8, 0)):
        ahead.by = timedelta(days=days)
        assert await prune_expired_rows(ada.plane) is False
        async with ada.pool.read() as tx:
            assert len(await notifications.events_after(tx, ada.tenant_id, job_id)) == left


async def test_a_file_that_is_just_being_shared_is_not_removed(
    ada: TenantData, ahead: AdjustableClock
) -> None:
    await keep_for(ada, 10)
    old = await ada.file(content_hash="ab" * 32)
    ahead.by = timedelta(days=11)
    async with ada.pool.transaction() as tx:
        twin = await media.file_by_hash(tx, ada.tenant_id, ada.user_id, "ab" * 32)
        assert twin is not None
        retaining = asyncio.create_task(expire_all(ada.plane))
        await asyncio.sleep(0.3)
        await media.create_media(
            tx,
            media_id=uuid4(),
            tenant_id=ada.tenant_id,
            user_id=ada.user_id,
            kind="image",
            original_file_id=twin.id,
            now=ahead(),
        )
    await retaining
    await expire_all(ada.plane)
    assert await ada.has(old) == (True, True)


async def test_a_small_picture_goes_with_its_picture_and_not_before(
    ada: TenantData, ahead: AdjustableClock
) -> None:
    await keep_for(ada, 10)
    store = ada.plane.store
    file = await ada.file()
    left = upload_key(ada.tenant_id, uuid4(), "lost.png")
    for key in (small_key(file.path), small_key(left)):
        await store.put(key, PNG, "image/webp")
    ahead.by = timedelta(days=2)
    await remove_all_orphans(ada.plane)
    assert await store.head(small_key(file.path)) is not None
    assert await store.head(small_key(left)) is None
    ahead.by = timedelta(days=11)
    await expire_all(ada.plane)
    assert await ada.has(file) == (False, False)
    assert await store.head(small_key(file.path)) is None
