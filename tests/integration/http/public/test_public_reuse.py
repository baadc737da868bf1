"""Effects that take a result which their customer has already, instead of running a job."""

import asyncio
from typing import Any

from sqlalchemy import select
from tests.support.jobs.fuse import Fuse, ProcessDied, fused
from tests.support.server.customers import PRICE, TOKENS, Customer, EffectSetup, png

from comfyfleet.server.db.central_tables import dispatches
from comfyfleet.server.db.tenant_tables import job_events, webhook_deliveries
from comfyfleet.server.jobs import submit
from comfyfleet.server.jobs.submit import JobRequest
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants import wallet as ledger

GIVEN = {"width": 64, "colour": 7}


async def offered(effect_setup: EffectSetup, **changes: Any) -> None:
    for slug in ("draw", "invert"):
        await effect_setup.change(effect_setup.effects[slug], reuse=True, **changes)


async def told(effect_setup: EffectSetup, ada: Customer, job_id: str) -> list[tuple[str, Any]]:
    pool = await effect_setup.plane.context.pool_of(ada.tenant_id)
    async with pool.read() as tx:
        rows = await tx.execute(select(job_events).order_by(job_events.c.id))
        return [(row.kind, row.data.get("status")) for row in rows if str(row.job_id) == job_id]


async def test_the_same_again_comes_back_at_once_for_nothing(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    await offered(effect_setup)
    video = await ada.video()
    first = await ada.job(effect_setup.invert, video_id=video)
    await effect_setup.work(b"inverted")
    other = await ada.video(png(), filename="the-same.png")
    made = await ada.submit(effect_setup.invert, video_id=other)
    assert made.status_code == 201
    again = made.json()
    assert (again["status"], again["price_tokens"], again["progress"]) == ("completed", 0, 100.0)
    assert again["reused_from"] == first
    assert (await ada.client.get(again["outputs"][0]["url"])).content == b"inverted"
    after = await ada.get(f"videos/{other}")
    assert after["status"] == "completed"
    assert (await ada.client.get(after["processed_file_url"])).content == b"inverted"
    assert await ada.balance() == TOKENS - PRICE
    assert (await ada.get(f"ai-jobs/{first}"))["reused_from"] is None
    followed = await ada.get(f"ai-jobs/{again['id']}/progress")
    assert followed["status"] == "completed"
    assert (await ada.get(f"ai-jobs/{again['id']}/again"))["problems"] == []
    lines = (await ada.get("wallet/transactions"))["transactions"]
    assert {each["job_id"] for each in lines if each["job_id"]} == {first}
    assert await told(effect_setup, ada, again["id"]) == [
        ("status", "queued"), ("outputs", None), ("status", "completed"),
    ]  # fmt: skip


async def test_no_worker_and_no_queue_hears_of_it(effect_setup: EffectSetup, ada: Customer) -> None:
    await offered(effect_setup)
    first = await ada.job(effect_setup.draw, properties=GIVEN)
    await effect_setup.work()
    again = (await ada.submit(effect_setup.draw, properties=GIVEN)).json()
    assert again["reused_from"] == first
    async with effect_setup.plane.central.read() as tx:
        known = set((await tx.execute(select(dispatches.c.tenant_job_id))).scalars())
    assert {str(each) for each in known} == {first}
    async with effect_setup.fleet_setup.worker("idle") as worker:
        assert (await worker.poll(wait_seconds=0))["job"] is None
    seen = await effect_setup.fleet_setup.admin.get(f"/api/admin/jobs/{again['id']}/details")
    assert seen.json()["reused_from"] == first


async def test_webhooks_are_told_as_of_any_other_job(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    await offered(effect_setup)
    made = await ada.client.post("/api/webhooks", json={"url": "https://shop.example/hook"})
    assert made.status_code == 201, made.text
    await ada.job(effect_setup.draw, properties=GIVEN)
    await effect_setup.work()
    again = (await ada.submit(effect_setup.draw, properties=GIVEN)).json()
    pool = await effect_setup.plane.context.pool_of(ada.tenant_id)
    async with pool.read() as tx:
        rows = (await tx.execute(select(webhook_deliveries))).all()
    mine = [row for row in rows if str(row.job_id) == again["id"]]
    assert [row.event for row in mine] == [row.event for row in rows if row not in mine]
    assert mine[0].payload["status"] == "completed"


async def test_only_what_is_the_same_and_ones_own_is_taken(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    async def reused(customer: Customer, **properties: Any) -> bool:
        made = (await customer.submit(effect_setup.draw, properties=properties)).json()
        if made["status"] == "queued":
            await effect_setup.work()
        return made["reused_from"] is not None

    assert not await reused(ada, **GIVEN)
    assert not await reused(ada, **GIVEN), "off by default"
    await offered(effect_setup)
    assert not await reused(ada, **GIVEN), "those before had no fingerprint"
    assert await reused(ada, **GIVEN)
    assert not await reused(ada, width=64, colour=8)
    assert not await reused(ada, width=65, colour=7)
    assert not await reused(ada, width=64)
    assert not await reused(ada, width=64), "its colour is left to chance"
    bob = await effect_setup.customer(ada.tenant_id)
    eve = await effect_setup.customer()
    assert not await reused(bob, **GIVEN)
    assert not await reused(eve, **GIVEN)
    assert await reused(bob, **GIVEN)
    await effect_setup.change(effect_setup.draw, reuse=True, overrides={"prefix": "other"})
    assert not await reused(ada, **GIVEN), "what the effect sets is a part of it"
    await effect_setup.change(effect_setup.draw, reuse=False)
    assert not await reused(ada, **GIVEN)


async def test_other_bytes_are_another_job(effect_setup: EffectSetup, ada: Customer) -> None:
    await offered(effect_setup)
    await ada.job(effect_setup.invert, video_id=await ada.video(png(colour=1)))
    await effect_setup.work()
    other = await ada.submit(effect_setup.invert, video_id=await ada.video(png(colour=2)))
    assert (other.json()["status"], other.json()["reused_from"]) == ("queued", None)


async def test_a_repeated_request_is_the_same_job(effect_setup: EffectSetup, ada: Customer) -> None:
    await offered(effect_setup)
    await ada.job(effect_setup.draw, properties=GIVEN)
    await effect_setup.work()
    key = {"properties": GIVEN, "idempotency_key": "k"}
    made = await ada.submit(effect_setup.draw, **key)
    again = await ada.submit(effect_setup.draw, **key)
    assert (made.status_code, again.status_code) == (201, 200)
    assert made.json()["id"] == again.json()["id"]
    assert made.json()["reused_from"]


async def test_of_a_batch_only_the_rest_is_run_and_paid(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    await offered(effect_setup)
    await ada.job(effect_setup.draw, properties=GIVEN)
    await effect_setup.work()
    items = [{"properties": each} for each in (GIVEN, {**GIVEN, "width": 70}, GIVEN)]
    body = {"effect_id": str(effect_setup.draw.id), "items": items}
    made = await ada.client.post("/api/ai-jobs/batches", json=body)
    assert made.status_code == 201, made.text
    assert await ada.balance() == TOKENS - 2 * PRICE
    found = await ada.get(f"ai-jobs/batches/{made.json()['id']}")
    assert [each["status"] for each in found["jobs"]] == ["completed", "queued", "completed"]


async def test_many_at_once_never_get_a_wrong_answer(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    await offered(effect_setup)
    first = await ada.job(effect_setup.draw, properties=GIVEN)
    await effect_setup.work()
    made = await asyncio.gather(
        *(ada.submit(effect_setup.draw, properties=GIVEN) for _ in range(10))
    )
    assert {each.json()["reused_from"] for each in made} == {first}
    assert await ada.balance() == TOKENS - PRICE


async def test_a_reuse_may_be_cut_anywhere(effect_setup: EffectSetup, ada: Customer) -> None:
    await offered(effect_setup)
    first = await ada.job(effect_setup.draw, properties=GIVEN)
    await effect_setup.work()
    context, fuse = effect_setup.plane.context, Fuse()
    async with context.central.read() as tx:
        tenant = await tenants.get_tenant(tx, ada.tenant_id)
    for steps in range(60):
        request = JobRequest(
            effect_id=effect_setup.draw.id,
            values=GIVEN,
            user_id=ada.user_id,
            idempotency_key=f"cut-{steps}",
        )
        fuse.left = steps
        try:
            await submit.submit_effect(fused(context, fuse), tenant, request)
            is_whole = True
        except ProcessDied:
            is_whole = False
        fuse.left = None
        job, _, _ = await submit.submit_effect(context, tenant, request)
        assert (job.status, str(job.spec.reused_from)) == ("completed", first)
        events = await told(effect_setup, ada, str(job.id))
        assert [status for _, status in events] == ["queued", None, "completed"]
        if is_whole:
            break
    assert is_whole
    assert steps > 3
    assert await ada.balance() == TOKENS - PRICE
    async with (await context.pool_of(ada.tenant_id)).read() as tx:
        assert await ledger.verify(tx) == []


async def test_what_failed_is_no_result(effect_setup: EffectSetup, ada: Customer) -> None:
    await offered(effect_setup)
    await ada.job(effect_setup.draw, properties=GIVEN)
    await effect_setup.fail()
    again = await ada.submit(effect_setup.draw, properties=GIVEN)
    assert again.json()["reused_from"] is None
