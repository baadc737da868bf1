"""Measures the service's overhead over HTTP.

The script measures the CPU time of the control plane's process for every route, compared with the
previous version and with a bare server that sends as many statements. It also measures latency,
jobs per second, the cost of an idle server, and the gain from several processes.

    make bench        or        python bench/service.py [--quick] [--only submit,poll] [--before PATH] [--processes 1,2]

All servers run next to each other and take turns in the same run. The lower quartile of each
counts. CPU time comes from the server's own process clock, so a busy machine hardly affects the
ratios. Statements are counted on their way to PostgreSQL, without sweeps.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from sqlalchemy.engine import make_url

from service_load.baseline import ROOT, baseline_at
from service_load.calls import Connections
from service_load.figures import AFTER, BEFORE, FLOOR, Figures, print_tables
from service_load.idle import idle
from service_load.job_lifecycle import (
    CONNECTIONS,
    ROUTES,
    BareCalls,
    JobLifecycle,
    running_control_plane,
)
from service_load.measures import CpuMeter, StatementMeter, latencies, throughput
from service_load.processes import ProcessComparison, watched
from service_load.server import control_plane, floor_server, running
from service_load.statements import relay
from support import exit_on_sigterm

sys.path.append(str(ROOT))
from tests.support.databases.postgres import create_database, running_postgres

console = Console(width=120)
SQLITE, POSTGRES = "sqlite", "postgres"
CPU, LATENCY, THROUGHPUT, IDLE = PARTS = ("cpu", "latency", "throughput", "idle")
WARM_CYCLES = 2


@dataclass(frozen=True)
class Plan:
    trees: Mapping[str, Path]  # the source trees of the previous and the current version
    databases: list[str]
    routes: list[str]
    has_floor: bool
    cycles: int
    calls: int  # number of calls of each route in a cycle
    latency_jobs: int
    throughput_jobs: int
    throughput_rounds: int
    idle_polls: int
    idle_seconds: float
    processes: list[int]
    parts: list[str]


async def statements_of(plan: Plan, server_url: str, folder: Path) -> dict[str, StatementMeter]:
    """Counts the statements of each version with a relay. Sweeps are turned off, because their
    statements would count as well."""
    meters = {}
    for side, tree in plan.trees.items():
        place = folder / f"relay-{side}"
        place.mkdir()
        async with relay(server_url, place) as (url, counted):
            urls = [_named(url, await create_database(server_url)) for _ in range(2)]
            command, environ = await asyncio.to_thread(
                control_plane, tree, folder / f"counted-{side}", urls, "--no-loops"
            )
            async with running_control_plane(command, environ, plan.calls) as (_, lifecycle):
                meter = StatementMeter(counted, lifecycle.connections)
                for _ in range(WARM_CYCLES):
                    await lifecycle.cycle(meter, plan.calls)
                meters[side] = meter = StatementMeter(counted, lifecycle.connections)
                await lifecycle.cycle(meter, plan.calls)
    return meters


def _named(relay_url: str, database_url: str) -> str:
    name = make_url(database_url).database
    return make_url(relay_url).set(database=name).render_as_string(hide_password=False)


async def measure(
    plan: Plan, database: str, server_url: str, folder: Path, profile: str, figures: Figures
) -> None:
    async with AsyncExitStack() as stack:
        meters: dict[str, CpuMeter] = {}
        lives: dict[str, JobLifecycle | BareCalls] = {}
        for side, tree in plan.trees.items():
            urls = [await create_database(server_url) for _ in range(2)]
            command, environ = control_plane(
                tree, folder / f"{database}-{side}", urls if database == POSTGRES else []
            )
            server, lifecycle = await stack.enter_async_context(
                running_control_plane(command, environ, plan.calls)
            )
            lives[side], meters[side] = (
                lifecycle,
                CpuMeter(server, lifecycle.connections, plan.routes),
            )
        if plan.has_floor:
            url = await create_database(server_url) if database == POSTGRES else ""
            command = floor_server(folder / f"{database}-floor", url, profile)
            server = stack.enter_context(running(command, {}))
            connections = Connections(server.url, CONNECTIONS)
            stack.callback(connections.close)
            lives[FLOOR] = BareCalls(connections)
            meters[FLOOR] = CpuMeter(server, connections, plan.routes)
        cycles = plan.cycles if CPU in plan.parts else 0
        for number in range(WARM_CYCLES + cycles):
            if number == WARM_CYCLES:
                for meter in meters.values():
                    meter.samples.clear()
            for side, calls in lives.items():
                await calls.cycle(meters[side], plan.calls)
        if cycles:
            figures.cpu[database] = {side: meter.samples for side, meter in meters.items()}
        planes = {side: calls for side, calls in lives.items() if isinstance(calls, JobLifecycle)}
        await _timed(plan, database, planes, meters, figures)


async def _timed(
    plan: Plan,
    database: str,
    planes: Mapping[str, JobLifecycle],
    meters: Mapping[str, CpuMeter],
    figures: Figures,
) -> None:
    if LATENCY in plan.parts:
        figures.latency[database] = {
            side: await latencies(meters[side].server.url, lifecycle, plan.latency_jobs)
            for side, lifecycle in planes.items()
        }
    if IDLE in plan.parts:
        figures.idle[database] = {
            side: await idle(
                meters[side].server,
                lifecycle.connections,
                lifecycle.secret,
                many=plan.idle_polls,
                seconds=plan.idle_seconds,
            )
            for side, lifecycle in planes.items()
        }
    if THROUGHPUT not in plan.parts:
        return
    runs = figures.throughput[database] = {side: [] for side in planes}
    for _ in range(plan.throughput_rounds):
        for side, lifecycle in planes.items():
            result = throughput(
                meters[side].server, lifecycle, jobs=plan.throughput_jobs, clients=8, workers=16
            )
            runs[side].append(await result)


async def compare_process_counts(
    plan: Plan, server_url: str, folder: Path
) -> list[ProcessComparison]:
    """Runs the same load on different numbers of processes, and returns the results with the waits
    in the database."""
    comparisons = []
    for count in plan.processes:
        urls = [await create_database(server_url) for _ in range(2)]
        command, environ = control_plane(
            ROOT, folder / f"processes-{count}", urls, "--processes", str(count)
        )
        async with running_control_plane(command, environ, plan.calls) as (server, lifecycle):
            jobs = plan.throughput_jobs
            await throughput(server, lifecycle, jobs=jobs // 5, clients=16, workers=32)
            async with watched(server_url) as (waits, samples):
                result = await throughput(server, lifecycle, jobs=jobs, clients=16, workers=32)
            comparisons.append(ProcessComparison(count, result, samples[0], waits))
    return comparisons


def main() -> None:
    exit_on_sigterm()
    arguments = _options().parse_args()
    prefixes = [word.strip().replace("_", " ") for word in arguments.only.split(",")]
    if unknown := [prefix for prefix in prefixes if not any(r.startswith(prefix) for r in ROUTES)]:
        raise SystemExit(f"--only: no route {unknown[0]!r}; there are {', '.join(ROUTES)}")
    figures = Figures()
    with (
        baseline_at(arguments.before)
        if not (arguments.no_before or (arguments.quick and not arguments.before))
        else nullcontext() as tree,
        running_postgres(durable=True) as url,
        tempfile.TemporaryDirectory(prefix="comfyfleet-service-") as folder,
    ):
        trees = {BEFORE: tree, AFTER: ROOT} if tree else {AFTER: ROOT}
        plan = Plan(
            trees=trees,
            databases=arguments.databases.split(","),
            routes=[route for route in ROUTES if route.startswith(tuple(prefixes))],
            has_floor=not arguments.no_floor,
            cycles=arguments.cycles or (2 if arguments.quick else 20),
            calls=10 if arguments.quick else 40,
            latency_jobs=5 if arguments.quick else 150,
            throughput_jobs=20 if arguments.quick else 500,
            throughput_rounds=1 if arguments.quick else 3,
            idle_polls=50 if arguments.quick else 10_000,
            idle_seconds=1 if arguments.quick else 20,
            processes=[int(count) for count in arguments.processes.split(",") if count],
            parts=[part for part in arguments.parts.split(",") if part],
        )
        if plan.parts:
            asyncio.run(_run(plan, url, Path(folder), figures, arguments.statements))
        figures.several = asyncio.run(compare_process_counts(plan, url, Path(folder)))
    print_tables(console, figures, plan.routes)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures.as_json(), indent=1) + "\n")


async def _run(plan: Plan, url: str, folder: Path, figures: Figures, is_printed: bool) -> None:
    meters = await statements_of(plan, url, folder)
    figures.statements = {side: meter.statements() for side, meter in meters.items()}
    if is_printed:
        _print_statements(plan, meters[AFTER])
    # The bare server sends the statements of the previous version. It shows how fast a server with
    # unchanged statements could be.
    profile = json.dumps(
        {
            route.replace(" ", "_").replace(",", ""): kinds
            for route, kinds in next(iter(meters.values())).profile().items()
        }
    )
    for database in plan.databases:
        await measure(plan, database, url, folder, profile, figures)


def _print_statements(plan: Plan, meter: StatementMeter) -> None:
    for route in plan.routes:
        console.rule(f"{route}, {meter.calls[route]} calls")
        for text in meter.texts[route]:
            console.print(" ".join(text.split())[:200], markup=False, highlight=False)


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description="What the service costs over HTTP.")
    options.add_argument("--quick", action="store_true", help="fewer cycles: for a first look")
    options.add_argument("--only", default="", help="routes, such as submit,poll")
    options.add_argument("--databases", default=f"{SQLITE},{POSTGRES}")
    options.add_argument("--parts", default=",".join(PARTS))
    options.add_argument(
        "--processes", default="", help="numbers of processes to compare, such as 1,2"
    )
    options.add_argument("--cycles", type=int, help="rounds over all routes")
    options.add_argument(
        "--before", type=Path, help="a tree of the previous version, with its .venv"
    )
    options.add_argument("--no-before", action="store_true", help="measure this tree only")
    options.add_argument("--no-floor", action="store_true")
    options.add_argument(
        "--statements", action="store_true", help="show the statements of each route"
    )
    options.add_argument("--json", type=Path, metavar="FILE")
    return options


if __name__ == "__main__":
    main()
