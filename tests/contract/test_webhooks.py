"""Webhooks, job events and batches as rows, on every database."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest

from comfyfleet.errors import Conflict, InvalidInput, LimitExceeded, NotFound
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.jobs import batches
from comfyfleet.server.jobs.model import JobBatch
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.notifications import store, webhooks
from comfyfleet.server.notifications.model import (
    TRIES_MAX,
    WEBHOOKS_PER_USER_MAX,
    DeliveryStatus,
    EndOfJob,
    EventKind,
    NewJobEvent,
    RegisteredWebhook,
    WebhookDelivery,
    WebhookEvent,
    WebhookResponse,
)

NOW = datetime(2026, 11, 15, 8, 30, tzinfo=UTC)
TENANT, USER, OTHER, JOB = UUID(int=1), UUID(int=2), UUID(int=3), UUID(int=10)
DONE = WebhookEvent.COMPLETED


async def make(tx: Tx, *wanted: str, url: str = "https://example.com/hook") -> RegisteredWebhook:
    return await webhooks.create_webhook(
        tx,
        webhook_id=uuid4(),
        tenant_id=TENANT,
        user_id=USER,
        url=url,
        events=wanted or tuple(WebhookEvent),
        now=NOW,
    )


async def announce(tx: Tx, job_id: UUID = JOB, at: datetime = NOW) -> int:
    end = EndOfJob(job_id, DONE, {"id": str(job_id)})
    return await webhooks.enqueue(tx, TENANT, USER, end, new_id=uuid4, now=at)


async def test_a_webhook_is_its_users_own(pool: Database) -> None:
    async with pool.transaction() as tx:
        made = await make(tx)
        assert await webhooks.list_webhooks(tx, TENANT, USER) == [made]
        assert await webhooks.list_webhooks(tx, TENANT, OTHER) == []
        for tenant_id, user_id in ((OTHER, USER), (TENANT, OTHER)):
            with pytest.raises(NotFound):
                await webhooks.get_webhook(tx, tenant_id, user_id, made.id)
            with pytest.raises(NotFound):
                await webhooks.delete_webhook(tx, tenant_id, user_id, made.id)
        await announce(tx)
        await webhooks.delete_webhook(tx, TENANT, USER, made.id)
        assert await webhooks.take_due_deliveries(tx, now=NOW, limit=9) == []
    assert made.secret == ""
    assert made.secret_with("a key").startswith("whsec_")
    assert made.secret_with("a key") != replace(made, id=uuid4()).secret_with("a key")
    assert made.secret_with("a key") != made.secret_with("another key")


async def test_what_can_not_be_called_is_refused(pool: Database) -> None:
    async with pool.transaction() as tx:
        for url in ("ftp://example.com", "https://example.com:22", "https://u:p@example.com"):
            with pytest.raises(InvalidInput):
                await make(tx, url=url)
        with pytest.raises(InvalidInput):
            await make(tx, "job.exploded")
        for _ in range(WEBHOOKS_PER_USER_MAX):
            await make(tx)
        with pytest.raises(LimitExceeded):
            await make(tx)


async def test_each_webhook_that_wants_it_is_told_once(pool: Database) -> None:
    async with pool.transaction() as tx:
        wants = await make(tx, "job.completed")
        await make(tx, "job.failed")
        assert await announce(tx) == 1
        assert await announce(tx) == 0
        [(delivery, webhook)] = await webhooks.take_due_deliveries(tx, now=NOW, limit=9)
    assert webhook == wants
    assert (delivery.event, delivery.tries, delivery.payload) == (DONE, 1, {"id": str(JOB)})


async def test_a_delivery_is_taken_by_one_at_a_time(pool: Database) -> None:
    async with pool.transaction() as tx:
        await make(tx)
        for number in range(20):
            await announce(tx, UUID(int=100 + number))

    async def take() -> list[UUID]:
        async with pool.transaction() as tx:
            return [each.id for each, _ in await webhooks.take_due_deliveries(tx, now=NOW, limit=4)]

    taken = [each for some in await asyncio.gather(*(take() for _ in range(8))) for each in some]
    assert len(taken) == len(set(taken)) == 20


async def taken(tx: Tx, at: datetime) -> WebhookDelivery:
    [(delivery, _)] = await webhooks.take_due_deliveries(tx, now=at, limit=9)
    return delivery


async def test_one_that_failed_is_tried_again_and_in_the_end_given_up(pool: Database) -> None:
    async with pool.transaction() as tx:
        webhook = await make(tx)
        await announce(tx)
        at = NOW
        for _ in range(TRIES_MAX):
            delivery = await taken(tx, at)
            noted = await webhooks.record_attempt(
                tx, delivery, WebhookResponse(status=500), now=at, chance=0
            )
            assert noted is not None
            assert await webhooks.take_due_deliveries(tx, now=at, limit=9) == []
            at = noted.not_before
        assert await webhooks.take_due_deliveries(tx, now=at + timedelta(days=9), limit=9) == []
        [logged] = await webhooks.list_deliveries(tx, webhook, limit=9)
    assert (logged.status, logged.tries, logged.last_status) == (
        DeliveryStatus.FAILED,
        TRIES_MAX,
        500,
    )


async def test_one_that_was_taken_in_is_not_sent_again(pool: Database) -> None:
    async with pool.transaction() as tx:
        await make(tx)
        await announce(tx)
        delivery = await taken(tx, NOW)
        noted = await webhooks.record_attempt(
            tx, delivery, WebhookResponse(status=204), now=NOW, chance=0
        )
        assert (
            await webhooks.record_attempt(
                tx, delivery, WebhookResponse(status=500), now=NOW, chance=0
            )
            is None
        )
        assert await webhooks.take_due_deliveries(tx, now=NOW + timedelta(days=9), limit=9) == []
    assert noted is not None
    assert (noted.status, noted.ended_at) == (DeliveryStatus.DELIVERED, NOW)


async def test_a_sender_that_died_is_followed_by_another_whose_word_counts(pool: Database) -> None:
    async with pool.transaction() as tx:
        await make(tx)
        await announce(tx)
        lost = await taken(tx, NOW)
        later = NOW + timedelta(seconds=60)
        second = await taken(tx, later)
        assert (
            await webhooks.record_attempt(
                tx, lost, WebhookResponse(error="late"), now=later, chance=0
            )
            is None
        )
        assert await webhooks.record_attempt(
            tx, second, WebhookResponse(status=200), now=later, chance=0
        )
    assert second.tries == 2


async def test_the_log_comes_in_pages_the_newest_first(pool: Database) -> None:
    async with pool.transaction() as tx:
        webhook = await make(tx)
        for number in range(5):
            await announce(tx, UUID(int=100 + number), NOW + timedelta(seconds=number // 2))
        first = await webhooks.list_deliveries(tx, webhook, limit=2)
        rest = await webhooks.list_deliveries(tx, webhook, before_id=first[-1].id, limit=9)
        with pytest.raises(NotFound):
            await webhooks.list_deliveries(tx, webhook, before_id=uuid4(), limit=9)
    assert len({each.id for each in first + rest}) == 5
    assert first[0].job_id == UUID(int=104)


async def test_a_reader_of_events_goes_on_where_it_stopped(pool: Database) -> None:
    async with pool.transaction() as tx:
        made = [
            await store.add_event(
                tx, NewJobEvent(TENANT, JOB, EventKind.PROGRESS, {"percent": each}), now=NOW
            )
            for each in range(4)
        ]
        await store.add_event(tx, NewJobEvent(TENANT, UUID(int=11), EventKind.STATUS, {}), now=NOW)
        assert await notifications.events_after(tx, TENANT, JOB) == made
        assert await notifications.events_after(tx, TENANT, JOB, after_id=made[1].id) == made[2:]
        assert await notifications.events_after(tx, OTHER, JOB) == []


async def test_the_number_of_a_removed_event_is_never_given_again(pool: Database) -> None:
    async with pool.transaction() as tx:
        first = await store.add_event(tx, NewJobEvent(TENANT, JOB, EventKind.STATUS, {}), now=NOW)
        assert await notifications.prune_events(tx, before=NOW, limit=9) == 0
        assert await notifications.prune_events(tx, before=NOW + timedelta(seconds=1), limit=9) == 1
        second = await store.add_event(tx, NewJobEvent(TENANT, JOB, EventKind.STATUS, {}), now=NOW)
    assert second.id > first.id


A_BATCH = JobBatch(UUID(int=50), TENANT, USER, UUID(int=51), 3, "key", "h" * 64, NOW)


async def test_the_same_key_is_the_same_batch(pool: Database) -> None:
    async with pool.transaction() as tx:
        assert await batches.create_batch(tx, A_BATCH) == (A_BATCH, True)
        assert await batches.create_batch(tx, replace(A_BATCH, id=uuid4())) == (A_BATCH, False)
        with pytest.raises(Conflict):
            await batches.create_batch(tx, replace(A_BATCH, id=uuid4(), request_hash="i" * 64))
        of_another = replace(A_BATCH, id=uuid4(), user_id=OTHER)
        assert await batches.create_batch(tx, of_another) == (of_another, True)
        for _ in range(2):
            keyless = replace(A_BATCH, id=uuid4(), idempotency_key=None)
            assert (await batches.create_batch(tx, keyless)).is_new


async def test_a_batch_is_cancelled_once_by_its_own_user(pool: Database) -> None:
    async with pool.transaction() as tx:
        await batches.create_batch(tx, A_BATCH)
        with pytest.raises(NotFound):
            await batches.mark_batch_cancelled(tx, TENANT, OTHER, A_BATCH.id, now=NOW)
        ended = await batches.mark_batch_cancelled(tx, TENANT, USER, A_BATCH.id, now=NOW)
        later = NOW + timedelta(days=1)
        assert await batches.mark_batch_cancelled(tx, TENANT, USER, A_BATCH.id, now=later) == ended
    assert ended.cancelled_at == NOW
