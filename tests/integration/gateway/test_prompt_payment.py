"""Tokens for prompts of ComfyUI's clients: reserved, used, given back, and refused when there are too few."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from tests.support.databases.factory import Databases
from tests.support.server.gateway import (
    PROMPT,
    GatewayInProcess,
    GatewayUser,
    gateway_on,
    history_entry,
    until,
)

from comfyfleet.api.admin import FleetPrompts
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.gateway.model import job_id_of
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.maintenance.embedded_fleet import FLEET, STAGE
from comfyfleet.server.tenants import wallet as ledger

FAILING = {
    "1": {"class_type": "ComfyfleetFail", "inputs": {"fail": True, "message": "no", "after_ms": 0}}
}


@pytest.fixture
async def server(databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayInProcess]:
    async with gateway_on(databases, tmp_path) as server:
        yield server


async def set_terms(server: GatewayInProcess, **terms: Any) -> None:
    async with server.plane.central.transaction() as tx:
        fleet = await fleets.get_fleet(tx, FLEET, STAGE)
        await catalog.set_prompt_terms(
            tx, fleet, FleetPrompts(allows_unknown=True, **terms), now=server.plane.clock()
        )
    server.plane.context.caches.gateway.clear()  # kept for a second


async def post(
    user: GatewayUser, prompt: Any = PROMPT, headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    async with user.http_async() as http:
        return await http.post("/prompt", json={"prompt": prompt, **body}, headers=headers)


async def run(user: GatewayUser, prompt: Any = PROMPT, **body: Any) -> str:
    answer = await post(user, prompt, **body)
    assert answer.status_code == 200, answer.text
    prompt_id = str(answer.json()["prompt_id"])
    async with user.http_async() as http:
        await until(lambda: history_entry(http, prompt_id))
    return prompt_id


async def lines(server: GatewayInProcess, user: GatewayUser) -> list[tuple[str, int]]:
    """Of the ledger, after the payment; each is of a prompt."""
    async with server.plane.context.tenant(user.tenant_id) as tx:
        found = await ledger.transactions(tx, user.tenant_id, user.user_id, limit=100)
        assert await ledger.verify(tx) == []
    return [(each.type.value, each.amount) for each in reversed(found[:-1])]


async def test_prompts_are_paid_by_their_terms(server: GatewayInProcess) -> None:
    await set_terms(server, price_per_second=1)
    bob = await server.new_user(tokens=100)
    await run(bob)
    # A run of less than a second, of the 60 that were reserved for one like no other.
    assert await lines(server, bob) == [("JOB_RESERVE", -60), ("JOB_CONSUME", 59)]
    await run(bob)
    assert (await lines(server, bob))[2:] == [("JOB_RESERVE", -60), ("JOB_CONSUME", 59)]

    await set_terms(server, price_tokens=7)
    ada = await server.new_user(tokens=20)
    prompt_id = await run(ada)
    assert await lines(server, ada) == [("JOB_RESERVE", -7), ("JOB_CONSUME", 0)]
    async with server.plane.context.tenant(ada.tenant_id) as tx:
        newest = (await ledger.transactions(tx, ada.tenant_id, ada.user_id, limit=1))[0]
    assert newest.job_id == job_id_of(ada.tenant_id, ada.user_id, prompt_id)


async def test_too_few_tokens_and_too_low_a_limit_are_refused(server: GatewayInProcess) -> None:
    await set_terms(server, price_per_second=1)
    poor = await server.new_user(tokens=10)
    refused = await post(poor)
    assert refused.status_code == 400
    assert refused.json()["node_errors"] == {}
    error = refused.json()["error"]
    assert error["type"] == "insufficient_tokens"
    assert error["message"] == "The prompt needs 60 tokens, and the balance is 10"
    assert error["extra_info"] == {"required_tokens": 60, "balance": 10}
    assert await lines(server, poor) == []
    await run(poor, extra_data={"max_tokens": 10})
    assert await lines(server, poor) == [("JOB_RESERVE", -10), ("JOB_CONSUME", 9)]
    # Now that it is known to take less than a second, all of the balance is enough.
    await run(poor)
    assert (await lines(server, poor))[2:] == [("JOB_RESERVE", -9), ("JOB_CONSUME", 8)]
    await set_terms(server, price_tokens=3)
    above = await post(poor, headers={"X-Max-Tokens": "2"})
    assert above.json()["error"]["type"] == "price_above_max_tokens"


async def test_a_prompt_that_fails_is_refunded_whole(server: GatewayInProcess) -> None:
    await set_terms(server, price_tokens=5)
    ada = await server.new_user(tokens=100)
    await run(ada, FAILING)
    assert await lines(server, ada) == [("JOB_RESERVE", -5), ("JOB_REFUND", 5)]


async def test_a_metered_prompt_pays_its_seconds_if_its_own_node_fails(
    server: GatewayInProcess,
) -> None:
    await set_terms(server, price_per_second=1)
    ada = await server.new_user(tokens=100)
    await run(ada, FAILING)
    assert await lines(server, ada) == [("JOB_RESERVE", -60), ("JOB_CONSUME", 59)]


LONG = {
    "1": {
        "class_type": "ComfyfleetFail",
        "inputs": {"fail": False, "message": "", "after_ms": 60_000},
    }
}


@pytest.mark.parametrize("by_v2", [False, True])
async def test_a_run_is_stopped_where_its_caller_would_not_pay_for_more(
    server: GatewayInProcess, by_v2: bool
) -> None:
    await set_terms(server, price_per_second=1)
    ada = await server.new_user(tokens=100)
    async with ada.http_async() as http:
        if by_v2:
            sent = await http.post("/api/v2/jobs?max_tokens=1", json={"workflow": LONG})
            prompt_id = sent.json()["id"]
        else:
            sent = await http.post(
                "/prompt", json={"prompt": LONG, "extra_data": {"max_tokens": 1}}
            )
            prompt_id = sent.json()["prompt_id"]
        await until(lambda: history_entry(http, prompt_id))
        entry = await history_entry(http, prompt_id)
        assert entry["status"]["messages"][-1][0] == "execution_interrupted"
        job = (await http.get(f"/api/v2/jobs/{prompt_id}")).json()
        assert job["status"] == "expired"
        assert "longer than its limit of 1 s" in job["error"]["message"]
        free = await http.post("/api/v2/jobs", json={"workflow": LONG, "max_tokens": 0})
        assert free.status_code == 422, free.text
    # The second that it ran is paid for, although it failed: it was stopped at its limit.
    assert await lines(server, ada) == [("JOB_RESERVE", -1), ("JOB_CONSUME", 0)]


async def test_an_interrupted_metered_run_pays_for_its_seconds(server: GatewayInProcess) -> None:
    await set_terms(server, price_per_second=1)
    ada = await server.new_user(tokens=100)
    async with ada.http_async() as http:
        sent = await http.post("/prompt", json={"prompt": LONG})
        prompt_id = sent.json()["prompt_id"]

        async def runs() -> bool:
            queue = (await http.get("/queue")).json()
            return bool(queue["queue_running"])

        await until(runs)
        await asyncio.sleep(1.1)  # what is measured is time
        await http.post("/interrupt", json={"prompt_id": prompt_id})
        await until(lambda: history_entry(http, prompt_id))
    reserved, consumed = await lines(server, ada)
    assert reserved == ("JOB_RESERVE", -60)
    assert consumed[0] == "JOB_CONSUME"
    assert 0 < consumed[1] < 59, "some seconds are paid for, and the rest went back"


async def test_one_customers_runs_do_not_change_what_another_must_reserve(
    server: GatewayInProcess,
) -> None:
    await set_terms(server, price_per_second=1)
    ada, bob = await server.new_user(tokens=1_000), await server.new_user(tokens=1_000)
    await run(ada)
    run_seconds = server.plane.context.caches.run_seconds
    async with server.plane.context.tenant(ada.tenant_id) as tx:
        line = (await ledger.transactions(tx, ada.tenant_id, ada.user_id, limit=1))[0]
        assert line.job_id is not None
        job = await jobs.get(tx, ada.tenant_id, line.job_id)
    run_seconds.note(ada.tenant_id, job.spec, 300.0)
    await run(ada)
    await run(bob)
    assert (await lines(server, ada))[2] == ("JOB_RESERVE", -900)
    assert (await lines(server, bob))[0] == ("JOB_RESERVE", -60)


SHOWN = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0},
    },
    "2": {"class_type": "SaveImageWebsocket", "inputs": {"images": ["1", 0]}},
}
SHOWN_AND_FAILED = {
    **SHOWN,
    "3": {
        "class_type": "ComfyfleetFail",
        "inputs": {"fail": True, "message": "no", "after_ms": 500, "value": ["1", 0]},
    },
}


@pytest.mark.parametrize("price", [0, 3])
async def test_a_picture_with_a_price_is_not_seen_before_it_is_paid_for(
    server: GatewayInProcess, price: int
) -> None:
    await set_terms(server, price_tokens=price)
    ada = await server.new_user(tokens=100)
    failed = await asyncio.to_thread(pictures_of, ada, SHOWN_AND_FAILED)
    assert failed == (0 if price else 1)
    assert await asyncio.to_thread(pictures_of, ada, SHOWN) == 1


def pictures_of(user: GatewayUser, prompt: Any) -> int:
    """How many frames a client gets until the run is over."""
    with user.open_engine_client() as talk:
        ear = talk.listen("me")
        prompt_id = talk.submit(prompt, client_id="me")
        ear.wait("executing", {"node": None, "prompt_id": prompt_id})
        return sum(name.startswith("binary") for name in ear.names())


async def test_a_failed_prompt_is_not_run_again_at_its_old_price(server: GatewayInProcess) -> None:
    await set_terms(server, price_tokens=1)
    ada = await server.new_user(tokens=100)
    prompt_id = await run(ada, FAILING)
    await set_terms(server, price_tokens=50)
    job_id = job_id_of(ada.tenant_id, ada.user_id, prompt_id)
    async with ada.http_async() as http:
        again = await http.post(f"/api/ai-jobs/{job_id}/retry")
    assert again.status_code == 409, again.text
    assert await lines(server, ada) == [("JOB_RESERVE", -1), ("JOB_REFUND", 1)]


async def test_prompts_sockets_and_messages_are_counted(server: GatewayInProcess) -> None:
    await set_terms(server, price_tokens=3)
    rich, poor = await server.new_user(tokens=9), await server.new_user()
    await asyncio.to_thread(listen_and_run, rich)
    await post(poor)
    nobody = {"1": {"class_type": "NoSuchNode", "inputs": {}}}
    await post(rich, nobody)
    shown = generate_latest(server.plane.meters.registry).decode()
    assert 'comfyfleet_prompts_total{outcome="accepted"} 1.0' in shown
    assert 'comfyfleet_prompts_total{outcome="insufficient_tokens"} 1.0' in shown
    assert 'comfyfleet_prompts_total{outcome="missing_node_type"} 1.0' in shown
    (events,) = (
        float(line.split()[-1])
        for line in shown.splitlines()
        if line.startswith("comfyfleet_gateway_events_total")
    )
    assert events > 5


def listen_and_run(user: GatewayUser) -> None:
    with user.open_engine_client() as talk:
        ear = talk.listen("me")
        prompt_id = talk.submit(PROMPT, client_id="me")
        ear.wait("executing", {"node": None, "prompt_id": prompt_id})
