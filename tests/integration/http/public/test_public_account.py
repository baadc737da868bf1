"""Effects, wallet, keys and webhooks."""

import asyncio
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import jsonschema
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ManualClock
from tests.support.server.control_plane import client_of, plane_on
from tests.support.server.customers import PRICE, TOKENS, Customer, EffectSetup, effect_setup_on

from comfyfleet.api.webhooks import is_signature_valid
from comfyfleet.clock import utc_now
from comfyfleet.server.http.app import create_app
from comfyfleet.server.notifications import webhooks
from comfyfleet.server.notifications.model import (
    WEBHOOKS_PER_USER_MAX,
    WebhookEvent,
    WebhookResponse,
)
from comfyfleet.transport.fetch import PublicHttpClient


async def test_an_effect_tells_all_that_a_form_needs(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    found = await ada.get(f"effects/{effect_setup.draw.id}")
    assert (found["slug"], found["title"], found["price_tokens"]) == ("draw", "draw", PRICE)
    assert found["takes"] is None
    schema = found["properties"]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["width"]["maximum"] == 512
    jsonschema.validate({"width": 32}, schema)
    takes = (await ada.get(f"effects/{effect_setup.invert.id}"))["takes"]
    assert (takes["kind"], takes["media_types"]) == ("image", [])
    assert (
        "input"
        not in (await ada.get(f"effects/{effect_setup.invert.id}"))["properties"]["properties"]
    )


async def test_the_catalogue_is_read_page_by_page(ada: Customer) -> None:
    first = await ada.get("effects", limit=1)
    assert ([each["slug"] for each in first["effects"]], first["next"]) == (["draw"], "draw")
    rest = await ada.get("effects", limit=1, after="draw")
    assert ([each["slug"] for each in rest["effects"]], rest["next"]) == (["invert"], None)


async def test_the_wallet_is_the_sum_of_its_transactions(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    await ada.client.delete(f"/api/ai-jobs/{job_id}")
    await ada.job(effect_setup.draw, properties={"width": 32})
    await effect_setup.work()
    page = await ada.get("wallet/transactions", limit=3)
    rest = await ada.get("wallet/transactions", limit=3, before=page["next"])
    lines = page["transactions"] + rest["transactions"]
    assert [(each["type"], each["amount"]) for each in lines] == [
        ("JOB_CONSUME", 0),
        ("JOB_RESERVE", -PRICE),
        ("JOB_REFUND", PRICE),
        ("JOB_RESERVE", -PRICE),
        ("PAYMENT_CREDIT", TOKENS),
    ]
    assert rest["next"] is None
    assert sum(each["amount"] for each in lines) == await ada.balance()


async def test_a_key_is_made_used_and_revoked(effect_setup: EffectSetup, ada: Customer) -> None:
    made = await ada.client.post("/api/keys", json={"name": "reader", "scopes": ["read"]})
    assert made.status_code == 201
    async with client_of(effect_setup.plane, made.json()["key"]) as reader:
        assert (await reader.get("/api/wallet")).status_code == 200
        for refused in (
            await reader.post("/api/keys", json={"name": "x"}),
            await reader.delete(f"/api/ai-jobs/{uuid4()}"),
        ):
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        listed = (await ada.get("keys"))["keys"]
        assert "key" not in listed[0]
        assert (listed[0]["prefix"], len(listed)) == (made.json()["key"][:11], 2)
        assert listed[0]["last_used_at"] is not None
        for _ in range(2):
            revoked = await ada.client.delete(f"/api/keys/{made.json()['id']}")
            assert revoked.json()["revoked_at"] is not None
        assert (await reader.get("/api/wallet")).status_code == 401


async def test_no_key_makes_one_that_may_more_or_lives_longer(effect_setup: EffectSetup) -> None:
    until = utc_now() + timedelta(days=1)
    limited = await effect_setup.customer(scopes=["read", "keys"], expires_at=until)
    more = await limited.client.post("/api/keys", json={"name": "x", "scopes": ["write"]})
    assert more.status_code == 403
    made = await limited.client.post("/api/keys", json={"name": "x"})
    assert made.json()["scopes"] == ["keys", "read"]
    assert made.json()["expires_at"] is not None
    later = {"name": "x", "expires_at": "2999-01-01T00:00:00Z"}
    capped = await limited.client.post("/api/keys", json=later)
    assert capped.json()["expires_at"] == made.json()["expires_at"]


async def test_a_key_needs_a_name_scopes_and_a_future(ada: Customer) -> None:
    wrong: list[dict[str, Any]] = [
        {"name": ""},
        {"name": "x\0"},
        {"name": "x", "scopes": []},
        {"name": "x", "scopes": ["everything"]},
        {"name": "x", "expires_at": "2001-01-01T00:00:00Z"},
        {"name": "x", "expires_at": "2031-01-01T00:00:00"},
        {"name": "x", "expires_at": "0001-01-01T00:00:00+14:00"},
    ]
    for body in wrong:
        refused = await ada.client.post("/api/keys", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_input")


async def test_a_webhooks_secret_is_read_by_keys_that_may_make_keys_and_leaves_a_trace(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    made = await ada.client.post("/api/webhooks", json={"url": "https://shop.example/hook"})
    path = f"/api/webhooks/{made.json()['id']}/secret"
    for scopes in (["write"], ["read", "write"], ["read", "keys"]):
        key, _ = await effect_setup.key(ada.tenant_id, ada.user_id, scopes=scopes)
        async with client_of(effect_setup.plane, key) as client:
            refused = await client.post(path)
        assert (refused.status_code, "secret" in refused.json()) == (403, False), scopes
    key, trusted = await effect_setup.key(ada.tenant_id, ada.user_id, scopes=["keys", "write"])
    async with client_of(effect_setup.plane, key) as client:
        assert (await client.post(path)).json() == made.json()
    stranger = await effect_setup.customer()
    assert (await stranger.client.post(path)).status_code == 404
    (noted,) = await effect_setup.fleet_setup.audited("show_webhook_secret")
    assert noted["tenant_id"] == str(ada.tenant_id)
    assert noted["details"]["by_key"] == str(trusted.id)
    assert "whsec_" not in str(noted)


async def test_as_many_webhooks_as_allowed_are_created_and_one_more_looks_up_no_host(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["93.184.216.34"]

    plane = replace(effect_setup.plane, outward=PublicHttpClient(resolver=resolve))
    async with client_of(plane, ada.key) as client:
        for number in range(WEBHOOKS_PER_USER_MAX):
            body = {"url": f"https://shop{number}.example/hook"}
            assert (await client.post("/api/webhooks", json=body)).status_code == 201
        refused = await client.post("/api/webhooks", json={"url": "https://late.example/hook"})
    assert refused.status_code == 413
    assert f"at most {WEBHOOKS_PER_USER_MAX} webhooks" in refused.text
    assert len(asked) == WEBHOOKS_PER_USER_MAX


async def test_a_webhook_has_a_secret_and_a_log(effect_setup: EffectSetup, ada: Customer) -> None:
    made = await ada.client.post("/api/webhooks", json={"url": "https://shop.example/hook"})
    assert made.status_code == 201
    assert made.json()["secret"].startswith("whsec_")
    path = f"/api/webhooks/{made.json()['id']}"
    (listed,) = (await ada.get("webhooks"))["webhooks"]
    assert "secret" not in listed
    assert set(listed["events"]) == set(WebhookEvent)

    assert (await ada.client.post(f"{path}/secret")).json() == made.json()
    renewed = create_app(replace(effect_setup.fleet_setup.plane, webhook_key="another"))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(renewed), base_url="http://x", headers=ada.client.headers
    ) as client:
        secret = (await client.post(f"{path}/secret")).json()["secret"]
    assert secret.startswith("whsec_")
    assert secret != made.json()["secret"]

    job_id = await ada.job(effect_setup.draw, properties={"width": 32})
    await ada.client.delete(f"/api/ai-jobs/{job_id}")
    (pending,) = (await ada.get(f"webhooks/{made.json()['id']}/deliveries"))["deliveries"]
    assert (pending["event"], pending["status"], pending["tries"]) == (
        "job.cancelled",
        "pending",
        0,
    )
    assert pending["job_id"] == job_id
    await note_answer(effect_setup, ada, 204)
    (sent,) = (await ada.client.get(f"{path}/deliveries")).json()["deliveries"]
    assert (sent["status"], sent["tries"], sent["last_status"]) == ("delivered", 1, 204)
    assert sent["next_try_at"] is None

    assert (await ada.client.delete(path)).status_code == 204
    assert (await ada.client.delete(path)).status_code == 404
    assert (await ada.client.get(f"{path}/deliveries")).status_code == 404


async def note_answer(effect_setup: EffectSetup, customer: Customer, status: int) -> None:
    now = effect_setup.plane.clock()
    pool = await effect_setup.plane.context.pool_of(customer.tenant_id)
    async with pool.transaction() as tx:
        for delivery, _ in await webhooks.take_due_deliveries(tx, now=now, limit=10):
            await webhooks.record_attempt(
                tx, delivery, WebhookResponse(status=status), now=now, chance=0
            )


async def test_a_webhook_needs_a_url_that_can_be_called(ada: Customer) -> None:
    wrong = [{"url": "ftp://x.example"}, {"url": "https://x.example", "events": ["job.exploded"]}]
    for body in (*wrong, {}):
        assert (await ada.client.post("/api/webhooks", json=body)).status_code == 422


async def test_a_user_has_so_many_webhooks(ada: Customer) -> None:
    body = {"url": "https://93.184.216.34/hook"}  # needs no lookup of a name
    answers = [await ada.client.post("/api/webhooks", json=body) for _ in range(21)]
    assert [each.status_code for each in answers] == [201] * 20 + [413]


async def test_a_key_that_calls_too_often_is_told_when_to_come_again(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    clock = ManualClock()
    limits = {"calls_per_second": 2.0, "calls_at_once": 3}
    async with (
        plane_on(sqlite_databases, tmp_path, clock=clock, **limits) as plane,
        effect_setup_on(plane) as effect_setup,
    ):
        ada, bob = await effect_setup.customer(), await effect_setup.customer()

        async def call(who: Customer) -> httpx.Response:
            return await who.client.get("/api/wallet")

        assert [(await call(ada)).status_code for _ in range(4)] == [200, 200, 200, 429]
        refused = await call(ada)
        assert refused.json()["error"]["code"] == "too_many_calls"
        assert refused.json()["error"]["details"] == {"retry_after_seconds": 0.5}
        assert refused.headers["retry-after"] == "1"
        assert (await call(bob)).status_code == 200
        clock.advance(seconds=1)
        assert [(await call(ada)).status_code for _ in range(3)] == [200, 200, 429]


async def test_a_body_is_no_larger_than_allowed(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    async with (
        plane_on(sqlite_databases, tmp_path, max_body_bytes=1000) as plane,
        effect_setup_on(plane) as effect_setup,
    ):
        ada = await effect_setup.customer()
        refused = await ada.submit(effect_setup.draw, properties={"prefix": "x" * 1000})
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "limit_exceeded")
        assert UUID((await ada.submit(effect_setup.draw)).json()["id"])


async def test_a_body_that_can_not_be_read_is_told_in_our_shape(ada: Customer) -> None:
    headers = {"Content-Type": "application/json"}
    half = b'{"name": "\\ud800"}'
    wrong = ((b"{", 422), (b'{"name": "\xff"}', 400), (b"", 422), (b"[]", 422), (half, 422))
    for content, status in wrong:
        answer = await ada.client.post("/api/keys", content=content, headers=headers)
        assert answer.status_code == status, content
        assert answer.json()["error"]["code"] == "invalid_input"


async def test_a_test_message_reaches_a_listed_server_and_no_other(
    databases: Databases, tmp_path: Path
) -> None:
    got: list[bytes] = []

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
        got.append(head + await reader.readexactly(size))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    receiver = await asyncio.start_server(receive, "127.0.0.1", 0)
    port = receiver.sockets[0].getsockname()[1]
    listed = f"127.0.0.1:{port}"
    async with (
        receiver,
        plane_on(databases, tmp_path, webhook_private_hosts=listed) as plane,
        effect_setup_on(plane) as setup,
    ):
        ada, bob = await setup.customer(), await setup.customer()
        made = await ada.client.post("/api/webhooks", json={"url": f"http://{listed}/hook"})
        assert made.status_code == 201, made.text
        path = f"/api/webhooks/{made.json()['id']}/test"
        tested = await ada.client.post(path)
        assert tested.json() == {"is_delivered": True, "status": 204, "error": None}
        [message] = got
        body = message.partition(b"\r\n\r\n")[2]
        signature = re.search(rb"(?i)x-comfyfleet-signature: (.*)\r", message)[1]  # type: ignore[index]
        at = int(plane.clock().timestamp())
        assert is_signature_valid(made.json()["secret"], body, signature.decode(), now=at)
        assert (await bob.client.post(path)).status_code == 404
        assert (await ada.get(f"webhooks/{made.json()['id']}/deliveries"))["deliveries"] == []
        refused = await ada.client.post("/api/webhooks", json={"url": "http://127.0.0.1:1/hook"})
        assert refused.status_code == 422
