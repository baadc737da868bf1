"""Webhooks: set up by a user, announced to within the job's own transaction, delivered by a sweep."""

from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.kernel.errors import LimitExceeded, NotFound
from comfyfleet.webhooks import store
from comfyfleet.webhooks.decide import next_try
from comfyfleet.webhooks.model import (
    WEBHOOKS_PER_USER_MAX,
    Answer,
    Delivery,
    DeliveryStatus,
    Webhook,
    WebhookEvent,
    check_events,
    check_url,
)

# Longer than a delivery may take, so that nobody else takes it up meanwhile.
TAKEN_SECONDS = 60
LOG_PAGE_MAX = 200
# Longer than a delivery is tried for: a server that was away over a weekend is called again.
DEAD_AFTER = timedelta(days=4)
ERROR_CHARACTERS_MAX = 500


async def create(
    tx: Tx,
    *,
    webhook_id: UUID,
    tenant_id: UUID,
    user_id: UUID,
    url: str,
    events: Collection[str],
    now: datetime,
) -> Webhook:
    if await store.count(tx, tenant_id, user_id) >= WEBHOOKS_PER_USER_MAX:
        raise LimitExceeded(f"a user has at most {WEBHOOKS_PER_USER_MAX} webhooks")
    checked = check_events(events)
    webhook = Webhook(webhook_id, tenant_id, user_id, check_url(url), "", checked, True, now)
    await store.add(tx, webhook)
    return webhook


async def all_of(tx: Tx, tenant_id: UUID, user_id: UUID) -> list[Webhook]:
    return await store.of_user(tx, tenant_id, user_id)


async def get(tx: Tx, tenant_id: UUID, user_id: UUID, webhook_id: UUID) -> Webhook:
    found = await store.get(tx, tenant_id, user_id, webhook_id)
    if found is None:
        raise NotFound(f"there is no webhook {webhook_id}")
    return found


async def remove(tx: Tx, tenant_id: UUID, user_id: UUID, webhook_id: UUID) -> None:
    """With what was still to be delivered, and its log."""
    if not await store.remove(tx, tenant_id, user_id, webhook_id):
        raise NotFound(f"there is no webhook {webhook_id}")


async def announce(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    job_id: UUID,
    event: WebhookEvent,
    payload: Mapping[str, Any],
    *,
    new_id: Callable[[], UUID],
    now: datetime,
) -> int:
    """In the transaction that ends the job: once for each webhook that wants it, however often told."""
    wanted = [
        each
        for each in await store.of_user(tx, tenant_id, user_id)
        if each.is_active and event in each.events
    ]
    rows = [_pending(each, job_id, event, payload, new_id(), now) for each in wanted]
    return await store.add_deliveries(tx, rows) if rows else 0


async def is_any_due(tx: Tx, now: datetime) -> bool:
    """Asked every few seconds, for nothing mostly: what takes them is much dearer."""
    return await store.is_any_due(tx, now)


async def take_due(tx: Tx, *, now: datetime, limit: int) -> list[tuple[Delivery, Webhook]]:
    until = now + timedelta(seconds=TAKEN_SECONDS)
    return await store.take_due(tx, now=now, until=until, limit=limit)


async def note(
    tx: Tx, delivery: Delivery, answer: Answer, *, now: datetime, chance: float
) -> Delivery | None:
    """None: another try has begun since, and its word counts."""
    said = {
        "last_status": answer.status,
        "last_error": answer.error[:ERROR_CHARACTERS_MAX] if answer.error else None,
    }
    again = None if answer.is_taken else next_try(delivery.tries, now, chance=chance)
    if again is not None:
        return await store.note(tx, delivery, {**said, "not_before": again})
    end = DeliveryStatus.DELIVERED if answer.is_taken else DeliveryStatus.FAILED
    return await store.note(tx, delivery, {**said, "status": end, "ended_at": now})


async def switch_off_if_dead(tx: Tx, webhook: Webhook, *, now: datetime) -> bool:
    """Whether nobody has taken anything there for days: then nothing more is sent until asked for."""
    since = await store.in_vain_since(tx, webhook.id)
    if since is None or now - since < DEAD_AFTER:
        return False
    return await store.switch_off(tx, webhook.id, now=now)


async def switch_on(
    tx: Tx, tenant_id: UUID, user_id: UUID, webhook_id: UUID, *, now: datetime
) -> tuple[Webhook, bool]:
    """And whether it was off. It is told of what ends from now on, and its failures are forgotten."""
    on = await store.switch_on(tx, tenant_id, user_id, webhook_id, now=now)
    return (on, True) if on else (await get(tx, tenant_id, user_id, webhook_id), False)


async def log(
    tx: Tx, webhook: Webhook, *, before_id: UUID | None = None, limit: int
) -> list[Delivery]:
    """The newest first; go on with `before_id` = the last one's id."""
    before = await store.delivery(tx, webhook.id, before_id) if before_id else None
    if before_id and before is None:
        raise NotFound(f"there is no delivery {before_id}")
    return await store.log(tx, webhook.id, before=before, limit=min(limit, LOG_PAGE_MAX))


async def prune(tx: Tx, *, before: datetime, limit: int) -> int:
    """What ended before then goes out of the log; how many went."""
    return await store.prune(tx, before=before, limit=limit)


def _pending(
    webhook: Webhook,
    job_id: UUID,
    event: WebhookEvent,
    payload: Mapping[str, Any],
    delivery_id: UUID,
    now: datetime,
) -> dict[str, Any]:
    return {
        "id": delivery_id,
        "tenant_id": webhook.tenant_id,
        "webhook_id": webhook.id,
        "job_id": job_id,
        "event": event,
        "payload": dict(payload),
        "status": DeliveryStatus.PENDING,
        "tries": 0,
        "not_before": now,
        "created_at": now,
    }
