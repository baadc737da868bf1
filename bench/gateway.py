"""Measures the gateway's overhead for a ComfyUI client, with the same 20 ms prompts on engines and
through the fleet.

The engines, the control plane (`comfyfleet up` on SQLite) and the workers are separate processes,
with one worker for each engine.

- Latency: one client sends one prompt at a time to the same engine, alternately direct and through
  the gateway. The time is from POST /prompt to its last message on the websocket.
- Throughput: all prompts are in progress at the same time. This program alternately distributes
  them over the engines and sends them to the gateway. Longer prompts are measured as well. Each
  result includes the CPU time of each part. If the parts need more cores than the machine
  has, the CPU is the limit instead of the queue.
- Polls: the CPU time of a poll with different numbers of prompts in the history, for the engine
  itself and for the gateway.

`--quick` sends fewer prompts, and doesn't check limits that require the full load.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

from overhead import STEP_MS, is_last, prompt
from support import (
    ADMIN_KEY,
    COMFYFLEET,
    exit_on_sigterm,
    exit_status,
    first_url,
    free_port,
    is_quick,
    process,
    wait_for,
)

ENGINES = 4
OVERHEAD_MS_MAX = 25.0
THROUGHPUT_MIN = 0.95
# Number of initial prompts that aren't counted. They fill caches, open connections and prepare
# statements.
WARM_UP = 10
SENDERS = 8
PROMPT_SECONDS_MAX = 300.0
FLEET = "default"
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Flood:
    """The number of prompts to send concurrently, and the duration of each prompt."""

    step_ms: int
    prompts: int
    rounds: int = 1


@dataclass(frozen=True)
class Load:
    latency_prompts: int
    floods: Sequence[Flood]  # only the first one has a limit
    histories: Sequence[int]  # number of prompts in the history when polls are measured
    polls: int


WHOLE = Load(
    latency_prompts=200,
    floods=(Flood(STEP_MS, 500, rounds=3), Flood(100, 300), Flood(500, 100)),
    histories=(100, 1000),
    polls=300,
)
QUICK = Load(
    latency_prompts=5,
    floods=(Flood(STEP_MS, 8), Flood(100, 8)),
    histories=(20,),
    polls=10,
)


@dataclass(frozen=True)
class Servers:
    gateway: str
    engines: Sequence[str]
    pids: Mapping[str, Sequence[int]]  # the process ids of each part

    def cpu_seconds(self) -> dict[str, float]:
        return {part: sum(map(cpu_seconds, pids)) for part, pids in self.pids.items()}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


@contextmanager
def servers(folder: Path, count: int) -> Iterator[Servers]:
    with ExitStack() as stack:
        engines = [
            stack.enter_context(process(COMFYFLEET, "engine", "--port", "0")) for _ in range(count)
        ]
        urls = [first_url(engine) for engine in engines]
        port = str(free_port())
        up = (COMFYFLEET, "up", "--no-worker", "--port", port, "--data", folder / "plane")
        plane = stack.enter_context(process(*up, COMFYFLEET_ADMIN_KEY=ADMIN_KEY))
        gateway = f"http://127.0.0.1:{port}"
        wait_for((folder / "plane" / "fleet.secret").exists)
        secret = (folder / "plane" / "fleet.secret").read_text().strip()
        environ = {"COMFYFLEET_FLEET_SECRET": secret, "AWS_EC2_METADATA_DISABLED": "true"}
        workers = [
            stack.enter_context(
                process(
                    *(COMFYFLEET, "worker", "--control", gateway, "--fleet", FLEET),
                    *("--backend", url, "--worker-id", f"worker-{number}"),
                    *("--state", folder / f"worker-{number}", "--log-level", "error"),
                    **environ,
                )
            )
            for number, url in enumerate(urls)
        ]
        wait_for(lambda: workers_online(gateway) == count)
        parts = {"control plane": [plane], "workers": workers, "engines": engines}
        yield Servers(gateway, urls, {name: [p.pid for p in own] for name, own in parts.items()})


def workers_online(gateway: str) -> int:
    """Returns the number of online workers, or 0 until the gateway knows their node types."""
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    try:
        listed = httpx.get(f"{gateway}/api/admin/workers", headers=headers, timeout=10).json()
        offered = httpx.get(f"{gateway}/object_info", timeout=10).json()
    except httpx.TransportError:
        return 0
    return len(listed["workers"]) if offered else 0


class Client:
    """A ComfyUI client with one websocket, and connections for prompts."""

    def __init__(self, http: httpx.AsyncClient, socket: ClientConnection, client_id: str) -> None:
        self._http = http
        self._socket = socket
        self._client_id = client_id

    async def post(self, step_ms: int = STEP_MS) -> str:
        prompt_id = str(uuid.uuid4())
        body = {"prompt": prompt(step_ms), "prompt_id": prompt_id, "client_id": self._client_id}
        (await self._http.post("/prompt", json=body)).raise_for_status()
        return prompt_id

    async def run(self) -> float:
        """Returns the seconds from POST to the last message."""
        started = time.perf_counter()
        await self.wait_for([await self.post()])
        return time.perf_counter() - started

    async def wait_for(self, prompt_ids: Sequence[str]) -> None:
        pending = set(prompt_ids)
        async with asyncio.timeout(PROMPT_SECONDS_MAX):
            while pending:
                message = json.loads(await self._socket.recv())
                pending -= (
                    {name for name in pending if is_last(message, name)}
                    if _ends(message)
                    else set()
                )

    async def flood(self, count: int, step_ms: int) -> None:
        """Sends prompts as fast as the server accepts them, and waits for their ends at the same
        time."""
        unsent = iter(range(count))
        ended = asyncio.create_task(self._hear_ends(count))

        async def send() -> None:
            for _ in unsent:
                await self.post(step_ms)

        await asyncio.gather(*(send() for _ in range(min(SENDERS, count))))
        await ended

    async def _hear_ends(self, count: int) -> None:
        async with asyncio.timeout(PROMPT_SECONDS_MAX):
            while count:
                count -= _ends(json.loads(await self._socket.recv()))


def _ends(message: dict[str, Any]) -> bool:
    return message["type"] == "executing" and message["data"]["node"] is None


async def open_client(stack: AsyncExitStack, url: str) -> Client:
    client_id = str(uuid.uuid4())
    http = await stack.enter_async_context(
        httpx.AsyncClient(base_url=url, timeout=PROMPT_SECONDS_MAX, trust_env=False)
    )
    socket_url = f"{url.replace('http', 'ws', 1)}/ws?clientId={client_id}"
    socket = await stack.enter_async_context(
        connect(socket_url, compression=None, proxy=None, max_queue=None)
    )
    await socket.recv()
    return Client(http, socket, client_id)


async def latency(running: Servers, count: int) -> dict[str, list[float]]:
    async with AsyncExitStack() as stack:
        sides = {
            "direct": await open_client(stack, running.engines[0]),
            "gateway": await open_client(stack, running.gateway),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(WARM_UP + count):
            for name, client in sides.items():
                took = await client.run()
                if number >= WARM_UP:
                    seconds[name].append(took)
        return seconds


async def throughput(running: Servers, load: Flood) -> float:
    """Returns the gateway's throughput as a share of the direct throughput."""
    print(f"{load.prompts} prompts of {load.step_ms} ms in parallel", flush=True)
    rates: dict[str, list[float]] = {"direct": [], "gateway": []}
    for _ in range(load.rounds):
        for name, urls in (("direct", running.engines), ("gateway", [running.gateway])):
            before = running.cpu_seconds()
            rates[name].append(await flood(urls, load.prompts, load.step_ms))
            spent = {
                part: 1000 * (after - before[part]) / load.prompts
                for part, after in running.cpu_seconds().items()
            }
            cpu = ", ".join(f"{part} {ms:.1f}" for part, ms in spent.items())
            print(
                f"  {name:8} {rates[name][-1]:7.1f} prompts/s; CPU ms per prompt: {cpu}", flush=True
            )
    part = statistics.median(rates["gateway"]) / statistics.median(rates["direct"])
    print(f"  {part:.2f} of the direct throughput; {os.cpu_count()} cores", flush=True)
    return part


async def flood(urls: Sequence[str], count: int, step_ms: int = STEP_MS) -> float:
    async with AsyncExitStack() as stack:
        clients = [await open_client(stack, url) for url in urls]
        started = time.perf_counter()
        await asyncio.gather(*(client.flood(count // len(urls), step_ms) for client in clients))
        return count / (time.perf_counter() - started)


async def floods(running: Servers, load: Load) -> float:
    """Returns the gateway's share of the direct throughput, for the load that has a limit."""
    for urls in (running.engines, [running.gateway]):
        await flood(urls, WARM_UP * len(running.engines))
    parts = [await throughput(running, item) for item in load.floods]
    return parts[0]


POLLS = ("/history", "/history/{last}", "/api/jobs", "/queue", "/prompt")
CHANGED = "/history, one deleted"
IDLE_SECONDS = 3.0


async def polls(running: Servers, load: Load) -> None:
    """Prints the CPU time that a poll takes on the engine and on the control plane."""
    sides = {
        "direct": (running.engines[0], "engines"),
        "gateway": (running.gateway, "control plane"),
    }
    for size in load.histories:
        spent: dict[str, dict[str, float]] = {}
        for name, (url, part) in sides.items():
            async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
                await fill_history(http, url, size)
                spent[name] = await poll_costs(http, running, part, load.polls)
        print(f"{size} prompts in the history: CPU ms per poll, {', '.join(sides)}")
        for name, direct in spent["direct"].items():
            print(f"  {name:24} {direct:7.2f} {spent['gateway'][name]:7.2f}", flush=True)


async def fill_history(http: httpx.AsyncClient, url: str, size: int) -> None:
    """Fills the history with exactly `size` prompts."""
    prompt_ids = list((await http.get("/history")).json())
    if prompt_ids:
        (await http.post("/history", json={"clear": True})).raise_for_status()
    await flood([url], size, step_ms=0)
    assert len((await http.get("/history")).json()) == size


async def poll_costs(
    http: httpx.AsyncClient, running: Servers, part: str, count: int
) -> dict[str, float]:
    """Returns the CPU milliseconds of each request, without the server's own work in the
    meantime."""
    ids = list((await http.get("/history")).json())
    idle = await idle_share(running, part)
    costs = {}

    async def cost(name: str, times: int, call: Callable[[int], Awaitable[None]]) -> None:
        started, before = time.perf_counter(), running.cpu_seconds()[part]
        for number in range(times):
            await call(number)
        by_itself = idle * (time.perf_counter() - started)
        costs[name] = 1000 * (running.cpu_seconds()[part] - before - by_itself) / times

    async def delete_and_poll(number: int) -> None:
        (await http.post("/history", json={"delete": [ids[number]]})).raise_for_status()
        (await http.get("/history")).raise_for_status()

    for path in POLLS:
        address = path.format(last=ids[-1])

        async def poll(_: int, address: str = address) -> None:
            (await http.get(address)).raise_for_status()

        await cost(path, count, poll)
    await cost(CHANGED, len(ids) // 2, delete_and_poll)
    return costs


async def idle_share(running: Servers, part: str) -> float:
    """Returns the CPU seconds per second while there are no requests."""
    before = running.cpu_seconds()[part]
    await asyncio.sleep(IDLE_SECONDS)
    return (running.cpu_seconds()[part] - before) / IDLE_SECONDS


def measure(load: Load) -> tuple[float, float]:
    """Returns the median overhead in milliseconds, and the gateway's share of the direct
    throughput."""
    with tempfile.TemporaryDirectory() as folder:
        with servers(Path(folder) / "one", 1) as running:
            seconds = asyncio.run(latency(running, load.latency_prompts))
            asyncio.run(polls(running, load))
        medians = {name: 1000 * statistics.median(samples) for name, samples in seconds.items()}
        print(f"one prompt of {STEP_MS} ms at a time")
        for name, samples in seconds.items():
            low = 1000 * statistics.quantiles(samples, n=4)[0]
            print(f"  {name:8} median {medians[name]:6.1f} ms, lower quartile {low:6.1f} ms")
        with servers(Path(folder) / "four", ENGINES) as running:
            part = asyncio.run(floods(running, load))
    return medians["gateway"] - medians["direct"], part


def main() -> int:
    exit_on_sigterm()
    overhead, part = measure(QUICK if is_quick() else WHOLE)
    print(f"median overhead {overhead:.1f} ms (at most {OVERHEAD_MS_MAX:.0f})")
    print(f"throughput {part:.2f} of the direct one (at least {THROUGHPUT_MIN})")
    return exit_status(is_met=overhead <= OVERHEAD_MS_MAX and part >= THROUGHPUT_MIN)


if __name__ == "__main__":
    sys.exit(main())
