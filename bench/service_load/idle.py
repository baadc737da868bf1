"""Measures what a control plane costs while it is idle: alone, and with workers in long polls."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from service_load.calls import Call, Connection, Connections
from service_load.job_lifecycle import register_all
from service_load.server import ServerProcess
from support import raise_file_limit

SETTLE_SECONDS = 3
WAIT_SECONDS = 60
FEW = 100
OPENED_AT_ONCE = 50


@dataclass(frozen=True)
class Idle:
    """Results in percent of a core and in megabytes."""

    alone_percent: float
    few_percent: float  # with a hundred waiting workers
    many: int
    base_mb: float
    many_mb: float


async def idle(
    server: ServerProcess, connections: Connections, secret: str, *, many: int, seconds: float
) -> Idle:
    raise_file_limit()
    await asyncio.sleep(SETTLE_SECONDS)
    alone, base = await _percent(server, seconds), server.memory_bytes()
    workers = await register_all(connections, secret, many, "idle")
    polls = [worker.poll(wait_seconds=WAIT_SECONDS) for worker in workers]
    waiting = await _wait(server.url, polls[:FEW])
    few = await _percent(server, seconds)
    waiting += await _wait(server.url, polls[FEW:])
    used = server.memory_bytes()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return Idle(alone, few, many, base / 1e6, used / 1e6)


async def _percent(server: ServerProcess, seconds: float) -> float:
    cpu, begin = server.cpu_seconds(), time.perf_counter()
    await asyncio.sleep(seconds)
    return 100 * (server.cpu_seconds() - cpu) / (time.perf_counter() - begin)


async def _wait(url: str, polls: Sequence[Call]) -> list[asyncio.Task[object]]:
    """Starts each poll on its own connection, like a worker."""
    tasks: list[asyncio.Task[object]] = []
    for start in range(0, len(polls), OPENED_AT_ONCE):
        few = polls[start : start + OPENED_AT_ONCE]
        tasks += [asyncio.create_task(_one(url, poll)) for poll in few]
        await asyncio.sleep(0.1)
    await asyncio.sleep(SETTLE_SECONDS)
    return tasks


async def _one(url: str, poll: Call) -> object:
    connection = Connection(url)
    try:
        return await connection.ask(poll)
    finally:
        connection.close()
