"""Tenants with their users, keys and wallets, as operators run them."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import client_of, plane_on

from comfyfleet.clock import utc_now
from comfyfleet.errors import Unauthenticated
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.tenants.model import Caller, PaymentClaim


async def make(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await client.post("/api/admin/tenants", json={"name": "Ada", **body})
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def user_path(made: dict[str, Any]) -> str:
    return f"/api/admin/tenants/{made['id']}/users/{made['user_id']}"


def wallet_path(made: dict[str, Any]) -> str:
    return f"/api/admin/tenants/{made['id']}/wallets/{made['user_id']}"


async def caller(plane: ControlPlane, key: str) -> Caller:
    async with plane.central.read() as tx:
        return await tenants.authenticate_key(tx, key, now=utc_now())


async def test_a_tenant_comes_with_a_user_and_a_key_that_works(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    made = await make(client, email="Ada@example.com")
    who = await caller(plane, made["key"])
    assert (str(who.tenant.id), str(who.user_id)) == (made["id"], made["user_id"])
    (user,) = (await client.get(f"/api/admin/tenants/{made['id']}/users")).json()["users"]
    assert (user["id"], user["email"], user["is_active"]) == (
        made["user_id"],
        "ada@example.com",
        True,
    )
    log = (await client.get("/api/admin/audit")).text
    assert "create_tenant" in log
    assert made["key"] not in log


async def test_new_tenants_go_to_the_pool_with_the_fewest(
    databases: Databases, tmp_path: Path
) -> None:
    pools = f"one={await databases.url('tenant')},two={await databases.url('tenant')}"
    async with (
        plane_on(databases, tmp_path, tenant_database_urls=pools) as plane,
        client_of(plane) as client,
    ):
        made = [await make(client) for _ in range(3)]
        # The tenant of operators' own jobs is in the first.
        assert [each["pool"] for each in made] == ["two", "one", "two"]
        assert (await client.get(wallet_path(made[0]))).json()["balance"] == 0


async def test_a_name_that_is_refused_leaves_no_user_behind(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    refused = await client.post("/api/admin/tenants", json={"name": " "})
    assert refused.status_code == 422
    refused = await client.post("/api/admin/tenants", json={"name": "a", "email": "nobody"})
    assert refused.status_code == 422
    assert len((await client.get("/api/admin/tenants")).json()["tenants"]) == 1


async def test_a_payment_is_credited_once(client: httpx.AsyncClient) -> None:
    made = await make(client)
    paid = {"amount": 500, "provider_transaction_id": "pi_1"}
    first = await client.post(f"{wallet_path(made)}/credits", json=paid)
    assert (first.status_code, first.json()) == (201, {"balance": 500})
    again = await client.post(f"{wallet_path(made)}/credits", json=paid)
    assert (again.status_code, again.json()) == (200, {"balance": 500})
    other = await client.post(
        f"{wallet_path(made)}/credits",
        json={"amount": 20, "provider_transaction_id": "pi_2", "reason": "a wrong picture"},
    )
    assert (other.status_code, other.json()) == (201, {"balance": 520})
    assert (await client.get(wallet_path(made))).json()["balance"] == 520
    listed = (await client.get(f"{wallet_path(made)}/transactions")).json()
    assert [each["amount"] for each in listed["transactions"]] == [20, 500]
    assert {each["type"] for each in listed["transactions"]} == {"PAYMENT_CREDIT"}
    entries = (await client.get("/api/admin/audit", params={"action": "credit"})).json()["entries"]
    assert [each["details"].get("reason") for each in entries] == ["a wrong picture", None]


async def test_a_payment_counts_once_in_all_tenants(client: httpx.AsyncClient) -> None:
    ada, bob = await make(client), await make(client, name="Bob")
    paid = {"amount": 500, "provider_transaction_id": "pi_1"}
    assert (await client.post(f"{wallet_path(ada)}/credits", json=paid)).status_code == 201
    refused = await client.post(f"{wallet_path(bob)}/credits", json=paid)
    assert refused.status_code == 409
    assert ada["id"] in refused.json()["error"]["message"]
    assert (await client.get(wallet_path(bob))).json()["balance"] == 0
    again = await client.post(f"{wallet_path(ada)}/credits", json=paid)
    assert (again.status_code, again.json()) == (200, {"balance": 500})
    other = await client.post(f"{wallet_path(ada)}/credits", json={**paid, "amount": 400})
    assert other.status_code == 409
    assert "with 500 tokens, not 400" in other.json()["error"]["message"]


async def test_a_payment_counts_once_among_tenants_credited_at_once(
    client: httpx.AsyncClient,
) -> None:
    made = [await make(client, name=f"Tenant {number}") for number in range(4)]
    paid = {"amount": 5, "provider_transaction_id": "pi_1"}
    calls = [client.post(f"{wallet_path(each)}/credits", json=paid) for each in made * 2]
    codes = [answer.status_code for answer in await asyncio.gather(*calls)]
    assert sorted(codes) == [200, 201, *[409] * 6]
    balances = [(await client.get(wallet_path(each))).json()["balance"] for each in made]
    assert sorted(balances) == [0, 0, 0, 5]


async def test_a_credit_that_was_interrupted_after_its_claim_is_completed_by_a_repeat(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    ada, bob = await make(client), await make(client, name="Bob")
    payment = PaymentClaim("pi_9", UUID(ada["id"]), UUID(ada["user_id"]), 5)
    async with plane.central.transaction() as tx:
        await ledger.claim_payment(tx, payment, now=utc_now())
    paid = {"amount": 5, "provider_transaction_id": "pi_9"}
    assert (await client.post(f"{wallet_path(bob)}/credits", json=paid)).status_code == 409
    completed = await client.post(f"{wallet_path(ada)}/credits", json=paid)
    assert (completed.status_code, completed.json()) == (201, {"balance": 5})
    entries = (await client.get("/api/admin/audit", params={"action": "credit"})).json()["entries"]
    assert [each["details"]["amount"] for each in entries] == [5]


@pytest.mark.parametrize(
    "body",
    [
        {"amount": 0, "provider_transaction_id": "a"},
        {"amount": -5, "provider_transaction_id": "a"},
        {"amount": 10**13, "provider_transaction_id": "a"},
        {"amount": 1.5, "provider_transaction_id": "a"},
        {"amount": 5, "provider_transaction_id": " "},
        {"amount": 5, "provider_transaction_id": "a\0b"},
        {"amount": 5},
    ],
    ids=str,
)
async def test_a_payment_that_is_none_is_refused(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    made = await make(client)
    answer = await client.post(f"{wallet_path(made)}/credits", json=body)
    assert answer.status_code == 422, answer.text
    assert (await client.get(wallet_path(made))).json()["balance"] == 0


async def test_the_wallet_of_another_tenants_user_is_not_there(client: httpx.AsyncClient) -> None:
    ada, bob = await make(client), await make(client, name="Bob")
    crossed = {**ada, "user_id": bob["user_id"]}
    paid = {"amount": 5, "provider_transaction_id": "pi_1"}
    for answer in (
        await client.get(wallet_path(crossed)),
        await client.get(f"{wallet_path(crossed)}/transactions"),
        await client.post(f"{wallet_path(crossed)}/credits", json=paid),
        await client.get(user_path(crossed)),
        await client.get(f"{user_path(crossed)}/keys"),
        await client.post(f"{user_path(crossed)}/keys", json={}),
        await client.get(wallet_path({**ada, "id": uuid4()})),
    ):
        assert answer.status_code == 404, answer.text


async def test_keys_are_made_listed_and_revoked(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    made = await make(client)
    wanted = {"name": "website", "scopes": ["read"]}
    answer = await client.post(f"{user_path(made)}/keys", json=wanted)
    assert answer.status_code == 201
    key = answer.json()
    assert (await caller(plane, key["key"])).key.scopes == {"read"}
    listed = (await client.get(f"{user_path(made)}/keys")).json()["keys"]
    assert {each["name"] for each in listed} == {"website", "first key"}
    assert all("key" not in each for each in listed)
    revoke = f"{user_path(made)}/keys/{key['id']}/revoke"
    assert (await client.post(revoke)).json()["revoked_at"]
    assert (await client.post(revoke)).status_code == 200
    with pytest.raises(Unauthenticated):
        await caller(plane, key["key"])
    assert (await client.post(f"{user_path(made)}/keys/{uuid4()}/revoke")).status_code == 404


async def test_a_key_can_not_have_expired_before_it_is_made(client: httpx.AsyncClient) -> None:
    made = await make(client)
    past = (utc_now() - timedelta(days=1)).isoformat()
    answer = await client.post(f"{user_path(made)}/keys", json={"expires_at": past})
    assert answer.status_code == 422
    naive = await client.post(f"{user_path(made)}/keys", json={"expires_at": "2099-01-01T00:00"})
    assert naive.status_code == 422


async def test_a_user_who_is_deactivated_has_no_key_any_more(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    made = await make(client)
    assert (await client.post(f"{user_path(made)}/deactivate")).json()["is_active"] is False
    with pytest.raises(Unauthenticated):
        await caller(plane, made["key"])
    assert (await client.post(f"{user_path(made)}/activate")).json()["is_active"] is True
    with pytest.raises(Unauthenticated):
        await caller(plane, made["key"])


async def test_a_tenants_users_are_listed_in_pages(client: httpx.AsyncClient) -> None:
    made = await make(client)
    path = f"/api/admin/tenants/{made['id']}/users"
    for number in range(3):
        body = {"email": f"{number}@example.com", "name": f"number {number}"}
        assert (await client.post(path, json=body)).status_code == 201
    taken = await client.post(path, json={"email": "1@example.com"})
    assert taken.status_code == 409
    page = (await client.get(path, params={"limit": 3})).json()
    rest = (await client.get(path, params={"limit": 3, "after": page["next"]})).json()
    assert (len(page["users"]), len(rest["users"]), rest["next"]) == (3, 1, None)


async def test_how_long_things_are_kept_is_set_by_tenant(client: httpx.AsyncClient) -> None:
    made = await make(client)
    path = f"/api/admin/tenants/{made['id']}"
    assert (await client.get(path)).json()["retention_days"] is None
    set_to = await client.put(f"{path}/retention", json={"retention_days": 30})
    assert set_to.json()["retention_days"] == 30
    assert (await client.put(f"{path}/retention", json={"retention_days": 0})).status_code == 422
    back = await client.put(f"{path}/retention", json={"retention_days": None})
    assert back.json()["retention_days"] is None
