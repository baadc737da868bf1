"""Where a user's server is told how jobs ended, and what came of telling it."""

from datetime import datetime
from typing import Any
from uuid import UUID

from fastapi import status
from pydantic import Field

from comfyfleet.audit import service as audit
from comfyfleet.fetching.targets import URL_CHARACTERS_MAX, target_of
from comfyfleet.http.given import GivenNow, GivenPlane
from comfyfleet.http.problems import problems
from comfyfleet.http.public.auth import KeyHolder, Reader, Writer
from comfyfleet.http.public.routing import PAGE_USUAL, Answer, Body, Limit, Text, public_router
from comfyfleet.tenants.keys.model import Scope
from comfyfleet.webhooks import service as webhooks
from comfyfleet.webhooks.model import (
    Delivery,
    DeliveryStatus,
    Webhook,
    WebhookEvent,
)

router = public_router("webhooks")


class NewWebhook(Body):
    url: Text = Field(
        max_length=URL_CHARACTERS_MAX,
        description="http or https, at a public address.",
        examples=["https://shop.example/hooks/comfyfleet"],
    )
    events: list[WebhookEvent] = Field(
        default=list(WebhookEvent), min_length=1, max_length=10, description="All, unless named."
    )


class WebhookAnswer(Answer):
    id: UUID
    url: str
    events: list[WebhookEvent]
    is_active: bool = Field(
        description="false: nobody took anything there for days; switch it on with …/activate."
    )
    created_at: datetime


class MadeWebhook(WebhookAnswer):
    secret: str = Field(
        description="Shown here and by …/secret only. Every delivery is signed with it (HMAC-SHA256).",
        examples=["whsec_5f…"],
    )


class Webhooks(Answer):
    webhooks: list[WebhookAnswer]


class DeliveryAnswer(Answer):
    id: UUID
    job_id: UUID
    event: WebhookEvent
    status: DeliveryStatus
    tries: int
    last_status: int | None = Field(description="What the server answered last.", examples=[200])
    last_error: str | None = Field(description="Why no answer came.")
    next_try_at: datetime | None = Field(description="null: it has ended.")
    payload: dict[str, Any]
    created_at: datetime
    ended_at: datetime | None


class Deliveries(Answer):
    deliveries: list[DeliveryAnswer] = Field(description="The newest first.")
    next: UUID | None = Field(description="Ask on with before=next; null: that was all.")


@router.post("/webhooks", status_code=status.HTTP_201_CREATED)
async def create(body: NewWebhook, plane: GivenPlane, now: GivenNow, caller: Writer) -> MadeWebhook:
    """Told of every job of this user that ends from now on. Its address must be a public one."""
    await plane.outward.refuse_private(target_of(body.url))
    async with plane.pools[caller.tenant.pool].begin() as tx:
        made = await webhooks.create(
            tx,
            webhook_id=plane.sides.new_id(),
            tenant_id=caller.tenant.id,
            user_id=caller.user_id,
            url=body.url,
            events=body.events,
            now=now,
        )
    return MadeWebhook(**_answer(made).model_dump(), secret=made.secret_with(plane.webhook_key))


@router.get("/webhooks")
async def list_webhooks(plane: GivenPlane, caller: Reader) -> Webhooks:
    async with plane.pools[caller.tenant.pool].look() as tx:
        found = await webhooks.all_of(tx, caller.tenant.id, caller.user_id)
    return Webhooks(webhooks=[_answer(each) for each in found])


@router.post("/webhooks/{webhook_id}/activate", responses=problems(404))
async def activate(
    webhook_id: UUID, plane: GivenPlane, now: GivenNow, caller: Writer
) -> WebhookAnswer:
    """One that was switched off, as nobody took anything there for days. It is told of every job that
    ends from now on; what it has missed is in its log."""
    async with plane.pools[caller.tenant.pool].begin() as tx:
        webhook, was_off = await webhooks.switch_on(
            tx, caller.tenant.id, caller.user_id, webhook_id, now=now
        )
    if was_off:
        async with plane.central.begin() as tx:
            await audit.record(
                tx,
                actor=caller.tenant.subject,
                action="switch_on",
                subject=f"webhook:{webhook.id}",
                now=now,
                tenant_id=caller.tenant.id,
            )
    return _answer(webhook)


@router.post("/webhooks/{webhook_id}/secret", responses=problems(404))
async def show_secret(
    webhook_id: UUID, plane: GivenPlane, now: GivenNow, caller: KeyHolder
) -> MadeWebhook:
    """The secret that its deliveries are signed with. It is another one after the operator has
    replaced the key from which secrets are made. Needs the scopes keys and write: a secret outlives
    the key that has read it."""
    caller.require(Scope.WRITE)
    async with plane.pools[caller.tenant.pool].look() as tx:
        webhook = await webhooks.get(tx, caller.tenant.id, caller.user_id, webhook_id)
    async with plane.central.begin() as tx:
        await audit.record(
            tx,
            actor=caller.tenant.subject,
            action="show_webhook_secret",
            subject=f"webhook:{webhook.id}",
            now=now,
            tenant_id=caller.tenant.id,
            details={"user_id": str(caller.user_id), "by_key": str(caller.key.id)},
        )
    return MadeWebhook(
        **_answer(webhook).model_dump(), secret=webhook.secret_with(plane.webhook_key)
    )


@router.delete(
    "/webhooks/{webhook_id}", status_code=status.HTTP_204_NO_CONTENT, responses=problems(404)
)
async def remove(webhook_id: UUID, plane: GivenPlane, caller: Writer) -> None:
    """With its log, and all that it was still to be told."""
    async with plane.pools[caller.tenant.pool].begin() as tx:
        await webhooks.remove(tx, caller.tenant.id, caller.user_id, webhook_id)


@router.get("/webhooks/{webhook_id}/deliveries", responses=problems(404))
async def deliveries(
    webhook_id: UUID,
    plane: GivenPlane,
    caller: Reader,
    before: UUID | None = None,
    limit: Limit = PAGE_USUAL,
) -> Deliveries:
    """What was sent, how often, and what the server said."""
    async with plane.pools[caller.tenant.pool].look() as tx:
        webhook = await webhooks.get(tx, caller.tenant.id, caller.user_id, webhook_id)
        found = await webhooks.log(tx, webhook, before_id=before, limit=limit + 1)
    page = found[:limit]
    return Deliveries(
        deliveries=[_delivery(each) for each in page],
        next=page[-1].id if len(found) > limit else None,
    )


def _answer(webhook: Webhook) -> WebhookAnswer:
    return WebhookAnswer(
        id=webhook.id,
        url=webhook.url,
        events=sorted(webhook.events),
        is_active=webhook.is_active,
        created_at=webhook.created_at,
    )


def _delivery(each: Delivery) -> DeliveryAnswer:
    is_pending = each.status == DeliveryStatus.PENDING
    return DeliveryAnswer(
        id=each.id,
        job_id=each.job_id,
        event=each.event,
        status=each.status,
        tries=each.tries,
        last_status=each.last_status,
        last_error=each.last_error,
        next_try_at=each.not_before if is_pending else None,
        payload=dict(each.payload),
        created_at=each.created_at,
        ended_at=each.ended_at,
    )
