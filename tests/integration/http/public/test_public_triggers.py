"""Triggers over the API, and the door where webhooks come in."""

import asyncio
import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4
from zoneinfo import ZoneInfo

import httpx
import pytest
from sqlalchemy import func, select
from tests.integration.http.public.test_public_graphs import GRAPH, made
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ManualClock
from tests.support.server.control_plane import client_of, plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on

from comfyfleet.api.webhooks import HEADER, TOLERANCE_SECONDS, sign
from comfyfleet.server.db.tenant_tables import trigger_delivery_keys
from comfyfleet.server.http.public import triggers as routes
from comfyfleet.server.maintenance.sweeps import fire_triggers
from comfyfleet.server.triggers import TRIGGERS_PER_USER_MAX, prune_firings

_PAID_NODE = {"id": "draw", "type": "workflow", "effect": "draw"}
PAID = {**GRAPH, "nodes": [GRAPH["nodes"][0], _PAID_NODE, GRAPH["nodes"][2]]}


async def trigger(ada: Customer, status: int = 201, **fields: Any) -> dict[str, Any]:
    graph = fields.pop("graph", None) or await graph_of(ada)
    body = {"name": "t", "graph": graph, "tokens_per_day": 100, **fields}
    answer = await ada.client.post("/api/triggers", json=body)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def graph_of(ada: Customer) -> str:
    listed = (await ada.get("graphs"))["graphs"]
    found: str = listed[0]["id"] if listed else await made(ada, PAID)
    return found


async def hook(
    ada: Customer, path: str | None = None, body: Any = b"{}", **headers: str
) -> httpx.Response:
    """As a server sends it that has no key."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = ada.client.build_request("POST", path or "/hooks/x", content=content, headers=named)
    if "authorization" not in {name.lower() for name in named}:
        del request.headers["authorization"]
    return await ada.client.send(request)


async def bearer(ada: Customer, found: dict[str, Any], body: Any, **headers: str) -> httpx.Response:
    secret = f"Bearer {found['secret']}"
    return await hook(ada, found["path"], body, Authorization=secret, **headers)


def signed(found: dict[str, Any], content: bytes, at: float) -> dict[str, str]:
    return {HEADER: sign(found["secret"], content, timestamp=int(at))}


async def test_a_schedule_is_made_shown_paused_resumed_and_deleted(ada: Customer) -> None:
    made_ = await trigger(ada, cron="30 7 * * MON-FRI", timezone="Europe/Berlin")
    assert (made_["kind"], made_["secret"], made_["path"]) == ("schedule", None, None)
    assert made_["next_at"] is not None
    assert made_["used_tokens"] == 0
    path = f"/api/triggers/{made_['id']}"
    paused = (await ada.client.post(f"{path}/pause")).json()
    assert (paused["is_paused"], paused["next_at"]) == (True, None)
    assert (await ada.client.post(f"{path}/resume")).json()["next_at"] is not None
    [listed] = (await ada.get("triggers"))["triggers"]
    assert listed == await ada.get(f"triggers/{made_['id']}")
    assert "secret" not in listed
    assert (await ada.client.post(f"{path}/secret")).status_code == 409
    assert (await ada.client.delete(path)).status_code == 204
    assert (await ada.client.get(path)).status_code == 404


async def test_a_trigger_is_fired_by_hand_and_lists_its_firings(ada: Customer) -> None:
    found = await trigger(ada, cron="0 0 1 1 *", inputs={"width": 32})
    path = f"/api/triggers/{found['id']}"
    fired = (await ada.client.post(f"{path}/fire", json={"idempotency_key": "a"})).json()
    again = (await ada.client.post(f"{path}/fire", json={"idempotency_key": "a"})).json()
    assert fired["status"] == again["status"] == "started"
    run = await ada.get(f"graph-runs/{fired['run_id']}")
    assert run["max_tokens"] == fired["max_tokens"] > 0
    await ada.client.post(f"{path}/fire", json={})
    page = await ada.get(f"triggers/{found['id']}/firings", limit=1)
    rest = await ada.get(f"triggers/{found['id']}/firings", before=page["next"])
    assert [each["cause"] for each in (*page["firings"], *rest["firings"])] == ["hand"] * 2
    assert rest["firings"][0]["run_status"] == run["status"]
    assert (await ada.get(f"triggers/{found['id']}"))["used_tokens"] == 2 * fired["max_tokens"]


async def test_a_secret_is_shown_once_and_opens_the_door(ada: Customer) -> None:
    found = await trigger(ada, inputs={"width": "body.size.width"})
    assert found["secret"].startswith("hook_")
    assert found["secret"] not in json.dumps(await ada.get("triggers"))
    assert found["secret"] not in json.dumps(await ada.get(f"triggers/{found['id']}"))
    answer = await bearer(ada, found, {"size": {"width": 48}})
    assert answer.status_code == 202, answer.text
    run = await ada.get(f"graph-runs/{answer.json()['run_id']}")
    assert run["inputs"] == {"width": 48}
    renewed = (await ada.client.post(f"/api/triggers/{found['id']}/secret")).json()
    assert renewed["secret"] != found["secret"]
    assert (await bearer(ada, found, {"size": {"width": 48}})).status_code == 404
    assert (await bearer(ada, renewed, {"size": {"width": 48}})).status_code == 202


async def test_a_signed_body_is_accepted_once_and_only_as_it_was_signed(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    found, content = await trigger(ada), b'{"a": 1}'
    now = effect_setup.plane.clock().timestamp()
    headers = signed(found, content, now)
    one = await hook(ada, found["path"], content, **headers)
    replayed = await hook(ada, found["path"], content, **headers)
    assert (one.status_code, replayed.status_code) == (202, 200), one.text
    assert one.json()["run_id"] == replayed.json()["run_id"]
    for bad in (
        await hook(ada, found["path"], b'{"a": 2}', **headers),
        await hook(ada, found["path"], content, **signed(found, content, now - 400)),
        await hook(ada, found["path"], content, **signed(found, content, now + 400)),
        await hook(ada, found["path"], content, **{HEADER: "t=x,,=,v1=,v1"}),
        await hook(
            ada,
            found["path"],
            content,
            Authorization=f"Bearer {found['secret']}",
            **{HEADER: "t=1,v1=0"},
        ),
    ):
        assert bad.status_code == 404, bad.text


ID, KEY = "X-Comfyfleet-Delivery", "Idempotency-Key"


def replays(signature: str) -> dict[str, dict[str, str]]:
    """The headers with which whoever has seen one request could send it again."""
    timestamp, mac = signature.split(",")
    return {
        "the same again": {ID: "d-1", HEADER: signature},
        "another delivery id": {ID: "d-2", HEADER: signature},
        "no delivery id": {HEADER: signature},
        "an idempotency key instead": {KEY: "d-3", HEADER: signature},
        "a space in the signature": {HEADER: f"{timestamp}, {mac}"},
        "the MAC twice": {HEADER: f"{signature},{mac}"},
        "another part": {HEADER: f"{signature},v2=x"},
        "a timestamp with a zero in front": {HEADER: signature.replace("t=", "t=0")},
        "both ids and another MAC before it": {
            ID: "d-4",
            KEY: "d-5",
            HEADER: f"{timestamp},v1=00,{mac}",
        },
    }


async def test_no_replay_of_a_signed_delivery_starts_another_run(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    found, content = await trigger(ada), b'{"a": 1}'
    headers = signed(found, content, effect_setup.plane.clock().timestamp())
    first = await hook(ada, found["path"], content, **{ID: "d-1", **headers})
    assert first.status_code == 202, first.text
    for name, replay in replays(headers[HEADER]).items():
        answer = await hook(ada, found["path"], content, **replay)
        assert (name, answer.status_code) == (name, 200), answer.text
        assert answer.json()["id"] == first.json()["id"], name
    assert len((await ada.get("graph-runs"))["runs"]) == 1


async def test_replays_at_the_same_time_start_one_run(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    found, content = await trigger(ada), b'{"a": 1}'
    headers = signed(found, content, effect_setup.plane.clock().timestamp())
    answers = await asyncio.gather(
        *(
            hook(ada, found["path"], content, **replay)
            for replay in replays(headers[HEADER]).values()
        )
    )
    assert sorted(each.status_code for each in answers) == [200] * 8 + [202]
    assert len({each.json()["run_id"] for each in answers}) == 1
    assert len((await ada.get("graph-runs"))["runs"]) == 1


async def test_an_id_joins_deliveries_that_were_signed_anew(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    """A sender that retries signs the body with a new timestamp. What it sends then can't be
    replayed under another id, either."""
    found, content = await trigger(ada), b'{"a": 1}'
    now = effect_setup.plane.clock().timestamp()
    retry = signed(found, content, now - 1)
    answers = [
        await hook(ada, found["path"], content, **{ID: "d-1", **signed(found, content, now)}),
        await hook(ada, found["path"], content, **{ID: "d-1", **retry}),
        await hook(ada, found["path"], content, **retry),
        await hook(ada, found["path"], content, **{ID: "d-2", **retry}),
        await bearer(ada, found, {"a": 1}, **{ID: "d-2"}),
    ]
    assert [each.status_code for each in answers] == [202, 200, 200, 200, 200]
    assert len({each.json()["id"] for each in answers}) == 1
    other = await hook(ada, found["path"], content, **signed(found, content, now - 2))
    assert other.status_code == 202


async def test_an_id_that_looks_like_a_signature_joins_nothing(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    found, content = await trigger(ada), b"{}"
    headers = signed(found, content, effect_setup.plane.clock().timestamp())
    timestamp, mac = headers[HEADER].removeprefix("t=").split(",v1=")
    first = await hook(ada, found["path"], content, **headers)
    other = await bearer(ada, found, {}, **{ID: f"signature/{timestamp}/{mac}"})
    by_hand = await ada.client.post(
        f"/api/triggers/{found['id']}/fire", json={"idempotency_key": "d-1"}
    )
    sent = await bearer(ada, found, {}, **{ID: "d-1"})
    assert len({each.json()["id"] for each in (first, other, by_hand, sent)}) == 4


async def test_the_keys_of_a_delivery_are_stored_as_long_as_its_firing(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    found, content = await trigger(ada), b"{}"
    now = effect_setup.plane.clock()
    headers = {ID: "d-1", **signed(found, content, now.timestamp())}
    await hook(ada, found["path"], content, **headers)
    count = select(func.count()).select_from(trigger_delivery_keys)
    async with effect_setup.plane.pools["main"].transaction() as tx:
        await prune_firings(tx, before=now - timedelta(seconds=2 * TOLERANCE_SECONDS), limit=9)
        assert await tx.scalar(count) == 2
        await prune_firings(tx, before=now + timedelta(seconds=1), limit=9)
        assert await tx.scalar(count) == 0


async def test_a_delivery_is_known_by_its_id(effect_setup: EffectSetup, ada: Customer) -> None:
    found = await trigger(ada)
    same = {"X-Comfyfleet-Delivery": "d-1"}
    answers = await asyncio.gather(*(bearer(ada, found, {}, **same) for _ in range(6)))
    assert sorted({each.status_code for each in answers}) == [200, 202]
    assert len({each.json()["id"] for each in answers}) == 1
    other = await bearer(ada, found, {}, **{"Idempotency-Key": "d-2"})
    assert other.status_code == 202
    assert len((await ada.get("graph-runs"))["runs"]) == 2
    long = await bearer(ada, found, {}, **{"X-Comfyfleet-Delivery": "d" * 201})
    assert long.status_code == 422


async def test_unknown_ids_and_wrong_secrets_are_answered_alike(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    found = await trigger(ada)
    stranger = await effect_setup.customer()
    theirs = await trigger(stranger)
    schedule = await trigger(ada, cron="0 0 * * *")
    wrong = {"Authorization": f"Bearer {theirs['secret']}"}
    answers = [
        await hook(ada, found["path"]),
        await hook(ada, found["path"], **wrong),
        await hook(ada, found["path"], b"not json", **wrong),
        await hook(ada, found["path"], Authorization=f"Basic {found['secret']}"),
        await hook(ada, found["path"], Authorization=f"Bearer {ada.key}"),
        await hook(ada, f"{found['path']}?secret={found['secret']}"),
        await hook(ada, f"/hooks/{uuid4()}", **wrong),
        await hook(ada, f"/hooks/{schedule['id']}", **wrong),
        await hook(ada, "/hooks/nothing", **wrong),
    ]
    assert {(each.status_code, each.json()["error"]["message"]) for each in answers} == {
        (404, "this webhook doesn't exist, or the secret is wrong")
    }
    assert (await ada.get(f"triggers/{found['id']}/firings"))["firings"] == []
    assert (await ada.get("graph-runs"))["runs"] == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 422),
        (b"\xff\xfe\xfa", 422),
        (b'{"a": NaN}', 422),
        (b'{"width": 1, "width": 2}', 422),
        (b"[" * 200 + b"]" * 200, 422),
        (b'{"width": "\\u0000"}', 422),
        (b'{"width": "wide"}', 422),
        (b'{"width": 1e400}', 422),
        (b"", 422),
        (b"[]", 422),
        (b'{"width": null}', 422),
        (b'{"width": "' + b"x" * 70_000 + b'"}', 413),
        (b'{"a": [' + b"[]," * 9000 + b'0], "width": 32}', 202),
    ],
)
async def test_hostile_bodies_are_refused(ada: Customer, body: bytes, status: int) -> None:
    found = await trigger(ada, inputs={"width": "body.width"})
    answer = await bearer(ada, found, body)
    assert answer.status_code == status, answer.text
    assert len((await ada.get("graph-runs"))["runs"]) == (status == 202)


async def test_a_paused_or_spent_webhook_says_so(ada: Customer) -> None:
    found = await trigger(ada, tokens_per_day=1)
    spent = await bearer(ada, found, {}, **{"X-Comfyfleet-Delivery": "d-1"})
    assert (spent.status_code, spent.json()["error"]["code"]) == (422, "limit_spent")
    assert (await ada.get(f"triggers/{found['id']}"))["is_spent"] is True
    [fired] = (await ada.get(f"triggers/{found['id']}/firings"))["firings"]
    assert (fired["status"], fired["error_code"]) == ("refused", "limit_spent")
    await ada.client.post(f"/api/triggers/{found['id']}/pause")
    assert (await bearer(ada, found, {})).status_code == 409


async def test_calls_of_one_webhook_are_limited(
    ada: Customer, monkeypatch: pytest.MonkeyPatch, effect_setup: EffectSetup
) -> None:
    monkeypatch.setattr(routes, "HOOK_CALLS_PER_SECOND", 0.001)
    monkeypatch.setattr(routes, "HOOK_CALLS_AT_ONCE", 3)
    found = await trigger(ada)
    async with client_of(effect_setup.plane, found["secret"]) as sender:
        answers = [
            await sender.post(found["path"], headers={"X-Comfyfleet-Delivery": "d"})
            for _ in range(4)
        ]
    assert [each.status_code for each in answers] == [202, 200, 200, 429]
    assert "retry-after" in answers[3].headers


async def test_scopes_are_needed(effect_setup: EffectSetup, ada: Customer) -> None:
    found = await trigger(ada)
    for scopes, creates, renews in (
        (["read"], (403, 403), 403),
        (["read", "write"], (201, 403), 403),
        (["read", "keys"], (403, 403), 403),
        (["read", "write", "keys"], (201, 201), 200),
    ):
        key, _ = await effect_setup.key(ada.tenant_id, ada.user_id, scopes=frozenset(scopes))
        async with client_of(effect_setup.plane, key) as client:
            body = {"name": "t", "graph": found["graph_id"], "tokens_per_day": 5}
            schedule = await client.post("/api/triggers", json={**body, "cron": "0 0 * * *"})
            webhook = await client.post("/api/triggers", json=body)
            assert (schedule.status_code, webhook.status_code) == creates
            secret = await client.post(f"/api/triggers/{found['id']}/secret")
            assert secret.status_code == renews
            assert (await client.get("/api/triggers")).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"cron": "* * * *"},
        {"timezone": "Mars/Base"},
        {"tokens_per_day": -1},
        {"tokens_per_day": True},
        {"tokensperday": 5},
        {"pipeline": "none", "graph": "none"},
        {"version": 0},
        {"inputs": {"height": 3}},
        {"inputs": {"width": "body..x"}},
        {"cron": "0 0 * * *", "inputs": {"width": "wide"}},
        {"name": ""},
    ],
)
async def test_what_could_never_fire_is_refused(ada: Customer, fields: dict[str, Any]) -> None:
    body = {"name": "t", "graph": await graph_of(ada), "tokens_per_day": 5, **fields}
    answer = await ada.client.post("/api/triggers", json=body)
    assert answer.status_code in ((404,) if "pipeline" in fields else (422,)), answer.text


async def test_a_user_has_so_many_triggers_and_no_more(ada: Customer) -> None:
    made_ = await trigger(ada)
    for _ in range(TRIGGERS_PER_USER_MAX - 1):
        await trigger(ada, graph=made_["graph_id"])
    assert (await trigger(ada, 413, graph=made_["graph_id"]))["error"]["code"] == "limit_exceeded"
    page = await ada.get("triggers", limit=100)
    assert (len(page["triggers"]), page["next"]) == (100, None)


async def test_a_pipeline_is_started_by_its_name(ada: Customer) -> None:
    document = {"name": "One step", "steps": [{"name": "Base", "workflow": "draw"}]}
    assert (await ada.client.post("/api/pipelines", json=document)).status_code == 201
    body = {"name": "p", "pipeline": "One step", "base_candidates": 2, "tokens_per_day": 40}
    found = (await ada.client.post("/api/triggers", json=body)).json()
    answer = await bearer(ada, found, {})
    assert answer.status_code == 202, answer.text
    run = await ada.get(f"pipeline-runs/{answer.json()['run_id']}")
    assert (run["limits"]["tokens"], run["base_candidates"]) == (40, 2)


async def test_two_control_planes_fire_a_moment_and_a_delivery_once(
    postgres_databases: Databases, tmp_path: Path
) -> None:
    clock = ManualClock()
    both: dict[str, Any] = {
        "central_database_url": await postgres_databases.url("central"),
        "tenant_database_urls": f"main={await postgres_databases.url('tenant')}",
        "clock": clock,
    }
    async with (
        plane_on(postgres_databases, tmp_path, **both) as here,
        plane_on(postgres_databases, tmp_path, **both) as there,
        effect_setup_on(here) as effect_setup,
    ):
        ada = await effect_setup.customer()
        schedules = [await trigger(ada, cron="0 * * * *", catch_up=True) for _ in range(8)]
        found = await trigger(ada)
        clock.advance(hours=1)
        await asyncio.gather(*(fire_triggers(plane) for plane in (here, there) * 3))
        for each in schedules:
            firings = (await ada.get(f"triggers/{each['id']}/firings"))["firings"]
            assert [fired["status"] for fired in firings].count("started") == 1, firings
        headers = {"X-Comfyfleet-Delivery": "d-1"}
        async with (
            client_of(here, found["secret"]) as one,
            client_of(there, found["secret"]) as other,
        ):
            answers = await asyncio.gather(
                *(each.post(found["path"], headers=headers) for each in (one, other) * 3)
            )
        assert sorted(each.status_code for each in answers) == [200] * 5 + [202]
        assert len({each.json()["id"] for each in answers}) == 1
        assert len((await ada.get("graph-runs", limit=100))["runs"]) == 9


async def test_a_schedule_is_tried_before_it_is_made(ada: Customer) -> None:
    path = "/api/triggers/moments"
    found = await ada.get("triggers/moments", cron="30 2 * * MON-FRI", timezone="Europe/Berlin")
    moments = [datetime.fromisoformat(each) for each in found["moments"]]
    assert len(moments) == 5
    assert moments == sorted(set(moments))
    at_home = [each.astimezone(ZoneInfo("Europe/Berlin")) for each in moments]
    assert {(each.hour, each.minute, each.weekday() < 5) for each in at_home} == {(2, 30, True)}
    for query in ({"cron": "a b c d e"}, {"cron": "0 2 * *"}, {"cron": "0 2 * * *", "timezone": "X"}):  # fmt: skip
        assert (await ada.client.get(path, params=query)).status_code == 422
    assert (await ada.get("triggers"))["triggers"] == []
