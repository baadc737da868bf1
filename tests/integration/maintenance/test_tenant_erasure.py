"""A tenant is erased: nothing private is left, the ledger is, and any step can be cut."""

import json
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import select
from tests.support.jobs.fuse import Fuse, ProcessDied, fused
from tests.support.server.fleet import FleetSetup
from tests.support.server.tenants import TenantData, customer_of

from comfyfleet.clock import utc_now
from comfyfleet.errors import Conflict, Unauthenticated
from comfyfleet.server.db.tenant_tables import (
    ai_jobs,
    batches,
    files,
    job_events,
    users,
    videos,
    webhooks,
)
from comfyfleet.server.jobs import submit
from comfyfleet.server.maintenance.checks import verify_ledger
from comfyfleet.server.maintenance.retention import erase_pending_tenants
from comfyfleet.server.notifications.webhooks import create_webhook
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import DEFAULT_TENANT

STEPS_MAX = 200


async def furnish(customer: TenantData) -> None:
    """A bit of everything."""
    await customer.pays(100)
    file = await customer.file()
    kept = await customer.media(file)
    await customer.job(file, price=10, video_id=kept.id)
    ended = await customer.job(file, price=20, idempotency_key="my own words")
    await submit.cancel_job(customer.plane.context, customer.tenant_id, ended.id)
    async with customer.pool.transaction() as tx:
        await create_webhook(
            tx,
            webhook_id=uuid4(),
            tenant_id=customer.tenant_id,
            user_id=customer.user_id,
            url="https://example.com/private",
            events=["job.completed"],
            now=utc_now(),
        )


async def rows(customer: TenantData, table: Any) -> list[dict[str, Any]]:
    async with customer.pool.read() as tx:
        found = await tx.execute(select(table).where(table.c.tenant_id == customer.tenant_id))
        return [dict(row) for row in found.mappings()]


async def require_erased(customer: TenantData) -> None:
    for table in (job_events, webhooks, batches, videos, files):
        assert await rows(customer, table) == [], table.name
    left = json.dumps([await rows(customer, ai_jobs), await rows(customer, users)], default=str)
    for private in ("private", "Secret", "my own words", "example.com"):
        assert private not in left
    prefix = f"tenants/{customer.tenant_id}/"
    assert [key async for key in customer.plane.store.keys(prefix)] == []
    jobs = await rows(customer, ai_jobs)
    assert {job["status"] for job in jobs} == {"cancelled"}
    assert await customer.balance() == 100, "what was reserved is refunded"
    assert (await verify_ledger(customer.plane.context, customer.tenant_id)).is_sound
    shown = (await customer.admin.get(customer.path)).json()
    assert shown["erased_at"] is not None
    assert "Ada" not in shown["name"]


async def test_nothing_private_is_left_and_the_ledger_is(
    house: FleetSetup, ada: TenantData
) -> None:
    bob = await customer_of(house.plane, house.admin, "Bob")
    for each in (ada, bob):
        await furnish(each)
    begun = await house.admin.post(f"{ada.path}/erase")
    assert (begun.status_code, begun.json()["erased_at"]) == (202, None)
    await erase_pending_tenants(house.plane.context)
    await require_erased(ada)
    assert len(await rows(ada, ai_jobs)) == 2
    assert len(await rows(bob, files)) == 1
    assert await bob.balance() == 90
    steps = [each["details"]["step"] for each in await house.audited("erase_tenant")]
    assert steps == ["ended", "begun"]
    again = await house.admin.post(f"{ada.path}/erase")
    assert again.status_code == 202
    assert await erase_pending_tenants(house.plane.context) == 0
    assert len(await house.audited("erase_tenant")) == 2


async def test_with_the_answer_the_keys_are_dead_and_nothing_new_comes(
    house: FleetSetup, ada: TenantData
) -> None:
    file = await ada.file()
    await house.admin.post(f"{ada.path}/erase")
    async with house.plane.central.read() as tx:
        with pytest.raises(Unauthenticated):
            await tenants.authenticate_key(tx, ada.key, now=utc_now())
    with pytest.raises(Conflict):
        await ada.job(file)
    assert (await house.admin.post(f"{ada.path}/users", json={})).status_code == 409
    path = f"{ada.path}/users/{ada.user_id}/keys"
    assert (await house.admin.post(path, json={})).status_code == 409


async def test_operators_own_tenant_is_not_erased(house: FleetSetup) -> None:
    answer = await house.admin.post(f"/api/admin/tenants/{DEFAULT_TENANT}/erase")
    assert answer.status_code == 422
    assert (await house.admin.post(f"/api/admin/tenants/{uuid4()}/erase")).status_code == 404


async def test_cut_off_at_any_step_it_is_taken_up_again(house: FleetSetup, ada: TenantData) -> None:
    await furnish(ada)
    await house.admin.post(f"{ada.path}/erase")
    fuse = Fuse()
    cut = fused(house.plane.context, fuse)
    for step in range(STEPS_MAX):
        fuse.left = step
        try:
            await erase_pending_tenants(cut)
        except ProcessDied:
            continue
        break
    else:
        pytest.fail("it never came to its end")
    await require_erased(ada)
    steps = [each["details"]["step"] for each in await house.audited("erase_tenant")]
    assert steps == ["ended", "begun"]
