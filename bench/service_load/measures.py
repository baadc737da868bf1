"""Measures CPU time and statements by route, the latency of single jobs, and jobs per second."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from service_load.calls import Call, Connection, Connections
from service_load.job_lifecycle import JOB_ROUTES, JobLifecycle, Worker
from service_load.server import ServerProcess
from service_load.statements import Counted

MICROSECONDS = 1_000_000
MILLISECONDS = 1_000
# Seconds to wait for a poll to arrive before a job is submitted for it.
POLL_ARRIVES_SECONDS = 0.03
POLL_SECONDS = 20
THROUGHPUT_SECONDS_MAX = 600


@dataclass
class CpuMeter:
    """Measures the microseconds of the server's CPU time per call, one sample for each round of a
    route."""

    server: ServerProcess
    connections: Connections
    routes: Collection[str]
    samples: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def __call__(self, route: str, calls: Sequence[Call]) -> list[Any]:
        if route not in self.routes and route not in JOB_ROUTES:
            return []
        before = self.server.cpu_seconds()
        answers = await self.connections.ask_all(calls)
        used = self.server.cpu_seconds() - before
        self.samples[route].append(MICROSECONDS * used / len(calls))
        return answers


@dataclass
class StatementMeter:
    counted: Counted
    connections: Connections
    calls: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    texts: dict[str, list[str]] = field(default_factory=dict)

    async def __call__(self, route: str, calls: Sequence[Call]) -> list[Any]:
        self.counted.take()
        answers = await self.connections.ask_all(calls)
        kinds, self.texts[route] = self.counted.take()
        self.kinds[route] += kinds
        self.calls[route] += len(calls)
        return answers

    def profile(self) -> dict[str, dict[str, int]]:
        """Returns the rounded number of statements per call, so that occasional statements don't
        count for the route."""
        return {
            route: {kind: round(count / self.calls[route]) for kind, count in kinds.items()}
            for route, kinds in self.kinds.items()
        }

    def statements(self) -> dict[str, float]:
        return {route: kinds.total() / self.calls[route] for route, kinds in self.kinds.items()}


@dataclass(frozen=True)
class Latencies:
    """The milliseconds of each job."""

    submit: list[float]
    has_it: list[float]  # from the submission to a waiting worker
    complete: list[float]


async def latencies(url: str, lifecycle: JobLifecycle, jobs: int) -> Latencies:
    """Submits one job at a time, for one worker that waits for it."""
    customer, ears = Connection(url), Connection(url)
    worker, took = lifecycle.workers[0], Latencies([], [], [])

    async def wait_for_it() -> tuple[float, Any]:
        answer = await ears.ask(worker.poll(wait_seconds=POLL_SECONDS))
        return time.perf_counter(), answer["job"]

    for number in range(jobs):
        waiting = asyncio.create_task(wait_for_it())
        await asyncio.sleep(POLL_ARRIVES_SECONDS)
        begin = time.perf_counter()
        await customer.ask(lifecycle.submit(number))
        submitted = time.perf_counter()
        had_at, job = await waiting
        await ears.ask(worker.put(job))
        done = time.perf_counter()
        await ears.ask(worker.complete(job))
        took.submit.append(MILLISECONDS * (submitted - begin))
        took.has_it.append(MILLISECONDS * (had_at - begin))
        took.complete.append(MILLISECONDS * (time.perf_counter() - done))
    customer.close()
    ears.close()
    return took


@dataclass(frozen=True)
class Throughput:
    jobs_per_second: float
    cpu_ms_per_job: float


async def throughput(
    server: ServerProcess, lifecycle: JobLifecycle, *, jobs: int, clients: int, workers: int
) -> Throughput:
    """Measures customers that submit as fast as they get answers, and waiting workers that run the
    jobs."""
    numbers, ended = iter(range(jobs)), 0
    all_done = asyncio.Event()

    async def customer() -> None:
        connection = Connection(server.url)
        for number in numbers:
            await connection.ask(lifecycle.submit(number))
        connection.close()

    async def work(worker: Worker) -> None:
        nonlocal ended
        connection = Connection(server.url)
        while ended < jobs:
            job = (await connection.ask(worker.poll(wait_seconds=1)))["job"]
            if job is None:
                continue
            await connection.ask(worker.put(job))
            await connection.ask(worker.complete(job))
            ended += 1
            if ended == jobs:
                all_done.set()
        connection.close()

    begin, cpu = time.perf_counter(), server.cpu_seconds()
    async with asyncio.timeout(THROUGHPUT_SECONDS_MAX), asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(customer())
        for worker in lifecycle.workers[:workers]:
            group.create_task(work(worker))
        await all_done.wait()
        seconds, used = time.perf_counter() - begin, server.cpu_seconds() - cpu
    return Throughput(jobs / seconds, MILLISECONDS * used / jobs)
