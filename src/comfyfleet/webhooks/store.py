"""The webhooks' only SQL."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Row,
    and_,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from comfyfleet.db import Tx
from comfyfleet.db.dialect import insert_if_new, is_one_of, locked
from comfyfleet.db.statement import Statement
from comfyfleet.db.tenant import webhook_deliveries as deliveries
from comfyfleet.db.tenant import webhooks
from comfyfleet.webhooks.model import Delivery, DeliveryStatus, Webhook, WebhookEvent

SWITCHED_OFF = "the webhook was switched off"


async def add(tx: Tx, webhook: Webhook) -> None:
    row = {**asdict(webhook), "events": sorted(webhook.events)}
    await tx.execute(insert(webhooks).values(row))


async def of_user(tx: Tx, tenant_id: UUID, user_id: UUID) -> list[Webhook]:
    query = (
        select(webhooks)
        .where(webhooks.c.tenant_id == tenant_id, webhooks.c.user_id == user_id)
        .order_by(webhooks.c.created_at, webhooks.c.id)
    )
    return [_webhook(row) for row in await tx.execute(query)]


async def count(tx: Tx, tenant_id: UUID, user_id: UUID) -> int:
    query = select(func.count()).where(
        webhooks.c.tenant_id == tenant_id, webhooks.c.user_id == user_id
    )
    return await tx.scalar(query) or 0


async def get(tx: Tx, tenant_id: UUID, user_id: UUID, webhook_id: UUID) -> Webhook | None:
    query = select(webhooks).where(_is(tenant_id, user_id, webhook_id))
    found = (await tx.execute(query)).first()
    return _webhook(found) if found else None


async def remove(tx: Tx, tenant_id: UUID, user_id: UUID, webhook_id: UUID) -> bool:
    statement = delete(webhooks).where(_is(tenant_id, user_id, webhook_id))
    return (await tx.execute(statement.returning(webhooks.c.id))).first() is not None


async def add_deliveries(tx: Tx, rows: Sequence[Mapping[str, Any]]) -> int:
    statement = insert_if_new(tx, deliveries, rows).returning(deliveries.c.id)
    return len((await tx.execute(statement)).all())


_ANY_DUE = Statement(
    lambda _: (
        select(deliveries.c.id)
        .where(
            deliveries.c.status == DeliveryStatus.PENDING,
            deliveries.c.not_before <= bindparam("by_now"),
        )
        .limit(1)
    )
)


async def is_any_due(tx: Tx, now: datetime) -> bool:
    return await _ANY_DUE.first(tx, {"by_now": now}) is not None


async def take_due(
    tx: Tx, *, now: datetime, until: datetime, limit: int
) -> list[tuple[Delivery, Webhook]]:
    """Counted as tried and put off until then: whoever dies while sending has only lost time."""
    # No join: it would lock the webhook's row, too, and others would skip all that is due to it.
    active = select(webhooks.c.id).where(webhooks.c.is_active.is_(True))
    place = func.row_number().over(
        partition_by=deliveries.c.tenant_id, order_by=deliveries.c.not_before
    )
    due = (
        select(deliveries.c.id, deliveries.c.not_before, place.label("place"))
        .where(
            deliveries.c.status == DeliveryStatus.PENDING,
            deliveries.c.not_before <= now,
            deliveries.c.webhook_id.in_(active),
        )
        .subquery()
    )
    # By turns, tenant by tenant: one with thousands that are due holds up no other.
    turns = (
        select(deliveries.c.id)
        .join(due, due.c.id == deliveries.c.id)
        # Looked at again under the lock: another may have taken it meanwhile.
        .where(deliveries.c.status == DeliveryStatus.PENDING, deliveries.c.not_before <= now)
        .order_by(due.c.place, due.c.not_before)
        .limit(limit)
    )
    free = locked(tx, turns, skip_locked=True, of=deliveries)
    ids = [row.id for row in await tx.execute(free)]
    taken = await tx.execute(
        update(deliveries)
        .where(is_one_of(tx, deliveries.c.id, ids))
        .values(tries=deliveries.c.tries + 1, not_before=until)
        .returning(deliveries)
    )
    found = [_delivery(row) for row in taken]
    wanted = {each.webhook_id for each in found}
    owners = await tx.execute(select(webhooks).where(is_one_of(tx, webhooks.c.id, wanted)))
    by_id = {row.id: _webhook(row) for row in owners}
    return [(each, by_id[each.webhook_id]) for each in found]


async def note(tx: Tx, delivery: Delivery, values: Mapping[str, Any]) -> Delivery | None:
    """None: another try has begun since, or it has ended."""
    statement = (
        update(deliveries)
        .where(
            deliveries.c.id == delivery.id,
            deliveries.c.status == DeliveryStatus.PENDING,
            deliveries.c.tries == delivery.tries,
        )
        .values(dict(values))
        .returning(deliveries)
    )
    found = (await tx.execute(statement)).first()
    return _delivery(found) if found else None


async def switch_on(
    tx: Tx, tenant_id: UUID, user_id: UUID, webhook_id: UUID, *, now: datetime
) -> Webhook | None:
    """None: it is on, or not there."""
    statement = update(webhooks).where(
        _is(tenant_id, user_id, webhook_id), webhooks.c.is_active.is_(False)
    )
    on = await tx.execute(statement.values(is_active=True, on_again_at=now).returning(webhooks))
    found = on.first()
    return _webhook(found) if found else None


async def in_vain_since(tx: Tx, webhook_id: UUID) -> datetime | None:
    """When the first of those was made that failed for good, after the last that was taken, and
    since it was switched on again."""
    of_it = deliveries.c.webhook_id == webhook_id
    taken = select(func.max(deliveries.c.created_at)).where(
        of_it, deliveries.c.status == DeliveryStatus.DELIVERED
    )
    again = select(webhooks.c.on_again_at).where(webhooks.c.id == webhook_id)
    query = select(func.min(deliveries.c.created_at)).where(
        of_it, deliveries.c.status == DeliveryStatus.FAILED
    )
    for since in (await tx.scalar(taken), await tx.scalar(again)):
        if since is not None:
            query = query.where(deliveries.c.created_at > since)
    found: datetime | None = await tx.scalar(query)
    return found


async def switch_off(tx: Tx, webhook_id: UUID, *, now: datetime) -> bool:
    """Whether it was on. What still waited has failed."""
    statement = update(webhooks).where(webhooks.c.id == webhook_id, webhooks.c.is_active.is_(True))
    off = await tx.execute(statement.values(is_active=False).returning(webhooks.c.id))
    if off.first() is None:
        return False
    await tx.execute(
        update(deliveries)
        .where(deliveries.c.webhook_id == webhook_id, deliveries.c.status == DeliveryStatus.PENDING)
        .values(status=DeliveryStatus.FAILED, ended_at=now, last_error=SWITCHED_OFF)
    )
    return True


async def log(tx: Tx, webhook_id: UUID, *, before: Delivery | None, limit: int) -> list[Delivery]:
    at = deliveries.c.created_at
    query = (
        select(deliveries)
        .where(deliveries.c.webhook_id == webhook_id)
        .order_by(at.desc(), deliveries.c.id.desc())
        .limit(limit)
    )
    if before is not None:
        is_same = and_(at == before.created_at, deliveries.c.id < before.id)
        query = query.where(or_(at < before.created_at, is_same))
    return [_delivery(row) for row in await tx.execute(query)]


async def prune(tx: Tx, *, before: datetime, limit: int) -> int:
    old = select(deliveries.c.id).where(deliveries.c.ended_at < before).limit(limit)
    gone = await tx.execute(
        delete(deliveries).where(deliveries.c.id.in_(old)).returning(deliveries.c.id)
    )
    return len(gone.all())


async def delivery(tx: Tx, webhook_id: UUID, delivery_id: UUID) -> Delivery | None:
    query = select(deliveries).where(
        deliveries.c.webhook_id == webhook_id, deliveries.c.id == delivery_id
    )
    found = (await tx.execute(query)).first()
    return _delivery(found) if found else None


def _is(tenant_id: UUID, user_id: UUID, webhook_id: UUID) -> ColumnElement[bool]:
    return and_(
        webhooks.c.tenant_id == tenant_id,
        webhooks.c.user_id == user_id,
        webhooks.c.id == webhook_id,
    )


def _webhook(row: Row[Any]) -> Webhook:
    events = frozenset(WebhookEvent(each) for each in row.events)
    return Webhook(**{**row._mapping, "events": events})


def _delivery(row: Row[Any]) -> Delivery:
    event, status = WebhookEvent(row.event), DeliveryStatus(row.status)
    return Delivery(**{**row._mapping, "event": event, "status": status})
