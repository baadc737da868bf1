"""Delivers what webhooks are to be told; one that nobody answers at for days is switched off."""

import asyncio
import logging
import random

from comfyfleet.audit import service as audit
from comfyfleet.db import Database
from comfyfleet.db.outages import level_of
from comfyfleet.kernel.errors import FleetError
from comfyfleet.plane import Plane
from comfyfleet.webhooks import service as webhooks
from comfyfleet.webhooks.delivering import deliver
from comfyfleet.webhooks.model import Answer, Delivery, DeliveryStatus, Webhook

log = logging.getLogger(__name__)
# All that are taken are sent at once: none waits so long that it might be taken a second time.
AT_ONCE_MAX = 20
TAKEN, REFUSED, UNANSWERED = "taken", "refused", "unanswered"


async def deliver_due(plane: Plane) -> bool:
    """True: there is more. A pool that is down holds up no other."""
    counts = await asyncio.gather(
        *(_deliver_of(plane, name, pool) for name, pool in plane.pools.items())
    )
    return AT_ONCE_MAX in counts


async def _deliver_of(plane: Plane, name: str, pool: Database) -> int:
    try:
        async with pool.look() as tx:
            if not await webhooks.is_any_due(tx, plane.clock()):
                return 0
        async with pool.begin() as tx:
            due = await webhooks.take_due(tx, now=plane.clock(), limit=AT_ONCE_MAX)
        await asyncio.gather(*(_deliver(plane, pool, *each) for each in due))
    except FleetError as error:
        log.log(level_of(error), "the webhooks of pool %s wait: %s", name, error.message)
        return 0
    return len(due)


async def _deliver(plane: Plane, pool: Database, delivery: Delivery, webhook: Webhook) -> None:
    key = plane.webhook_key
    answer = await deliver(plane.outward, webhook, delivery, key=key, now=plane.clock())
    plane.meters.deliveries.labels(_outcome(answer)).inc()
    now, chance = plane.clock(), random.random()  # noqa: S311 - to keep retries apart
    async with pool.begin() as tx:
        noted = await webhooks.note(tx, delivery, answer, now=now, chance=chance)
        has_failed = noted is not None and noted.status is DeliveryStatus.FAILED
        is_off = has_failed and await webhooks.switch_off_if_dead(tx, webhook, now=now)
    if is_off:
        await _record(plane, webhook)


def _outcome(answer: Answer) -> str:
    if answer.is_taken:
        return TAKEN
    return UNANSWERED if answer.status is None else REFUSED


async def _record(plane: Plane, webhook: Webhook) -> None:
    """The address is the customer's own affair, and may hold a secret: it is not told."""
    log.info("webhook %s was switched off: nobody has taken anything for days", webhook.id)
    async with plane.central.begin() as tx:
        await audit.record(
            tx,
            actor="sweep",
            action="switch_off",
            subject=f"webhook:{webhook.id}",
            now=plane.clock(),
            tenant_id=webhook.tenant_id,
        )
