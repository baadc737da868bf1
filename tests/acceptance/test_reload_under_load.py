"""A reload of `comfyfleet serve --processes 2` fails no call, also none that waits, and a stop ends all of them in order."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from tests.support.server.customers import DRAWN
from tests.support.server.deployment import Deployment
from tests.support.server.polling_load import PollingLoad, children_of, register_workers

pytestmark = pytest.mark.slow
PROCESSES, WORKERS, CLIENTS, WAITERS, STREAMS = 2, 10, 10, 8, 4
WAIT_SECONDS = 30
SECONDS_MAX = 240
CALLS_MIN = 2000
HIGH = {"calls_per_second": "1000000", "calls_at_once": "1000000"}


@dataclass
class WaitingLoad:
    """Clients that wait for a job which nobody runs, and readers of event streams."""

    url: str
    key: str
    job_id: str
    calls: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    is_over: bool = False
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list, repr=False)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._repeat(self._wait)) for _ in range(WAITERS)]
        self._tasks += [asyncio.create_task(self._repeat(self._stream)) for _ in range(STREAMS)]

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _repeat(self, act: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
        headers = {"Authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60) as client:
            while not self.is_over:
                try:
                    await act(client)
                except httpx.ConnectError as error:
                    if not self.is_over:
                        self.failed[repr(error)] += 1
                except httpx.TransportError as error:
                    self.failed[repr(error)] += 1

    async def _wait(self, client: httpx.AsyncClient) -> None:
        answer = await client.get(f"/api/ai-jobs/{self.job_id}", params={"wait": WAIT_SECONDS})
        self._note("wait", answer)

    async def _stream(self, client: httpx.AsyncClient) -> None:
        async with client.stream("GET", "/api/account/events") as answer:
            async for _ in answer.aiter_bytes():
                self.calls["events"] += 1
        self._note("stream", answer)

    def _note(self, kind: str, answer: httpx.Response) -> None:
        if answer.status_code == 200:
            self.calls[kind] += 1
        else:
            self.failed[f"{kind} {answer.status_code}"] += 1


@dataclass(frozen=True)
class Loaded:
    deployment: Deployment
    polling: PollingLoad
    waiting: WaitingLoad

    def children(self) -> list[int]:
        return children_of(self.deployment.control.pid)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS_MAX):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.1)


@pytest.fixture
async def loaded(tmp_path: Path) -> AsyncIterator[Loaded]:
    async with Deployment(tmp_path, None, **HIGH) as deployment:
        await asyncio.to_thread(deployment.start_control, "--processes", str(PROCESSES))
        admin, url = deployment.admin, deployment.url
        secret = admin.create_fleet("gpus")
        admin.register_workflow("draw", DRAWN, [], "2")
        tenant = admin.ask("POST", "/api/admin/tenants", json={"name": "acme"})
        path = f"/api/admin/tenants/{tenant['id']}/wallets/{tenant['user_id']}/credits"
        admin.ask("POST", path, json={"amount": 10, "provider_transaction_id": "first"})
        effect = {"slug": "draw", "workflow_slug": "draw", "price_tokens": 1, "published": True}
        made = admin.ask("POST", "/api/admin/effects", json=effect)
        headers = {"Authorization": f"Bearer {tenant['key']}"}
        async with httpx.AsyncClient(base_url=url, headers=headers) as client:
            job = await client.post("/api/ai-jobs", json={"effect_id": made["id"]})
        waiting = WaitingLoad(url, tenant["key"], job.raise_for_status().json()["id"])
        keys = await register_workers(url, secret, "gpus", WORKERS)
        async with PollingLoad(url, keys, tenant["key"], CLIENTS) as polling:
            waiting.start()
            try:
                yield Loaded(deployment, polling, waiting)
            finally:
                waiting.cancel()


async def test_no_call_fails_during_a_reload(loaded: Loaded) -> None:
    polling, waiting = loaded.polling, loaded.waiting
    await loaded.until(lambda: waiting.calls["events"] >= STREAMS)
    old = set(loaded.children())
    os.kill(loaded.deployment.control.pid, signal.SIGHUP)
    await loaded.until(lambda: not old & set(loaded.children()))
    await loaded.until(lambda: polling.calls >= CALLS_MIN)
    ended = waiting.calls["wait"], waiting.calls["stream"]
    assert ended[0] >= WAITERS, "those that waited at an old process were answered"
    assert ended[1] >= STREAMS
    assert (polling.failed, waiting.failed) == (Counter(), Counter())
    assert "Traceback" not in loaded.deployment.control.said()


async def test_a_stop_answers_all_that_waits(loaded: Loaded) -> None:
    polling, waiting = loaded.polling, loaded.waiting
    await loaded.until(lambda: waiting.calls["events"] >= STREAMS)
    waiting.is_over = True
    loaded.deployment.control.terminate()
    await waiting.finish()
    assert await asyncio.to_thread(loaded.deployment.control.wait) == 0
    assert waiting.failed == Counter()
    assert (waiting.calls["wait"], waiting.calls["stream"]) == (WAITERS, STREAMS)
    assert not [name for name in polling.failed if name.startswith("500")]
    assert "Traceback" not in loaded.deployment.control.said()
    assert "graceful shutdown exceeded" not in loaded.deployment.control.said()
