"""A client's next prompt runs on the backend that ran its previous one."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.gateway import (
    PROMPT,
    GatewayInProcess,
    GatewayUser,
    gateway_on,
    history_entry,
    until,
)

from comfyfleet.server.gateway.offers import offer_cache
from comfyfleet.server.gateway.previous_backends import by_client
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.model import EndedPrompt

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)


@pytest.fixture
async def server(databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayInProcess]:
    async with gateway_on(databases, tmp_path, engines=2) as server:
        # However long the machine takes, the preferred worker asks before another one may.
        matcher = server.plane.queue._matcher
        matcher._rules = replace(matcher._rules, preferred_max_wait=timedelta(seconds=60))
        await until(lambda: all_poll(server))
        offer_cache(server.plane).forget()  # it may have been read before both were there
        yield server


async def all_poll(server: GatewayInProcess) -> bool:
    return server.plane.queue.parked() == len(server.engines)


async def runs(server: GatewayInProcess) -> list[int]:
    async with httpx.AsyncClient() as http:
        answers = [await http.get(f"{engine.url}/history") for engine in server.engines]
    return [len(answer.json()) for answer in answers]


async def run(http: httpx.AsyncClient, client_id: str, color: int) -> None:
    prompt: dict[str, Any] = {**PROMPT}
    prompt["1"] = {**PROMPT["1"], "inputs": {**PROMPT["1"]["inputs"], "color": color}}
    answer = await http.post("/prompt", json={"prompt": prompt, "client_id": client_id})
    assert answer.status_code == 200, answer.text
    await until(lambda: history_entry(http, answer.json()["prompt_id"]))


async def test_prompts_of_a_client_run_on_one_backend_while_it_is_free(
    server: GatewayInProcess,
) -> None:
    ada, bob = await server.new_user(), await server.new_user()
    async with ada.http_async() as hers, bob.http_async() as his:
        for color in range(4):
            await run(hers, "krita", color)
        first = await runs(server)
        assert sorted(first) == [0, 4]
        mine = first.index(4)
        # Whoever has no previous prompt gets any backend, which changes nothing for her.
        await run(his, "script", 9)
        before = await runs(server)
        await run(hers, "krita", 8)
        assert (await runs(server))[mine] == before[mine] + 1


async def test_a_prompt_runs_on_another_backend_while_the_preferred_one_is_busy(
    server: GatewayInProcess,
) -> None:
    matcher = server.plane.queue._matcher
    matcher._rules = replace(matcher._rules, preferred_max_wait=timedelta(seconds=0.3))
    ada = await server.new_user()
    async with ada.http_async() as http:
        await run(http, "krita", 0)
        endless = {"image": ["1", 0], "steps": 1000, "step_ms": 60, "previews": False}
        slow = {**PROMPT, "2": {"class_type": "ComfyfleetSteps", "inputs": endless}}
        answer = await http.post("/prompt", json={"prompt": slow, "client_id": "krita"})
        assert answer.status_code == 200, answer.text
        await until(lambda: busy(server))
        (preferred,) = await busy(server)
        before = await runs(server)
        await run(http, "krita", 1)
        assert await busy(server) == [preferred], "the first prompt still runs"
        after = await runs(server)
        other = 1 - preferred
        assert after[other] == before[other] + 1
        await http.post("/interrupt")


async def busy(server: GatewayInProcess) -> list[int]:
    """Returns the numbers of the engines that run a prompt."""
    async with httpx.AsyncClient() as http:
        answers = [await http.get(f"{engine.url}/queue") for engine in server.engines]
    return [n for n, answer in enumerate(answers) if answer.json()["queue_running"]]


def ended(client_id: str | None) -> EndedPrompt:
    return EndedPrompt(uuid4(), None, NOW, client_id)


def test_the_previous_prompt_is_the_clients_own_or_else_the_users() -> None:
    prompts = [ended("browser"), ended("krita"), ended("krita")]
    assert by_client(prompts, "krita") == [*prompts[1:], prompts[0]]
    assert by_client(prompts, "new") == by_client(prompts, None) == prompts
    assert by_client([], "krita") == []


async def test_the_clients_of_ended_prompts_are_known(server: GatewayInProcess) -> None:
    ada = await server.new_user()
    async with ada.http_async() as http:
        await run(http, "krita", 0)
        await run(http, "browser", 1)
        assert await last_clients(server, ada) == ["browser", "krita"]
        await http.post("/history", json={"clear": True})
        assert await last_clients(server, ada) == ["browser", "krita"]


async def last_clients(server: GatewayInProcess, user: GatewayUser) -> list[str | None]:
    owner = user.tenant_id, user.user_id
    async with server.plane.context.tenant(user.tenant_id) as tx:
        return [prompt.client_id for prompt in await jobs.last_ended_prompts(tx, *owner, limit=8)]
