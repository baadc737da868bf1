"""Measures the overhead of a graph run, compared with a program that calls the engines itself.

A layered graph runs on four engines, each with a worker. The control plane, the workers and the
engines are separate processes. The program uses plain asyncio. It knows the URLs of the engines,
sends them the prompts of a layer, and starts the next layer when a layer is complete. It uploads no
files and stores nothing. The graph and the program are timed from outside, one after the other, on
the same engines. The fastest of three rounds counts.

A loop, whose rounds run one after the other, and a map, whose items run on any free engine, are
also compared with such programs. This yields the overhead of a round and of an item.

The last measurement needs no engine. It advances a fan-out to its end on SQLite, job by job, and
notifies the control plane of each job as usual. The time per job must not grow with the size of the
run.

    python bench/graphs.py            runs everything
    python bench/graphs.py layers     runs only one part: layers, rounds, items or fanout
    python bench/graphs.py --quick    runs the smallest load as a smoke test, without limits
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


# Each job uses a different color, so that nothing comes from the engine's cache.
COLORS = itertools.count(10_000, 10_000)


class Pair(NamedTuple):
    """The durations of the graph and of the program, in seconds."""

    ours: float
    plain: float

    @property
    def summary(self) -> str:
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
    """Returns a graph in which each node waits for the whole previous layer, by a merge node
    between layers."""
    nodes: list[dict[str, Any]] = []
    connections: list[dict[str, str]] = []
    for layer in range(layers):
        nodes.append({"id": f"merge_{layer}", "type": "merge"})
        for number in range(WIDTH):
            name = f"node_{layer}_{number}"
            color = first_color + layer * WIDTH + number
            properties: dict[str, Any] = {"milliseconds": milliseconds}
            if layer == 0:
                properties["color"] = color
            nodes.append(
                {"id": name, "type": "workflow", "workflow": "wait", "properties": properties}
            )
            if layer:
                # All nodes of a layer have the same count. A separate property distinguishes their
                # colors.
                source = f"merge_{layer - 1}.output.count"
                connections.append({"from": source, "to": f"{name}.after"})
                properties["color"] = color
            connections.append({"from": f"{name}.output", "to": f"merge_{layer}.input_{number}"})
    nodes.append({"id": "end", "type": "output"})
    connections.append({"from": f"merge_{layers - 1}.output", "to": "end.value"})
    return {"name": "layers", "nodes": nodes, "connections": connections}


def looped(rounds: int, milliseconds: int, first_color: int) -> dict[str, Any]:
    properties = {"color": f"{{{{ {first_color} + round }}}}", "milliseconds": milliseconds}
    do = {"workflow": "wait", "properties": properties}
    loop = {
        "id": "again",
        "type": "loop",
        "at_most": rounds,
        "until": f"round >= {rounds}",
        "do": do,
    }
    return one_node(loop)


def mapped(items: int, milliseconds: int, first_color: int) -> dict[str, Any]:
    properties = {"color": "{{ item }}", "milliseconds": milliseconds}
    do = {"workflow": "wait", "properties": properties}
    colors = list(range(first_color, first_color + items))
    over = {"id": "colors", "type": "input", "value_type": "integer[]", "default": colors}
    map_node = {"id": "again", "type": "map", "over": "input.colors", "max_items": items, "do": do}
    return one_node(map_node, over)


def one_node(node: dict[str, Any], *inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": str(node["type"]),
        "nodes": [*inputs, node, {"id": "end", "type": "output"}],
        "connections": [{"from": f"{node['id']}.output", "to": "end.value"}],
    }


# The program that calls the engines directly


@dataclass(frozen=True)
class Engine:
    """An engine with an open websocket, as in a well-written program."""

    client: httpx.AsyncClient
    url: str
    client_id: str
    socket: Any

    async def execute(self, prompt_nodes: dict[str, Any]) -> None:
        """Sends a prompt, and waits for its messages on the websocket like any ComfyUI client."""
        body = {"prompt": prompt_nodes, "client_id": self.client_id}
        sent = await self.client.post(f"{self.url}/prompt", json=body)
        prompt_id = sent.raise_for_status().json()["prompt_id"]
        async for message in self.socket:
            if is_over(message, prompt_id):
                break
        history = (await self.client.get(f"{self.url}/history/{prompt_id}")).json()
        (picture,) = history[prompt_id]["outputs"]["3"]["images"]
        (await self.client.get(f"{self.url}/view", params=picture)).raise_for_status()


Program = Callable[[list[Engine]], Awaitable[None]]
# Parameters: the size, the duration of a job in milliseconds, and its first color.
MakeProgram = Callable[[int, int, int], Program]
MakeGraph = Callable[[int, int, int], dict[str, Any]]


async def direct(urls: list[str], program: Program) -> float:
    """Returns the seconds that the program takes, without the time to connect."""
    from websockets.asyncio.client import connect

    async with httpx.AsyncClient(timeout=60) as client, AsyncExitStack() as stack:
        engines = []
        for url in urls:
            client_id = uuid4().hex
            socket = connect(f"{url.replace('http', 'ws', 1)}/ws?clientId={client_id}")
            engines.append(Engine(client, url, client_id, await stack.enter_async_context(socket)))
        begin = time.perf_counter()
        await program(engines)
        return time.perf_counter() - begin


def by_layers(layers: int, milliseconds: int, first_color: int) -> Program:
    async def program(engines: list[Engine]) -> None:
        for layer in range(layers):
            colors = range(first_color + layer * WIDTH, first_color + (layer + 1) * WIDTH)
            work = zip(engines, colors, strict=True)
            await asyncio.gather(
                *(engine.execute(prompt(color, milliseconds)) for engine, color in work)
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
    """Checks whether this is the message that follows the success message. Only then is the run in
    the history."""
    if not isinstance(message, str) or prompt_id not in message:
        return False
    event = json.loads(message)
    return bool(event["type"] == "executing" and event["data"]["node"] is None)


# The same work as a graph


@contextmanager
def fleet(folder: Path, engines: list[str]) -> Iterator[httpx.Client]:
    """Yields the customer's client of a control plane with a worker for each engine."""
    environ = {
        "COMFYFLEET_CALLS_PER_SECOND": "10000",
        "COMFYFLEET_CALLS_AT_ONCE": "10000",
    }
    with ExitStack() as stack:
        url, admin = stack.enter_context(control_plane(folder / "plane", **environ))
        created = posted(admin, "/api/admin/fleets", slug=FLEET, stage="production")
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
                "COMFYFLEET_FLEET_SECRET": created["secret"],
                "AWS_EC2_METADATA_DISABLED": "true",
            }
            stack.enter_context(process(COMFYFLEET, "worker", *where, *state, **secret))
        wait_for(lambda: len(admin.get("/api/admin/workers").json()["workers"]) == len(engines))
        yield stack.enter_context(httpx.Client(base_url=url, headers=bearer(tenant["key"])))


def posted(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.is_success, answer.text
    fields: dict[str, Any] = answer.json()
    return fields


def as_graph(customer: httpx.Client, document: dict[str, Any]) -> float:
    """Returns the seconds from the request that starts the run to the event of its end."""
    graph = posted(customer, "/api/graphs", **document)
    begin = time.perf_counter()
    run = posted(customer, f"/api/graphs/{graph['id']}/runs")
    with customer.stream("GET", f"/api/graph-runs/{run['id']}/events", timeout=600) as events:
        for line in events.iter_lines():
            if line == "event: end":
                break
    took = time.perf_counter() - begin
    ended = customer.get(f"/api/graph-runs/{run['id']}").json()
    assert ended["status"] == "completed", ended["error"]
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
        yield [first_url(engine) for engine in started]


class Bench(NamedTuple):
    """A control plane with a worker for each engine, and the engines themselves."""

    customer: httpx.Client
    engines: list[str]

    def compare(self, graph: MakeGraph, program: MakeProgram, size: int, milliseconds: int) -> Pair:
        """Runs the graph and the program alternately, several times. The fastest run of each
        counts, because other load only adds time."""
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
        as_graph(customer, layered(2, 10, next(COLORS)))  # the first run loads everything
        asyncio.run(direct(engines, by_layers(2, 10, next(COLORS))))
        yield Bench(customer, engines)


def layers() -> bool:
    with bench() as opened:
        return not [duration for duration in (1000, 100) if not compare_layers(opened, duration)]


def rounds() -> bool:
    with bench() as opened:
        pair = opened.compare(looped, by_rounds, LOOP_ROUNDS, JOB_MS)
    per_round = 1000 * (pair.ours - pair.plain) / LOOP_ROUNDS
    print(
        f"a loop of {LOOP_ROUNDS} rounds, {JOB_MS} ms each: {pair.summary}, {per_round:.1f} ms per round\n"
        f"  at most {LAYER_MS_MAX:.0f} ms per round"
    )
    return per_round <= LAYER_MS_MAX


def items() -> bool:
    with bench() as opened:
        pair = opened.compare(mapped, by_items, MAP_ITEMS, JOB_MS)
    per_item = 1000 * (pair.ours - pair.plain) / MAP_ITEMS
    print(
        f"a map of {MAP_ITEMS} items over {ENGINES} engines, {JOB_MS} ms each: "
        f"{pair.summary}, {per_item:.1f} ms per item"
    )
    return True


def compare_layers(opened: Bench, milliseconds: int) -> bool:
    pair = opened.compare(layered, by_layers, LAYERS, milliseconds)
    ours, plain = pair
    per_layer = 1000 * (ours - plain) / LAYERS
    print(
        f"{LAYERS * WIDTH} nodes in {LAYERS} layers over {ENGINES} engines, {milliseconds} ms each: "
        f"{pair.summary}, {per_layer:.1f} ms per layer"
    )
    if milliseconds == 1000:
        print(f"  makespan at most {MAKESPAN_MAX} x")
        return ours / plain <= MAKESPAN_MAX
    print(f"  at most {LAYER_MS_MAX:.0f} ms per layer")
    return per_layer <= LAYER_MS_MAX


# The fan-out without an engine


def fanout() -> bool:
    """Runs each fan-out in its own process, because the peak memory is measured per process."""
    figures = {items: fan_out_of(items) for items in FANOUTS}
    small, large = figures[FANOUTS[0]], figures[FANOUTS[-1]]
    growth = (large["total"] / large["jobs"]) / (small["total"] / small["jobs"])
    per_job = 1024 * (large["peak_mb"] - small["peak_mb"]) / (large["jobs"] - small["jobs"])
    print(f"  memory grows by {per_job:.1f} KB per job (at most {JOB_KB_MAX} KB)")
    return is_within_growth_limit(growth) and per_job <= JOB_KB_MAX


def is_within_growth_limit(growth: float) -> bool:
    print(
        f"  a job takes {growth:.2f} x as long as in a fan-out of {FANOUTS[0]:,} (at most {GROWTH_MAX} x)"
    )
    return growth <= GROWTH_MAX


def fan_out_of(items: int) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).with_name("graph_fan_out.py")), str(items)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    print(
        f"fan-out of {items:,}, {figures['jobs']:,} jobs to their end: "
        f"{figures['total'] / figures['jobs']:.2f} ms per job, start {figures['start']:.0f} ms, "
        f"then {figures['first']:.2f} ms at first, {figures['last']:.2f} ms at last, "
        f"the end {figures['end']:.0f} ms; peak memory {figures['peak_mb']:.0f} MB"
    )
    return figures


def main() -> int:
    exit_on_sigterm()
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    parts = {"layers": layers, "rounds": rounds, "items": items, "fanout": fanout}
    selected = [argument for argument in sys.argv[1:] if argument in parts] or list(parts)
    missed = [part for part in selected if not parts[part]()]
    return exit_status(is_met=not missed)


if __name__ == "__main__":
    sys.exit(main())
