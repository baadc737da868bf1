"""All SQL for job events, webhooks and the audit log."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple
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

from comfyfleet.api.values import is_storable
from comfyfleet.server.db import Tx
from comfyfleet.server.db.central_tables import audit_log
from comfyfleet.server.db.dialect import for_update, insert_if_new, is_one_of
from comfyfleet.server.db.driver import PreparedStatement, StatementCall
from comfyfleet.server.db.tenant_tables import job_events, outbox, webhooks
from comfyfleet.server.db.tenant_tables import webhook_deliveries as deliveries
from comfyfleet.server.notifications.model import (
    AuditEntry,
    DeliveryStatus,
    EventKind,
    NewJobEvent,
    RegisteredWebhook,
    StoredJobEvent,
    WebhookDelivery,
    WebhookEvent,
)

COLUMNS = ("tenant_id", "job_id", "kind", "data", "created_at")
_ADD_EVENT = PreparedStatement(
    lambda tx: insert(job_events).returning(job_events.c.id), columns=COLUMNS
)


async def add_event(tx: Tx, new: NewJobEvent, *, now: datetime) -> StoredJobEvent:
    row = {**new._asdict(), "created_at": now}
    return StoredJobEvent(id=(await _ADD_EVENT.rows(tx, row))[0]["id"], **row)


async def add_events(tx: Tx, new: Sequence[NewJobEvent], *, now: datetime) -> None:
    """Adds events in the given order."""
    if len(new) == 1:
        await add_event(tx, new[0], now=now)
    elif new:
        await tx.execute(
            insert(job_events), [{**event._asdict(), "created_at": now} for event in new]
        )


def add_events_call(new: Sequence[NewJobEvent], *, now: datetime) -> StatementCall:
    """Builds a single INSERT for several events, so that their ids are in order."""
    values = {
        f"{name}_{place}": value
        for place, event in enumerate(new)
        for name, value in {**event._asdict(), "created_at": now}.items()
    }
    return _add_events_statement(len(new)), values


@cache
def _add_events_statement(count: int) -> PreparedStatement:
    rows: list[dict[str, Any]] = [
        {name: bindparam(f"{name}_{place}", type_=job_events.c[name].type) for name in COLUMNS}
        for place in range(count)
    ]
    return PreparedStatement(lambda tx: insert(job_events).values(rows))


async def events_after(
    tx: Tx, tenant_id: UUID, job_id: UUID, *, after_id: int, limit: int
) -> list[StoredJobEvent]:
    query = (
        select(job_events)
        .where(
            job_events.c.tenant_id == tenant_id,
            job_events.c.job_id == job_id,
            job_events.c.id > after_id,
        )
        .order_by(job_events.c.id)
        .limit(limit)
    )
    return [_event(row) for row in await tx.execute(query)]


async def prune_events(tx: Tx, *, before: datetime, limit: int) -> int:
    old = select(job_events.c.id).where(job_events.c.created_at < before).limit(limit)
    deleted = await tx.execute(
        delete(job_events).where(job_events.c.id.in_(old)).returning(job_events.c.id)
    )
    return len(deleted.all())


def _event(row: Row[Any]) -> StoredJobEvent:
    return StoredJobEvent(**{**row._mapping, "kind": EventKind(row.kind)})


SWITCHED_OFF = "the webhook was disabled"


async def add_webhook(tx: Tx, webhook: RegisteredWebhook) -> None:
    row = {**asdict(webhook), "events": sorted(webhook.events)}
    await tx.execute(insert(webhooks).values(row))


async def add_webhook_if_new(tx: Tx, webhook: RegisteredWebhook) -> None:
    row = {**asdict(webhook), "events": sorted(webhook.events)}
    await tx.execute(insert_if_new(tx, webhooks, [row]))


async def webhooks_of_user(tx: Tx, tenant_id: UUID, user_id: UUID) -> list[RegisteredWebhook]:
    query = (
        select(webhooks)
        .where(webhooks.c.tenant_id == tenant_id, webhooks.c.user_id == user_id)
        .order_by(webhooks.c.created_at, webhooks.c.id)
    )
    return [_webhook(row) for row in await tx.execute(query)]


async def count_webhooks(tx: Tx, tenant_id: UUID, user_id: UUID) -> int:
    query = select(func.count()).where(
        webhooks.c.tenant_id == tenant_id, webhooks.c.user_id == user_id, webhooks.c.url != ""
    )
    return await tx.scalar(query) or 0


async def get_webhook(
    tx: Tx, tenant_id: UUID, user_id: UUID, webhook_id: UUID
) -> RegisteredWebhook | None:
    query = select(webhooks).where(_is_webhook(tenant_id, user_id, webhook_id))
    row = (await tx.execute(query)).first()
    return _webhook(row) if row else None


async def delete_webhook(tx: Tx, tenant_id: UUID, user_id: UUID, webhook_id: UUID) -> bool:
    statement = delete(webhooks).where(_is_webhook(tenant_id, user_id, webhook_id))
    return (await tx.execute(statement.returning(webhooks.c.id))).first() is not None


async def add_deliveries(tx: Tx, rows: Sequence[Mapping[str, Any]]) -> int:
    statement = insert_if_new(tx, deliveries, rows).returning(deliveries.c.id)
    return len((await tx.execute(statement)).all())


_ANY_DUE = PreparedStatement(
    lambda _: (
        select(deliveries.c.id)
        .where(
            deliveries.c.status == DeliveryStatus.PENDING,
            deliveries.c.not_before <= bindparam("by_now"),
        )
        .limit(1)
    )
)


async def is_any_delivery_due(tx: Tx, now: datetime) -> bool:
    return await _ANY_DUE.first(tx, {"by_now": now}) is not None


async def take_due_deliveries(
    tx: Tx, *, now: datetime, until: datetime, limit: int
) -> list[tuple[WebhookDelivery, RegisteredWebhook]]:
    """Takes due deliveries: counts the attempt, and schedules the next one at `until` in case the
    sender dies."""
    # No join, because it would also lock the webhook's row, and other processes would skip all its
    # due deliveries.
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
    # Tenants take turns, so that a tenant with thousands of due deliveries doesn't delay the
    # others.
    turns = (
        select(deliveries.c.id)
        .join(due, due.c.id == deliveries.c.id)
        # Checked again under the lock, because another process may have taken the delivery.
        .where(deliveries.c.status == DeliveryStatus.PENDING, deliveries.c.not_before <= now)
        .order_by(due.c.place, due.c.not_before)
        .limit(limit)
    )
    free = for_update(tx, turns, skip_locked=True, of=deliveries)
    ids = [row.id for row in await tx.execute(free)]
    rows = await tx.execute(
        update(deliveries)
        .where(is_one_of(tx, deliveries.c.id, ids))
        .values(tries=deliveries.c.tries + 1, not_before=until)
        .returning(deliveries)
    )
    due_deliveries = [_delivery(row) for row in rows]
    webhook_ids = {delivery.webhook_id for delivery in due_deliveries}
    owners = await tx.execute(select(webhooks).where(is_one_of(tx, webhooks.c.id, webhook_ids)))
    by_id = {row.id: _webhook(row) for row in owners}
    return [(delivery, by_id[delivery.webhook_id]) for delivery in due_deliveries]


async def record_attempt(
    tx: Tx, delivery: WebhookDelivery, values: Mapping[str, Any]
) -> WebhookDelivery | None:
    """Records the result of an attempt. Returns None if a later attempt has started, or the
    delivery has ended."""
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
    row = (await tx.execute(statement)).first()
    return _delivery(row) if row else None


async def enable_webhook(
    tx: Tx, tenant_id: UUID, user_id: UUID, webhook_id: UUID, *, now: datetime
) -> RegisteredWebhook | None:
    """Enables a webhook. Returns None if it is missing or already enabled."""
    statement = update(webhooks).where(
        _is_webhook(tenant_id, user_id, webhook_id), webhooks.c.is_active.is_(False)
    )
    on = await tx.execute(statement.values(is_active=True, on_again_at=now).returning(webhooks))
    row = on.first()
    return _webhook(row) if row else None


async def failing_since(tx: Tx, webhook_id: UUID) -> datetime | None:
    """Returns when the webhook's deliveries began to fail, which is the creation time of the first
    failed delivery since the webhook last succeeded or was re-enabled."""
    of_it = deliveries.c.webhook_id == webhook_id
    last_success = select(func.max(deliveries.c.created_at)).where(
        of_it, deliveries.c.status == DeliveryStatus.DELIVERED
    )
    again = select(webhooks.c.on_again_at).where(webhooks.c.id == webhook_id)
    query = select(func.min(deliveries.c.created_at)).where(
        of_it, deliveries.c.status == DeliveryStatus.FAILED
    )
    for since in (await tx.scalar(last_success), await tx.scalar(again)):
        if since is not None:
            query = query.where(deliveries.c.created_at > since)
    first_failure: datetime | None = await tx.scalar(query)
    return first_failure


async def disable_webhook(tx: Tx, webhook_id: UUID, *, now: datetime) -> bool:
    """Disables a webhook and fails its pending deliveries. Returns False if it was already
    disabled."""
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


async def list_deliveries(
    tx: Tx, webhook_id: UUID, *, before: WebhookDelivery | None, limit: int
) -> list[WebhookDelivery]:
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


async def reset_delivery(
    tx: Tx, webhook_id: UUID, delivery_id: UUID, *, now: datetime
) -> WebhookDelivery | None:
    """Makes a delivery due now and resets its attempts. Returns None if it doesn't exist."""
    statement = (
        update(deliveries)
        .where(deliveries.c.webhook_id == webhook_id, deliveries.c.id == delivery_id)
        .values(status=DeliveryStatus.PENDING, tries=0, not_before=now, ended_at=None)
        .returning(deliveries)
    )
    row = (await tx.execute(statement)).first()
    return _delivery(row) if row else None


async def prune_deliveries(tx: Tx, *, before: datetime, limit: int) -> int:
    old = select(deliveries.c.id).where(deliveries.c.ended_at < before).limit(limit)
    deleted = await tx.execute(
        delete(deliveries).where(deliveries.c.id.in_(old)).returning(deliveries.c.id)
    )
    return len(deleted.all())


async def get_delivery(tx: Tx, webhook_id: UUID, delivery_id: UUID) -> WebhookDelivery | None:
    query = select(deliveries).where(
        deliveries.c.webhook_id == webhook_id, deliveries.c.id == delivery_id
    )
    row = (await tx.execute(query)).first()
    return _delivery(row) if row else None


def _is_webhook(tenant_id: UUID, user_id: UUID, webhook_id: UUID) -> ColumnElement[bool]:
    return and_(
        webhooks.c.tenant_id == tenant_id,
        webhooks.c.user_id == user_id,
        webhooks.c.id == webhook_id,
    )


def _webhook(row: Row[Any]) -> RegisteredWebhook:
    events = frozenset(WebhookEvent(event) for event in row.events)
    return RegisteredWebhook(**{**row._mapping, "events": events})


def _delivery(row: Row[Any]) -> WebhookDelivery:
    event, status = WebhookEvent(row.event), DeliveryStatus(row.status)
    return WebhookDelivery(**{**row._mapping, "event": event, "status": status})


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Fields to filter by. None matches everything."""

    action: str | None = None
    subject: str | None = None
    actor: str | None = None
    tenant_id: UUID | None = None
    since: datetime | None = None
    until: datetime | None = None


async def add_audit_entry(tx: Tx, row: Mapping[str, Any]) -> None:
    await tx.execute(insert(audit_log).values(dict(row)))


async def copy_audit_entry(tx: Tx, source: str, row: Mapping[str, Any]) -> None:
    """Adds the entry for a row in a tenant's database, unless another process has already copied
    it."""
    await tx.execute(insert_if_new(tx, audit_log, [{**row, "source": source}]))


async def newest_audit_entries(
    tx: Tx, wanted: AuditFilter, *, before_id: int | None, limit: int
) -> list[AuditEntry]:
    if not all(is_storable(text) for text in (wanted.action, wanted.subject, wanted.actor) if text):
        return []
    columns = [column for column in audit_log.c if column.name != "source"]
    query = select(*columns).order_by(audit_log.c.id.desc()).limit(limit)
    for name in ("action", "subject", "actor", "tenant_id"):
        value = getattr(wanted, name)
        if value is not None:
            query = query.where(audit_log.c[name] == value)
    if wanted.since is not None:
        query = query.where(audit_log.c.at >= wanted.since)
    if wanted.until is not None:
        query = query.where(audit_log.c.at < wanted.until)
    if before_id is not None:
        query = query.where(audit_log.c.id < before_id)
    return [_entry(row) for row in await tx.execute(query)]


async def prune_audit_entries(tx: Tx, *, before: datetime, limit: int) -> int:
    """Deletes the oldest entries that were written before the given time. Finds them by id, because
    ids are in chronological order."""
    first = select(audit_log.c.id, audit_log.c.at).order_by(audit_log.c.id).limit(limit).subquery()
    old = select(first.c.id).where(first.c.at < before)
    deleted = await tx.execute(delete(audit_log).where(audit_log.c.id.in_(old)))
    return int(deleted.rowcount)


def _entry(row: Row[Any]) -> AuditEntry:
    return AuditEntry(**row._mapping)


# Rows of a tenant's outbox that don't belong to a job. Their `job_id` is the id of another subject.
AUDIT, STOP = "audit", "stop_user"


async def add_note(
    tx: Tx,
    kind: str,
    tenant_id: UUID,
    subject_id: UUID,
    payload: Mapping[str, Any],
    *,
    now: datetime,
) -> None:
    row = {
        "tenant_id": tenant_id,
        "job_id": subject_id,
        "kind": kind,
        "payload": dict(payload),
        "not_before": now,
        "created_at": now,
    }
    await tx.execute(insert(outbox).values(row))


class Note(NamedTuple):
    id: int
    tenant_id: UUID
    subject_id: UUID
    payload: Mapping[str, Any]
    created_at: datetime


async def notes(tx: Tx, kind: str, *, limit: int) -> list[Note]:
    columns = (outbox.c.id, outbox.c.tenant_id, outbox.c.job_id, outbox.c.payload)
    query = select(*columns, outbox.c.created_at).where(outbox.c.kind == kind)
    return [Note(*row) for row in await tx.execute(query.order_by(outbox.c.id).limit(limit))]


async def delete_notes(tx: Tx, ids: Sequence[int]) -> None:
    await tx.execute(delete(outbox).where(is_one_of(tx, outbox.c.id, ids)))
