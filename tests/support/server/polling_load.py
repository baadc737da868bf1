"""Workers that poll and clients that send calls, over raw keep-alive connections.

Also measures the work of each server process for them."""

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

POLL_SECONDS = 1.0
RECONNECT_SECONDS = 0.05
PAUSE_SECONDS = 0.2


@dataclass
class Caller:
    """A client that uses one connection until the server closes it."""

    host: str
    port: int
    key: str
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Returns the status and the JSON body; raises OSError or EOFError for a lost connection."""
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        content = b"" if body is None else json.dumps(body).encode()
        self.writer.write(self._head(method, path, len(content)) + content)
        try:
            return await self._answer()
        except (OSError, EOFError):
            self.close()
            raise

    def _head(self, method: str, path: str, size: int) -> bytes:
        lines = (
            f"{method} {path} HTTP/1.1",
            f"Host: {self.host}",
            f"Authorization: Bearer {self.key}",
            "Content-Type: application/json",
            f"Content-Length: {size}",
        )
        return "\r\n".join((*lines, "", "")).encode()

    async def _answer(self) -> tuple[int, Any]:
        assert self.reader is not None
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        status = int(head.split(" ", 2)[1])
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        if headers.get("connection") == "close":
            self.close()
        return status, json.loads(body) if body else None

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


@dataclass
class PollingLoad:
    """Runs `workers` that poll and `clients` that read their account, until the block ends."""

    url: str
    keys: Mapping[str, str] = field(repr=False)  # of workers, by id
    customer_key: str
    clients: int
    calls: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list, repr=False)

    async def __aenter__(self) -> "PollingLoad":
        self._tasks = [asyncio.create_task(self._poll(*each)) for each in self.keys.items()]
        self._tasks += [asyncio.create_task(self._read()) for _ in range(self.clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _caller(self, key: str) -> Caller:
        address = urlsplit(self.url)
        assert address.hostname is not None
        assert address.port is not None
        return Caller(address.hostname, address.port, key)

    async def _poll(self, worker_id: str, key: str) -> None:
        body = {"worker_id": worker_id, "wait_seconds": POLL_SECONDS, "held": []}
        await self._repeat(self._caller(key), "POST", "/api/worker/poll", body)

    async def _read(self) -> None:
        await self._repeat(self._caller(self.customer_key), "GET", "/api/wallet")

    async def _repeat(self, caller: Caller, method: str, path: str, body: Any = None) -> None:
        with contextlib.closing(caller):
            while True:
                try:
                    status, answer = await caller.call(method, path, body)
                except (OSError, EOFError) as error:
                    self.failed[type(error).__name__] += 1
                    await asyncio.sleep(RECONNECT_SECONDS)
                    continue
                self.calls += 1
                if status >= 400:
                    self.failed[f"{status} {answer}"] += 1
                    await asyncio.sleep(RECONNECT_SECONDS)
                elif method == "GET":
                    await asyncio.sleep(PAUSE_SECONDS)

    async def calls_done(self, count: int) -> None:
        """Waits for so many more calls."""
        until = self.calls + count
        while self.calls < until:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def register_workers(url: str, secret: str, fleet: str, count: int) -> dict[str, str]:
    """Returns the workers' keys by their ids."""
    keys = {}
    async with httpx.AsyncClient(base_url=url, headers={"X-Fleet-Secret": secret}) as client:
        for number in range(count):
            body = {"worker_id": f"w{number}", "fleet_slug": fleet}
            answer = await client.post("/api/worker/register", json=body, timeout=30)
            keys[f"w{number}"] = answer.raise_for_status().json()["token"]
    return keys


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of all threads of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def connections_of(pids: list[int], port: int) -> dict[int, int]:
    """Counts the established connections to a port by the process that holds them."""
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].split(":")[1], 16) == port and fields[3] == "01":
            inodes.add(f"socket:[{fields[9]}]")
    return {pid: sum(link in inodes for link in _links(pid)) for pid in pids}


def _links(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(FileNotFoundError):  # the process, or a file, may be gone
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(str(descriptor.readlink()))
    return found
