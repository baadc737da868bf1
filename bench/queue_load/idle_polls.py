"""Measures idle long polls over HTTP. One process serves them, and this one holds their connections
open.

There are two measurements. The first uses a bare ASGI function, so it covers only sockets, HTTP and
the queue. The second uses the control plane's whole application, where each poll comes from a
different worker with its own key. The second has fewer polls, because on a slow machine the first
polls are answered before more than a few thousand have arrived.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from sqlalchemy import delete, insert

from comfyfleet.clock import utc_now
from comfyfleet.server.db import Database, open_database
from comfyfleet.server.db.central_tables import fleets, worker_workflows, workers, workflow_fleets
from comfyfleet.server.queue.model import NewDispatch, QueueLane
from comfyfleet.server.queue.queue import DispatchQueue
from comfyfleet.settings import Settings
from queue_load import comfyfleet_queue
from support import free_port, raise_file_limit

POLLS_MAX = 10_000
WHOLE_POLLS_MAX = 2_000
SPARE_FILES = 200
ARRIVALS = 50
WAIT_SECONDS = 60  # a worker may not request more
BARE_WAIT_SECONDS = 600  # long enough for the last of ten thousand polls to arrive
POLL = "/api/worker/poll"
BENCH = Path(__file__).resolve().parents[1]


def polls_possible() -> int:
    """Returns the number of polls that the limit of open files allows."""
    return min(POLLS_MAX, raise_file_limit() - SPARE_FILES)


def serve(url: str, port: int, *, is_whole: bool) -> None:
    """Runs the measured process."""
    polls_possible()
    asyncio.run(_serve_whole(url, port) if is_whole else _serve_bare(url, port))


async def _serve_bare(url: str, port: int) -> None:
    async with comfyfleet_queue.opened(open_database(url)) as queue:
        background = asyncio.create_task(queue.run())
        await _listen(QueueApp(queue), port)
        background.cancel()


async def _serve_whole(url: str, port: int) -> None:
    from comfyfleet.server.app import open_control_plane
    from comfyfleet.server.http.app import create_app

    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(central_database_url=url)
        async with open_control_plane(settings, Path(folder), utc_now) as plane:
            await _listen(QueueApp(plane.context.queue, create_app(plane)), port)


async def _listen(app: Any, port: int) -> None:
    config = uvicorn.Config(
        app, port=port, log_level="error", backlog=POLLS_MAX, lifespan="off", loop="asyncio"
    )
    await uvicorn.Server(config).serve()


class QueueApp:
    """An ASGI application that reports a queue's statistics, and passes polls to the queue or to
    another application."""

    def __init__(self, queue: DispatchQueue, poll_app: Any = None) -> None:
        self._queue = queue
        self._poll_app = poll_app
        self._lease_queries = 0
        self._lease = queue._hot.lease
        queue._hot.lease = self._counted  # type: ignore[method-assign]

    async def _counted(self, *args: Any, **more: Any) -> Any:
        self._lease_queries += 1
        return await self._lease(*args, **more)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == POLL and self._poll_app:
            await self._poll_app(scope, receive, send)
            return
        if path == POLL:
            number = int(dict(scope["headers"])[b"authorization"].rpartition(b"-")[2])
            await self._queue.lease(comfyfleet_queue.worker(number), wait_seconds=BARE_WAIT_SECONDS)
        elif path == "/put":
            job = NewDispatch(uuid.uuid4(), uuid.uuid4(), QueueLane(1, "production", "self_hosted"))
            await self._queue.enqueue([job])
        megabytes = psutil.Process().memory_info().rss / 1e6
        facts = {"waiting": self._queue.parked(), "looks": self._lease_queries, "mb": megabytes}
        body = json.dumps(facts).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def add_workers(database: Database, number: int) -> None:
    """Creates a fleet that may run every workflow, with this many workers."""
    now = utc_now()
    async with database.transaction() as tx:
        for table in (worker_workflows, workers, workflow_fleets, fleets):
            await tx.execute(delete(table))
        fleet = {"slug": "a", "stage": "production", "secret_hash": "", "created_at": now}
        fleet_id = (await tx.execute(insert(fleets).values(fleet).returning(fleets.c.id))).scalar()
        assigned = [
            {"workflow_id": workflow_id, "fleet_id": fleet_id, "created_at": now}
            for workflow_id in range(1, comfyfleet_queue.WORKFLOWS + 1)
        ]
        await tx.execute(insert(workflow_fleets), assigned)
        rows = [_worker_row(index, fleet_id, now) for index in range(number)]
        for start in range(0, number, 500):
            await tx.execute(insert(workers), rows[start : start + 500])


def _worker_row(number: int, fleet_id: int | None, now: datetime) -> dict[str, Any]:
    return {
        "worker_id": f"gpu-{number}",
        "key_hash": sha256(key_of(number).encode()).hexdigest(),
        "fleet_id": fleet_id,
        "registration_source": "fleet",
        "protocol_version": 1,
        "capabilities": [],
        "providers": ["self_hosted"],
        "max_concurrency": 1,
        "is_approved": True,
        "models_loaded": [],
        "last_seen_at": now,
        "created_at": now,
    }


def key_of(number: int) -> str:
    return f"{'k' * 57}-{number}"


@asynccontextmanager
async def served(database: Database, *, is_whole: bool) -> AsyncIterator[int]:
    port = free_port()
    call = f"from queue_load.idle_polls import serve; serve({database.url!r}, {port}, is_whole={is_whole})"
    folder = str(BENCH)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", f"import sys; sys.path.append({folder!r}); {call}"
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                await call_json(port, "/facts")
                break
            await asyncio.sleep(0.1)
        yield port
    finally:
        process.kill()
        await process.wait()


async def call_json(port: int, path: str) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


async def poll(port: int, number: int) -> None:
    fields = {"worker_id": f"gpu-{number}", "current_load": 0, "max_concurrency": 1}
    fields |= {"providers": ["self_hosted"], "wait_seconds": WAIT_SECONDS}
    body = json.dumps(fields)
    head = f"POST {POLL} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key_of(number)}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((head + body).encode())
    await reader.readline()
    writer.close()


async def measured(database: Database, polls: int, *, is_whole: bool) -> dict[str, float]:
    await add_workers(database, polls)
    async with served(database, is_whole=is_whole) as port:
        empty = (await call_json(port, "/facts"))["mb"]
        tasks = [asyncio.create_task(poll(port, number)) for number in range(polls)]
        facts = await _until_all_wait(port, polls)
        start = time.perf_counter()
        for _ in range(ARRIVALS):
            await call_json(port, "/put")
        seconds = time.perf_counter() - start
        while sum(task.done() for task in tasks) < ARRIVALS:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        after = await call_json(port, "/facts")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return {
        "polls": facts["waiting"],
        "mb": after["mb"],
        "mb_before": empty,
        "claims_per_job": (after["looks"] - facts["looks"]) / ARRIVALS,
        "ms_per_job": 1000 * seconds / ARRIVALS,
    }


async def _until_all_wait(port: int, polls: int) -> Any:
    for _ in range(600):
        facts = await call_json(port, "/facts")
        if facts["waiting"] >= polls:
            return facts
        await asyncio.sleep(0.2)
    return facts
