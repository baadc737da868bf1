"""One delivery: signed, sent to a public address, its answer read no further than its status."""

import asyncio
import json
from datetime import datetime

from comfyfleet.fetching.outward import Outward
from comfyfleet.fetching.targets import target_of
from comfyfleet.kernel.errors import FleetError
from comfyfleet.webhooks.model import Answer, Delivery, Webhook
from comfyfleet.wire.signatures import HEADER, signature

DELIVERY_SECONDS = 20.0
DELIVERY_ID = "X-Comfyfleet-Delivery"


async def deliver(
    outward: Outward,
    webhook: Webhook,
    delivery: Delivery,
    *,
    key: str,
    now: datetime,
    within_seconds: float = DELIVERY_SECONDS,
) -> Answer:
    """Never raises for what is the customer's server's doing. A redirect is no success.

    `key` is the installation's, from which webhooks' secrets are made.
    """
    body = body_of(delivery)
    headers = {
        "Content-Type": "application/json",
        DELIVERY_ID: str(delivery.id),
        HEADER: signature(webhook.secret_with(key), body, timestamp=int(now.timestamp())),
    }
    try:
        target = target_of(webhook.url, ports=outward.ports)
        async with (
            asyncio.timeout(within_seconds),
            outward.request("POST", target, headers=headers, content=body) as response,
        ):
            return Answer(status=response.status_code)
    except TimeoutError:
        return Answer(error=f"no answer within {within_seconds:g} seconds")
    except FleetError as error:
        return Answer(error=error.message)


def body_of(delivery: Delivery) -> bytes:
    message = {
        "id": str(delivery.id),
        "type": delivery.event,
        "created_at": delivery.created_at.isoformat(),
        "data": dict(delivery.payload),
    }
    return json.dumps(message, separators=(",", ":"), sort_keys=True).encode()
