"""Idle long polls over HTTP: one process serves them, this one holds their connections open.

The server is uvicorn with a bare ASGI function: what is measured are sockets, HTTP and the queue.
"""

import asyncio
import contextlib
import json
import resource
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import uvicorn

from comfyfleet.db import Database, open_database
from comfyfleet.dispatch import service
from comfyfleet.dispatch.model import Lane, NewDispatch
from comfyfleet.dispatch.queue import Queue
from comfyfleet.kernel.clock import utc_now
from queueing import ours

POLLS_MAX = 10_000
SPARE_FILES = 200
ARRIVALS = 50
WAIT_SECONDS = 600
BENCH = Path(__file__).resolve().parents[1]


def polls_possible() -> int:
    """As many as the limit on open files allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(POLLS_MAX, soft - SPARE_FILES)


def serve(url: str, port: int) -> None:
    """The process that is measured."""
    polls_possible()
    asyncio.run(_serve(url, port))


async def _serve(url: str, port: int) -> None:
    database = open_database(url)
    async with ours.opened(database) as queue:
        looks = 0
        look = queue._hot.lease

        async def counted(*args: Any, **more: Any) -> Any:
            nonlocal looks
            looks += 1
            return await look(*args, **more)

        queue._hot.lease = counted  # type: ignore[method-assign]

        async def answered(path: str) -> dict[str, Any]:
            match path.split("/"):
                case ["", "poll", number]:
                    asking = ours.worker(int(number))
                    lease = await queue.lease(asking, wait_seconds=WAIT_SECONDS)
                    return {"dispatch_id": lease and lease.dispatch_id}
                case ["", "put"]:
                    await put(database, queue)
            megabytes = psutil.Process().memory_info().rss / 1e6
            return {"waiting": queue.parked(), "looks": looks, "mb": megabytes}

        async def app(scope: Any, _receive: Any, send: Any) -> None:
            body = json.dumps(await answered(scope["path"])).encode()
            headers = [(b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        config = uvicorn.Config(
            app, port=port, log_level="error", backlog=POLLS_MAX, lifespan="off", loop="asyncio"
        )
        background = asyncio.create_task(queue.run())
        await uvicorn.Server(config).serve()
        background.cancel()


async def put(database: Database, queue: Queue) -> None:
    job = NewDispatch(uuid.uuid4(), uuid.uuid4(), Lane(1, "production", "self_hosted"))
    async with database.begin() as tx:
        await service.enqueue(tx, [job], now=utc_now())
    queue.wake([job.lane])


@asynccontextmanager
async def served(database: Database) -> AsyncIterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    call = f"from queueing.idle import serve; serve({database.url!r}, {port})"
    folder = str(BENCH)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", f"import sys; sys.path.append({folder!r}); {call}"
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError):
                await asked(port, "/facts")
                break
            await asyncio.sleep(0.1)
        yield port
    finally:
        process.kill()
        await process.wait()


async def asked(port: int, path: str) -> Any:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return json.loads(answer.partition(b"\r\n\r\n")[2])


async def measured(database: Database, polls: int) -> dict[str, float]:
    async with served(database) as port:
        empty = (await asked(port, "/facts"))["mb"]
        held = [asyncio.create_task(asked(port, f"/poll/{number}")) for number in range(polls)]
        facts = await _until_all_wait(port, polls)
        start = time.perf_counter()
        for _ in range(ARRIVALS):
            await asked(port, "/put")
        seconds = time.perf_counter() - start
        while sum(each.done() for each in held) < ARRIVALS:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        after = await asked(port, "/facts")
        for each in held:
            each.cancel()
        await asyncio.wait(held)
    return {
        "polls": facts["waiting"],
        "mb": after["mb"],
        "mb_before": empty,
        "claims_per_job": (after["looks"] - facts["looks"]) / ARRIVALS,
        "ms_per_job": 1000 * seconds / ARRIVALS,
    }


async def _until_all_wait(port: int, polls: int) -> Any:
    for _ in range(600):
        facts = await asked(port, "/facts")
        if facts["waiting"] >= polls:
            return facts
        await asyncio.sleep(0.2)
    return facts
