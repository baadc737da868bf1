"""A webhook's delivery, to a real server behind a made-up address."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID, uuid4

import httpx
import pytest

from comfyfleet.api.webhooks import HEADER, is_signature_valid
from comfyfleet.errors import FleetError, InvalidInput
from comfyfleet.server.notifications.model import (
    DeliveryStatus,
    RegisteredWebhook,
    WebhookDelivery,
    WebhookEvent,
)
from comfyfleet.server.notifications.webhooks import DELIVERY_ID, body_of, send_delivery, send_test
from comfyfleet.settings import parse_private_hosts
from comfyfleet.transport.fetch import Fetcher, FetchLimits, PublicHttpClient
from comfyfleet.transport.ssrf import parse_webhook_url

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


LISTED = frozenset({("hooks.internal", 8443), ("127.0.0.1", 3000)})


@pytest.mark.parametrize("url", ["http://hooks.internal:8443/a?b", "http://127.0.0.1:3000/"])
async def test_a_private_address_that_the_operator_has_listed_is_called(url: str) -> None:
    customer = Customer()
    outward = PublicHttpClient(resolver=private, transport=customer, private_hosts=LISTED)
    webhook = replace(HOOK, url=url)
    assert (await send_delivery(outward, webhook, DELIVERY, key="", now=NOW)).is_success
    test_id = uuid4()
    answer = await send_test(outward, webhook, key="", test_id=test_id, now=NOW)
    assert answer.is_success
    request = customer.got[-1]
    at = int(NOW.timestamp())
    assert is_signature_valid("whsec_1", request.content, request.headers[HEADER], now=at)
    assert (request.headers[DELIVERY_ID], b'"type":"test"' in request.content) == (
        str(test_id),
        True,
    )


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.internal/",
        "http://hooks.internal:8444/",
        "http://hooks.internal.:8443/",
        "http://other.internal:8443/",
        "http://127.0.0.1/",
        "http://127.1:3000/",
        "http://[::ffff:127.0.0.1]:3000/",
        "http://example.com:8443/",
    ],
)
async def test_no_other_host_or_port_is_called(url: str) -> None:
    customer = Customer()
    outward = PublicHttpClient(resolver=private, transport=customer, private_hosts=LISTED)
    answer = await send_delivery(outward, replace(HOOK, url=url), DELIVERY, key="", now=NOW)
    assert answer.error is not None
    assert customer.got == []


async def test_an_address_that_a_job_names_is_public_whatever_is_listed() -> None:
    customer = Customer()
    outward = PublicHttpClient(resolver=private, transport=customer, private_hosts=LISTED)
    for url in ("http://hooks.internal:8443/", "http://127.0.0.1:3000/"):
        delivery = replace(DELIVERY, url=url)
        answer = await send_delivery(outward, HOOK, delivery, key="", now=NOW)
        assert answer.error is not None
    assert customer.got == []


async def test_a_redirect_to_a_listed_address_is_not_followed() -> None:
    customer = Customer(status=302)
    outward = PublicHttpClient(resolver=private, transport=customer, private_hosts=LISTED)
    webhook = replace(HOOK, url="http://hooks.internal:8443/")
    answer = await send_delivery(outward, webhook, DELIVERY, key="", now=NOW)
    assert (answer.is_success, len(customer.got)) == (False, 1)


async def test_listed_addresses_are_for_webhooks_only() -> None:
    outward = PublicHttpClient(resolver=private, transport=Customer(), private_hosts=LISTED)
    fetcher = Fetcher(outward, media_type_of=lambda data: "image/png")
    for url in ("http://hooks.internal:8443/a.png", "http://127.0.0.1:3000/a.png"):
        with pytest.raises(FleetError):
            async with fetcher.open(url, FetchLimits(1000)):
                pass


def test_the_list_has_hosts_with_ports() -> None:
    text = "localhost:3000, [::1]:8080,Hooks.Internal:443,"
    assert parse_private_hosts(text) == {
        ("localhost", 3000),
        ("::1", 8080),
        ("hooks.internal", 443),
    }
    for wrong in ("localhost", "localhost:0", "a:70000", "http://a:1", "10.0.0.0/8:1", "*:80"):
        with pytest.raises(InvalidInput, match="must be host:port"):
            parse_private_hosts(wrong)


def test_a_port_that_is_not_listed_names_the_setting_and_the_entry() -> None:
    with pytest.raises(InvalidInput, match=r"lists 127\.0\.0\.1:9000, .*WEBHOOK_PRIVATE_HOSTS"):
        parse_webhook_url("http://127.0.0.1:9000/hook", {("localhost", 9000)})
