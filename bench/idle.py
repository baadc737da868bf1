"""Measures the CPU and memory usage of an idle control plane, alone and with waiting workers.

    make bench        or        python bench/idle.py [--polls 10000] [--seconds 20] [--before PATH] [--quick]

Each worker waits on its own socket with its own key, and polls again after each response, like a
real worker. CPU and memory are those of the server's process.
"""

import argparse
import asyncio
import contextlib
import json
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table
from sqlalchemy import insert, select

from comfyfleet.clock import utc_now
from comfyfleet.server.db import open_database
from comfyfleet.server.db.central_tables import fleets, workers
from comfyfleet.server.secrets import hash_key
from service_load.baseline import ROOT
from service_load.server import UNLIMITED, ServerProcess, control_plane, running
from support import ADMIN_KEY, exit_on_sigterm, is_quick, raise_file_limit

sys.path.append(str(ROOT))
from tests.support.databases.postgres import create_database, running_postgres

SQLITE, POSTGRES = "sqlite", "postgres"
FEW_POLLS = 10 if is_quick() else 100
ROWS_AT_ONCE = 500
WAIT_SECONDS = 5 if is_quick() else 60
SETTLE_SECONDS = 0.5 if is_quick() else 6.0
ALL_WAIT_SECONDS_MAX = 300
SPARE_FILES = 500
# The rate at which connections are opened. It is limited, because opening a connection costs more
# than waiting on it.
OPENED_PER_SECOND = 200
AGAIN_SECONDS = 0.5 if is_quick() else 5.0


@dataclass(frozen=True)
class Idle:
    alone_percent: float
    few_percent: float
    alone_mb: float
    many_percent: float
    many_mb: float
    polls: int

    @property
    def kb_per_poll(self) -> float:
        return (self.many_mb - self.alone_mb) * 1000 / max(1, self.polls)


class Waiter(asyncio.Protocol):
    """A worker that polls repeatedly while it is connected."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, _, body = self._answer.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.I)
        if length and len(body) >= int(length[1]):
            is_good, self._answer = head.startswith(b"HTTP/1.1 200"), b""
            # After an error, the worker polls again later, like a real worker.
            pause = 0.0 if is_good else AGAIN_SECONDS
            asyncio.get_running_loop().call_later(pause, self._ask)

    def _ask(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(self._request)


def _request(url: str, endpoint: str, body: dict[str, Any], headers: dict[str, str]) -> bytes:
    content = json.dumps(body).encode()
    all_headers = {"Host": urlsplit(url).netloc, "Content-Type": "application/json", **headers}
    lines = [f"POST /api/worker/{endpoint} HTTP/1.1", f"Content-Length: {len(content)}"]
    lines += [f"{name}: {text}" for name, text in all_headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + content


def call_json(url: str, path: str, body: dict[str, Any], method: str = "POST") -> Any:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(  # noqa: S310 - our own server
        f"{url}{path}", json.dumps(body).encode(), headers, method=method
    )
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        return json.load(answer)


def fleet_at(url: str) -> None:
    """Creates a fleet with a workflow for which workers can wait."""
    call_json(url, "/api/admin/fleets", {"slug": "gpus", "stage": "production"})
    prompt = {"1": {"class_type": "SaveImage", "inputs": {"images": ["1", 0]}}}
    workflow = {"slug": "draw", "document": prompt, "properties": [], "output_node_id": "1"}
    call_json(url, "/api/admin/workflows", workflow)
    slugs = {"workflow_slugs": ["draw"]}
    call_json(url, "/api/admin/fleets/gpus/production/workflows", slugs, method="PUT")


async def registered(url: str, database: str, number: int) -> list[str]:
    """Inserts rows for workers of the fleet. Returns their keys by number."""
    keys = [sha256(f"{url} {index}".encode()).hexdigest() for index in range(number)]
    now, central = utc_now(), open_database(database)
    async with central.transaction() as tx:
        fleet_id = await tx.scalar(select(fleets.c.id))
        rows = [
            {
                "worker_id": f"gpu-{index}",
                "key_hash": hash_key(key),
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
            for index, key in enumerate(keys)
        ]
        for start in range(0, number, ROWS_AT_ONCE):
            await tx.execute(insert(workers), rows[start : start + ROWS_AT_ONCE])
    await central.close()
    return keys


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 0


def waiting_at(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics") as answer:  # noqa: S310
        match = re.search(rb"^comfyfleet_waiting_polls (\S+)", answer.read(), re.M)
    return int(float(match[1])) if match else 0


@asynccontextmanager
async def waiters(url: str, keys: list[str]) -> AsyncIterator[None]:
    """Opens a waiting poll for each key. All polls are waiting when the block begins."""
    loop, transports = asyncio.get_running_loop(), []
    for number, key in enumerate(keys):
        body = {"worker_id": f"gpu-{number}", "wait_seconds": WAIT_SECONDS, "held": []}
        request = _request(url, "poll", body, {"Authorization": f"Bearer {key}"})
        transport, _ = await loop.create_connection(partial(Waiter, request), *_place(url))
        transports.append(transport)
        await asyncio.sleep(1 / OPENED_PER_SECOND)
    deadline = time.monotonic() + ALL_WAIT_SECONDS_MAX
    while (count := await asyncio.to_thread(waiting_at, url)) < 0.99 * len(keys):
        if time.monotonic() > deadline:
            raise SystemExit(
                f"only {count} of {len(keys)} workers wait, because there are too few cores"
            )
        await asyncio.sleep(1)
    yield
    for transport in transports:
        transport.abort()


async def cpu_percent(server: ServerProcess, seconds: float) -> float:
    await asyncio.sleep(SETTLE_SECONDS)
    cpu_before, at = server.cpu_seconds(), time.monotonic()
    await asyncio.sleep(seconds)
    return 100 * (server.cpu_seconds() - cpu_before) / (time.monotonic() - at)


async def measured(server: ServerProcess, database: str, polls: int, seconds: float) -> Idle:
    alone_percent, alone = await cpu_percent(server, seconds), server.memory_bytes()
    await asyncio.to_thread(fleet_at, server.url)
    keys = await registered(server.url, database, polls)
    async with waiters(server.url, keys[:FEW_POLLS]):
        # In one wait interval, the server accepts and checks each worker once or twice.
        few = await cpu_percent(server, WAIT_SECONDS)
    await asyncio.sleep(SETTLE_SECONDS)
    async with waiters(server.url, keys):
        # In another such interval, each worker polls again. If polls leaked memory, it would show.
        many_percent, many = await cpu_percent(server, WAIT_SECONDS), server.memory_bytes()
    return Idle(alone_percent, few, alone / 1e6, many_percent, many / 1e6, polls)


@contextmanager
def server_of(tree: Path, data: Path, urls: list[str]) -> Iterator[ServerProcess]:
    """Yields the server of a tree: `serve` on PostgreSQL, or `up` without a worker if there are no
    databases."""
    command, environ = control_plane(tree, data, urls)
    if not urls:
        program = tree / ".venv/bin/comfyfleet"
        command = [program, "up", "--no-worker", "--port", "0", "--data", data]
        environ = dict(UNLIMITED)
    with running(command, environ) as server:
        yield server


def main(polls: int, seconds: float, databases: list[str], before: Path | None) -> None:
    exit_on_sigterm()
    trees = {"before": before.resolve()} if before else {}
    trees["now"] = ROOT
    results: dict[tuple[str, str], Idle] = {}
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        for database in databases:
            is_postgres = database == POSTGRES
            postgres = opened.enter_context(running_postgres(durable=True)) if is_postgres else ""
            for side, tree in trees.items():
                urls = [asyncio.run(create_database(postgres)) for _ in range(2 * is_postgres)]
                data = folder / f"{database}-{side}"
                central = urls[0] if urls else f"sqlite:///{data}/central.sqlite3"
                with server_of(tree, data, urls) as server:
                    measure = measured(server, central, polls, seconds)
                    results[database, side] = asyncio.run(measure)
    print_table(results)


def print_table(results: dict[tuple[str, str], Idle]) -> None:
    table = Table(title="An idle control plane")
    for name in ("database", "version", "alone", f"{FEW_POLLS} wait", "RSS alone", "RSS, waiting"):
        table.add_column(name)
    table.add_column("per wait")
    table.add_column("all wait")
    for (database, side), idle in results.items():
        table.add_row(
            database,
            side,
            f"{idle.alone_percent:.2f}% of a core",
            f"{idle.few_percent:.2f}%",
            f"{idle.alone_mb:.0f} MB",
            f"{idle.many_mb:.0f} MB with {idle.polls:,}",
            f"{idle.kb_per_poll:.1f} KB",
            f"{idle.many_percent:.0f}%",
        )
    Console(width=120).print(table)


def allow_files() -> int:
    """Raises the limit of open files, and returns the number of polls that it allows."""
    return raise_file_limit() - SPARE_FILES


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--polls", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--database", choices=[SQLITE, POSTGRES], action="append")
    parser.add_argument("--before", type=Path, help="a tree with a .venv to compare with")
    parser.add_argument("--quick", action="store_true", help="few polls, for one second")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.polls, arguments.seconds = 50, 1.0
    main(
        min(arguments.polls, allow_files()),
        arguments.seconds,
        arguments.database or [SQLITE, POSTGRES],
        arguments.before,
    )
