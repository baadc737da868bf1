"""Bodies of callers with a key: misspelt, malformed, or made to break what reads them next."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on

from comfyfleet.errors import InvalidInput
from comfyfleet.server.catalog.draft import PROPERTIES_MAX
from comfyfleet.server.http.request_body import _object, parse_tolerantly

ECHO = {
    "name": "Echo",
    "nodes": [{"id": "x", "type": "input", "value_type": "any"}, {"id": "y", "type": "output"}],
    "connections": [{"from": "x.value", "to": "y.value"}],
}
JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def effect_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[EffectSetup]:
    async with plane_on(databases, tmp_path) as plane, effect_setup_on(plane) as effect_setup:
        yield effect_setup


@pytest.fixture
async def plain_shop(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[EffectSetup]:
    async with (
        plane_on(sqlite_databases, tmp_path) as plane,
        effect_setup_on(plane) as effect_setup,
    ):
        yield effect_setup


async def echo(ada: Customer) -> str:
    made = await ada.client.post("/api/graphs", json=ECHO)
    assert made.status_code == 201, made.text
    return f"/api/graphs/{made.json()['id']}/runs"


async def post(client: httpx.AsyncClient, path: str, body: str) -> httpx.Response:
    return await client.post(path, content=body.encode(), headers=JSON)


async def test_what_no_database_can_keep_is_refused_and_breaks_nothing(
    effect_setup: EffectSetup,
) -> None:
    ada = await effect_setup.customer()
    path = await echo(ada)
    for value, said in (
        ('"\\ud800"', "half a character"),
        ('"a\\u0000b"', "NUL"),
        ('{"\\u0000": 1}', "NUL"),
        ("NaN", "NaN is not a JSON number"),
        ("-Infinity", "-Infinity is not a JSON number"),
        ("1e999", "too large"),
        ("9" * 5000, "too large"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ("[" * 900 + "]" * 900, "nested more than 100 levels"),
        ("[" * 100_000 + "]" * 100_000, "nested more than 100 levels"),
    ):
        answer = await post(ada.client, path, f'{{"inputs": {{"x": {value}}}}}')
        assert answer.status_code == 422, (value[:20], answer.text)
        assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
async def test_another_encoding_hides_nothing_from_the_reader(
    effect_setup: EffectSetup, encoding: str
) -> None:
    ada = await effect_setup.customer()
    path = await echo(ada)
    for value in ('"a\\u0000b"', '{"\\u0000": 1}', '"\\ud800"', '"\\uD800"'):
        body = f'{{"inputs": {{"x": {value}}}}}'.encode(encoding)
        answer = await ada.client.post(path, content=body, headers=JSON)
        assert answer.status_code == 422, (value, answer.text)
    assert parse_tolerantly('["a\\u0000", "\\ud800"]'.encode(encoding)) == ["a\ufffd", "\ufffd"]


class Name(str):
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return super().__eq__(other)


def test_a_field_that_stands_twice_is_found_among_very_many_in_one_pass() -> None:
    names = [Name(number) for number in range(2_000)]
    with pytest.raises(InvalidInput, match="'1999' occurs twice"):
        _object([(name, 1) for name in [*names, Name(1_999)]])
    assert Name.compared < 10 * len(names)


async def test_a_file_id_that_is_none_is_a_value_like_any_other(effect_setup: EffectSetup) -> None:
    ada = await effect_setup.customer()
    path = await echo(ada)
    for value in ("abc", "", 7, None, {"file_id": "x"}, ["y"]):
        answer = await ada.client.post(path, json={"inputs": {"x": {"file_id": value}}})
        assert answer.status_code in (201, 422), (value, answer.text)


async def test_a_misspelt_field_is_refused_with_the_right_one(plain_shop: EffectSetup) -> None:
    ada = await plain_shop.customer()
    path = await echo(ada)
    wrong: list[tuple[httpx.AsyncClient, str, dict[str, Any], str]] = [
        (ada.client, path, {"inputs": {"x": 1}, "maxtokens": 3}, "'maxtokens'; did you mean 'max_tokens'?"),
        (ada.client, path, {"input": {"x": 1}}, "did you mean 'inputs'?"),
        (ada.client, "/api/ai-jobs", {"efect_id": str(plain_shop.draw.id)}, "'effect_id'?"),
        (plain_shop.fleet_setup.admin, "/api/admin/fleets", {"slug": "x", "stag": "y"}, "'stage'?"),
        (plain_shop.fleet_setup.admin, "/api/admin/maintenance", {"onn": True}, "'on'?"),
    ]  # fmt: skip
    for client, where, body, said in wrong:
        answer = await client.post(where, json=body)
        assert answer.status_code == 422, (where, answer.text)
        assert said in answer.json()["error"]["message"]


async def test_a_worker_may_be_newer_than_we_are(plain_shop: EffectSetup) -> None:
    joined = await plain_shop.fleet_setup.register("newer", colour="green")
    assert joined.status_code == 200


@pytest.mark.parametrize(
    ("word", "body"),
    [
        ("fail", '"error": "a\\u0000b \\ud800"'),
        ("fail", '"error": {"exception_message": "a\\u0000b", "step": NaN}'),
        ("requeue", '"reason": "spot", "detail": "a\\u0000b\\ud800"'),
    ],
)
async def test_an_odd_text_of_a_backend_costs_a_worker_nothing(
    effect_setup: EffectSetup, word: str, body: str
) -> None:
    ada = await effect_setup.customer()
    await ada.job(effect_setup.draw)
    async with effect_setup.fleet_setup.worker() as worker:
        job = await worker.job()
        lease = f'"dispatch_id": {job["dispatch_id"]}, "lease_token": "{job["lease_token"]}"'
        said = await post(worker.client, f"/api/worker/{word}", f"{{{lease}, {body}}}")
    assert said.status_code == 200, said.text


async def test_neither_true_nor_a_text_is_an_amount(plain_shop: EffectSetup) -> None:
    ada = await plain_shop.customer(tokens=0)
    path = f"/api/admin/tenants/{ada.tenant_id}/wallets/{ada.user_id}/credits"
    for amount in (True, "5", 5.0, 1.5):
        body = {"amount": amount, "provider_transaction_id": "x1"}
        answer = await plain_shop.fleet_setup.admin.post(path, json=body)
        assert answer.status_code == 422, amount
        assert answer.json()["error"]["message"] == "amount: must be a whole number"
    assert await ada.balance() == 0


async def test_a_payment_told_again_with_another_amount_is_a_conflict(
    effect_setup: EffectSetup,
) -> None:
    ada = await effect_setup.customer(tokens=0)
    path = f"/api/admin/tenants/{ada.tenant_id}/wallets/{ada.user_id}/credits"
    statuses = []
    for amount in (5, 5, 7):
        body = {"amount": amount, "provider_transaction_id": "x1"}
        statuses.append((await effect_setup.fleet_setup.admin.post(path, json=body)).status_code)
    assert statuses == [201, 200, 409]
    assert await ada.balance() == 5


async def test_more_properties_than_an_effect_can_have_are_not_looked_at(
    plain_shop: EffectSetup,
) -> None:
    ada = await plain_shop.customer()
    body = {
        "effect_id": str(plain_shop.draw.id),
        "idempotency_key": "k",
        "properties": {f"p{number}": 1 for number in range(PROPERTIES_MAX + 1)},
    }
    answer = await ada.client.post("/api/ai-jobs", json=body)
    assert answer.status_code == 422
    assert "properties" in answer.json()["error"]["message"]
    assert str(PROPERTIES_MAX) in answer.json()["error"]["message"]


async def test_what_is_wrong_is_told_in_plain_words(plain_shop: EffectSetup) -> None:
    ada = await plain_shop.customer()
    for body, said in (
        ("[1]", "body: must be an object"),
        ("{", "body: must be valid JSON"),
        ('{"effect_id": "x"}', "effect_id: must be an id (a UUID)"),
        ("{}", "effect_id: is missing"),
        (f'{{"effect_id": "{plain_shop.draw.id}", "properties": []}}', "properties: must be an object"),
    ):  # fmt: skip
        answer = await post(ada.client, "/api/ai-jobs", body)
        assert answer.status_code == 422, body
        assert said in answer.json()["error"]["message"]
    refused = await plain_shop.fleet_setup.register("w", workflow_slugs={})
    assert "workflow_slugs: must be a list" in refused.json()["error"]["message"]
