"""What it costs that a graph is run for you, against a program that calls the engines itself.

A layered graph over four engines, each with a worker; control plane, workers and engines are
processes of their own. The program is plain asyncio: it knows the engines, sends each prompt to the
first that is free, and goes on to the next layer when a layer is done; it uploads no files and keeps
nothing. Both are timed from outside, one after the other, on the same engines; of three rounds the
quickest counts.

Then a loop, whose rounds come one after the other, and a map, whose items go to whichever engine is free, against
programs of the same kind: what a round costs, and what an item costs.

The last figure needs no engine: a fan-out is advanced job by job to its end, each job as its control
plane would hear of it, on SQLite. The time of a job must not grow with the size of the run.

    python bench/graphs.py            all of it
    python bench/graphs.py layers     only the layers; `rounds`, `items`, `fanout`: only that
    python bench/graphs.py --quick    the smallest load, to see that it runs; nothing is judged
"""

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import httpx

from support import (
    COMFYFLEET,
    bearer,
    control_plane,
    exit_on_sigterm,
    exit_status,
    first_url,
    is_quick,
    process,
    wait_for,
)

ENGINES = 4
LAYERS, WIDTH = 2 if is_quick() else 15, ENGINES  # 60 nodes
LOOP_ROUNDS, MAP_ITEMS, JOB_MS = (2, 4, 20) if is_quick() else (30, 200, 100)
ROUNDS = 1 if is_quick() else 3
MAKESPAN_MAX = 1.05
LAYER_MS_MAX = 30.0
GROWTH_MAX = 1.5
JOB_KB_MAX = 20.0
FANOUTS = (5, 20) if is_quick() else (100, 1_000, 10_000)
FLEET = "gpus"


# Another color is another picture: nothing comes from the engine's cache.
COLORS = itertools.count(10_000, 10_000)


class Pair(NamedTuple):
    """Seconds of the graph, and of the program."""

    ours: float
    plain: float

    @property
    def told(self) -> str:
        return f"{self.ours:.2f} s, the program {self.plain:.2f} s: {self.ours / self.plain:.3f} x"


def prompt(color: int, milliseconds: int) -> dict[str, Any]:
    return {
        "1": {
            "class_type": "EmptyImage",
            "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": color},
        },
        "2": {
            "class_type": "ComfyfleetSteps",
            "inputs": {
                "steps": 1,
                "step_ms": milliseconds,
                "previews": False,
                "image": ["1", 0],
            },
        },
        "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "o"}},
    }


PROPERTIES = [
    {"name": "color", "type": "integer", "binding": "1.color", "default": 0},
    {"name": "milliseconds", "type": "integer", "binding": "2.step_ms", "default": 100},
]


def layered(layers: int, milliseconds: int, first_color: int) -> dict[str, Any]:
    """Each node of a layer waits for all of the layer before: a merge node connects them."""
    nodes: list[dict[str, Any]] = []
    connections: list[dict[str, str]] = []
    for layer in range(layers):
        nodes.append({"id": f"merge_{layer}", "type": "merge"})
        for number in range(WIDTH):
            name = f"node_{layer}_{number}"
            color = first_color + layer * WIDTH + number
            given: dict[str, Any] = {"milliseconds": milliseconds}
            if layer == 0:
                given["color"] = color
            nodes.append({"id": name, "type": "workflow", "workflow": "wait", "properties": given})
            if layer:
                # Counted: the same number for each node of a layer, so the layer's own is added.
                source = f"merge_{layer - 1}.output.count"
                connections.append({"from": source, "to": f"{name}.after"})
                given["color"] = color
            connections.append({"from": f"{name}.output", "to": f"merge_{layer}.input_{number}"})
    nodes.append({"id": "end", "type": "output"})
    connections.append({"from": f"merge_{layers - 1}.output", "to": "end.value"})
    return {"name": "layers", "nodes": nodes, "connections": connections}


def looped(rounds: int, milliseconds: int, first_color: int) -> dict[str, Any]:
    given = {"color": f"{{{{ {first_color} + round }}}}", "milliseconds": milliseconds}
    do = {"workflow": "wait", "properties": given}
    loop = {
        "id": "again",
        "type": "loop",
        "at_most": rounds,
        "until": f"round >= {rounds}",
        "do": do,
    }
    return one_node(loop)


def mapped(items: int, milliseconds: int, first_color: int) -> dict[str, Any]:
    given = {"color": "{{ item }}", "milliseconds": milliseconds}
    do = {"workflow": "wait", "properties": given}
    colors = list(range(first_color, first_color + items))
    over = {"id": "colors", "type": "input", "value_type": "integer[]", "default": colors}
    each = {"id": "again", "type": "map", "over": "input.colors", "max_items": items, "do": do}
    return one_node(each, over)


def one_node(node: dict[str, Any], *inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": str(node["type"]),
        "nodes": [*inputs, node, {"id": "end", "type": "output"}],
        "connections": [{"from": f"{node['id']}.output", "to": "end.value"}],
    }


# Directly


@dataclass(frozen=True)
class Engine:
    """An engine with an open websocket, as a well-written program has it."""

    client: httpx.AsyncClient
    url: str
    client_id: str
    socket: Any

    async def execute(self, wanted: dict[str, Any]) -> None:
        """Waits for the messages on the websocket, as every client of ComfyUI does."""
        body = {"prompt": wanted, "client_id": self.client_id}
        sent = await self.client.post(f"{self.url}/prompt", json=body)
        prompt_id = sent.raise_for_status().json()["prompt_id"]
        async for message in self.socket:
            if is_over(message, prompt_id):
                break
        found = (await self.client.get(f"{self.url}/history/{prompt_id}")).json()
        (picture,) = found[prompt_id]["outputs"]["3"]["images"]
        (await self.client.get(f"{self.url}/view", params=picture)).raise_for_status()


Program = Callable[[list[Engine]], Awaitable[None]]
# Of a size, the milliseconds of a job and the first of its colors.
MakeProgram = Callable[[int, int, int], Program]
MakeGraph = Callable[[int, int, int], dict[str, Any]]


async def direct(urls: list[str], program: Program) -> float:
    """The seconds that the program takes once it is connected."""
    from websockets.asyncio.client import connect

    async with httpx.AsyncClient(timeout=60) as client, AsyncExitStack() as stack:
        engines = []
        for url in urls:
            client_id = uuid4().hex
            socket = connect(f"{url.replace('http', 'ws', 1)}/ws?clientId={client_id}")
            engines.append(Engine(client, url, client_id, await stack.enter_async_context(socket)))
        began = time.perf_counter()
        await program(engines)
        return time.perf_counter() - began


def by_layers(layers: int, milliseconds: int, first_color: int) -> Program:
    async def program(engines: list[Engine]) -> None:
        for layer in range(layers):
            colors = range(first_color + layer * WIDTH, first_color + (layer + 1) * WIDTH)
            work = zip(engines, colors, strict=True)
            await asyncio.gather(
                *(each.execute(prompt(color, milliseconds)) for each, color in work)
            )

    return program


def by_rounds(rounds: int, milliseconds: int, first_color: int) -> Program:
    async def program(engines: list[Engine]) -> None:
        for color in range(first_color, first_color + rounds):
            await engines[0].execute(prompt(color, milliseconds))

    return program


def by_items(items: int, milliseconds: int, first_color: int) -> Program:
    async def program(engines: list[Engine]) -> None:
        colors = iter(range(first_color, first_color + items))

        async def work_off(engine: Engine) -> None:
            for color in colors:
                await engine.execute(prompt(color, milliseconds))

        await asyncio.gather(*map(work_off, engines))

    return program


def is_over(message: str | bytes, prompt_id: str) -> bool:
    """Whether it is the message after the success: only then the run is in the history."""
    if not isinstance(message, str) or prompt_id not in message:
        return False
    told = json.loads(message)
    return bool(told["type"] == "executing" and told["data"]["node"] is None)


# As a graph


@contextmanager
def fleet(folder: Path, engines: list[str]) -> Iterator[httpx.Client]:
    """The customer's client of a control plane with a worker for each engine."""
    environ = {
        "COMFYFLEET_CALLS_PER_SECOND": "10000",
        "COMFYFLEET_CALLS_AT_ONCE": "10000",
    }
    with ExitStack() as stack:
        url, admin = stack.enter_context(control_plane(folder / "plane", **environ))
        made = posted(admin, "/api/admin/fleets", slug=FLEET, stage="production")
        posted(
            admin,
            "/api/admin/workflows",
            slug="wait",
            document={
                **prompt(0, 100),
                "4": {"class_type": "PrimitiveInt", "inputs": {"value": 0}},
            },
            properties=[*PROPERTIES, {"name": "after", "type": "integer", "binding": "4.value"}],
            output_node_id="3",
            price_tokens=0,
        )
        body = {"workflow_slugs": ["wait"]}
        admin.put(f"/api/admin/fleets/{FLEET}/production/workflows", json=body).raise_for_status()
        tenant = posted(admin, "/api/admin/tenants", name="bench")
        for number, engine in enumerate(engines):
            where = ("--control", url, "--fleet", FLEET, "--backend", engine)
            state = ("--state", folder / f"worker-{number}", "--worker-id", f"w{number}")
            secret = {
                "COMFYFLEET_FLEET_SECRET": made["secret"],
                "AWS_EC2_METADATA_DISABLED": "true",
            }
            stack.enter_context(process(COMFYFLEET, "worker", *where, *state, **secret))
        wait_for(lambda: len(admin.get("/api/admin/workers").json()["workers"]) == len(engines))
        yield stack.enter_context(httpx.Client(base_url=url, headers=bearer(tenant["key"])))


def posted(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


def as_graph(customer: httpx.Client, document: dict[str, Any]) -> float:
    """From the request that starts the run to the event of its end."""
    graph = posted(customer, "/api/graphs", **document)
    began = time.perf_counter()
    run = posted(customer, f"/api/graphs/{graph['id']}/runs")
    with customer.stream("GET", f"/api/graph-runs/{run['id']}/events", timeout=600) as events:
        for line in events.iter_lines():
            if line == "event: end":
                break
    took = time.perf_counter() - began
    seen = customer.get(f"/api/graph-runs/{run['id']}").json()
    assert seen["status"] == "completed", seen["error"]
    return took


@contextmanager
def engines_in(folder: Path) -> Iterator[list[str]]:
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                process(COMFYFLEET, "engine", "--port", "0", "--data", folder / f"engine-{number}")
            )
            for number in range(ENGINES)
        ]
        yield [first_url(each) for each in started]


class Bench(NamedTuple):
    """A control plane with a worker for each engine, and the engines themselves."""

    customer: httpx.Client
    engines: list[str]

    def compare(self, graph: MakeGraph, program: MakeProgram, size: int, milliseconds: int) -> Pair:
        """One after the other, several times, and the quickest of each, because other load disturbs."""
        pairs = []
        for _ in range(ROUNDS):
            ours = as_graph(self.customer, graph(size, milliseconds, next(COLORS)))
            plain = asyncio.run(direct(self.engines, program(size, milliseconds, next(COLORS))))
            pairs.append((ours, plain))
        return Pair(min(ours for ours, _ in pairs), min(plain for _, plain in pairs))


@contextmanager
def bench() -> Iterator[Bench]:
    with (
        tempfile.TemporaryDirectory() as name,
        engines_in(Path(name)) as engines,
        fleet(Path(name), engines) as customer,
    ):
        as_graph(customer, layered(2, 10, next(COLORS)))  # everything is loaded once
        asyncio.run(direct(engines, by_layers(2, 10, next(COLORS))))
        yield Bench(customer, engines)


def layers() -> bool:
    with bench() as opened:
        return not [each for each in (1000, 100) if not compare_layers(opened, each)]


def rounds() -> bool:
    with bench() as opened:
        found = opened.compare(looped, by_rounds, LOOP_ROUNDS, JOB_MS)
    per_round = 1000 * (found.ours - found.plain) / LOOP_ROUNDS
    print(
        f"a loop of {LOOP_ROUNDS} rounds, {JOB_MS} ms each: {found.told}, {per_round:.1f} ms a round\n"
        f"  at most {LAYER_MS_MAX:.0f} ms a round"
    )
    return per_round <= LAYER_MS_MAX


def items() -> bool:
    with bench() as opened:
        found = opened.compare(mapped, by_items, MAP_ITEMS, JOB_MS)
    per_item = 1000 * (found.ours - found.plain) / MAP_ITEMS
    print(
        f"a map of {MAP_ITEMS} items over {ENGINES} engines, {JOB_MS} ms each: "
        f"{found.told}, {per_item:.1f} ms an item"
    )
    return True


def compare_layers(opened: Bench, milliseconds: int) -> bool:
    found = opened.compare(layered, by_layers, LAYERS, milliseconds)
    ours, plain = found
    per_layer = 1000 * (ours - plain) / LAYERS
    print(
        f"{LAYERS * WIDTH} nodes in {LAYERS} layers over {ENGINES} engines, {milliseconds} ms each: "
        f"{found.told}, {per_layer:.1f} ms a layer"
    )
    if milliseconds == 1000:
        print(f"  makespan at most {MAKESPAN_MAX} x")
        return ours / plain <= MAKESPAN_MAX
    print(f"  at most {LAYER_MS_MAX:.0f} ms a layer")
    return per_layer <= LAYER_MS_MAX


# A fan-out


def fanout() -> bool:
    """Each in its own process, so that its memory peak is its own."""
    found = {items: fan_out_of(items) for items in FANOUTS}
    small, large = found[FANOUTS[0]], found[FANOUTS[-1]]
    growth = (large["total"] / large["jobs"]) / (small["total"] / small["jobs"])
    per_job = 1024 * (large["peak_mb"] - small["peak_mb"]) / (large["jobs"] - small["jobs"])
    print(f"  memory grows by {per_job:.1f} KB a job (at most {JOB_KB_MAX} KB)")
    return is_within_growth_limit(growth) and per_job <= JOB_KB_MAX


def is_within_growth_limit(growth: float) -> bool:
    print(f"  a job costs {growth:.2f} x of what it costs among 100 (at most {GROWTH_MAX} x)")
    return growth <= GROWTH_MAX


def fan_out_of(items: int) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).with_name("graph_fan_out.py")), str(items)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(told.splitlines()[-1])
    print(
        f"fan-out of {items:,}, {found['jobs']:,} jobs to their end: "
        f"{found['total'] / found['jobs']:.2f} ms a job, start {found['start']:.0f} ms, "
        f"then {found['first']:.2f} ms at first, {found['last']:.2f} ms at last, "
        f"the end {found['end']:.0f} ms; peak memory {found['peak_mb']:.0f} MB"
    )
    return found


def main() -> int:
    exit_on_sigterm()
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    parts = {"layers": layers, "rounds": rounds, "items": items, "fanout": fanout}
    wanted = [each for each in sys.argv[1:] if each in parts] or list(parts)
    missed = [part for part in wanted if not parts[part]()]
    return exit_status(is_met=not missed)


if __name__ == "__main__":
    sys.exit(main())
