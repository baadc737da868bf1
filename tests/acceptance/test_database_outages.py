"""An outage of PostgreSQL under mixed requests: one line at its start, one at its end, and 503 in between."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from tests.support.jobs.counted_jobs import FLEET
from tests.support.jobs.large_graph import GraphCustomer, document, prepare
from tests.support.server.deployment import ADMIN_KEY, Deployment

SETTINGS = {
    "lease_seconds": "60",
    "heartbeat_seconds": "5",
    "sweep_seconds": "3",
    "outage_seconds": "60",
    "calls_per_second": "1000",
    "calls_at_once": "1000",
}
ALLOWED = {503, 429}
ROUND_SECONDS = 0.05
QUIET_SECONDS = 2.5  # longer than an outage takes to settle
RECOVERY_SECONDS_MAX = 60


class Load:
    """Requests of every kind that repeat until the end, and the errors that they got."""

    def __init__(self, url: str, key: str, run_id: str) -> None:
        self._url, self._key, self._run_id = url, key, run_id
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.last_error_at = 0.0
        self._paths = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Load":
        acts = [
            *(
                self._request("GET", path, self._key)
                for path in (
                    "/api/wallet",
                    "/api/ai-jobs",
                    "/api/graph-runs",
                    f"/api/graph-runs/{self._run_id}",
                    "/queue",
                    "/history",
                    "/object_info",
                    "/api/v2/jobs",
                    "/api/media",
                )
            ),
            *(
                self._request("GET", path, ADMIN_KEY)
                for path in (
                    "/api/admin/overview",
                    "/api/admin/workers",
                    "/api/admin/dispatches?status=queued",
                    "/api/admin/audit",
                    "/metrics",
                    "/readyz",
                )
            ),
            self._request("POST", "/api/admin/workers/worker-1/rotate-token", ADMIN_KEY),
            self._request("POST", "/prompt", self._key, json={"prompt": {}}),
            self._stream("/api/admin/events", ADMIN_KEY),
            self._stream(f"/api/graph-runs/{self._run_id}/events", self._key),
            self._socket(),
            self._hook_that_hangs_up(),
        ]
        self._paths = len(acts) - 2  # the socket and the hook note no status
        self._tasks = [asyncio.create_task(act) for act in acts]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        assert {type(each) for each in results} == {asyncio.CancelledError}, results

    async def begun(self) -> None:
        """Waits until every path was answered."""
        async with asyncio.timeout(RECOVERY_SECONDS_MAX):
            while len({path for path, _ in self.statuses}) < self._paths:  # noqa: ASYNC110
                await asyncio.sleep(ROUND_SECONDS)

    def errors(self) -> dict[tuple[str, int], int]:
        return {
            (path, status): count
            for (path, status), count in self.statuses.items()
            if status >= 500 and status not in ALLOWED
        }

    def _note(self, path: str, status: int) -> None:
        self.statuses[path, status] += 1
        if status >= 500:
            self.last_error_at = time.monotonic()

    @contextlib.asynccontextmanager
    async def _client(self, key: str) -> AsyncIterator[httpx.AsyncClient]:
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=self._url, headers=headers, timeout=60) as client:
            yield client

    async def _request(self, method: str, path: str, key: str, **options: Any) -> None:
        async with self._client(key) as client:
            while True:
                answer = await client.request(method, path, **options)
                self._note(path, answer.status_code)
                await asyncio.sleep(ROUND_SECONDS)

    async def _stream(self, path: str, key: str) -> None:
        async with self._client(key) as client:
            while True:
                async with client.stream("GET", path) as answer:
                    self._note(path, answer.status_code)
                    with contextlib.suppress(httpx.TransportError, TimeoutError):
                        async with asyncio.timeout(3.5):  # longer than the pause between key checks
                            async for _ in answer.aiter_bytes():
                                pass
                await asyncio.sleep(ROUND_SECONDS)

    async def _socket(self) -> None:
        url = self._url.replace("http", "ws") + "/ws?clientId=load"
        headers = {"Authorization": f"Bearer {self._key}"}
        while True:
            with contextlib.suppress(websockets.WebSocketException, OSError, TimeoutError):
                async with websockets.connect(url, additional_headers=headers) as socket:
                    async with asyncio.timeout(3.5):
                        async for _ in socket:
                            pass
            await asyncio.sleep(ROUND_SECONDS)

    async def _hook_that_hangs_up(self) -> None:
        host, port = self._url.removeprefix("http://").split(":")
        head = (
            f"POST /hooks/{self._run_id} HTTP/1.1\r\nhost: {host}\r\n"
            "content-type: application/json\r\ncontent-length: 1000\r\n\r\n{"
        )
        while True:
            _, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(head.encode())
                await writer.drain()
                await asyncio.sleep(ROUND_SECONDS)
            finally:
                writer.transport.abort()


STARTED, ENDED = "unavailable", "available again"
Fault = Callable[[Deployment], Awaitable[None]]


async def stopped(deployment: Deployment) -> None:
    await asyncio.to_thread(deployment.postgres.stop_at_once)
    await asyncio.sleep(3)
    await asyncio.to_thread(deployment.postgres.start)


async def paused(deployment: Deployment) -> None:
    deployment.postgres.freeze()
    await asyncio.sleep(20)
    deployment.postgres.thaw()


async def terminated(deployment: Deployment) -> None:
    await deployment.postgres.terminate_connections()


def outage_lines(log: str, word: str) -> list[str]:
    return [line for line in log.splitlines() if "database " in line and f" is {word}" in line]


async def has_no_errors(load: Load, deployment: Deployment) -> None:
    """Waits until no request has failed for a while, and the outage's end is logged."""
    async with asyncio.timeout(RECOVERY_SECONDS_MAX):
        while True:
            log = deployment.control.said()
            starts, ends = outage_lines(log, STARTED), outage_lines(log, ENDED)
            is_quiet = time.monotonic() - load.last_error_at > QUIET_SECONDS
            if is_quiet and starts and len(starts) == len(ends):
                return
            await asyncio.sleep(0.1)


def open_run(customer: GraphCustomer, deployment: Deployment, secret: str) -> str:
    """A graph run that waits for a machine, so that every sweep judges it."""
    (engine,) = deployment.start_engines("engine-1")
    deployment.start_worker("worker-1", engine, fleet=FLEET, secret=secret)
    graph = document("worker-1", "worker-1")
    for node in graph["nodes"]:
        if node["type"] == "workflow":
            node["timeout"] = 600
            node["properties"] = node.get("properties", {})
    graph_id = customer.stored(graph)
    return customer.started(graph_id, "one")


@pytest.mark.parametrize("fault", [stopped, terminated, paused])
async def test_an_outage_is_two_lines_in_the_log_and_only_503(tmp_path: Path, fault: Fault) -> None:
    async with Deployment(tmp_path, None, **SETTINGS) as deployment:
        secret, customer = await asyncio.to_thread(prepare, deployment)
        run_id = await asyncio.to_thread(open_run, customer, deployment, secret)
        async with Load(deployment.url, customer.key, run_id) as load:
            await load.begun()
            assert load.errors() == {}
            await fault(deployment)
            await has_no_errors(load, deployment)
        log = deployment.control.said()
        assert load.errors() == {}
        for database in ("central", "tenants"):
            lines = [
                word
                for word in (STARTED, ENDED)
                for line in outage_lines(log, word)
                if f"/{database}" in line
            ]
            assert lines in ([], [STARTED, ENDED]), lines
        assert outage_lines(log, STARTED)
        assert "not ready" not in log, "the outage is logged already"
        assert "Traceback" not in log, log[log.index("Traceback") - 2000 :][:6000]
        assert "never retrieved" not in log
