"""What customers' servers are told, by a real server behind a made-up public address."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import select, update
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tests.support.databases.factory import Databases
from tests.support.server.asgi import free_listener, served
from tests.support.server.control_plane import client_of, plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on
from tests.support.server.tenants import AdjustableClock, TenantData, customer_of

from comfyfleet.api.webhooks import HEADER, is_signature_valid
from comfyfleet.server.db.tenant_tables import webhooks as webhook_rows
from comfyfleet.server.jobs import submit
from comfyfleet.server.maintenance.sweeps import deliver_due
from comfyfleet.server.notifications import webhooks
from comfyfleet.server.notifications.model import (
    RETRY_SECONDS,
    RegisteredWebhook,
    WebhookDelivery,
    WebhookEvent,
)
from comfyfleet.transport.fetch import PublicHttpClient

SECRET = "whsec_of_tests"


@dataclass
class WebhookReceiver:
    """A customer's server: it keeps what it got, and answers as told."""

    status: int = 200
    port: int = 0
    got: list[tuple[str, bytes]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def take(self, request: Request) -> Response:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        await asyncio.sleep(0.02)
        self.got.append((request.headers[HEADER], await request.body()))
        self.at_once -= 1
        return Response(status_code=self.status)


class Detour(httpx.AsyncHTTPTransport):
    """What goes to the public address arrives at the receiver."""

    def __init__(self, receiver: WebhookReceiver) -> None:
        super().__init__()
        self._shop = receiver

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        assert request.url.host == "93.184.216.34"
        request.url = request.url.copy_with(scheme="http", host="127.0.0.1", port=self._shop.port)
        return await super().handle_async_request(request)


async def public(_host: str, _port: int) -> Sequence[str]:
    return ["93.184.216.34"]


@asynccontextmanager
async def open_shop() -> AsyncIterator[WebhookReceiver]:
    receiver, listener = WebhookReceiver(), free_listener()
    receiver.port = listener.getsockname()[1]
    app = Starlette(routes=[Route("/hook", receiver.take, methods=["POST"])])
    async with served(app, listener):
        yield receiver


@pytest.fixture
async def receiver() -> AsyncIterator[WebhookReceiver]:
    async with open_shop() as receiver:
        yield receiver


@pytest.fixture
async def fleet_setup(
    databases: Databases, tmp_path: Path, ahead: AdjustableClock, receiver: WebhookReceiver
) -> AsyncIterator[FleetSetup]:
    outward = PublicHttpClient(resolver=public, transport=Detour(receiver))
    async with (
        plane_on(databases, tmp_path, clock=ahead) as plane,
        fleet_setup_on(replace(plane, outward=outward)) as fleet_setup,
    ):
        yield fleet_setup
    await outward.aclose()


@pytest.fixture
async def caller(fleet_setup: FleetSetup) -> TenantData:
    return await customer_of(fleet_setup.plane, fleet_setup.admin)


async def hook(customer: TenantData) -> RegisteredWebhook:
    async with customer.pool.transaction() as tx:
        return await webhooks.create_webhook(
            tx,
            webhook_id=uuid4(),
            tenant_id=customer.tenant_id,
            user_id=customer.user_id,
            url="https://shop.example/hook",
            events=list(WebhookEvent),
            now=customer.plane.clock(),
        )


async def cancelled(customer: TenantData) -> str:
    job = await customer.job(await customer.file())
    await submit.cancel_job(customer.plane.context, customer.tenant_id, job.id)
    return str(job.id)


async def try_till_it_ends(
    fleet_setup: FleetSetup, ahead: AdjustableClock, start: timedelta
) -> None:
    """Each time when it is due, chance included: about a day in all."""
    for waited in accumulate((0, *RETRY_SECONDS)):
        ahead.by = start + timedelta(seconds=waited * 1.25)
        await deliver_due(fleet_setup.plane)


async def log_of(customer: TenantData, webhook: RegisteredWebhook) -> list[WebhookDelivery]:
    async with customer.pool.read() as tx:
        return await webhooks.list_deliveries(tx, webhook, limit=100)


async def test_the_end_of_a_job_is_told_signed_and_once(
    fleet_setup: FleetSetup, caller: TenantData, receiver: WebhookReceiver, ahead: AdjustableClock
) -> None:
    webhook = await hook(caller)
    job_id = await cancelled(caller)
    await deliver_due(fleet_setup.plane)
    await deliver_due(fleet_setup.plane)
    [(signed, body)] = receiver.got
    secret = webhook.secret_with(fleet_setup.plane.webhook_key)
    assert is_signature_valid(secret, body, signed, now=int(ahead().timestamp()))
    told = json.loads(body)
    assert (told["type"], told["data"]["job_id"]) == ("job.cancelled", job_id)
    (delivery,) = await log_of(caller, webhook)
    assert (delivery.status, delivery.tries, delivery.last_status) == ("delivered", 1, 200)


async def test_a_secret_is_shown_once_and_stored_nowhere(
    fleet_setup: FleetSetup, caller: TenantData, receiver: WebhookReceiver, ahead: AdjustableClock
) -> None:
    async with client_of(fleet_setup.plane, caller.key) as client:
        asked = {"url": "https://shop.example/hook"}
        made = (await client.post("/api/webhooks", json=asked)).json()
    async with caller.pool.read() as tx:
        rows = (await tx.execute(select(webhook_rows))).all()
    assert rows
    assert made["secret"] not in str(rows)
    assert fleet_setup.plane.webhook_key not in str(rows)
    await cancelled(caller)
    await deliver_due(fleet_setup.plane)
    [(signed, body)] = receiver.got
    assert is_signature_valid(made["secret"], body, signed, now=int(ahead().timestamp()))


async def test_a_webhook_from_before_keeps_its_secret(
    fleet_setup: FleetSetup, caller: TenantData, receiver: WebhookReceiver, ahead: AdjustableClock
) -> None:
    webhook = await hook(caller)
    async with caller.pool.transaction() as tx:
        is_it = webhook_rows.c.id == webhook.id
        await tx.execute(update(webhook_rows).where(is_it).values(secret=SECRET))
    await cancelled(caller)
    await deliver_due(fleet_setup.plane)
    [(signed, body)] = receiver.got
    assert is_signature_valid(SECRET, body, signed, now=int(ahead().timestamp()))


async def test_a_server_that_refuses_is_asked_again_later(
    fleet_setup: FleetSetup, caller: TenantData, receiver: WebhookReceiver, ahead: AdjustableClock
) -> None:
    webhook = await hook(caller)
    await cancelled(caller)
    receiver.status = 500
    await deliver_due(fleet_setup.plane)
    await deliver_due(fleet_setup.plane)
    assert len(receiver.got) == 1
    receiver.status = 204
    ahead.by = timedelta(minutes=1)
    await deliver_due(fleet_setup.plane)
    (delivery,) = await log_of(caller, webhook)
    assert (len(receiver.got), delivery.status, delivery.tries) == (2, "delivered", 2)


async def test_many_are_told_at_once_within_bounds(
    fleet_setup: FleetSetup, caller: TenantData, receiver: WebhookReceiver
) -> None:
    await hook(caller)
    for _ in range(25):
        await cancelled(caller)
    assert await deliver_due(fleet_setup.plane) is True
    assert await deliver_due(fleet_setup.plane) is False
    assert len(receiver.got) == 25
    assert 1 < receiver.most_at_once <= 20


async def test_a_webhook_that_fails_for_days_is_switched_off(
    fleet_setup: FleetSetup, caller: TenantData, receiver: WebhookReceiver, ahead: AdjustableClock
) -> None:
    webhook = await hook(caller)
    receiver.status = 410
    for day in range(6):
        ahead.by = timedelta(days=3 * day)
        await cancelled(caller)
        await try_till_it_ends(fleet_setup, ahead, timedelta(days=3 * day))
    async with caller.pool.read() as tx:
        found = await webhooks.get_webhook(tx, caller.tenant_id, caller.user_id, webhook.id)
    assert not found.is_active
    (entry,) = await fleet_setup.audited("switch_off")
    assert (entry["actor"], entry["subject"]) == ("sweep", f"webhook:{webhook.id}")
    assert "shop.example" not in json.dumps(entry)
    assert all(each.ended_at for each in await log_of(caller, webhook))
    heard = len(receiver.got)
    await cancelled(caller)
    await deliver_due(fleet_setup.plane)
    assert len(receiver.got) == heard


async def test_one_that_was_switched_off_can_be_switched_on_again(
    fleet_setup: FleetSetup, caller: TenantData, receiver: WebhookReceiver, ahead: AdjustableClock
) -> None:
    webhook = await hook(caller)
    receiver.status = 410
    for day in range(0, 9, 4):
        await cancelled(caller)
        await try_till_it_ends(fleet_setup, ahead, timedelta(days=day))

    async def is_on() -> bool:
        async with caller.pool.read() as tx:
            found = await webhooks.get_webhook(tx, caller.tenant_id, caller.user_id, webhook.id)
        return found.is_active

    assert not await is_on()
    ahead.by = timedelta(days=20)
    async with client_of(fleet_setup.plane, caller.key) as client:
        for _ in range(2):
            answer = await client.post(f"/api/webhooks/{webhook.id}/activate")
            assert (answer.status_code, answer.json()["is_active"]) == (200, True)
    (entry,) = await fleet_setup.audited("switch_on")
    assert (entry["actor"], entry["subject"]) == (
        f"tenant:{caller.tenant_id}",
        f"webhook:{webhook.id}",
    )
    heard = len(receiver.got)
    await cancelled(caller)
    await try_till_it_ends(fleet_setup, ahead, timedelta(days=20))
    assert len(receiver.got) > heard, "it is told of what ends from now on"
    assert await is_on(), "what failed before then no longer counts"
    await cancelled(caller)
    await try_till_it_ends(fleet_setup, ahead, timedelta(days=26))
    assert not await is_on(), "four more days in vain"


async def test_one_failure_among_successes_switches_nothing_off(
    fleet_setup: FleetSetup, caller: TenantData, receiver: WebhookReceiver, ahead: AdjustableClock
) -> None:
    webhook = await hook(caller)
    for day, status in enumerate((500, 200, 500, 200, 500)):
        receiver.status = status
        start = timedelta(days=5 * day)
        ahead.by = start
        await cancelled(caller)
        await try_till_it_ends(fleet_setup, ahead, start)
    async with caller.pool.read() as tx:
        found = await webhooks.get_webhook(tx, caller.tenant_id, caller.user_id, webhook.id)
    assert found.is_active
