"""A webhook's delivery, to a real server behind a made-up address."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import UUID

import httpx
import pytest

from comfyfleet.api.webhooks import HEADER, is_signature_valid
from comfyfleet.server.notifications.model import (
    DeliveryStatus,
    RegisteredWebhook,
    WebhookDelivery,
    WebhookEvent,
)
from comfyfleet.server.notifications.webhooks import DELIVERY_ID, body_of, send_delivery
from comfyfleet.transport.fetch import PublicHttpClient

NOW = datetime(2026, 11, 15, 8, 30, tzinfo=UTC)
HOOK = RegisteredWebhook(
    UUID(int=1), UUID(int=2), UUID(int=3), "http://example.com/hook", "whsec_1",
    frozenset(WebhookEvent), True, NOW,
)  # fmt: skip
DELIVERY = WebhookDelivery(
    UUID(int=4), UUID(int=2), HOOK.id, UUID(int=5), WebhookEvent.COMPLETED, {"status": "completed"},
    DeliveryStatus.PENDING, 1, NOW, None, None, NOW, None,
)  # fmt: skip


class Customer(httpx.AsyncBaseTransport):
    """Answers as told and keeps what it got."""

    def __init__(self, status: int = 200, seconds: float = 0) -> None:
        self.status, self.seconds = status, seconds
        self.got: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        self.got.append(request)
        await asyncio.sleep(self.seconds)
        return httpx.Response(self.status, headers={"Location": "http://10.0.0.1/"})


async def public(_host: str, _port: int) -> Sequence[str]:
    return ["93.184.216.34"]


async def private(_host: str, _port: int) -> Sequence[str]:
    return ["10.0.0.1"]


async def test_it_is_signed_so_that_the_customer_can_tell() -> None:
    customer = Customer()
    answer = await send_delivery(
        PublicHttpClient(resolver=public, transport=customer), HOOK, DELIVERY, key="", now=NOW
    )
    assert answer.is_success
    [request] = customer.got
    at = int(NOW.timestamp())
    assert is_signature_valid("whsec_1", request.content, request.headers[HEADER], now=at)
    assert request.headers[DELIVERY_ID] == str(DELIVERY.id)
    assert request.content == body_of(DELIVERY)
    assert request.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("status", [302, 400, 410, 500])
async def test_what_is_no_success_is_not_taken_for_one(status: int) -> None:
    customer = Customer(status)
    answer = await send_delivery(
        PublicHttpClient(resolver=public, transport=customer), HOOK, DELIVERY, key="", now=NOW
    )
    assert (answer.status, answer.is_success) == (status, False)
    assert len(customer.got) == 1


async def test_an_address_that_became_private_is_not_called() -> None:
    customer = Customer()
    answer = await send_delivery(
        PublicHttpClient(resolver=private, transport=customer), HOOK, DELIVERY, key="", now=NOW
    )
    assert answer.error == "the host example.com has no public address"
    assert customer.got == []


async def test_a_slow_customer_is_not_waited_for() -> None:
    outward = PublicHttpClient(resolver=public, transport=Customer(seconds=5))
    answer = await send_delivery(outward, HOOK, DELIVERY, key="", now=NOW, within_seconds=0.05)
    assert answer.error == "no answer within 0.05 seconds"
