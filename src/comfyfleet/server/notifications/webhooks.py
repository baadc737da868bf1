"""Webhooks: registration, deliveries stored in the transaction of their event, and signed requests
to public addresses."""

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from comfyfleet.api.webhooks import HEADER, sign
from comfyfleet.errors import Conflict, FleetError, InvalidInput, LimitExceeded, NotFound
from comfyfleet.server.db import Tx
from comfyfleet.server.notifications import store
from comfyfleet.server.notifications.model import (
    WEBHOOKS_PER_USER_MAX,
    DeliveryStatus,
    EndOfJob,
    RegisteredWebhook,
    WebhookDelivery,
    WebhookResponse,
    check_events,
    check_url,
    next_attempt_at,
)
from comfyfleet.transport.fetch import PublicHttpClient
from comfyfleet.transport.ssrf import (
    HostPort,
    address_spelled,
    is_public,
    parse_public_url,
    parse_webhook_url,
)

# How long a process reserves a delivery, in seconds. Sending never takes that long, so no other
# process sends the same delivery in the meantime.
TAKEN_SECONDS = 60
LOG_PAGE_MAX = 200
# Longer than deliveries are retried, so that a webhook isn't disabled because its server was down
# over a weekend.
DEAD_AFTER = timedelta(days=4)
ERROR_CHARACTERS_MAX = 500
ROWS_AT_ONCE_MAX = 500


async def create_webhook(
    tx: Tx,
    *,
    webhook_id: UUID,
    tenant_id: UUID,
    user_id: UUID,
    url: str,
    events: Collection[str],
    private_hosts: Collection[HostPort] = (),
    now: datetime,
) -> RegisteredWebhook:
    """Registers a webhook. `private_hosts` are the private hosts that the operator allows webhooks
    to call."""
    await require_room(tx, tenant_id, user_id)
    checked = check_events(events)
    webhook = RegisteredWebhook(
        webhook_id, tenant_id, user_id, check_url(url, private_hosts), "", checked, True, now
    )
    await store.add_webhook(tx, webhook)
    return webhook


async def require_room(tx: Tx, tenant_id: UUID, user_id: UUID) -> None:
    if await store.count_webhooks(tx, tenant_id, user_id) >= WEBHOOKS_PER_USER_MAX:
        raise LimitExceeded(f"a user can have at most {WEBHOOKS_PER_USER_MAX} webhooks")


async def prepare_for_jobs(
    tx: Tx, tenant_id: UUID, user_id: UUID, url: str, *, now: datetime
) -> str:
    """Checks an address given by a job, and ensures that deliveries to it can be signed.

    They belong to a webhook of the user that has no address, so that the user needs only one
    secret."""
    checked = parse_public_url(url)
    address = address_spelled(checked.host)
    if address is not None and not is_public(address):
        raise InvalidInput("the address must be public", field="webhook_url")
    await store.add_webhook_if_new(tx, webhook_for_jobs(tenant_id, user_id, now=now))
    return checked.url


def webhook_for_jobs(tenant_id: UUID, user_id: UUID, *, now: datetime) -> RegisteredWebhook:
    webhook_id = uuid5(user_id, f"{tenant_id}/webhook_url")
    return RegisteredWebhook(webhook_id, tenant_id, user_id, "", "", frozenset(), True, now)


async def list_webhooks(tx: Tx, tenant_id: UUID, user_id: UUID) -> list[RegisteredWebhook]:
    stored = await store.webhooks_of_user(tx, tenant_id, user_id)
    return [webhook for webhook in stored if not webhook.is_for_jobs]


async def get_webhook(
    tx: Tx, tenant_id: UUID, user_id: UUID, webhook_id: UUID
) -> RegisteredWebhook:
    webhook = await store.get_webhook(tx, tenant_id, user_id, webhook_id)
    if webhook is None:
        raise NotFound(f"webhook {webhook_id} was not found")
    return webhook


async def delete_webhook(tx: Tx, tenant_id: UUID, user_id: UUID, webhook_id: UUID) -> None:
    """Deletes a webhook with its pending deliveries and its log."""
    if not await store.delete_webhook(tx, tenant_id, user_id, webhook_id):
        raise NotFound(f"webhook {webhook_id} was not found")


async def enqueue(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    end: EndOfJob,
    *,
    new_id: Callable[[], UUID],
    now: datetime,
) -> int:
    """Adds one delivery for each webhook that subscribes to the event, in the transaction that ends
    the job. Repeating it adds nothing."""
    return await enqueue_all(tx, tenant_id, user_id, [end], new_id=new_id, now=now)


async def enqueue_all(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    ends: Sequence[EndOfJob],
    *,
    new_id: Callable[[], UUID],
    now: datetime,
) -> int:
    """Adds deliveries like `enqueue`, for several events of a user. Returns how many deliveries are
    new."""
    active = [
        webhook
        for webhook in await store.webhooks_of_user(tx, tenant_id, user_id)
        if webhook.is_active
    ]
    rows = [
        _pending(webhook, end, new_id(), now)
        for end in ends
        for webhook in active
        if end.is_for(webhook)
    ]
    parts = (rows[at : at + ROWS_AT_ONCE_MAX] for at in range(0, len(rows), ROWS_AT_ONCE_MAX))
    return sum([await store.add_deliveries(tx, part) for part in parts])


async def is_any_delivery_due(tx: Tx, now: datetime) -> bool:
    """Checks whether any delivery is due. The check must be cheap, because it runs every few
    seconds and usually finds nothing."""
    return await store.is_any_delivery_due(tx, now)


async def take_due_deliveries(
    tx: Tx, *, now: datetime, limit: int
) -> list[tuple[WebhookDelivery, RegisteredWebhook]]:
    until = now + timedelta(seconds=TAKEN_SECONDS)
    return await store.take_due_deliveries(tx, now=now, until=until, limit=limit)


async def record_attempt(
    tx: Tx, delivery: WebhookDelivery, answer: WebhookResponse, *, now: datetime, chance: float
) -> WebhookDelivery | None:
    """Records the result of an attempt. Returns None if a later attempt has started, whose result
    counts instead."""
    result = {
        "last_status": answer.status,
        "last_error": answer.error[:ERROR_CHARACTERS_MAX] if answer.error else None,
    }
    again = None if answer.is_success else next_attempt_at(delivery.tries, now, chance=chance)
    if again is not None:
        return await store.record_attempt(tx, delivery, {**result, "not_before": again})
    end = DeliveryStatus.DELIVERED if answer.is_success else DeliveryStatus.FAILED
    return await store.record_attempt(tx, delivery, {**result, "status": end, "ended_at": now})


async def disable_if_dead(tx: Tx, webhook: RegisteredWebhook, *, now: datetime) -> bool:
    """Disables a webhook whose deliveries have failed for days. Returns whether it did."""
    if webhook.is_for_jobs:
        return False  # one of its addresses may fail while others work
    since = await store.failing_since(tx, webhook.id)
    if since is None or now - since < DEAD_AFTER:
        return False
    return await store.disable_webhook(tx, webhook.id, now=now)


async def enable(
    tx: Tx, tenant_id: UUID, user_id: UUID, webhook_id: UUID, *, now: datetime
) -> tuple[RegisteredWebhook, bool]:
    """Enables a webhook and forgets its failures. Also returns whether it was disabled."""
    on = await store.enable_webhook(tx, tenant_id, user_id, webhook_id, now=now)
    return (on, True) if on else (await get_webhook(tx, tenant_id, user_id, webhook_id), False)


async def list_deliveries(
    tx: Tx, webhook: RegisteredWebhook, *, before_id: UUID | None = None, limit: int
) -> list[WebhookDelivery]:
    """Returns a page of deliveries, newest first. `before_id` is the last id of the previous
    page."""
    before = await store.get_delivery(tx, webhook.id, before_id) if before_id else None
    if before_id and before is None:
        raise NotFound(f"delivery {before_id} was not found")
    return await store.list_deliveries(
        tx, webhook.id, before=before, limit=min(limit, LOG_PAGE_MAX)
    )


async def redeliver(
    tx: Tx, webhook: RegisteredWebhook, delivery_id: UUID, *, now: datetime
) -> WebhookDelivery:
    """Sends a delivery again, with the same id, so that its receiver can recognize it."""
    if await store.get_delivery(tx, webhook.id, delivery_id) is None:
        raise NotFound(f"delivery {delivery_id} was not found")
    if not webhook.is_active:
        raise Conflict("the webhook is disabled; enable it first")
    delivery = await store.reset_delivery(tx, webhook.id, delivery_id, now=now)
    if delivery is None:
        raise NotFound(f"delivery {delivery_id} was not found")
    return delivery


async def prune_deliveries(tx: Tx, *, before: datetime, limit: int) -> int:
    """Deletes old deliveries that have ended. Returns their number."""
    return await store.prune_deliveries(tx, before=before, limit=limit)


def _pending(
    webhook: RegisteredWebhook, end: EndOfJob, delivery_id: UUID, now: datetime
) -> dict[str, Any]:
    return {
        "id": delivery_id,
        "tenant_id": webhook.tenant_id,
        "webhook_id": webhook.id,
        "job_id": end.job_id,
        "event": end.event,
        "payload": dict(end.payload),
        "status": DeliveryStatus.PENDING,
        "tries": 0,
        "not_before": now,
        "created_at": now,
        "url": end.url if webhook.is_for_jobs else None,
    }


DELIVERY_SECONDS = 20.0
DELIVERY_ID = "X-Comfyfleet-Delivery"


async def send_delivery(
    outward: PublicHttpClient,
    webhook: RegisteredWebhook,
    delivery: WebhookDelivery,
    *,
    key: str,
    now: datetime,
    within_seconds: float = DELIVERY_SECONDS,
) -> WebhookResponse:
    """Sends a signed delivery. Errors of the customer's server are returned, not raised. A redirect
    counts as a failure.

    `key` is the installation's key, from which webhook secrets are derived. An address given by a
    job must always be public."""
    listed = outward.private_hosts if delivery.url is None else frozenset[HostPort]()
    message = SignedMessage(
        delivery.id, body_of(delivery), webhook.secret_with(key), webhook.tenant_id
    )
    url = delivery.url or webhook.url
    return await _send(outward, url, message, listed, now=now, within_seconds=within_seconds)


TEST_EVENT, TEST_SECONDS = "test", 10.0


async def send_test(
    outward: PublicHttpClient, webhook: RegisteredWebhook, *, key: str, test_id: UUID, now: datetime
) -> WebhookResponse:
    """Sends a signed test message once, and returns the response. Stores nothing."""
    content = {
        "id": str(test_id),
        "type": TEST_EVENT,
        "created_at": now.isoformat(),
        "data": {"webhook_id": str(webhook.id)},
    }
    message = SignedMessage(test_id, _as_body(content), webhook.secret_with(key), webhook.tenant_id)
    return await _send(
        outward,
        webhook.url,
        message,
        outward.private_hosts,
        now=now,
        within_seconds=TEST_SECONDS,
    )


class SignedMessage(NamedTuple):
    id: UUID
    body: bytes
    secret: str
    tenant_id: UUID


async def _send(
    outward: PublicHttpClient,
    url: str,
    message: SignedMessage,
    listed: Collection[HostPort],
    *,
    now: datetime,
    within_seconds: float,
) -> WebhookResponse:
    headers = {
        "Content-Type": "application/json",
        DELIVERY_ID: str(message.id),
        HEADER: sign(message.secret, message.body, timestamp=int(now.timestamp())),
    }
    try:
        target = parse_webhook_url(url, listed, ports=outward.ports)
        async with (
            asyncio.timeout(within_seconds),
            outward.request(
                "POST",
                target,
                headers=headers,
                content=message.body,
                listed=listed,
                who=message.tenant_id,
            ) as response,
        ):
            return WebhookResponse(status=response.status_code)
    except TimeoutError:
        return WebhookResponse(error=f"no answer within {within_seconds:g} seconds")
    except FleetError as error:
        return WebhookResponse(error=error.message)


def body_of(delivery: WebhookDelivery) -> bytes:
    message = {
        "id": str(delivery.id),
        "type": delivery.event,
        "created_at": delivery.created_at.isoformat(),
        "data": dict(delivery.payload),
    }
    return _as_body(message)


def _as_body(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), sort_keys=True).encode()
