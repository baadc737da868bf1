"""A key is dead at once, also for who has begun a call with it and takes time to send the rest."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import EffectSetup, effect_setup_on

from comfyfleet.server.http import middleware

JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def effect_setup(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EffectSetup]:
    monkeypatch.setattr(middleware, "SLOW_SECONDS", 0.0)
    async with plane_on(databases, tmp_path) as plane, effect_setup_on(plane) as effect_setup:
        yield effect_setup


async def sent_around(
    client: httpx.AsyncClient, path: str, body: Any, act: Callable[[], Awaitable[object]]
) -> httpx.Response:
    """Its first byte, then the act, then the rest."""
    text = json.dumps(body).encode()

    async def content() -> AsyncIterator[bytes]:
        yield text[:1]
        await act()
        yield text[1:]

    return await client.post(path, content=content(), headers=JSON)


async def test_a_customers_key_that_is_revoked_before_the_last_byte_submits_nothing(
    effect_setup: EffectSetup,
) -> None:
    customer = await effect_setup.customer()
    mine = f"/api/admin/tenants/{customer.tenant_id}/users/{customer.user_id}"

    async def revoke() -> None:
        (key,) = (await effect_setup.fleet_setup.admin.get(f"{mine}/keys")).json()["keys"]
        await effect_setup.fleet_setup.act(
            f"{mine.removeprefix('/api/admin/')}/keys/{key['id']}/revoke"
        )

    before = await customer.balance()
    body = {"effect_id": str(effect_setup.draw.id), "idempotency_key": "late"}
    answer = await sent_around(customer.client, "/api/ai-jobs", body, revoke)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthenticated")
    wallets = f"/api/admin/tenants/{customer.tenant_id}/wallets/{customer.user_id}"
    assert (await effect_setup.fleet_setup.admin.get(wallets)).json()["balance"] == before


async def test_a_worker_that_is_revoked_before_the_last_byte_is_told_so(
    effect_setup: EffectSetup,
) -> None:
    async with effect_setup.fleet_setup.worker() as worker:

        async def revoke() -> None:
            await effect_setup.fleet_setup.act("workers/w1/revoke")

        said = {"worker_id": "w1", "held": []}
        answer = await sent_around(worker.client, "/api/worker/poll", said, revoke)
        assert answer.status_code == 401, answer.text


@pytest.mark.parametrize("slow_seconds", [0.0, 60.0], ids=["slow", "quick"])
async def test_an_order_that_comes_before_the_last_byte_of_a_poll_holds(
    effect_setup: EffectSetup, slow_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "SLOW_SECONDS", slow_seconds)
    said, fleet_setup = {"worker_id": "w1", "held": []}, effect_setup.fleet_setup
    await fleet_setup.submit()
    async with fleet_setup.worker() as worker:

        async def polled(path: str, **order: Any) -> httpx.Response:
            return await sent_around(
                worker.client, "/api/worker/poll", said, lambda: fleet_setup.act(path, **order)
            )

        assert (await polled("workers/w1/drain")).json()["job"] is None
        await fleet_setup.act("workers/w1/undrain")
        assert (await polled("maintenance", on=True)).json()["job"] is None
        await fleet_setup.act("maintenance", on=False)
        assert (await polled("workflows/invert/pause")).json()["job"] is None
        await fleet_setup.act("workflows/invert/resume")
        assert (await polled("workers/w1/revoke")).json().get("job") is None
        await fleet_setup.act("workers/w1/approve")
        assert await worker.job()


async def test_who_is_slow_and_has_a_good_key_is_served(effect_setup: EffectSetup) -> None:
    customer = await effect_setup.customer()

    async def nothing() -> None:
        return None

    body = {"effect_id": str(effect_setup.draw.id), "idempotency_key": "slow"}
    answer = await sent_around(customer.client, "/api/ai-jobs", body, nothing)
    assert answer.status_code == 201, answer.text
